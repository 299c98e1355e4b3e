"""Simulates the pods of a cluster and the scheduler that places them."""
