"""Holds the command `bigfleet pod-controller` and its process."""
