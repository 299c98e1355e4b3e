"""Benchmarks: what is timed, on workloads that arithmetic alone generates (docs/spec/benchmarks.md)."""
