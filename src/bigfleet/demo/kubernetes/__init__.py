"""Runs a real Kubernetes control plane on loopback, with simulated nodes and pods."""
