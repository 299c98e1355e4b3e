"""`bigfleet snapshot`: save the coordinator's tables, and restore a store from them (docs/spec/coordinator.md §10)."""
