"""Stores the coordinator's tables: the protocol of stores, SQLite, snapshots."""
