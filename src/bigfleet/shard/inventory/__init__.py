"""Stores the machines of a shard and answers queries about them."""
