"""Defines what every part of the fault world may ask of a shard process."""

from bigfleet.engine.decision import Decision
from bigfleet.shard.cycle.controller import Shard


class ObservedShard(Shard):
    """A shard with its place among the processes of a world."""

    #: Counts the processes of the world, from the first on.
    number: int
    #: Of the last cycle that had one.
    last_decision: Decision | None = None

    def divergences(self) -> int:
        """Return how often the engine's own check found another answer."""
        return int(self.metrics.engine_divergences._value.get())
