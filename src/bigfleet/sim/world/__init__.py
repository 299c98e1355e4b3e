"""The world of faults: real shards, providers and operators on the simulated kernel (docs/spec/simulation.md)."""
