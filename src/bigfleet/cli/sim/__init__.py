"""Implements `bigfleet sim`: runs the fault world and the closed-loop scenarios (docs/spec/simulation.md)."""
