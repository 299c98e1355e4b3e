"""Compiles the loops of the columnar engine."""
