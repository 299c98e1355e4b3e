"""Times the phases of one cycle: `cycle_phase_duration_seconds` (docs/spec/shard.md §14).

The shard's own phases end in its loop. Those of a decision end in the thread that decides, which reports each while the
loop waits, because the engine reads no clock. The phases add up to the cycle without overlap. A phase that did not end
is never observed.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from bigfleet.engine.decision import Phase
from bigfleet.model.clock import Clock
from bigfleet.shard.metrics import ShardMetrics

#: Under which name each phase of a decision is shown.
SHOWN_AS: Final[Mapping[Phase, str]] = MappingProxyType(
    {Phase.FOLD: "snapread", Phase.ASSIGN: "phase1", Phase.PREEMPT: "phase2", Phase.RECLAIM: "phase3"}
)


class PhaseTimer:
    """The phases of one cycle, from the moment at which it is made."""

    def __init__(self, clock: Clock, metrics: ShardMetrics) -> None:
        self._clock = clock
        self._metrics = metrics
        self._started_seconds = clock.monotonic_seconds()
        #: What each phase of the decision has taken so far.
        self._spent_seconds = dict.fromkeys(Phase, 0.0)

    def end(self, name: str) -> None:
        """Observe the time since the last phase ended."""
        self._metrics.cycle_phase.labels(name).observe(self._elapsed_seconds())

    def decided(self, phase: Phase) -> None:
        """Count the time since the last phase ended for one of the decision, which may come to it more than once."""
        self._spent_seconds[phase] += self._elapsed_seconds()

    def end_decision(self) -> None:
        """Observe the phases of the decision; the answer's way back to the loop belongs to the last one."""
        self.decided(Phase.RECLAIM)
        for phase, seconds in self._spent_seconds.items():
            self._metrics.cycle_phase.labels(SHOWN_AS[phase]).observe(seconds)

    def _elapsed_seconds(self) -> float:
        started_seconds, self._started_seconds = self._started_seconds, self._clock.monotonic_seconds()
        return self._started_seconds - started_seconds
