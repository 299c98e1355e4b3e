"""Simulates the API server of a Kubernetes cluster in memory, for unit tests and the simulation.

`InMemoryApiServer` holds the objects; each `InMemoryApi` is one client of it and implements `KubernetesApi`.
"""
