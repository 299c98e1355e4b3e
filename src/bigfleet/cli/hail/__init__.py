"""Implements `bigfleet hail` and `hail-dedicated`: our allocator in the place of Ganeti's `hail`."""
