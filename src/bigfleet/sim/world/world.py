"""The world of faults put together: shards, coordinator, provider and clusters, in two phases, on the kernel.

In the first phase faults of the plan come, and every event is held against the invariants; then all heals, and the
world must come to rest in a bounded time (docs/spec/simulation.md). `run_plan` is a function of its plan alone. Nothing
in the product knows that it runs here.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec
import structlog

from bigfleet.engine.decision import ActionKind
from bigfleet.model import labels
from bigfleet.model.clock import NANOS_PER_SECOND
from bigfleet.model.penalty import bucket_for_dollars
from bigfleet.model.profile import SpreadMode, TopologySpread
from bigfleet.operator.requests import CapacityRequest, CoLocation, Exclusion, LabelSelector
from bigfleet.provider.backends.simulated.book import SimulatedHost
from bigfleet.provider.records.fence import Mark
from bigfleet.provider.records.record import Record
from bigfleet.sim.checkers import liveness, marks
from bigfleet.sim.checkers.handovers import by_event, remember
from bigfleet.sim.faults.catalogue import chaos
from bigfleet.sim.kernel.journal import Journal
from bigfleet.sim.kernel.loop import KernelClock, KernelLoop, drop_all, run_kernel
from bigfleet.sim.kernel.network import Network
from bigfleet.sim.kernel.processes import Process
from bigfleet.sim.kernel.streams import Streams
from bigfleet.sim.observations import Committed, Event, Evidence, Hosted, Marked, Titled, Violation
from bigfleet.sim.plan_generator import GONE, NONE, SHORT_QUEUES, KindPlan, Plan
from bigfleet.sim.pods.scheduler import Template
from bigfleet.sim.sites.cluster import ClusterSite
from bigfleet.sim.sites.fleet import Fleet, shard_name
from bigfleet.sim.sites.provider import ProviderSite
from bigfleet.sim.sites.shard import ShardSite

#: How often the timeline is sampled.
SAMPLE_SECONDS = 10.0
#: S12, which is looked at between two runs.
SILENCE_CHANGES_NOTHING = "With the coordinator gone, no shard's decisions differ from those of one that never had one."


class Sample(NamedTuple):
    """The world at one moment, for the timeline."""

    at_seconds: float
    #: Machines by state, as the provider's disk has them.
    machines: dict[str, int]
    #: Rows of the last decision that lack something.
    short_rows: int
    actions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one run came to."""

    plan: Plan
    violations: tuple[Violation, ...]
    trace_hash: str
    journal: Journal
    samples: tuple[Sample, ...]
    simulated_seconds: float
    steps: int
    cycles: int
    faults: Counter[str] = field(default_factory=Counter)
    reached: Counter[str] = field(default_factory=Counter)
    actions: Counter[str] = field(default_factory=Counter)
    checks: Counter[str] = field(default_factory=Counter)


