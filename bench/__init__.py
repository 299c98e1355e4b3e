"""Benchmarks: what is timed, on workloads that arithmetic alone generates (docs/spec/benchmarks.md)."""

from bigfleet.cli.runtime.kernel_cache import keep_kernels

# Before any module of this package imports the kernels.
keep_kernels()
