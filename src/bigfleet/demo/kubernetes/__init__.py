"""Runs a real Kubernetes control plane on loopback, with nodes that run pods in name only."""
