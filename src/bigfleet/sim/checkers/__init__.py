"""Checks the invariants and the liveness properties of the fault world."""
