"""Defines the behaviours, one module per area of docs/spec/provider.md §23, in no particular order."""
