"""Records the input and the decision of each cycle, and reads recordings."""
