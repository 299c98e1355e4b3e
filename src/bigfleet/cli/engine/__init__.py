"""Implements `bigfleet engine`: runs cases and fleets through an engine, offline.

The one runner of the cases in tests/cases/engine: the tests and the command share it.
"""
