"""Implements `bigfleet shard`: one shard as a process."""
