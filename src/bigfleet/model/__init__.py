"""Defines the values that all of BigFleet shares: machines and their states, demand, quantities, penalties, ids.

Everything here is immutable or pure. This package imports no other package of BigFleet, does no I/O and reads no clock.
"""
