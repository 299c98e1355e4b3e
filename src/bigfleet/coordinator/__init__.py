"""Coordinates shards: stores which shard owns which machines, and moves spare machines to unmet demand.

docs/spec/coordinator.md. It provisions nothing and never dials a shard. Shards continue to work without it.
"""
