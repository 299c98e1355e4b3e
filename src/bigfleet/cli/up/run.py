"""One run of `bigfleet up`, put together: children, clusters, demand, view, summary, in that order and back.

Nothing here decides about capacity; it starts the real processes and lets a person watch them.
"""

import asyncio
import json
import random
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.live import Live

from bigfleet.cli.faults import RunFault
from bigfleet.cli.runtime import SystemClock, stop_on_signals
from bigfleet.cli.up.drive import DemoDriver, Driver, ReplayDriver
from bigfleet.cli.up.observer import Observer
from bigfleet.cli.up.readiness import answers_ready, until_ready
from bigfleet.cli.up.report import RunResult, summary, write_report
from bigfleet.cli.up.settings import UpSettings
from bigfleet.cli.up.state_dir import Ports, StateDir
from bigfleet.cli.up.supervisor import ChildSpec, Supervisor
from bigfleet.cli.up.view import Status, View, look_words
from bigfleet.model.clock import Clock
from bigfleet.model.ids import ClusterId
from bigfleet.operator.session import SessionSettings
from bigfleet.rpc.session_client import GrpcSessionDialer
from bigfleet.sim.cluster import SimulatedCluster
from bigfleet.sim.fleet import REGION, ZONES, Fleet, default_fleet, trace_fleet
from bigfleet.sim.trace import TraceReplay
from bigfleet.sim.workload import WorkloadReplay

SHARD_ID: Final = "shard-0"
#: The world's durations shrink with the speed, down to what a process can still tell apart.
TIME_SCALE_MIN: Final = 0.001
LOOK_SECONDS: Final = 1.0
PLAIN_LINE_SECONDS: Final = 5.0
SCREENS_PER_SECOND: Final = 2
SMALL_FLEET_MACHINES: Final = 500
SUMMARY_WIDTH: Final = 110
#: Ends of sessions are told to a person by the view; dialling again is quick, as the shard is on this machine.
SESSION: Final = SessionSettings(rollup_interval_seconds=5.0, rollup_gap_seconds=0.1)
_WORLD_FAILED_HOLD_SECONDS: Final = 600.0
_WORLD_RECONCILE_SECONDS: Final = 60.0


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
    """What a run consists of once it stands."""

    settings: UpSettings
    state: StateDir
    clock: Clock
    supervisor: Supervisor
    observer: Observer
    clusters: Mapping[str, SimulatedCluster]
    driver: Driver
    shard_address: str
    shard_metrics_port: int
    stopwatch: "_Stopwatch"


async def run_up(settings: UpSettings, console: Console) -> int:
    """Run until the demand ends, --for is over, or a signal comes; print the summary and return the exit code.

    Raises UsageFault and RunFault.
    """
    clock = SystemClock()
    stop = stop_on_signals()
    fleet = trace_fleet(settings.trace.nodes) if settings.trace else default_fleet(settings.machines)
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
    result = _result(parts, ran_seconds)
    console.print(summary(result))
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


def _assemble(settings: UpSettings, state: StateDir, fleet: Fleet, clock: Clock) -> _Parts:
    scale = time_scale(settings)
    ports = state.ports()
    supervisor = Supervisor(_child_specs(settings, state, ports, fleet, scale), clock)
    shard_address = f"127.0.0.1:{ports.shard}"
    observer = Observer(shard_address, settings.cluster_ids, clock)
    clusters = {
        cluster: SimulatedCluster(
            cluster=ClusterId(cluster),
            dialer=GrpcSessionDialer(shard_address),
            clock=clock,
            rng=random.Random(f"{settings.seed}/{cluster}"),  # noqa: S311 - a simulation's dwell, no secret
            time_scale=scale,
            settings=SESSION,
        )
        for cluster in settings.cluster_ids
    }
    return _Parts(
        settings=settings,
        state=state,
        clock=clock,
        supervisor=supervisor,
        observer=observer,
        clusters=clusters,
        driver=_driver(settings, state, fleet, clusters, observer, clock),
        shard_address=shard_address,
        shard_metrics_port=ports.shard_metrics,
        stopwatch=_Stopwatch(clock),
    )


def _driver(
    settings: UpSettings,
    state: StateDir,
    fleet: Fleet,
    clusters: Mapping[str, SimulatedCluster],
    observer: Observer,
    clock: Clock,
) -> Driver:
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
    )
    return DemoDriver(
        demand=workload, clusters=clusters, observer=observer, settings=settings, state=state, clock=clock
    )


