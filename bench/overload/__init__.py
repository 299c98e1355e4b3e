"""Overload of a whole shard: what floods of sessions, roll-ups and bytes do to honest clusters, and what is shed."""
