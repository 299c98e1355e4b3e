"""Coordinates shards: stores which shard owns what, and moves spare machines to unmet demand.

docs/spec/coordinator.md. It decides no provisioning, never dials a shard, and nothing stops when it is gone.
"""
