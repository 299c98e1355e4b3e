"""The behaviours, one module per area of docs/spec/provider.md §23. Nothing here may depend on the order of areas."""
