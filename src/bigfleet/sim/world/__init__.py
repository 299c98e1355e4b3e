"""Builds and runs the fault world: real shards, providers and operators (docs/spec/simulation.md)."""
