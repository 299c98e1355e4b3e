"""Holds figures against thresholds, prints them as tables, and measures known weaknesses on hand-made fleets."""
