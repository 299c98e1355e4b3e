"""Runs the decision cycle: takes a snapshot, decides, applies the safety limits, queues actions."""
