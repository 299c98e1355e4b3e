"""Runs `bigfleet up`: starts children, clusters, demand and view in order, stops them in reverse, prints a summary.

This module does not decide about capacity; it starts the real processes and shows them.
"""

import asyncio
import random
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console, RenderableType
from rich.live import Live

from bigfleet.cli.get.moves import MoveState
from bigfleet.cli.runtime.failures import RunFault
from bigfleet.cli.runtime.system import SystemClock, stop_on_signals
from bigfleet.cli.up.children import COORDINATOR, child_specs, port_names, shard_names, zones_of
from bigfleet.cli.up.demand_drivers import DemandDriver, DemoDriver, ReplayDriver
from bigfleet.cli.up.fleet_check import FleetCheck, FleetChecker
from bigfleet.cli.up.fleet_observer import SeveralObserver
from bigfleet.cli.up.moves import CoordinatorWatch
from bigfleet.cli.up.observer import ShardObserver, Watcher
from bigfleet.cli.up.readiness import WAITING, answers_ready, until_ready
from bigfleet.cli.up.report import RunResult, summary, write_report
from bigfleet.cli.up.settings import UpSettings
from bigfleet.cli.up.shard_tables import move_line, moves_text, shard_table, shards_over_time
from bigfleet.cli.up.state_dir import StateDir
from bigfleet.cli.up.supervisor import Supervisor
from bigfleet.cli.up.view import LiveView, RunStatus, look_words, look_words_of_several
from bigfleet.demo.cluster import SimulatedCluster
from bigfleet.demo.fleet import DemoFleet, default_fleet, trace_fleet
from bigfleet.demo.trace import TraceReplay
from bigfleet.demo.workload import WorkloadReplay
from bigfleet.model.clock import Clock
from bigfleet.model.ids import ClusterId
from bigfleet.operator.session import SessionSettings
from bigfleet.rpc.clients.session import GrpcSessionDialer

#: The world's durations shrink with the speed, down to what a process can still distinguish.
TIME_SCALE_MIN: Final = 0.001
LOOK_SECONDS: Final = 1.0
PLAIN_LINE_SECONDS: Final = 5.0
SCREENS_PER_SECOND: Final = 2
SUMMARY_WIDTH: Final = 110
OTHERS: Final = "waiting for the other shards …"
#: Thirty reports of a shard are enough on any machine.
ZONES_SECONDS_MAX: Final = 60.0
ZONES_ASSIGNED: Final = "the coordinator gives each shard its zone …"
#: The view shows ends of sessions; dialling again is quick, as the shard is on this machine.
SESSION: Final = SessionSettings(rollup_interval_seconds=5.0, rollup_gap_seconds=0.1)


class _Stopwatch:
    """How long the run has lasted: it begins when the shard is ready, however long that took."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started_seconds: float | None = None

    def start(self) -> None:
        """Let the run begin."""
        self._started_seconds = self._clock.monotonic_seconds()

    @property
    def seconds(self) -> float:
        """Seconds since the run began; 0 before."""
        return 0.0 if self._started_seconds is None else self._clock.monotonic_seconds() - self._started_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """The parts of a run that has started."""

    settings: UpSettings
    state: StateDir
    clock: Clock
    supervisor: Supervisor
    observer: Watcher
    #: None where there is one shard.
    watch: CoordinatorWatch | None
    clusters: Mapping[str, SimulatedCluster]
    checker: FleetChecker
    driver: DemandDriver
    #: By name of the shard's process: its HTTP, in the order in which they start.
    shard_metrics_ports: Mapping[str, int]
    #: How another terminal looks at the running fleet.
    look: str
    stopwatch: _Stopwatch


async def run_up(settings: UpSettings, console: Console) -> int:
    """Run until the demand ends, --for is over, or a signal comes; print the summary and return the exit code.

    Raises UsageFault and RunFault.
    """
    clock = SystemClock()
    stop = stop_on_signals()
    trace = settings.trace
    fleet = trace_fleet(trace.nodes) if trace else default_fleet(settings.machines, zones_of(settings))
    with StateDir.open(settings.state_dir, identity=settings.identity, fresh=settings.fresh) as state:
        if state.progress().finished:
            raise RunFault(f"the trace in {state.path} was replayed to its end; --fresh replays it again")
        async with AsyncExitStack() as stack:
            parts = _assemble(settings, state, fleet, clock)
            stack.push_async_callback(parts.observer.close)
            stack.push_async_callback(parts.supervisor.stop)
            failure = await _run_until(stop, parts, console)
            ran_seconds = parts.stopwatch.seconds
            if failure is None:
                await parts.observer.look()
            parts.driver.save()
    # The children are gone: what is printed now stays the last word.
    if failure is not None:
        raise failure
    # A run that was stopped before its shard had answered has no machines to check.
    check = await parts.checker.check() if parts.observer.figures.inventory else None
    result = _result(parts, ran_seconds, check)
    console.print(_summary(result))
    if settings.report is not None:
        write_report(settings.report, result)
        console.print(f"report written to {settings.report}")
    return 0


def time_scale(settings: UpSettings) -> float:
    """Return what the world's durations are multiplied with, so that machines keep up with virtual time."""
    speed = settings.speed
    if speed is None and settings.trace is not None:
        replay = TraceReplay(settings.trace.pods, settings.cluster_ids)
        speed = (replay.end_second - replay.start_second) / (settings.for_seconds or 1.0)
    return min(1.0, max(TIME_SCALE_MIN, 1.0 / (speed or 1.0)))


