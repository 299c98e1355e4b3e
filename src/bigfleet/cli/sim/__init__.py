"""`bigfleet sim`: runs the deterministic world of faults and the closed-loop scenarios (docs/spec/simulation.md)."""
