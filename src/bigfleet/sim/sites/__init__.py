"""Simulates the sites of both simulators: shards, coordinators, providers, clusters, their stores."""
