"""Simulates the sites of the fault world: shards, coordinators, providers, clusters, their stores."""
