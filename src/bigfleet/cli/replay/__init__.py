"""Implements `bigfleet replay`: decides recorded cycles again, and reports whether and why they differ.

`recorder` manages the recorder of a running shard. `command` defines the flags, `replaying` decides and compares,
`cycle_plan` converts one cycle to a plan, `changes` reads changed settings, `records` and `tables` print the result.
"""