def _assemble(settings: UpSettings, state: StateDir, fleet: DemoFleet, clock: Clock) -> _Parts:
    scale = time_scale(settings)
    ports = state.ports(port_names(settings))
    names = shard_names(settings)
    addresses = {shard: f"127.0.0.1:{ports[name]}" for shard, name in names.items()}
    observer, watch, look = _eyes(settings, state, addresses, ports, clock)
    clusters = {
        cluster: SimulatedCluster(
            cluster=ClusterId(cluster),
            dialer=GrpcSessionDialer(addresses[shard]),
            clock=clock,
            rng=random.Random(f"{settings.seed}/{cluster}"),  # noqa: S311 - a simulation's dwell, no secret
            time_scale=scale,
            settings=SESSION,
        )
        for shard, its_clusters in settings.clusters_of.items()
        for cluster in its_clusters
    }
    return _Parts(
        settings=settings,
        state=state,
        clock=clock,
        supervisor=Supervisor(child_specs(settings, state, ports, fleet, scale), clock),
        observer=observer,
        watch=watch,
        clusters=clusters,
        checker=FleetChecker(clusters, observer, clock),
        driver=_driver(settings, state, fleet, clusters, observer, clock),
        shard_metrics_ports={name: ports[f"{name}_metrics"] for name in names.values()},
        look=look,
        stopwatch=_Stopwatch(clock),
    )


def _eyes(
    settings: UpSettings, state: StateDir, addresses: Mapping[str, str], ports: Mapping[str, int], clock: Clock
) -> tuple[Watcher, CoordinatorWatch | None, str]:
    """Return the reader of the fleet, that of the coordinator, and the commands that show both in another terminal."""
    observers = {
        shard: ShardObserver(address, settings.clusters_of[shard], clock) for shard, address in addresses.items()
    }
    if settings.shards == 1:
        (shard,) = observers
        return observers[shard], None, look_words(addresses[shard])
    coordinator = f"127.0.0.1:{ports[COORDINATOR]}"
    moved_before = max((point.moved_machines for point in state.progress().timeline), default=0)
    watch = CoordinatorWatch(coordinator, clock, moved_before=moved_before)
    several = SeveralObserver(observers, settings.cluster_ids, watch)
    return several, watch, look_words_of_several(coordinator, addresses)


def _driver(
    settings: UpSettings,
    state: StateDir,
    fleet: DemoFleet,
    clusters: Mapping[str, SimulatedCluster],
    observer: Watcher,
    clock: Clock,
) -> DemandDriver:
    if settings.trace is not None:
        return ReplayDriver(
            replay=TraceReplay(settings.trace.pods, settings.cluster_ids),
            clusters=clusters,
            observer=observer,
            settings=settings,
            state=state,
            clock=clock,
        )
    workload = WorkloadReplay(
        seed=settings.seed,
        clusters=settings.cluster_ids,
        cpu_machines=fleet.cpu_machines,
        gpu_machines=fleet.gpu_machines,
        groups=tuple(settings.clusters_of.values()),
    )
    return DemoDriver(
        demand=workload, clusters=clusters, observer=observer, settings=settings, state=state, clock=clock
    )


async def _run_until(stop: asyncio.Event, parts: _Parts, console: Console) -> Exception | None:
    """Run until the demand ends or a person stops the run; return the fault, if there is one."""
    stopping = asyncio.create_task(stop.wait(), name="stop")
    starting = asyncio.create_task(_get_ready(parts, console), name="start")
    tasks: list[asyncio.Task[Any]] = [stopping]
    try:
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return None
        starting.result()
        parts.stopwatch.start()
        driving = asyncio.create_task(parts.driver.run(), name="driver")
        tasks += [
            driving,
            asyncio.create_task(parts.supervisor.watch(), name="children"),
            asyncio.create_task(_show(parts, console), name="view"),
            asyncio.create_task(_look(parts), name="observer"),
            asyncio.create_task(parts.checker.run(), name="check"),
            *(asyncio.create_task(cluster.run(), name=name) for name, cluster in parts.clusters.items()),
        ]
        if parts.settings.for_seconds is not None and parts.settings.trace and parts.settings.speed:
            # A trace at a given speed may be longer than --for; it goes on at the next start.
            tasks.append(asyncio.create_task(parts.clock.sleep(parts.settings.for_seconds), name="for"))
        done, _running = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    except RunFault as fault:
        return fault
    finally:
        # The view goes first, so that the terminal is whole again before anything is printed.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return None


