"""Runs the fault world: a phase with faults, then a phase without, in which it must converge.

Every event is checked against the invariants; rest must come within a bounded virtual time (docs/spec/simulation.md).
`run_plan` is a function of its plan alone. Nothing in the product knows that it runs here.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec
import structlog

from bigfleet.engine.decision import ActionKind
from bigfleet.model import labels
from bigfleet.model.clock import NANOS_PER_SECOND
from bigfleet.model.penalty import bucket_for_dollars
from bigfleet.model.profile import SpreadMode, TopologySpread
from bigfleet.model.validation import validating
from bigfleet.operator.requests import CapacityRequest, CoLocation, Exclusion, LabelSelector
from bigfleet.sim.checkers import liveness
from bigfleet.sim.faults.catalogue import chaos
from bigfleet.sim.kernel.journal import Journal
from bigfleet.sim.kernel.loop import KernelLoop, drop_all, run_kernel
from bigfleet.sim.kernel.streams import Streams
from bigfleet.sim.observations import Violation
from bigfleet.sim.plan_generator import GONE, NONE, KindPlan, WorldPlan
from bigfleet.sim.pods.scheduler import Template
from bigfleet.sim.world.world import Sample, World

W = TypeVar("W", bound=World)

#: How often the timeline is sampled.
SAMPLE_SECONDS = 10.0
#: S12, which is looked at between two runs.
SILENCE_CHANGES_NOTHING = "With the coordinator gone, no shard's decisions differ from those of one that never had one."


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldResult:
    """What one run came to."""

    plan: WorldPlan
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


async def _live(world: World) -> None:
    """Live through both phases, or to the first violation."""
    world.provider.start()
    for number, site in enumerate(world.clusters):
        for kind in world.plan.clusters[number]:
            site.templates[kind.name] = _template(site.name, kind)
            site.resize(kind.name, kind.count)
        site.start()
    for shard in world.shards:
        shard.start(world.plan.settings())
    world.fleet.start()
    tasks = [asyncio.create_task(chaos(world)), asyncio.create_task(_change_demand(world))]
    await safety_phase(world)
    for task in (*tasks, *world.faults_running):
        task.cancel()
    await asyncio.gather(*tasks, *world.faults_running, return_exceptions=True)
    if world.observations.violations:
        return
    await heal(world)
    is_at_rest = await liveness.come_to_rest(world)
    if world.observations.violations:
        return
    await last_words(world, is_at_rest)


async def safety_phase(world: World) -> None:
    """Wait until the time for faults is over, or for the first violation."""
    while world.clock.monotonic_seconds() < world.plan.safety_seconds and not world.observations.violations:
        await world.clock.sleep(SAMPLE_SECONDS)
        world.sample()


async def _change_demand(world: World) -> None:
    rng = world.demand_rng
    while True:
        await world.clock.sleep(rng.expovariate(1.0 / world.plan.change_seconds_mean))
        number = rng.randrange(len(world.clusters))
        site, kind = world.clusters[number], rng.choice(world.plan.clusters[number])
        wanted = 0 if kind.is_gang and rng.random() < 0.5 else rng.randint(0, max(1, 2 * kind.count))
        wanted = kind.count if kind.is_gang and wanted else wanted
        world.observations.note("demand", site.name, f"{kind.name} {site.count(kind.name)} to {wanted}")
        site.resize(kind.name, wanted)


async def heal(world: World) -> None:
    """End every fault and start what is dead or was silenced by the plan."""
    world.observations.note("heal", "world")
    world.healed_unix_nanos = world.clock.unix_nanos()
    world.network.heal()
    world.provider.faulty_responses.clear()
    world.provider.store.is_down = False
    for zombie in world.zombies:
        zombie.kill()
    for site in world.clusters:
        site.faulty_responses.clear()
        site.stop_twin()
        site.process.dies_at_step = None
        site.process.resume()
        if not site.process.is_alive:
            site.start()
        elif site.cluster is not None:
            site.cluster.apply()
    world.provider.process.kill()
    world.provider.start(is_calm=True)
    world.fleet.heal()
    for shard_site in world.shards:
        process, shard = shard_site.process, shard_site.shard
        process.dies_at_step = None
        process.resume()
        is_held = shard is not None and shard.is_held_until_restart()
        if not process.is_alive or world.plan.posture != "execute" or is_held:
            process.kill()
            shard_site.start(world.plan.settings(is_healed=True))


async def last_words(world: World, is_at_rest: bool) -> None:
    """Look at everything that must hold in the end."""
    observations = world.observations
    if is_at_rest:
        before, recovered = Counter(observations.actions), observations.reached["a failed machine recovered"]
        before[ActionKind.RECLAIM.label] -= len(observations.stranded)
        await world.clock.sleep(liveness.QUIET_SECONDS)
        # A machine that comes back is supply that changes.
        if recovered == observations.reached["a failed machine recovered"]:
            after = Counter(observations.actions)
            after[ActionKind.RECLAIM.label] -= len(observations.stranded)
            after.subtract(before)
            for kind, count in (+after).items():
                observations.breach("L2", f"{count} {kind} after the world had come to rest")
            observations.checks["L2"] += 1
    found = False
    for name, text in liveness.last_words(world):
        observations.breach(name, text)
        found = True
    for name in ("L1", "L3", "L4", "L5", "L6", "L7", "L8"):
        observations.checks[name] += 1
    decided = [entry for entry in world.journal.entries if entry.kind == "decided"]
    acted_seconds = decided[-1].at_nanos / NANOS_PER_SECOND if decided else 0.0
    is_acting = world.clock.monotonic_seconds() - acted_seconds < liveness.REST_SECONDS
    if not is_at_rest and (is_acting or not found):
        recent = [entry.line for entry in decided[-3:]]
        observations.breach("L2", f"the world did not come to rest: {liveness.unrest(world)}; last decided {recent}")


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


def run_plan(plan: WorldPlan) -> WorldResult:
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
    difference = f"{ours.line!r}, and {'the end' if theirs is None else repr(theirs.line)}"
    breach = Violation("S12", ours.at_nanos, f"{SILENCE_CHANGES_NOTHING} With a silent one and with none: {difference}")
    return replace(result, violations=(breach, *result.violations))


def _run(plan: WorldPlan) -> WorldResult:
    return run_world(plan, lambda loop, streams: World(plan, loop, streams), _live)


def run_world(
    plan: WorldPlan, make: Callable[[KernelLoop, Streams], W], live: Callable[[W], Awaitable[None]]
) -> WorldResult:
    """Make a world and let it live on a kernel of its own; return what it came to."""
    streams = Streams(plan.seed)
    worlds: list[W] = []

    async def main(loop: KernelLoop) -> WorldResult:
        world = make(loop, streams)
        worlds.append(world)
        await live(world)
        for fault in loop.faults:
            world.observations.breach("S0", f"a task ended by {type(fault).__name__}: {fault}")
        observations = world.observations
        world.journal.is_closed = True
        return WorldResult(
            plan=plan,
            violations=tuple(observations.violations),
            trace_hash=world.journal.hash,
            journal=world.journal,
            samples=tuple(world.samples),
            simulated_seconds=loop.time(),
            steps=loop.steps,
            cycles=observations.cycles,
            faults=observations.faults,
            reached=observations.reached,
            actions=observations.actions,
            checks=observations.checks,
        )

    def watch(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> str:
        if event.get("exc_info") and worlds:
            worlds[-1].observations.unexpected.append(_event_text(event))
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(
        processors=[structlog.processors.add_log_level, watch],
        wrapper_class=structlog.make_filtering_bound_logger(40),
        cache_logger_on_first_use=False,
    )
    try:
        with validating():
            return run_kernel(main, streams.of("scheduler"), streams.of("scheduler aside"))
    finally:
        worlds.clear()
        drop_all()
        with suppress(Exception):
            structlog.configure(**before)


def _event_text(event: MutableMapping[str, Any]) -> str:
    error = event["exc_info"]
    if error is True:
        error = sys.exc_info()[1]
    return f"{event.get('event')}: {type(error).__name__}: {error}"
