"""Records what each cycle decided on and what it decided, and reads recordings."""
