"""Runs one shard: owns machines, receives demand from operators, decides every few seconds, and actuates.

docs/spec/shard.md. One event loop touches all state here; the engine works on an immutable snapshot. The cycle never
waits for an action, a worker never decides, and this package does not know the coordinator.
"""