class World:
    """Everything of one run."""

    def __init__(self, plan: Plan, loop: KernelLoop, streams: Streams) -> None:
        self.plan = plan
        self.loop = loop
        self.clock = KernelClock(loop)
        self.journal = Journal()
        self.evidence = Evidence(self.journal, lambda: loop.now_nanos)
        self.rng = streams.of("faults")
        self.network = Network(self.clock, streams.of("network"))
        self._demand_rng = streams.of("workload")
        self._invariants = by_event()
        self.samples: list[Sample] = []
        self.zombies: list[Process] = []
        #: When faults ended; 0 before.
        self.healed_unix_nanos = 0
        self.faults_running: list[asyncio.Task[None]] = []
        if "net-reset" in plan.faults:
            self.network.usual.reset_share = 0.01
        if "net-slow" in plan.faults:
            self.network.usual.delay_seconds_max = 2.0
        self.provider = ProviderSite(
            cloud_world=plan.cloud(),
            has_short_queues=SHORT_QUEUES in plan.faults,
            seed=plan.seed,
            clock=self.clock,
            ids=streams.ids("provider"),
            rng=streams.of("provider"),
            evidence=self.evidence,
        )
        fixed = {offer.slot.id for offer in self.provider.offers if offer.slot.fixed}
        self.evidence.fixed.update(fixed)
        self.provider.store.on_record = self._recorded
        self.provider.store.on_mark = self._marked
        self.provider.book.on_host = self._hosted
        self.evidence.records = self.provider.store.records
        self.fleet = Fleet(plan, clock=self.clock, make_rng=streams.of, evidence=self.evidence, tell=self.tell)
        names = [shard_name(number) for number in range(plan.shards)]
        self.shards = [
            ShardSite(
                name,
                network=self.network,
                provider=self.provider,
                clock=self.clock,
                make_ids=streams.ids,
                evidence=self.evidence,
                tell=self.tell,
                disk=self.fleet.disks.get(name),
                link=self.fleet.links.get(name),
            )
            for name in names
        ]
        self.clusters = [
            ClusterSite(
                name=f"c{number}",
                network=self.network,
                shard=self.shards[plan.home(number)],
                clock=self.clock,
                make_rng=streams.of,
                evidence=self.evidence,
                tell=self.tell,
                hidden_cpu_milli=plan.hidden_cpu_milli,
            )
            for number in range(len(plan.clusters))
        ]

    # ---- what is seen -------------------------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        """Hold an event against every invariant that looks at its kind."""
        evidence = self.evidence
        marks.observe(event, evidence)
        for name, _event, check in self._invariants.get(type(event), ()):
            evidence.checks[name] += 1
            for text in check(event, evidence):
                evidence.breach(name, text)
        if isinstance(event, Titled):
            remember(event, evidence)

    def _recorded(self, before: Record | None, after: Record | None) -> None:
        known = after or before
        assert known is not None, "a change is about a machine"
        self.evidence.machines.add(known.id)
        if before is None or after is None or before.state is not after.state:
            state = after.state.label if after is not None else "gone"
            self.evidence.note("state", known.id, f"{state} {known.machine.cluster} {known.machine.last_error[:60]}")
        for site in self.clusters:
            site.follow(before, after)
        self.tell(Committed(before, after))

    def _marked(self, mark: Mark) -> None:
        key = (mark.machine_id, mark.shard_id)
        self.tell(Marked(mark, self.evidence.marks.get(key)))
        self.evidence.marks[key] = mark

    def _hosted(self, machine_id: str, before: SimulatedHost | None, after: SimulatedHost | None) -> None:
        self.tell(Hosted(machine_id, before, after, machine_id in self.evidence.fixed, self.clock.unix_nanos()))

    def sample(self) -> None:
        """Note how the world is, for the timeline; gangs that are stuck start over."""
        for site in self.clusters:
            site.pods.restart_gangs()
        machines = Counter(record.state.label for record in self.provider.store.records.values())
        decisions = [site.shard.last_decision for site in self.shards if site.shard is not None]
        short = sum(bool(row.unresolved) for decision in decisions if decision is not None for row in decision.rows)
        actions = sum(self.evidence.actions.values())
        self.samples.append(Sample(self.clock.monotonic_seconds(), dict(sorted(machines.items())), short, actions))

    # ---- the two phases -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Live through both phases, or to the first violation."""
        self.provider.start()
        for number, site in enumerate(self.clusters):
            for kind in self.plan.clusters[number]:
                site.templates[kind.name] = _template(site.name, kind)
                site.resize(kind.name, kind.count)
            site.start()
        for shard in self.shards:
            shard.start(self.plan.settings())
        self.fleet.start()
        tasks = [asyncio.create_task(chaos(self)), asyncio.create_task(self._change_demand())]
        await self._safety_phase()
        for task in (*tasks, *self.faults_running):
            task.cancel()
        await asyncio.gather(*tasks, *self.faults_running, return_exceptions=True)
        if self.evidence.violations:
            return
        await self._heal()
        is_at_rest = await liveness.come_to_rest(self)
        if self.evidence.violations:
            return
        await self._last_words(is_at_rest)

    async def _safety_phase(self) -> None:
        while self.clock.monotonic_seconds() < self.plan.safety_seconds and not self.evidence.violations:
            await self.clock.sleep(SAMPLE_SECONDS)
            self.sample()

    async def _change_demand(self) -> None:
        rng = self._demand_rng
        while True:
            await self.clock.sleep(rng.expovariate(1.0 / self.plan.change_seconds_mean))
            number = rng.randrange(len(self.clusters))
            site, kind = self.clusters[number], rng.choice(self.plan.clusters[number])
            wanted = 0 if kind.is_gang and rng.random() < 0.5 else rng.randint(0, max(1, 2 * kind.count))
            wanted = kind.count if kind.is_gang and wanted else wanted
            self.evidence.note("demand", site.name, f"{kind.name} {site.count(kind.name)} to {wanted}")
            site.resize(kind.name, wanted)

    async def _heal(self) -> None:
        """End every fault; whoever is dead or silent by a person's word is started again."""
        self.evidence.note("heal", "world")
        self.healed_unix_nanos = self.clock.unix_nanos()
        self.network.heal()
        self.provider.lies.clear()
        self.provider.store.is_down = False
        for zombie in self.zombies:
            zombie.kill()
        for site in self.clusters:
            site.lies.clear()
            site.stop_twin()
            site.process.dies_at_step = None
            site.process.resume()
            if not site.process.is_alive:
                site.start()
            elif site.cluster is not None:
                site.cluster.apply()
        self.provider.process.kill()
        self.provider.start(is_calm=True)
        self.fleet.heal()
        for shard_site in self.shards:
            process, shard = shard_site.process, shard_site.shard
            process.dies_at_step = None
            process.resume()
            is_held = shard is not None and shard.is_held_until_restart()
            if not process.is_alive or self.plan.posture != "execute" or is_held:
                process.kill()
                shard_site.start(self.plan.settings(is_healed=True))

    async def _last_words(self, is_at_rest: bool) -> None:
        evidence = self.evidence
        if is_at_rest:
            before, recovered = Counter(evidence.actions), evidence.reached["a failed machine recovered"]
            before[ActionKind.RECLAIM.label] -= len(evidence.stranded)
            await self.clock.sleep(liveness.QUIET_SECONDS)
            # A machine that comes back is supply that changes.
            if recovered == evidence.reached["a failed machine recovered"]:
                after = Counter(evidence.actions)
                after[ActionKind.RECLAIM.label] -= len(evidence.stranded)
                after.subtract(before)
                for kind, count in (+after).items():
                    evidence.breach("L2", f"{count} {kind} after the world had come to rest")
                evidence.checks["L2"] += 1
        found = False
        for name, text in liveness.last_words(self):
            evidence.breach(name, text)
            found = True
        for name in ("L1", "L3", "L4", "L5", "L6", "L7", "L8"):
            evidence.checks[name] += 1
        decided = [entry for entry in self.journal.entries if entry.kind == "decided"]
        acted_seconds = decided[-1].at_nanos / NANOS_PER_SECOND if decided else 0.0
        is_acting = self.clock.monotonic_seconds() - acted_seconds < liveness.REST_SECONDS
        if not is_at_rest and (is_acting or not found):
            recent = [entry.line for entry in decided[-3:]]
            evidence.breach("L2", f"the world did not come to rest: {liveness.unrest(self)}; last decided {recent}")


