"""Converts the objects of a cluster to the demand that its shard decides on: requests, waiting pods, overheads.

A roll-up is never built from a view that may be partial: a cluster that was not read is not an empty one
(docs/spec/operator.md §3).
"""
