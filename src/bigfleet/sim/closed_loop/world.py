"""One closed world: the real shard, provider kit and operator flow on virtual time, cycle by cycle.

docs/spec/simulation.md. Everything outside of the shard's own process is here: who is alive, what happens when, and in
which order clusters report. A cycle begins with its events, the shard decides half-way through it, and what takes no
cycles has ended when it ends. It measures nothing and must never touch what the processes decide.
"""

import asyncio
import random  # noqa: TID251 - every stream is seeded
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import CollectorRegistry

from bigfleet.model.ids import ClusterId, ShardId
from bigfleet.model.machine import Machine
from bigfleet.model.states import MachineState
from bigfleet.provider.core import CapacityCore
from bigfleet.provider.options import CoreOptions
from bigfleet.provider.record import Record
from bigfleet.shard.audit import AuditLog
from bigfleet.shard.controller import CycleReport, Shard
from bigfleet.shard.outbox import CloseReason
from bigfleet.shard.ports import ShardSettings, compute_inline
from bigfleet.shard.state_file import StateFile
from bigfleet.sim.closed_loop.agent import ClusterOperator
from bigfleet.sim.closed_loop.coordinator import Coordinator
from bigfleet.sim.closed_loop.in_process import KitProvider, LocalDialer
from bigfleet.sim.closed_loop.pods import Template
from bigfleet.sim.closed_loop.scenario import Event, Scenario, Takes
from bigfleet.sim.closed_loop.stock import Stocked, clusters_of, stamps_of, stocked, templates_of
from bigfleet.sim.closed_loop.substrate import Substrate
from bigfleet.sim.testkit import SeededIds, make_core
from bigfleet.sim.virtual_time import LoopClock

SHARD = ShardId("shard-0")
#: Between two clusters that report one after the other.
_TURN_SECONDS = 0.2
#: Before the first cycle: sessions open, roll-ups arrive.
_OPENING_SECONDS = 5.0
#: A cluster that reports when it is told to reports by itself this seldom.
_SELDOM_SECONDS = 1e9

#: A source of ids knows this many seeds; worlds that share one differ in every other stream.
_IDS_SEEDS = 1_000_000
#: Who has not stopped by then never will.
_STOP_SECONDS_MAX = 600.0

MakeShard = Callable[..., Shard]