def _template(cluster: str, kind: KindPlan) -> Template:
    gang = None
    if kind.is_gang:
        selector = LabelSelector(match_labels={"app": kind.name})
        gang = CoLocation(topology_key=labels.RACK, namespace=cluster, selector=selector)
    request = CapacityRequest(
        id="",
        resources={"cpu": f"{kind.cpu_milli}m", "memory": f"{2 * kind.cpu_milli}Mi"},
        priority=kind.priority,
        interruption_bucket=bucket_for_dollars(kind.penalty_dollars),
        reclamation_bucket=bucket_for_dollars(kind.penalty_dollars),
        co_location=gang,
        exclusion=Exclusion(group=kind.name, max_per_machine=kind.per_machine_max) if kind.per_machine_max else None,
        spreads=(TopologySpread(labels.ZONE, 1, SpreadMode.DO_NOT_SCHEDULE),) if kind.is_spread else (),
    )
    return Template.of(kind.name, kind.name, request, is_unschedulable=kind.is_unschedulable)


def run_plan(plan: Plan) -> Result:
    """Run a plan from its start to its end. Equal plans give equal results in any process.

    Where no coordinator ever answers, it is run again with shards that know of none, and held against that (S12).
    """
    result = _run(plan)
    if plan.coordinator != GONE:
        return result
    alone = _run(msgspec.structs.replace(plan, coordinator=NONE))
    result.checks["S12"] += len(alone.journal.entries)
    if result.trace_hash == alone.trace_hash:
        return result
    pairs = zip(result.journal.entries, alone.journal.entries, strict=False)
    ours, theirs = next((pair for pair in pairs if pair[0] != pair[1]), (result.journal.entries[-1], None))
    told = f"{ours.line!r}, and {'the end' if theirs is None else repr(theirs.line)}"
    breach = Violation("S12", ours.at_nanos, f"{SILENCE_CHANGES_NOTHING} With a silent one and with none: {told}")
    return replace(result, violations=(breach, *result.violations))


def _run(plan: Plan) -> Result:
    streams = Streams(plan.seed)
    worlds: list[World] = []

    async def main(loop: KernelLoop) -> Result:
        world = World(plan, loop, streams)
        worlds.append(world)
        await world.run()
        for fault in loop.faults:
            world.evidence.breach("S0", f"a task ended by {type(fault).__name__}: {fault}")
        evidence = world.evidence
        world.journal.is_closed = True
        return Result(
            plan=plan,
            violations=tuple(evidence.violations),
            trace_hash=world.journal.hash,
            journal=world.journal,
            samples=tuple(world.samples),
            simulated_seconds=loop.time(),
            steps=loop.steps,
            cycles=evidence.cycles,
            faults=evidence.faults,
            reached=evidence.reached,
            actions=evidence.actions,
            checks=evidence.checks,
        )

    def watch(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> str:
        if event.get("exc_info") and worlds:
            worlds[-1].evidence.unexpected.append(_told(event))
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(
        processors=[structlog.processors.add_log_level, watch],
        wrapper_class=structlog.make_filtering_bound_logger(40),
        cache_logger_on_first_use=False,
    )
    try:
        return run_kernel(main, streams.of("scheduler"), streams.of("scheduler aside"))
    finally:
        worlds.clear()
        drop_all()
        with suppress(Exception):
            structlog.configure(**before)


def _told(event: MutableMapping[str, Any]) -> str:
    error = event["exc_info"]
    if error is True:
        error = sys.exc_info()[1]
    return f"{event.get('event')}: {type(error).__name__}: {error}"