async def _get_ready(parts: _Parts, console: Console) -> None:
    """Start the children and return when every shard can decide. Raises RunFault when one of them cannot run."""
    first, *others = parts.shard_metrics_ports
    # The first shard alone compiles the kernels, if they are not at hand; the others find them.

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    await parts.supervisor.start(through=first, on_wait=say)
    await _while_children_live(parts, _until_ready(parts, console, first, WAITING))
    await parts.supervisor.start(on_wait=say)
    for name in others:
        await _while_children_live(parts, _until_ready(parts, console, name, OTHERS))
    if parts.watch is not None:
        await _while_children_live(parts, _get_zones(parts, parts.watch, console))


async def _until_ready(parts: _Parts, console: Console, name: str, waiting: str) -> None:
    port, log = parts.shard_metrics_ports[name], str(parts.state.logs / f"{name}.log")
    await until_ready(lambda: answers_ready(port), parts.clock, console, log=log, waiting=waiting)


async def _get_zones(parts: _Parts, watch: CoordinatorWatch, console: Console) -> None:
    """Return once each shard that has its zone has read the machines in it; a run without them would begin starving."""
    log = str(parts.state.logs / f"{COORDINATOR}.log")
    try:
        having = await watch.assign_zones(dict(zip(parts.settings.shard_ids, zones_of(parts.settings), strict=True)))
    except RunFault as fault:
        raise RunFault(f"{fault} (log: {log})") from fault
    started_seconds = parts.clock.monotonic_seconds()

    async def have_machines() -> bool:
        figures = await parts.observer.look()
        if parts.clock.monotonic_seconds() - started_seconds > ZONES_SECONDS_MAX:
            # Whoever has moved all of them elsewhere in a former run wants to see that.
            return True
        return parts.observer.answers and all(figures.shards[shard].machines for shard in having)

    await until_ready(have_machines, parts.clock, console, log=log, waiting=ZONES_ASSIGNED)


async def _while_children_live(parts: _Parts, waiting: Coroutine[Any, Any, None]) -> None:
    """Wait for something; raises RunFault as soon as a child cannot be restarted."""
    tasks = (asyncio.create_task(waiting), asyncio.create_task(parts.supervisor.watch()))
    try:
        done, _running = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _look(parts: _Parts) -> None:
    while True:
        await parts.observer.look()
        await parts.clock.sleep(LOOK_SECONDS)


async def _show(parts: _Parts, console: Console) -> None:
    # On a terminal it lies below the screen of the view, and is there again when the run is over.
    console.print(parts.look, highlight=False, markup=False, soft_wrap=True)
    view = LiveView(parts.observer, lambda: _status(parts), parts.clock)
    if console.is_terminal:
        with Live(
            view, console=console, screen=True, refresh_per_second=SCREENS_PER_SECOND, auto_refresh=False
        ) as live:
            while True:
                live.refresh()
                await parts.clock.sleep(1 / SCREENS_PER_SECOND)
    while True:
        await parts.clock.sleep(PLAIN_LINE_SECONDS)
        for move in parts.watch.take_news() if parts.watch is not None else ():
            # What was given arrives, or is reported when it does not; the line between would say little.
            if move.state is not MoveState.GIVEN:
                console.print(move_line(move), highlight=False, markup=False, soft_wrap=True)
        console.print(view.plain_line(), highlight=False, markup=False, soft_wrap=True)


def _status(parts: _Parts) -> RunStatus:
    settings = parts.settings
    what = "trace" if settings.trace else "demo"
    speed = f" · {settings.speed:g}×" if settings.speed else ""
    shards = f"{settings.shards} shards on {settings.store.value} · " if settings.shards > 1 else ""
    return RunStatus(
        title=f"{what} · {shards}{settings.clusters} clusters · {settings.machines} machines{speed}",
        position_seconds=parts.driver.position_seconds,
        run_seconds=parts.stopwatch.seconds,
        done_share=parts.driver.done_share,
        children=parts.supervisor.statuses,
        clusters_connected=sum(cluster.statistics().connected for cluster in parts.clusters.values()),
        clusters=settings.clusters,
        look=parts.look,
        check=parts.checker.last,
        check_age_seconds=parts.checker.age_seconds,
        moves=parts.watch.tally.moves if parts.watch is not None else (),
    )


def _result(parts: _Parts, ran_seconds: float, check: FleetCheck | None) -> RunResult:
    return RunResult(
        figures=parts.observer.figures,
        actions=parts.observer.actions.counts(),
        timeline=parts.driver.timeline,
        shard_ids=parts.settings.shard_ids,
        cycles=parts.observer.cycles_total,
        seconds=ran_seconds,
        restarts=parts.supervisor.restarts_total,
        is_trace=parts.settings.trace is not None,
        finished=parts.driver.finished,
        check=check,
        moves=parts.watch.tally.moves if parts.watch is not None else (),
    )


def _summary(result: RunResult) -> RenderableType:
    if not result.figures.shards:
        return summary(result)
    shards = shard_table(result.figures, title="shards, wanted → bound")
    return summary(result, shards, shards_over_time(result.timeline), moves_text(result.moves))
