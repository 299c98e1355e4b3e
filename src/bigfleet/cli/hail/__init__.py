"""Implements `bigfleet hail` and `hail-dedicated`: BigFleet's allocator as a replacement of Ganeti's `hail`."""
