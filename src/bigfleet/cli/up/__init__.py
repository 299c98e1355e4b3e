"""Implements `bigfleet up`: a provider, a shard and simulated clusters on one machine, with a live view.

The real server processes and the real session flow; only the clusters' Kubernetes and the cloud are simulated.
"""
