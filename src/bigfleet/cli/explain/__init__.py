"""Implements `bigfleet explain`: why a live shard's last cycle decided on a row or a machine as it did.

`command` has the flags and asks, `page` shows the answer to a person.
"""
