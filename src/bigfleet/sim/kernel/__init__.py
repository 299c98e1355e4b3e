"""The kernel of the deterministic world: time, order, randomness, processes and network (docs/spec/simulation.md)."""
