"""Runs `bigfleet up --kubernetes N`: planes, fleet, operators, workloads, a line per cluster, a summary.

The workloads change all the time, as those of real clusters do. This module does not decide about capacity.
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bigfleet.cli.runtime.failures import RunFault
from bigfleet.cli.runtime.system import SystemClock, SystemIds, stop_on_signals
from bigfleet.cli.up.check_text import check_table
from bigfleet.cli.up.fleet_check import FleetCheck, check_fleet
from bigfleet.cli.up.kubernetes.children import (
    PROVIDER,
    SHARD,
    PlaneAccess,
    cluster_specs,
    fleet_specs,
    port_names,
)
from bigfleet.cli.up.kubernetes.plane import DemoPlane
from bigfleet.cli.up.kubernetes.settings import KubernetesSettings
from bigfleet.cli.up.observer import ShardObserver
from bigfleet.cli.up.readiness import answers_ready, until_ready
from bigfleet.cli.up.state_dir import StateDir
from bigfleet.cli.up.supervisor import Supervisor
from bigfleet.demo.fleet import default_fleet
from bigfleet.demo.kubernetes.control_plane import ControlPlane, ControlPlaneError, ControlPlaneSettings
from bigfleet.demo.kubernetes.workloads import batch, gang, initial_manifests
from bigfleet.model.clock import Clock
from bigfleet.model.ids import ClusterId, Rng
from bigfleet.model.machine import Machine
from bigfleet.operator.kubernetes.api import ApiError
from bigfleet.rpc.clients.provider import GrpcProvider, ProviderDeadlines
from bigfleet.shard.ports import ProviderRefusal

LINE_SECONDS: Final = 5.0
#: The shard is looked at more often than a line is printed, so that no action is missed.
LOOK_SECONDS: Final = 1.0
#: How often the workloads of a cluster change.
CHANGE_SECONDS: Final = 20.0
_LIST_SECONDS: Final = 0.5
_WAITING: Final = "waiting until the shard has read its machines …"


class ProviderMachines:
    """The machines that the provider lists; read again when they are older than half a second."""

    def __init__(self, provider: GrpcProvider, clock: Clock) -> None:
        self._provider = provider
        self._clock = clock
        self._machines: Sequence[Machine] = ()
        self._read_seconds: float | None = None
        self._reading = asyncio.Lock()

    async def read(self) -> Sequence[Machine]:
        """Return the machines; the former ones while the provider is away."""
        async with self._reading:
            now_seconds = self._clock.monotonic_seconds()
            if self._read_seconds is None or now_seconds - self._read_seconds >= _LIST_SECONDS:
                try:
                    listing = await self._provider.list(b"")
                    self._machines = [record.machine for record in listing.records]
                except ProviderRefusal:
                    # It is being started, or started again.
                    pass
                self._read_seconds = now_seconds
            return self._machines


async def run_kubernetes(settings: KubernetesSettings, console: Console) -> int:
    """Run until --for is over or a signal comes; print the summary and return the exit code.

    Raises UsageFault and RunFault.
    """
    clock = SystemClock()
    stop = stop_on_signals()
    with StateDir.open(settings.state_dir, identity=settings.identity, fresh=settings.fresh) as state:
        async with AsyncExitStack() as stack:
            try:
                run = await _start(settings, state, stack, clock, console)
                await run.until(stop, settings.for_seconds)
            except (ControlPlaneError, ApiError) as error:
                raise RunFault(f"{error} (logs: {state.logs} and {state.path}/planes)") from error
            table, check = run.cluster_table(), await run.check()
            actions = run.observer.actions.counts()
    console.print(table)
    console.print(check_table(check))
    for kind, outcomes in sorted(actions.items()):
        console.print(f"{kind}: " + ", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items())))
    return 0


async def _start(
    settings: KubernetesSettings, state: StateDir, stack: AsyncExitStack, clock: Clock, console: Console
) -> "_Run":
    """Start everything; what was started ends with the stack, in the opposite order."""
    rng = random.Random(settings.seed)  # noqa: S311 - a demonstration's workloads, no secret
    ports = state.ports(port_names(settings))
    console.print(f"starting {settings.planes} control planes …", highlight=False)
    planes = await _planes(settings, state, stack, clock, rng)
    access = {}
    for name, plane in planes.items():
        stack.push_async_callback(plane.close)
        access[name] = PlaneAccess(*await plane.prepare(settings.deploy))
    specs = [
        *fleet_specs(settings, state, ports, default_fleet(settings.machines)),
        *cluster_specs(settings, state, ports, access),
    ]
    supervisor = Supervisor(specs, clock)
    stack.push_async_callback(supervisor.stop)

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    await supervisor.start(through=SHARD, on_wait=say)
    log = str(state.logs / f"{SHARD}.log")
    metrics_port = ports[f"{SHARD}_metrics"]
    await until_ready(lambda: answers_ready(metrics_port), clock, console, log=log, waiting=_WAITING)
    await supervisor.start(on_wait=say)
    provider = GrpcProvider(
        f"127.0.0.1:{ports[PROVIDER]}",
        deadlines=ProviderDeadlines(call_seconds=10.0, list_seconds=10.0),
        clock=clock,
    )
    stack.push_async_callback(provider.close)
    observer = ShardObserver(f"127.0.0.1:{ports[SHARD]}", settings.cluster_ids, clock)
    stack.push_async_callback(observer.close)
    return _Run(
        planes=planes,
        supervisor=supervisor,
        observer=observer,
        read_machines=ProviderMachines(provider, clock),
        clock=clock,
        rng=rng,
        print_line=lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True),
    )


async def _planes(
    settings: KubernetesSettings, state: StateDir, stack: AsyncExitStack, clock: Clock, rng: Rng
) -> dict[str, DemoPlane]:
    made = {}
    for name in settings.cluster_ids:
        plane_settings = ControlPlaneSettings(program=settings.program, folder=state.path / "planes" / name)
        made[name] = ControlPlane(plane_settings, clock=clock, ids=SystemIds(), rng=rng)
        stack.push_async_callback(made[name].stop)
    await asyncio.gather(*(plane.start() for plane in made.values()))
    return {name: DemoPlane(ClusterId(name), plane, clock=clock, rng=rng) for name, plane in made.items()}


class _Run:
    """Everything that runs."""

    def __init__(
        self,
        *,
        planes: Mapping[str, DemoPlane],
        supervisor: Supervisor,
        observer: ShardObserver,
        read_machines: ProviderMachines,
        clock: Clock,
        rng: Rng,
        print_line: Callable[[str], None],
    ) -> None:
        self.observer = observer
        self._planes = planes
        self._supervisor = supervisor
        self._read_machines = read_machines
        self._clock = clock
        self._rng = rng
        self._print_line = print_line

    async def until(self, stop: asyncio.Event, seconds: float | None) -> None:
        """Run until the event or the time; raises RunFault when a program cannot be run."""
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(plane.run(self._read_machines.read), name=name)
                for name, plane in self._planes.items()
            ]
            running += [tasks.create_task(self._drive(plane)) for plane in self._planes.values()]
            running += [tasks.create_task(self._look()), tasks.create_task(self._show())]
            watching = tasks.create_task(self._supervisor.watch())
            waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(stop.wait())]
            if seconds is not None:
                waits.append(asyncio.ensure_future(self._clock.sleep(seconds)))
            try:
                await asyncio.wait((*waits, *running, watching), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (*waits, *running, watching):
                    task.cancel()

    async def _drive(self, plane: DemoPlane) -> None:
        """Create the workloads of a cluster, then change them again and again."""
        await plane.create(initial_manifests(self._rng))
        number = 0
        while True:
            await self._clock.sleep(CHANGE_SECONDS * self._rng.uniform(0.75, 1.25))
            number += 1
            kind = int(self._rng.uniform(0, 3))
            if kind == 0:
                await plane.scale("web", int(self._rng.uniform(8, 36)))
            elif kind == 1:
                await plane.create([batch(f"batch-{number}", int(self._rng.uniform(4, 16)))])
            else:
                await plane.create([gang(f"training-{number}", 4)])

    async def _look(self) -> None:
        while True:
            await self.observer.look()
            await self._clock.sleep(LOOK_SECONDS)

    async def _show(self) -> None:
        started_seconds = self._clock.monotonic_seconds()
        while True:
            await self._clock.sleep(LINE_SECONDS)
            seconds = self._clock.monotonic_seconds() - started_seconds
            self._print_line(f"{seconds:.0f}s  " + "  ".join(self._words()))

    def _words(self) -> list[str]:
        words = []
        for name, plane in self._planes.items():
            figures, costs = plane.figures(), self.observer.figures.clusters.get(name)
            dollars = costs.cost_usd_per_hour if costs is not None else 0.0
            words.append(
                f"{name}: {figures.running} running, {figures.pending} pending, {figures.nodes} nodes, ${dollars:.2f}/h"
            )
        return words

    def cluster_table(self) -> Table:
        """Return the summary's table of clusters."""
        table = Table(
            box=None, pad_edge=False, padding=(0, 2), title="clusters", title_justify="left",
            title_style="bold underline",
        )  # fmt: skip
        for heading in ("cluster", "pods", "running", "starting", "pending", "nodes", "$/h"):
            table.add_column(heading, justify="left" if heading == "cluster" else "right")
        for name, plane in self._planes.items():
            figures, costs = plane.figures(), self.observer.figures.clusters.get(name)
            dollars = costs.cost_usd_per_hour if costs is not None else 0.0
            numbers = (figures.pods, figures.running, figures.starting, figures.pending, figures.nodes)
            table.add_row(name, *map(str, numbers), f"{dollars:.2f}")
        return table

    async def check(self) -> FleetCheck:
        """Compare the fleet with a packer's, for the demand of this moment."""
        figures = await self.observer.look()
        pods = {name: await plane.requests() for name, plane in self._planes.items()}
        return await asyncio.to_thread(check_fleet, pods, figures)
