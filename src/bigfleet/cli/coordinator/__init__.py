"""Implements `bigfleet coordinator`: one replica of the coordinator as a process (docs/spec/coordinator.md §1).

`command` has the flags, `store_url` opens the store, `process` puts the parts together.
"""
