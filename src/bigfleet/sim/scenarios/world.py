"""Runs one closed world: the real shard, provider kit and operator flow on virtual time, cycle by cycle.

docs/spec/simulation.md. Its processes, wires and coordinator are those of the world of faults. Everything outside of
the shard's own process is here: who is alive, what happens when, and in which order clusters report. A cycle begins
with its events, the shard decides half-way through it, and what takes no cycles has ended when it ends. It measures
nothing and must never touch what the processes decide.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bigfleet.model import labels
from bigfleet.model.ids import ClusterId, ShardId
from bigfleet.model.ownership import Base
from bigfleet.model.states import MachineState
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.kit.options import CoreOptions
from bigfleet.provider.records.record import Record
from bigfleet.provider.testing import SeededIds, make_core
from bigfleet.shard.audit.log import AuditLog
from bigfleet.shard.cycle.controller import Shard
from bigfleet.shard.cycle.cycle_report import CycleReport
from bigfleet.shard.ownership.state_file import StateFile
from bigfleet.shard.ports import FenceToken, ShardSettings
from bigfleet.shard.sessions.outbox import CloseReason
from bigfleet.sim.kernel.network import Connection
from bigfleet.sim.kernel.processes import Process
from bigfleet.sim.kernel.streams import seeded
from bigfleet.sim.kernel.virtual_time import LoopClock
from bigfleet.sim.pods.scheduler import Template
from bigfleet.sim.scenarios.cluster_agent import ClusterOperator
from bigfleet.sim.scenarios.coordinator import REPORT_SECONDS, Coordinator
from bigfleet.sim.scenarios.scenario_file import COORDINATOR, Crash, Event, Home, Scenario, Takes
from bigfleet.sim.scenarios.stock import Stocked, clusters_of, stamps_of, stocked, templates_of
from bigfleet.sim.scenarios.substrate import ScenarioSubstrate
from bigfleet.sim.sites.places import ReachableProvider, ReachableShard, even_network
from bigfleet.sim.sites.session_dialer import SimulatedDialer
from bigfleet.sim.sites.shard_process import make_simulated_shard

#: The one shard, where the scenario has no several.
SHARD = "shard-0"
#: Between two clusters that report one after the other.
_TURN_SECONDS = 0.2
#: Before the first cycle: sessions open, roll-ups arrive.
_OPENING_SECONDS = 5.0
#: A cluster that reports on request reports by itself this seldom.
_SELDOM_SECONDS = 1e9

#: A source of ids knows this many seeds; worlds that share one differ in every other stream.
_IDS_SEEDS = 1_000_000

MakeShard = Callable[..., Shard]


@dataclass(slots=True)
class ProcessTraffic:
    """What went from and to one process of a shard."""

    #: Mutating calls that left it.
    calls: int = 0
    #: Clusters of which a roll-up has reached it.
    heard: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class ShardProcess:
    """One process of the shard."""

    process: Process
    #: Of its shard.
    name: str
    shard: Shard
    traffic: ProcessTraffic
    #: What runs beside its cycles.
    tasks: "list[asyncio.Task[None]]"
    #: Its open file, where a coordinator may change what it owns.
    file: StateFile | None = None
    #: Cycles for which it goes on though a newer process stands; None for the newest.
    lives_for_cycles: int | None = None

    @property
    def id(self) -> str:
        """Of this process alone."""
        return self.process.name


class _NewestProcess(ReachableShard):
    """The newest process of a shard; no other one serves sessions."""

    async def serve(self, connection: Connection[bytes, bytes]) -> None:
        """Serve one session's stream, unless it was opened to an older process."""
        if connection.server is not self.process:
            connection.break_off("another process of the shard serves sessions now")
            return
        await super().serve(connection)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one process decided in one cycle of the world."""

    process: ShardProcess
    report: CycleReport


class ClosedWorld:
    """A scenario with everything in it. Enter `running`, then ask for one `cycle` after the other."""

    def __init__(
        self,
        scenario: Scenario,
        takes: Takes,
        *,
        seed: int,
        make_audit: Callable[["ClosedWorld", str], AuditLog],
        make_shard: MakeShard = Shard,
        disk: Path | None = None,
        crash: Crash | None = None,
    ) -> None:
        """Build everything; `make_audit` gets the world and a name for each process. Raises UnmappableRequest.

        `disk` is a folder for what shards keep; with it there is a coordinator.
        """
        self.scenario = scenario
        self.clock = LoopClock()
        self.cycle = 0
        #: When the cycle of the moment began.
        self.began_seconds = 0.0
        #: Those that are alive, the newest last.
        self.processes: list[ShardProcess] = []
        #: How many processes of shards there ever were.
        self._started = 0
        self.homes: Mapping[str, Home] = scenario.shards or {SHARD: Home(zones=(), clusters=scenario.clusters)}
        self._crash = crash
        #: Cycle before which a new process starts, 0 for none.
        self._starts_at_cycle = 0
        #: Processes that were killed: collected, their tasks would run on to their end.
        self._dead: list[Process] = []
        self._network = even_network(self.clock, seeded(f"{seed}/network"))
        of_coordinator = seeded(f"{seed}/coordinator")
        self.coordinator = (
            None if disk is None else Coordinator(self.clock, even_network(self.clock, of_coordinator), of_coordinator)
        )
        self._disk = disk
        #: Cycles before which the coordinator's process, and its store, come back; 0 while they are there.
        self._coordinator_back_at = 0
        self._store_back_at = 0
        self._make_audit = make_audit
        self._make_shard = make_shard
        self._ids = SeededIds(seed % _IDS_SEEDS)
        self._seed = seed
        self._draws = seeded(f"{seed}/events")
        self.stock = {each.slot.id: each for each in stocked(scenario)}
        self.templates: dict[tuple[str, int], Template] = {}
        for workload in scenario.workloads:
            self.templates |= templates_of(workload)
        self._places = {name: _NewestProcess(name) for name in self.homes}
        self._operator_processes = {name: Process(f"operator-{name}") for name in scenario.clusters}
        self.operators = {name: self._operator(name) for name in scenario.clusters}
        self.substrate = self._substrate(takes)
        self.core: CapacityCore = make_core(
            self.substrate,
            ids=self._ids,
            seed=seed,
            # A machine that failed stays so, for its expectation to see.
            options=CoreOptions(is_inline=True, failed_hold_seconds=0),
        )
        self._provider = ReachableProvider("provider", self.core)
        self.settings = ShardSettings(
            cycle_interval_seconds=scenario.cycle_seconds,
            reclaim_cap_fraction=scenario.reclaim_cap,
            reclaim_after_seconds=scenario.reclaim_after_seconds,
            incremental_reconcile=scenario.incremental_reconcile,
        )

    def _operator(self, name: str) -> ClusterOperator:
        interval_seconds = _SELDOM_SECONDS if self.scenario.rotating_reports else self.scenario.cycle_seconds
        return ClusterOperator(
            cluster=ClusterId(name),
            dialer=SimulatedDialer(self._network, self._places[self._home_of(name)], self._operator_processes[name]),
            clock=self.clock,
            rng=seeded(f"{self._seed}/operator/{name}"),
            rollup_interval_seconds=interval_seconds,
        )

    def _substrate(self, takes: Takes) -> ScenarioSubstrate:
        return ScenarioSubstrate(
            [each.slot for each in self.stock.values()],
            hosts=[i for i, each in self.stock.items() if each.state is not MachineState.SPECULATIVE],
            sold_out={each.instance_type for each in self.scenario.shapes.values() if each.sold_out},
            takes=takes,
            cycle_seconds=self.scenario.cycle_seconds,
            clock=self.clock,
            joined=lambda machine, cluster: self.operators[cluster].node_joined(machine),
            left=lambda machine_id, cluster, is_lost: self.operators[cluster].node_left(machine_id, is_lost=is_lost),
        )

    # ---- life ----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def running(self) -> AsyncIterator["ClosedWorld"]:
        """Bring everything up as the scenario begins, and take it down again."""
        for begins in (self.core.start, self.core.loaded):
            await self._provider.process.spawn(begins())
        for workload in self.scenario.workloads:
            for cluster in clusters_of(self.scenario, workload.cluster):
                self._resize(workload.name, cluster, workload.pods)
        for each in self.stock.values():
            if each.state is MachineState.CONFIGURED:
                await self._bind_as_before(each)
        await self.clock.sleep(1.0)
        self.substrate.is_slow = True
        if self.coordinator is not None:
            self.coordinator.open_store()
            self.coordinator.start()
        for name in self.homes:
            await self._start_process(name)
        sessions = [self._operator_processes[name].spawn(each.run()) for name, each in self.operators.items()]
        await self.clock.sleep(_OPENING_SECONDS)
        await self._hand_out_zones()
        crashing = asyncio.create_task(self._crash_once())
        try:
            yield self
            _raise_fault_of(crashing)
        finally:
            crashing.cancel()
            for process in list(self.processes):
                self._kill(process)
            for task in sessions:
                _raise_fault_of(task)
            if self.coordinator is not None:
                self.coordinator.check()

    async def _hand_out_zones(self) -> None:
        """Let the coordinator give each of several shards its zones, and wait until all know of it."""
        if self.coordinator is None or not self.scenario.shards:
            return
        for name, home in self.homes.items():
            for zone in home.zones:
                await self.coordinator.assign(zone, ShardId(name))
        await self.clock.sleep(3 * REPORT_SECONDS)

    async def _crash_once(self) -> None:
        """Let the process of this arm die at its time, and come back."""
        crash = self._crash
        if crash is None or self.coordinator is None:
            return
        await self.clock.sleep(crash.at_second)
        if crash.process == COORDINATOR:
            self.coordinator.stop()
        for process in [each for each in self.processes if each.name == crash.process]:
            self._kill(process)
        await self.clock.sleep(crash.down)
        if crash.process == COORDINATOR:
            self.coordinator.start()
        else:
            await self._start_process(crash.process)

    def _home_of(self, cluster: str) -> str:
        return next(name for name, home in self.homes.items() if cluster in home.clusters)

    async def _bind_as_before(self, each: Stocked) -> None:
        template = self.templates.get(each.bound_for) if each.bound_for is not None else None
        await self.core.configure(each.slot.id, each.cluster, b"", stamps_of(template, self._home_of(each.cluster)))

    async def _start_process(self, name: str) -> None:
        file = None
        self._started += 1
        if self._disk is not None:
            owns = Base.DOMAINS if self.scenario.shards else Base.ALL
            file = StateFile.open(self._disk / name, shard_id=name, clock=self.clock, new_file_owns=owns)
        process, traffic = Process(f"{name}/{self._started}"), ProcessTraffic()

        def called(_method: str, _machine_id: str, _token: FenceToken, answer: str) -> None:
            traffic.calls += not answer

        shard = make_simulated_shard(
            self._make_shard,
            site=self._provider,
            network=self._network,
            caller=process.name,
            on_call=called,
            synchronous_create=self.scenario.synchronous_create,
            shard_id=ShardId(name),
            epoch=self._started if file is None else file.epoch,
            settings=self.settings,
            clock=self.clock,
            ids=self._ids,
            audit_log=self._make_audit(self, process.name),
            ownership_file=None if file is None else file.ownership,
            on_rollup=lambda session, _offer, _outcome: traffic.heard.add(session.cluster),
        )
        await process.spawn(shard.make_ready())
        tasks = [process.spawn(shard.actuator.run())]
        if self.coordinator is not None and file is not None:
            tasks.append(process.spawn(self.coordinator.link(shard, file.ownership).run()))
        self.processes.append(ShardProcess(process, name, shard, traffic, tasks, file))
        self._places[name].process, self._places[name].shard = process, shard

    def _kill(self, process: ShardProcess) -> None:
        """End a process at once: what it has in flight gets no answer, and no answer of it arrives."""
        for task in process.tasks:
            _raise_fault_of(task)
        process.process.kill()
        self._network.close_streams_of(process.process)
        if process.file is not None:
            process.file.close()
            process.file = None
        self.processes.remove(process)
        self._dead.append(process.process)

    def newest(self, name: str) -> ShardProcess | None:
        """Return the process of a shard that serves sessions, None while there is none."""
        return next((process for process in reversed(self.processes) if process.name == name), None)

    @property
    def is_whole(self) -> bool:
        """Return whether every shard has a process."""
        return all(self.newest(name) is not None for name in self.homes)

    def owners(self, record: Record) -> list[str]:
        """Return the shards that own a machine, by their files; without files there is one shard, and it does."""
        if self._disk is None:
            return list(self.homes)
        by = record.metadata.get(labels.ASSIGNED_SHARD, "")
        return [
            process.name
            for process in self.processes
            if process.file is not None
            and process.file.ownership.owned.owns(
                record.machine, by, me=ShardId(process.name), inherits=frozenset(), stays=False
            )
        ]

    # ---- what readers ask ----------------------------------------------------------------------------------------

    async def records(self) -> dict[str, Record]:
        """Return the provider's records by machine."""
        return {record.id: record for record in (await self.core.list()).records}

    def states(self, records: dict[str, Record]) -> Counter[MachineState]:
        """Return how many machines are in each state."""
        return Counter(record.state for record in records.values())

    # ---- cycles --------------------------------------------------------------------------------------------------

    async def run_cycle(self, decided: Callable[[Step], Awaitable[None]]) -> None:
        """Run the next cycle of the world; `decided` hears of each process's decision before it is carried out."""
        self.cycle += 1
        began_seconds = self.began_seconds = self.clock.monotonic_seconds()
        half_seconds, cycle_seconds = self.scenario.cycle_seconds / 2, self.scenario.cycle_seconds
        await self._renew_processes()
        self._renew_coordinator()
        for operator in self.operators.values():
            operator.pods.restart_gangs()
        for event in self.scenario.events:
            if event.happens_in(self.cycle):
                await self._happen(event)
        if self.scenario.rotating_reports:
            await self._report_in_turn()
        await self.clock.sleep(began_seconds + half_seconds - self.clock.monotonic_seconds())
        for process in list(self.processes):
            cycle = await process.process.outcome(process.shard.step(is_timer=True))
            if cycle is not None and process in self.processes:
                await decided(Step(process=process, report=cycle.result()))
        await self.clock.sleep(began_seconds + cycle_seconds - self.clock.monotonic_seconds())

    async def _renew_processes(self) -> None:
        for process in list(self.processes):
            if process.lives_for_cycles is None:
                continue
            process.lives_for_cycles -= 1
            if process.lives_for_cycles < 0:
                self._kill(process)
        if self._starts_at_cycle == self.cycle:
            for name in self.homes:
                await self._start_process(name)

    def _renew_coordinator(self) -> None:
        if self.coordinator is None:
            return
        if self._coordinator_back_at == self.cycle:
            self.coordinator.start()
        if self._store_back_at == self.cycle:
            self.coordinator.cut_store(is_cut=False)

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
        if event.zombie_for_cycles is not None:
            for process in list(self.processes):
                await self._make_zombie(process, event.zombie_for_cycles)
        if self.coordinator is not None and event.coordinator_gone_for_cycles is not None:
            self.coordinator.stop()
            self._coordinator_back_at = self.cycle + event.coordinator_gone_for_cycles
        if self.coordinator is not None and event.store_cut_for_cycles is not None:
            self.coordinator.cut_store(is_cut=True)
            self._store_back_at = self.cycle + event.store_cut_for_cycles

    def _resize(self, workload: str, cluster: str, pods: int) -> None:
        for (name, _gang), template in self.templates.items():
            if name == workload:
                self.operators[cluster].pods.resize(template, pods)

    async def _make_zombie(self, old: ShardProcess, cycles: int) -> None:
        """Let a new process stand beside one that does not know of it: it keeps its memory and loses its sessions."""
        old.lives_for_cycles = cycles
        await self._start_process(old.name)
        for session in old.shard.sessions:
            old.shard.sessions.close(session, CloseReason.GONE)


def _raise_fault_of(task: asyncio.Task[None]) -> None:
    """Raise what ended a task, so that no run goes on, or ends well, without a part of its world."""
    if task.done() and not task.cancelled():
        task.result()
