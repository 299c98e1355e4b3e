"""Simulates BigFleet deterministically: real flows on virtual time (docs/spec/simulation.md)."""
