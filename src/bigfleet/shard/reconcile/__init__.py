"""Reconciles a shard's inventory with what its providers list."""
