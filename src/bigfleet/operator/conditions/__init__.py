"""Shows on each CapacityRequest what the shard has acknowledged and decided (docs/spec/operator.md §5).

A status never influences a decision: the roll-up is built from specs only.
"""
