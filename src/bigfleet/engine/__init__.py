"""Decides, purely: demand and inventory in, actions and reasons out.

`decide` in `bigfleet.engine.plain_engine` states it in plain Python (docs/spec/engine.md). Nothing here reads a
clock, does I/O, draws randomness, logs, or remembers anything between two calls.
"""
