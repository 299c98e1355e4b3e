"""The workloads of docs/spec/benchmarks.md, and what is timed on them."""
