"""Answers bootstrap requests with the data that makes a machine join this cluster (docs/spec/operator.md §6).

A token or rendered data must never get into a log, an error text or a `repr`.
"""
