"""Writes the audit log of a shard and verifies that it is complete."""
