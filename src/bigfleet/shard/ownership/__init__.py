"""Stores which machines a shard owns, and hands machines over between shards."""
