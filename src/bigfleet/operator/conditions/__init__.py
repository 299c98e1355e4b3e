"""Shows on each CapacityRequest what the shard has acknowledged and judged (docs/spec/operator.md §5).

What is shown never leads a decision: the roll-up is built from specs alone.
"""
