"""Answers bootstrap requests: what a machine runs to join this cluster as a node (docs/spec/operator.md §6).

A token or rendered data must never get into a log, an error text or a `repr`.
"""
