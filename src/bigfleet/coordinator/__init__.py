"""The coordinator: which shard owns what, and which spare machines move to where demand stays unmet.

docs/spec/coordinator.md. It decides no provisioning, never dials a shard, and nothing stops when it is gone.
"""
