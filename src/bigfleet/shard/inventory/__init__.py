"""Holds the machines that a shard knows, and answers queries about them."""
