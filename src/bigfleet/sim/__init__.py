"""The deterministic world: real flows on virtual time (docs/spec/simulation.md)."""
