"""Coordinates shards: keeps which shard owns what, and moves spare machines to where demand stays unmet.

docs/spec/coordinator.md. It decides no provisioning, never dials a shard, and nothing stops when it is gone.
"""
