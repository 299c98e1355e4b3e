"""Implements `bigfleet pod-controller`: the command and its process."""
