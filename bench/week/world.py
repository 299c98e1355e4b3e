"""Runs one week of a shard with its clusters and its provider on virtual time, in one mode.

docs/spec/benchmarks.md, "A week with exchanges". The shard, its search for exchanges, the session's wire and the
operator's flow are the real ones; provider, pods and scheduler are simulated. A minute begins with what happens from
outside; the shard decides half-way through it, then looks for exchanges.
"""

import asyncio
import gc
from collections.abc import Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry

from bench.week.figures import WARM_UP_MINUTES, WeekFigures, Why
from bench.week.paths import DEMAND_STEP_MINUTES, POOLS, Loss, Paths
from bench.week.provider import WeekProvider
from bigfleet.exchange.values import ExchangeMode, WaitReason
from bigfleet.model.compute import compute_inline
from bigfleet.model.frames import NodeStatus
from bigfleet.model.ids import ClusterId, ShardId
from bigfleet.model.machine import Machine
from bigfleet.model.states import MachineState
from bigfleet.provider.testing import SeededIds
from bigfleet.shard.cycle.controller import Shard
from bigfleet.shard.exchange.exchange_records import ExchangeRecord, MemoryExchanges
from bigfleet.shard.exchange.proposals import ExchangeProposals
from bigfleet.shard.ports import ShardSettings
from bigfleet.sim.kernel.loop import InOrder, run_kernel
from bigfleet.sim.kernel.processes import Process
from bigfleet.sim.kernel.streams import seeded
from bigfleet.sim.kernel.virtual_time import LoopClock
from bigfleet.sim.pods.evictions import Cause, Eviction
from bigfleet.sim.scenarios.cluster_agent import ClusterOperator
from bigfleet.sim.sites.places import ReachableShard, even_network
from bigfleet.sim.sites.session_dialer import SimulatedDialer

MINUTE: Final = 60.0
#: A cycle and a look at exchanges take place so often.
CYCLE_MINUTES: Final = 2
#: Objects that refer to each other are collected at fixed times only, so that equal runs are equal.
_COLLECT_MINUTES: Final = 240
#: A drain that an exchange asked for has ended when its record ends, or a little later.
_AFTERWARDS_NANOS: Final = int(3 * MINUTE * 1e9)