def _child_specs(
    settings: UpSettings, state: StateDir, ports: Ports, fleet: Fleet, scale: float
) -> tuple[ChildSpec, ...]:
    world: dict[str, Any] = {"region": REGION, "zones": ZONES, "pools": fleet.pools}
    world_path = state.write_text("world.json", json.dumps(world, indent=1) + "\n")
    provider = (
        "provider", "simulated",
        "--addr", f"127.0.0.1:{ports.provider}",
        "--metrics-addr", f"127.0.0.1:{ports.provider_metrics}",
        "--state", _absolute(state.path / "provider.db"),
        "--world", _absolute(world_path),
        "--seed", str(settings.seed),
        "--time-scale", repr(scale),
        "--failed-hold", f"{max(1.0, _WORLD_FAILED_HOLD_SECONDS * scale):.3f}s",
        "--reconcile-interval", f"{max(2.0, _WORLD_RECONCILE_SECONDS * scale):.3f}s",
    )  # fmt: skip
    shard = (
        "shard",
        "--id", SHARD_ID,
        "--listen", f"127.0.0.1:{ports.shard}",
        "--metrics-addr", f"127.0.0.1:{ports.shard_metrics}",
        "--data-dir", _absolute(state.path / "shard"),
        "--provider-addr", f"127.0.0.1:{ports.provider}",
        "--cycle-interval", _cycle_interval(settings),
        "--wake-min-gap", "200ms",
    )  # fmt: skip
    return tuple(
        ChildSpec(
            name=name,
            arguments=arguments,
            port=port,
            log=state.logs / f"{name}.log",
            pid_file=state.path / f"{name}.pid",
        )
        for name, arguments, port in (("provider", provider, ports.provider), ("shard", shard, ports.shard))
    )


def _cycle_interval(settings: UpSettings) -> str:
    if settings.trace is None:
        return "1s"
    # Each sample waits for a decision; a small fleet is decided in milliseconds.
    return "200ms" if settings.machines <= SMALL_FLEET_MACHINES else "500ms"


def _absolute(path: Path) -> str:
    return str(path.absolute())


async def _run_until(stop: asyncio.Event, parts: _Parts, console: Console) -> Exception | None:
    """Let everything run until the demand ends or somebody stops it; return what went wrong, if anything did."""
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
    """Start the children and return when the shard can decide. Raises RunFault when one of them cannot run."""
    await parts.supervisor.start()
    log = str(parts.state.logs / "shard.log")
    ready = until_ready(lambda: answers_ready(parts.shard_metrics_port), parts.clock, console, log=log)
    tasks = (asyncio.create_task(ready), asyncio.create_task(parts.supervisor.watch()))
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
    console.print(look_words(parts.shard_address), highlight=False, markup=False, soft_wrap=True)
    view = View(parts.observer, lambda: _status(parts), parts.clock)
    if console.is_terminal:
        with Live(
            view, console=console, screen=True, refresh_per_second=SCREENS_PER_SECOND, auto_refresh=False
        ) as live:
            while True:
                live.refresh()
                await parts.clock.sleep(1 / SCREENS_PER_SECOND)
    while True:
        await parts.clock.sleep(PLAIN_LINE_SECONDS)
        console.print(view.plain_line(), highlight=False, markup=False, soft_wrap=True)


def _status(parts: _Parts) -> Status:
    settings = parts.settings
    what = "trace" if settings.trace else "demo"
    speed = f" · {settings.speed:g}×" if settings.speed else ""
    return Status(
        title=f"{what} · {settings.clusters} clusters · {settings.machines} machines{speed}",
        position_seconds=parts.driver.position_seconds,
        run_seconds=parts.stopwatch.seconds,
        done_share=parts.driver.done_share,
        children=parts.supervisor.statuses,
        clusters_connected=sum(cluster.statistics().connected for cluster in parts.clusters.values()),
        clusters=settings.clusters,
        shard_address=parts.shard_address,
    )


def _result(parts: _Parts, ran_seconds: float) -> RunResult:
    return RunResult(
        figures=parts.observer.figures,
        actions=parts.observer.actions.counts(),
        timeline=parts.driver.timeline,
        shard_ids=(SHARD_ID,),
        cycles=parts.observer.cycles_total,
        seconds=ran_seconds,
        restarts=parts.supervisor.restarts_total,
        is_trace=parts.settings.trace is not None,
        finished=parts.driver.finished,
    )
