"""Simulates time, order, randomness, processes and network (docs/spec/simulation.md)."""