class WeekOperator(ClusterOperator):
    """One cluster; it reports what its nodes host whenever that changed."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._sent: dict[str, tuple[Mapping[str, str], int]] = {}

    def report_nodes(self) -> None:
        """Send the status of each node whose pods changed."""
        statuses: list[NodeStatus] = list(self.node_statuses())
        for status in statuses:
            seen = (status.requested, status.pods)
            if self._sent.get(status.machine_id) != seen:
                self._sent[status.machine_id] = seen
                self.client.node_changed(status)
        for gone in self._sent.keys() - {status.machine_id for status in statuses}:
            del self._sent[gone]


class _KeptExchanges(MemoryExchanges):
    """Records of exchanges, and all that were ever written."""

    def __init__(self) -> None:
        super().__init__()
        self.history: dict[str, ExchangeRecord] = {}

    def put(self, record: ExchangeRecord, now_unix_nanos: int) -> None:
        """Add or replace a record."""
        super().put(record, now_unix_nanos)
        self.history[record.id] = record


class Week:
    """One run."""

    def __init__(self, paths: Paths, *, mode: ExchangeMode, seed: int, slots: int) -> None:
        self._paths = paths
        self.figures = WeekFigures(mode=mode.value, seed=seed, minutes=paths.minutes)
        self._clock = LoopClock()
        self._minute = 0
        self._process = Process("shard-0/1")
        network = even_network(self._clock, seeded(f"{seed}/network"))
        place = ReachableShard("shard-0")
        self.operators: dict[str, WeekOperator] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._operator_processes = {name: Process(f"operator-{name}") for name in paths.clusters}
        for name in paths.clusters:
            self.operators[name] = WeekOperator(
                cluster=ClusterId(name),
                dialer=SimulatedDialer(network, place, self._operator_processes[name]),
                clock=self._clock,
                rng=seeded(f"{seed}/operator/{name}"),
                rollup_interval_seconds=MINUTE,
            )
        self.provider = WeekProvider(slots=slots, seed=seed, joined=self._joined, left=self._left)
        self.store = _KeptExchanges()
        self.shard = Shard(
            shard_id=ShardId("shard-0"),
            epoch=1,
            settings=ShardSettings(cycle_interval_seconds=CYCLE_MINUTES * MINUTE, incremental_reconcile=True),
            provider=self.provider,
            clock=self._clock,
            ids=SeededIds(seed),
            compute=compute_inline,
            registry=CollectorRegistry(),
            exchange_store=self.store,
        )
        place.process, place.shard = self._process, self.shard
        self.proposals = ExchangeProposals(
            shard=self.shard, mode=mode, clock=self._clock, compute=compute_inline, workers=None
        )
        self._losing: Loss | None = None
        self._seen_evictions = dict.fromkeys(paths.clusters, 0)
        self._begun: set[str] = set()

    # ---- nodes come and go -----------------------------------------------------------------------------------------

    def _joined(self, machine: Machine) -> None:
        self.operators[machine.cluster].node_joined(machine)

    def _left(self, machine_id: str, cluster: str, cause: Loss | None) -> None:
        operator = self.operators[cluster]
        operator.node_left(machine_id, is_lost=cause is not None)
        self._note_evictions(cluster, cause)

    # ---- the run ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Let all minutes pass."""
        await self._process.spawn(self.shard.make_ready())
        self._tasks.append(self._process.spawn(self.shard.actuator.run()))
        self.provider.set_prices(self._paths.prices[0])
        for name, operator in self.operators.items():
            self._tasks.append(self._operator_processes[name].spawn(operator.run()))
        for minute in range(self._paths.minutes):
            self._minute = minute
            await self._one_minute(minute)
        self.figures.records = list(self.store.history.values())
        self.figures.calls = self.provider.calls

    async def _one_minute(self, minute: int) -> None:
        began_seconds = self._clock.monotonic_seconds()
        self.provider.tick(minute)
        self._happen(minute)
        for cluster, operator in self.operators.items():
            operator.report_nodes()
            self._note_evictions(cluster, None)
        self._measure()
        if minute % CYCLE_MINUTES == 0:
            await self._clock.sleep(MINUTE / 2)
            await self._cycle()
        await self._clock.sleep(began_seconds + MINUTE - self._clock.monotonic_seconds())
        for task in self._tasks:
            if task.done():
                task.result()
        if minute % _COLLECT_MINUTES == 0:
            gc.collect()

    async def _cycle(self) -> None:
        cycle = await self._process.outcome(self.shard.step(is_timer=True))
        assert cycle is not None, "the shard's process lives"
        self.figures.failed_cycles += cycle.result().decision is None
        await self.proposals.look()
        self._note_exchanges()

    def _happen(self, minute: int) -> None:
        if minute:
            self.provider.set_prices(self._paths.prices.get(minute, ()))
        self.provider.set_sold_out(frozenset(pool for pool in POOLS if self._paths.is_sold_out(pool, minute)))
        for machine_id, cause in self._paths.losses.get(minute, ()):
            self.provider.lose(machine_id, cause)
        if minute % DEMAND_STEP_MINUTES == 0:
            for name, operator in self.operators.items():
                for workload, pods in self._paths.pods_at(name, minute).items():
                    operator.pods.resize(self._paths.templates[name][workload], pods)

    # ---- what is measured ------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        if self._minute < WARM_UP_MINUTES:
            return
        figures = self.figures
        usd = self.provider.usd_per_hour() / 60
        figures.cost_usd += usd
        if (self._minute - WARM_UP_MINUTES) % 60 == 0:
            figures.by_hour_usd.append(0.0)
        figures.by_hour_usd[-1] += usd
        day = self._minute // (24 * 60)
        for record in self.provider.records.values():
            if record.cluster and record.state is not MachineState.FAILED:
                figures.machine_minutes += 1
                key = (record.cluster, day)
                figures.held[key] = figures.held.get(key, 0) + 1
        for name, operator in self.operators.items():
            figures.pod_minutes += len(operator.pods.pods)
            figures.pending_pod_minutes += len(operator.pods.waiting)
            figures.busy_minutes += self.shard.exchanges.course_of(name) is not None

    def _note_evictions(self, cluster: str, loss: Loss | None) -> None:
        evictions = self.operators[cluster].evictions
        for eviction in evictions[self._seen_evictions[cluster] :]:
            why = self._why(eviction, loss)
            self.figures.evicted[why] += eviction.pods
            self.figures.stranded[why] += eviction.left_waiting
            self.figures.without_room[why] += eviction.without_room
        self._seen_evictions[cluster] = len(evictions)

    def _why(self, eviction: Eviction, loss: Loss | None) -> Why:
        if eviction.cause is Cause.LOST:
            return Why.FAILURE if loss is Loss.FAILURE else Why.INTERRUPTION
        if eviction.cause is not Cause.RECLAIMED:
            return Why.OTHER
        now_nanos = self._clock.unix_nanos()
        for record in self.store.history.values():
            is_open = not record.ended_unix_nanos or record.ended_unix_nanos + _AFTERWARDS_NANOS > now_nanos
            if is_open and eviction.machine_id in record.goes_ids:
                return Why.EXCHANGE
        return Why.RECLAIM

    def _note_exchanges(self) -> None:
        for record in self.store.records.values():
            if record.id in self._begun:
                continue
            self._begun.add(record.id)
            for found in self.proposals.found(record.cluster):
                self.figures.passed_over_usd_per_hour += sum(
                    each.gate.saving_usd_per_hour
                    for each in found.exchanges.proposals
                    if each.waits_for in (None, WaitReason.BUDGET) and each.machine_ids != record.goes_ids
                )


def run_week(paths: Paths, *, mode: ExchangeMode, seed: int, slots: int) -> WeekFigures:
    """Run a week and return its figures; equal arguments return equal figures. Not on a running event loop."""
    found: list[WeekFigures] = []

    async def course() -> None:
        week = Week(paths, mode=mode, seed=seed, slots=slots)
        await week.run()
        found.append(week.figures)

    run_kernel(lambda _loop: course(), InOrder())
    return found[0]
