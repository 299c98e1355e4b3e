"""Implements `bigfleet cluster`: retires clusters that are gone (docs/operating.md)."""
