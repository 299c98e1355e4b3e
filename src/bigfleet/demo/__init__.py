"""Simulates the clusters, machines and workloads that `bigfleet up` runs against."""
