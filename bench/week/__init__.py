"""Simulates weeks of a fleet with and without exchanges, over a real shard on virtual time."""
