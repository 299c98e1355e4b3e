"""Runs the decision engine of a shard: prepares it off the event loop, and reports failed self-checks.

docs/spec/shard.md §1, docs/adr/0110-columnar-engine.md. One engine serves one shard for its life, because the state
that it keeps between cycles makes them fast. It may be called only when it is ready, and by one caller at a time. This
module does not read an answer.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import structlog

from bigfleet.engine.columns.store import ColumnSnapshot
from bigfleet.engine.decision import Decision, Options, PhaseListener
from bigfleet.model.compute import Compute
from bigfleet.model.need import Need
from bigfleet.shard.metrics import ShardMetrics

_log = structlog.get_logger("bigfleet.shard.cycle.engine_runner")

#: Divergences of one decision that are logged; the rest are dropped.
_LOGGED_MAX = 16


class EngineDivergence(Protocol):
    """Two ways to decide the same cycle that came to different answers, or one that failed."""

    @property
    def decisions(self) -> int:
        """How many decisions the engine had made, this one included."""
        ...

    @property
    def difference(self) -> str:
        """One line: where the answers differ."""
        ...

    @property
    def evidence(self) -> Mapping[str, object]:
        """What it takes to see it again, as plain values."""
        ...


class DecisionEngine(Protocol):
    """Decides cycle after cycle, from any thread, for one caller at a time."""

    def decide(
        self, view: ColumnSnapshot, demand: Sequence[Need], options: Options, /, *, on_phase: PhaseListener
    ) -> Decision: ...


class EngineMaker(Protocol):
    """Makes a ready engine, however long that takes; it is called off the loop."""

    def __call__(
        self, *, verify_every_cycles: int, on_divergence: Callable[[EngineDivergence], None]
    ) -> DecisionEngine: ...


def fleet_engine(*, verify_every_cycles: int, on_divergence: Callable[[EngineDivergence], None]) -> DecisionEngine:
    """Return the engine for large fleets with its kernels loaded, compiled when no compiled form is at hand.

    `on_divergence` is called in the thread that decides when a check or a decision fails; the answer of the full pass,
    or of the plain engine, is then used.
    """
    # Importing it is what loads the kernels.
    from bigfleet.engine.columnar.engine import warm_up
    from bigfleet.engine.fleet_engine import FleetEngine

    warm_up()
    return FleetEngine(verify_every_cycles=verify_every_cycles, on_divergence=on_divergence)


class EngineRunner:
    """Asks the shard's engine."""

    def __init__(
        self, *, make_engine: EngineMaker, verify_every_cycles: int, compute: Compute, metrics: ShardMetrics
    ) -> None:
        self._make_engine = make_engine
        self._verify_every_cycles = verify_every_cycles
        self._compute = compute
        self._metrics = metrics
        self._engine: DecisionEngine | None = None
        self._making = asyncio.Lock()
        #: Filled by the thread that decides, emptied by the loop.
        self._diverged: deque[EngineDivergence] = deque(maxlen=_LOGGED_MAX)

    @property
    def is_ready(self) -> bool:
        """Return whether the engine can be asked."""
        return self._engine is not None

    async def make_ready(self) -> None:
        """Make the engine off the loop, once; whatever its making raises is raised here."""
        async with self._making:
            if self._engine is None:
                make = partial(
                    self._make_engine,
                    verify_every_cycles=self._verify_every_cycles,
                    on_divergence=self._diverged.append,
                )
                self._engine = await self._compute(make)

    async def decide(
        self, view: ColumnSnapshot, demand: Sequence[Need], options: Options, on_phase: PhaseListener
    ) -> Decision:
        """Return the engine's answer for one cycle, worked out off the loop, where `on_phase` is called too."""
        engine = self._engine
        assert engine is not None, "asked before it was ready"
        try:
            return await self._compute(lambda: engine.decide(view, demand, options, on_phase=on_phase))
        finally:
            self._log_divergences()

    def _log_divergences(self) -> None:
        while self._diverged:
            divergence = self._diverged.popleft()
            self._metrics.engine_divergences.inc()
            _log.error(
                "engine.diverged",
                decisions=divergence.decisions,
                difference=divergence.difference,
                evidence=divergence.evidence,
                advice="the cycle used the full or the plain pass; report this line",
            )