@dataclass(slots=True, eq=False)
class Process:
    """One process of the shard."""

    shard: Shard
    provider: KitProvider
    #: What runs beside its cycles.
    tasks: "list[asyncio.Task[None]]"
    #: Its open file, where a coordinator may change what it owns.
    file: StateFile | None = None
    #: Clusters of which a roll-up has reached this process.
    heard: set[str] = field(default_factory=set)
    #: Cycles for which it goes on though a newer process stands; None for the newest.
    lives_for_cycles: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one process decided in one cycle of the world."""

    process: Process
    report: CycleReport


class World:
    """A scenario with everything in it. Enter `running`, then ask for one `cycle` after the other."""

    def __init__(
        self,
        scenario: Scenario,
        takes: Takes,
        *,
        seed: int,
        make_audit: Callable[["World", int], AuditLog],
        make_shard: MakeShard = Shard,
        disk: Path | None = None,
    ) -> None:
        """Build everything; `make_audit` gets the world and the epoch of each process. Raises UnmappableRequest.

        `disk` is a folder for what the shard keeps; with it there is a coordinator.
        """
        self.scenario = scenario
        self.clock = LoopClock()
        self.cycle = 0
        #: Those that are alive, the newest last.
        self.processes: list[Process] = []
        #: Of the newest process; rises with each.
        self.epoch = 0
        #: Cycle before which a new process starts, 0 for none.
        self._starts_at_cycle = 0
        self.coordinator = None if disk is None else Coordinator(self.clock)
        self._disk = disk
        #: Cycles before which the coordinator's process, and its store, come back; 0 while they are there.
        self._coordinator_back_at = 0
        self._store_back_at = 0
        self._make_audit = make_audit
        self._make_shard = make_shard
        self._ids = SeededIds(seed % _IDS_SEEDS)
        self._seed = seed
        self._draws = self._rng("events")
        self.stock = {each.slot.id: each for each in stocked(scenario)}
        self.templates: dict[tuple[str, int], Template] = {}
        for workload in scenario.workloads:
            self.templates |= templates_of(workload)
        self.operators = {name: self._operator(name) for name in scenario.clusters}
        self.substrate = self._substrate(takes)
        self.core: CapacityCore = make_core(
            self.substrate,
            ids=self._ids,
            seed=seed,
            # A machine that failed stays so, for its expectation to see.
            options=CoreOptions(is_inline=True, failed_hold_seconds=0),
        )
        self.settings = ShardSettings(
            cycle_interval_seconds=scenario.cycle_seconds,
            reclaim_cap_fraction=scenario.reclaim_cap,
            incremental_reconcile=scenario.incremental_reconcile,
        )

    def _rng(self, stream: str) -> random.Random:
        return random.Random(f"{self._seed}/{stream}")  # noqa: S311 - a simulation, no secret

    def _operator(self, name: str) -> ClusterOperator:
        interval_seconds = _SELDOM_SECONDS if self.scenario.rotating_reports else self.scenario.cycle_seconds
        return ClusterOperator(
            cluster=ClusterId(name),
            dialer=LocalDialer(self._serving, self._heard, self.clock),
            clock=self.clock,
            rng=self._rng(f"operator/{name}"),
            rollup_interval_seconds=interval_seconds,
        )

    def _substrate(self, takes: Takes) -> Substrate:
        return Substrate(
            [each.slot for each in self.stock.values()],
            hosts=[i for i, each in self.stock.items() if each.state is not MachineState.SPECULATIVE],
            takes=takes,
            cycle_seconds=self.scenario.cycle_seconds,
            clock=self.clock,
            joined=lambda machine, cluster: self.operators[cluster].node_joined(machine),
            left=lambda machine_id, cluster: self.operators[cluster].node_left(machine_id),
        )

    # ---- life ----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def running(self) -> AsyncIterator["World"]:
        """Bring everything up as the scenario begins, and take it down again."""
        await self.core.start()
        await self.core.loaded()
        for workload in self.scenario.workloads:
            for cluster in clusters_of(self.scenario, workload.cluster):
                self._resize(workload.name, cluster, workload.pods)
        for each in self.stock.values():
            if each.state is MachineState.CONFIGURED:
                await self._bind_as_before(each)
        await self.clock.sleep(1.0)
        self.substrate.is_slow = True
        if self.coordinator is not None:
            self.coordinator.start()
        await self._start_process()
        sessions = [asyncio.create_task(operator.run()) for operator in self.operators.values()]
        await self.clock.sleep(_OPENING_SECONDS)
        try:
            yield self
        finally:
            for process in list(self.processes):
                self._kill(process)
            if self.coordinator is not None:
                self.coordinator.stop()
            for task in sessions:
                task.cancel()
            _done, stuck = await asyncio.wait(sessions, timeout=_STOP_SECONDS_MAX)
            await self.core.stop()
            if stuck:
                raise RuntimeError(f"{len(stuck)} operators did not stop in {_STOP_SECONDS_MAX:g} s when told to")

    async def _bind_as_before(self, each: Stocked) -> None:
        template = self.templates.get(each.bound_for) if each.bound_for is not None else None
        await self.core.configure(each.slot.id, each.cluster, b"", stamps_of(template, SHARD))

    async def _start_process(self) -> None:
        file = None
        if self._disk is not None:
            file = StateFile.open(self._disk, shard_id=SHARD, clock=self.clock)
        self.epoch = self.epoch + 1 if file is None else file.epoch
        provider = KitProvider(self.core, self.clock, synchronous_create=self.scenario.synchronous_create)
        shard = self._make_shard(
            shard_id=SHARD,
            epoch=self.epoch,
            settings=self.settings,
            provider=provider,
            clock=self.clock,
            ids=self._ids,
            compute=compute_inline,
            registry=CollectorRegistry(),
            audit_log=self._make_audit(self, self.epoch),
            ownership_file=None if file is None else file.ownership,
        )
        await shard.make_ready()
        tasks = [asyncio.create_task(shard.actuator.run())]
        if self.coordinator is not None and file is not None:
            tasks.append(asyncio.create_task(self.coordinator.link(shard, file.ownership).run()))
        self.processes.append(Process(shard, provider, tasks, file))

    def _kill(self, process: Process) -> None:
        """End a process at once: what it has in flight gets no answer, and no answer of it arrives."""
        process.provider.is_cut = True
        for task in process.tasks:
            task.cancel()
        process.shard.stop_sessions()
        if process.file is not None:
            process.file.close()
        self.processes.remove(process)

    @property
    def newest(self) -> Process | None:
        """The process that serves sessions, None while there is none."""
        return self.processes[-1] if self.processes else None

    def _serving(self) -> Shard | None:
        return self.newest.shard if self.newest is not None else None

    def _heard(self, shard: Shard, cluster: str) -> None:
        for process in self.processes:
            if process.shard is shard:
                process.heard.add(cluster)

    # ---- what readers ask ----------------------------------------------------------------------------------------

    async def records(self) -> dict[str, Record]:
        """Return the provider's records by machine."""
        return {record.id: record for record in (await self.core.list()).records}

    def machines_of(self, records: dict[str, Record], state: MachineState) -> list[Machine]:
        """Return the machines in a state, ids ascending."""
        return [record.machine for _id, record in sorted(records.items()) if record.state is state]

    def states(self, records: dict[str, Record]) -> Counter[MachineState]:
        """Return how many machines are in each state."""
        return Counter(record.state for record in records.values())

    # ---- cycles --------------------------------------------------------------------------------------------------

    async def run_cycle(self, decided: Callable[[Step], Awaitable[None]]) -> None:
        """Run the next cycle of the world; `decided` hears of each process's decision before it is carried out."""
        self.cycle += 1
        began_seconds = self.clock.monotonic_seconds()
        half_seconds, cycle_seconds = self.scenario.cycle_seconds / 2, self.scenario.cycle_seconds
        await self._renew_processes()
        self._renew_coordinator()
        for event in self.scenario.events:
            if event.happens_in(self.cycle):
                await self._happen(event)
        if self.scenario.rotating_reports:
            await self._report_in_turn()
        await self.clock.sleep(began_seconds + half_seconds - self.clock.monotonic_seconds())
        for process in list(self.processes):
            report = await process.shard.step(is_timer=True)
            await decided(Step(process=process, report=report))
        await self.clock.sleep(began_seconds + cycle_seconds - self.clock.monotonic_seconds())

    async def _renew_processes(self) -> None:
        for process in list(self.processes):
            if process.lives_for_cycles is None:
                continue
            process.lives_for_cycles -= 1
            if process.lives_for_cycles < 0:
                self._kill(process)
        if self._starts_at_cycle == self.cycle:
            await self._start_process()

    def _renew_coordinator(self) -> None:
        if self.coordinator is None:
            return
        if self._coordinator_back_at == self.cycle:
            self.coordinator.start()
        if self._store_back_at == self.cycle:
            self.coordinator.store.is_cut = False

    async def _report_in_turn(self) -> None:
        names = list(self.operators)
        first = self.cycle % len(names)
        for name in names[first:] + names[:first]:
            self.operators[name].client.demand_changed()
            await self.clock.sleep(_TURN_SECONDS)

    # ---- events --------------------------------------------------------------------------------------------------

    async def _happen(self, event: Event) -> None:
        if event.resize is not None:
            for cluster in clusters_of(self.scenario, event.resize.cluster):
                self._resize(event.resize.workload, cluster, event.resize.pods)
        if event.random_resize is not None:
            drawn = event.random_resize
            cluster = self._draws.choice(list(self.operators))
            self._resize(drawn.workload, cluster, self._draws.randint(drawn.pods_min, drawn.pods_max))
        if event.lose is not None:
            for cluster in clusters_of(self.scenario, event.lose.cluster):
                running = self.operators[cluster].pods.machines_running(event.lose.workload)
                await asyncio.gather(*(self.substrate.lose(i) for i in running[: event.lose.machines]))
        if event.fail is not None:
            self.substrate.failures[event.fail.call].extend([event.fail.text] * event.fail.calls)
        if event.shard_dies_for_cycles is not None:
            for process in list(self.processes):
                self._kill(process)
            self._starts_at_cycle = self.cycle + event.shard_dies_for_cycles
        if event.zombie_for_cycles is not None and self.newest is not None:
            await self._make_zombie(self.newest, event.zombie_for_cycles)
        if self.coordinator is not None and event.coordinator_gone_for_cycles is not None:
            self.coordinator.stop()
            self._coordinator_back_at = self.cycle + event.coordinator_gone_for_cycles
        if self.coordinator is not None and event.store_cut_for_cycles is not None:
            self.coordinator.store.is_cut = True
            self._store_back_at = self.cycle + event.store_cut_for_cycles

    def _resize(self, workload: str, cluster: str, pods: int) -> None:
        for (name, _gang), template in self.templates.items():
            if name == workload:
                self.operators[cluster].pods.resize(template, pods)

    async def _make_zombie(self, old: Process, cycles: int) -> None:
        """Let a new process stand beside one that does not know of it: it keeps its memory and loses its sessions."""
        old.lives_for_cycles = cycles
        await self._start_process()
        for session in old.shard.sessions:
            old.shard.sessions.close(session, CloseReason.GONE)
