"""Advances the demand of a run: the workload of the demonstration, or a trace that is replayed and sampled.

Both store their position, so that a stopped run resumes there. A replay stops its clock while it takes a sample: every
cluster reports the demand of exactly that trace second, the shard acknowledges it, and the sample is taken from a
decision on that demand. This module does not know how demand is shown.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from bigfleet.cli.runtime.failures import RunFault
from bigfleet.cli.up.amounts import plain_numbers
from bigfleet.cli.up.observer import FleetFigures, Watcher
from bigfleet.cli.up.settings import UpSettings
from bigfleet.cli.up.shard_tables import shard_points
from bigfleet.cli.up.state_dir import Progress, StateDir, TimelinePoint
from bigfleet.demo.cluster import RollUpRejected, SimulatedCluster
from bigfleet.demo.trace import TraceReplay
from bigfleet.model.clock import Clock
from bigfleet.operator.requests import CapacityRequest

SAMPLES: Final = 60
#: Demand changes at most so often; what came and went in between is never seen.
TICK_SECONDS: Final = 0.25
#: A demonstration is written down this often, and its points are thinned beyond the maximum.
POINT_SECONDS: Final = 2.0
POINTS_MAX: Final = 600
#: At the end of a timed demonstration demand stands still for this share of the time, at most so long, so that the
#: summary shows a fleet that has had time to follow.
SETTLE_SHARE: Final = 0.3
SETTLE_SECONDS_MAX: Final = 20.0
#: How long a sample may take before the run is given up; a child that is restarted needs a few seconds.
SAMPLE_SECONDS_MAX: Final = 120.0

Changes = Mapping[str, tuple[Sequence[CapacityRequest], Sequence[str]]]


class Demand(Protocol):
    """Anything that knows the demand of each second."""

    def advance(self, second: int) -> Changes:
        """Move to a later second; return what came and what went, by cluster."""
        ...


class DemandDriver(Protocol):
    """What the run sees of either."""

    @property
    def position_seconds(self) -> float:
        """Where virtual time stands."""
        ...

    @property
    def done_share(self) -> float | None:
        """How much of it is done, from 0 to 1; None when it has no end."""
        ...

    @property
    def timeline(self) -> Sequence[TimelinePoint]:
        """What was written down so far."""
        ...

    @property
    def finished(self) -> bool:
        """Return whether a trace was replayed to its end; a demonstration has none."""
        ...

    async def run(self) -> None:
        """Move demand until the end, if there is one."""
        ...

    def save(self) -> None:
        """Keep where the run stands."""
        ...


def timeline_point(seconds: float, figures: FleetFigures) -> TimelinePoint:
    """Return the fleet's figures as a point of the timeline."""
    return TimelinePoint(
        seconds=seconds,
        demand=plain_numbers(figures.demand),
        bound=plain_numbers(figures.bound),
        shortfall=plain_numbers(figures.shortfall),
        bound_machines=figures.bound_machines,
        shortfall_by_model={model: plain_numbers(lacking) for model, lacking in figures.shortfall_by_model.items()},
        shards=shard_points(figures),
        moved_machines=figures.moved_machines,
    )


class DemoDriver:
    """The demonstration: demand follows virtual time until somebody stops it, or for a while."""

    def __init__(
        self,
        *,
        demand: Demand,
        clusters: Mapping[str, SimulatedCluster],
        observer: Watcher,
        settings: UpSettings,
        state: StateDir,
        clock: Clock,
    ) -> None:
        self._demand = demand
        self._clusters = clusters
        self._observer = observer
        self._for_seconds = settings.for_seconds
        self._speed = settings.speed or 1.0
        self._state = state
        self._clock = clock
        progress = state.progress()
        self._timeline = list(progress.timeline)
        self.position_seconds = progress.position_seconds
        self.finished = False
        self._run_seconds = 0.0
        self._wrote_at_seconds = 0.0

    @property
    def done_share(self) -> float | None:
        """How much of --for is over."""
        return min(1.0, self._run_seconds / self._for_seconds) if self._for_seconds else None

    @property
    def timeline(self) -> Sequence[TimelinePoint]:
        """One point every few seconds."""
        return self._timeline

    async def run(self) -> None:
        """Move demand; return when --for is over."""
        still_after_seconds = float("inf")
        if self._for_seconds is not None:
            still_after_seconds = self._for_seconds - min(SETTLE_SECONDS_MAX, SETTLE_SHARE * self._for_seconds)
        started_seconds = self._clock.monotonic_seconds()
        while self._for_seconds is None or self._run_seconds < self._for_seconds:
            _apply(self._demand.advance(int(self.position_seconds)), self._clusters)
            await self._clock.sleep(TICK_SECONDS)
            passed_seconds = self._clock.monotonic_seconds() - started_seconds - self._run_seconds
            self._run_seconds += passed_seconds
            if self._run_seconds < still_after_seconds:
                self.position_seconds += passed_seconds * self._speed
            if self._run_seconds - self._wrote_at_seconds >= POINT_SECONDS and self._observer.answers:
                self._wrote_at_seconds = self._run_seconds
                self._write_down()

    def _write_down(self) -> None:
        self._timeline.append(timeline_point(round(self.position_seconds, 3), self._observer.figures))
        if len(self._timeline) > POINTS_MAX:
            self._timeline = self._timeline[::2]
        self.save()

    def save(self) -> None:
        """Keep virtual time and the timeline."""
        self._state.save_progress(Progress(position_seconds=self.position_seconds, timeline=tuple(self._timeline)))


