"""Builds and checks compiled kernels: `bigfleet kernels`."""
