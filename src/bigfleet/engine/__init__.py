"""Decides which actions a shard takes: a pure function of demand and inventory.

`decide` in `bigfleet.engine.plain_engine` states it in plain Python (docs/spec/engine.md). This package does not read a
clock, does I/O, draws randomness, logs, or remembers anything between two calls.
"""
