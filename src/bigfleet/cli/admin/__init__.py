"""`bigfleet admin`: what a person changes in the coordinator's tables (docs/coordinator.md)."""
