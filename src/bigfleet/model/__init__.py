"""Defines the values that all of BigFleet shares: machines and their states, demand, quantities, penalties, ids.

Everything here is immutable or pure. This package imports nothing of ours, does no I/O and reads no clock.
"""
