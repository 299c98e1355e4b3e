"""Implements `bigfleet explain`: why a live shard's last cycle decided on a row or a machine as it did.

`command` calls the shard, `page` formats the answer.
"""