class ReplayDriver:
    """A trace: its clock runs between samples and stands still at each."""

    def __init__(
        self,
        *,
        replay: TraceReplay,
        clusters: Mapping[str, SimulatedCluster],
        observer: Watcher,
        settings: UpSettings,
        state: StateDir,
        clock: Clock,
    ) -> None:
        self._replay = replay
        self._clusters = clusters
        self._observer = observer
        self._state = state
        self._clock = clock
        self._start, self._end = replay.start_second, replay.end_second
        self._speed = settings.speed
        self._leg_seconds = (settings.for_seconds or 0.0) / SAMPLES
        #: What the last sample took; the legs of a replay with a given length are shorter by that.
        self._sample_cost_seconds = 0.5
        progress = state.progress()
        self._timeline = list(progress.timeline)
        self.position_seconds: float = max(progress.position_seconds, self._start)
        self.finished = progress.finished

    @property
    def done_share(self) -> float:
        """How much of the trace is over."""
        return (self.position_seconds - self._start) / max(1, self._end - self._start)

    @property
    def timeline(self) -> Sequence[TimelinePoint]:
        """The samples taken so far, over all resumed runs."""
        return self._timeline

    def sample_seconds(self) -> list[int]:
        """Return the trace seconds that are sampled: the first, the last, and evenly between."""
        span = self._end - self._start
        return sorted({self._start + span * number // SAMPLES for number in range(SAMPLES + 1)})

    async def run(self) -> None:
        """Replay from where the last run stood to the end. Raises RunFault when a sample cannot be had."""
        taken = {point.seconds for point in self._timeline}
        self._move_to(self.position_seconds)
        for second in self.sample_seconds():
            if second in taken or second < self.position_seconds:
                continue
            await self._run_clock_to(second)
            figures = await self._sample(second)
            self._timeline.append(timeline_point(second, figures))
            self.save()
        self.finished = True
        self.save()

    def save(self) -> None:
        """Keep the trace's clock and the samples."""
        self._state.save_progress(
            Progress(position_seconds=self.position_seconds, finished=self.finished, timeline=tuple(self._timeline))
        )

    def _move_to(self, second: float) -> None:
        self.position_seconds = second
        _apply(self._replay.advance(int(second)), self._clusters)

    async def _run_clock_to(self, second: int) -> None:
        """Let trace time run to a second: at the given speed, or in what a leg leaves beside its sample."""
        from_second = self.position_seconds
        started_seconds = self._clock.monotonic_seconds()
        leg_seconds = (
            (second - from_second) / self._speed if self._speed else self._leg_seconds - self._sample_cost_seconds
        )
        while True:
            passed_seconds = self._clock.monotonic_seconds() - started_seconds
            if passed_seconds + TICK_SECONDS >= leg_seconds:
                await self._clock.sleep(leg_seconds - passed_seconds)
                self._move_to(second)
                return
            await self._clock.sleep(TICK_SECONDS)
            share = min(1.0, (passed_seconds + TICK_SECONDS) / leg_seconds)
            self._move_to(from_second + (second - from_second) * share)

    async def _sample(self, second: int) -> FleetFigures:
        started_seconds = self._clock.monotonic_seconds()
        try:
            async with asyncio.timeout(SAMPLE_SECONDS_MAX):
                while True:
                    lost_before = self._sessions_lost()
                    await asyncio.gather(*(cluster.report() for cluster in self._clusters.values()))
                    figures = await self._observer.look_after(self._clock.unix_nanos())
                    # A shard that was restarted in between forgot the demand: its answer may lack clusters.
                    if self._sessions_lost() == lost_before:
                        break
        except TimeoutError:
            raise RunFault(
                f"at trace second {second} the shard has not answered for {SAMPLE_SECONDS_MAX:g} s; "
                f"its log is {self._state.logs / 'shard.log'}"
            ) from None
        except RollUpRejected as rejection:
            raise RunFault(str(rejection)) from rejection
        self._sample_cost_seconds = self._clock.monotonic_seconds() - started_seconds
        return figures

    def _sessions_lost(self) -> int:
        return sum(cluster.statistics().sessions_lost_total for cluster in self._clusters.values())


def _apply(changes: Changes, clusters: Mapping[str, SimulatedCluster]) -> None:
    for cluster, (came, went) in changes.items():
        clusters[cluster].apply(add=came, remove=went)
