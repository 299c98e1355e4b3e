"""Looks for exchanges of a shard's machines in the background."""
