"""Keeps the machines of a fleet as columns of integers, with immutable views: the snapshot format."""
