"""Provides `bigfleet operator`."""
