"""Implements `bigfleet admin`: changes the coordinator's tables (docs/coordinator.md)."""
