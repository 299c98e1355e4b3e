"""Turns the objects of a cluster into the demand that its shard decides on: requests, waiting pods, overheads.

Never a roll-up from a view that may be partial: an unread cluster is not an empty one (docs/spec/operator.md §3).
"""
