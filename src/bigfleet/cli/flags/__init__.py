"""Defines flags that several commands share, and parses their values."""
