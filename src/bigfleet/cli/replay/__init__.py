"""Implements `bigfleet replay`: decides recorded cycles again, and shows whether and why they differ.

`recorder` keeps the recorder of a running shard; `command` has the flags of the replay, `replaying` decides and
compares, `single` makes one cycle a plan, `changes` reads what is to be different, `records` and `tables` show it.
"""
