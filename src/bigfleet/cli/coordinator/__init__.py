"""Implements `bigfleet coordinator`: one replica of the coordinator as a process (docs/spec/coordinator.md §1).

`command` defines the flags, `store_url` opens the store, `process` builds and runs the replica.
"""
