"""Simulates a cloud, and implements the provider's backend over it.

docs/spec/provider.md §21. Start reading at `bigfleet.provider.backends.simulated.cloud`. This package must not draw
randomness that is not keyed by what it is about.
"""
