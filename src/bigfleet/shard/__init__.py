"""Runs one shard: it owns machines, learns demand from operators, decides every few seconds, and actuates.

docs/spec/shard.md. All state here is touched by one event loop alone; the engine works on an immutable snapshot. The
cycle never waits for an action, a worker never decides, and nothing here may know the coordinator.
"""
