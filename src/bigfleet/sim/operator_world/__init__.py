"""Builds and runs the operator world: the real operator and pod controller under faults (docs/spec/simulation.md)."""
