"""A shard follows target compositions that workers work out beside it, and never waits long for one."""

import asyncio
from dataclasses import replace

import pytest

from bigfleet.engine.decision import Options
from bigfleet.model.frames import CAPABILITY_NEED_STATUS
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.planner.composition import Composition
from bigfleet.planner.plan import DEFAULT, THOROUGH, plan
from bigfleet.planner.problem import PlanSettings, Problem, ProblemFault, SchedulerOrder
from bigfleet.planner.search import Effort
from bigfleet.recording.values import options_delta, options_of
from bigfleet.shard.cluster_policy import ClusterPolicies, ClusterPolicy
from bigfleet.shard.ports import ShardSettings
from tests.shard.cycle.test_pods import pods
from tests.shard.world import ScriptedProvider, World, machine

S = MachineState

pytestmark = pytest.mark.virtual_time


class Workers:
    """Plan in this process, after a while."""

    def __init__(self, seconds: float, fault: Exception | None = None) -> None:
        self.seconds, self.fault, self.free = seconds, fault, 4
        self.problems: list[Problem] = []
        self.efforts: list[Effort] = []

    async def plan(self, problem: Problem, effort: Effort) -> Composition:
        """Return the composition, or fail, after the time."""
        self.problems.append(problem)
        self.efforts.append(effort)
        await asyncio.sleep(self.seconds)
        if self.fault is not None:
            raise self.fault
        return plan(problem)


def offers(provider: ScriptedProvider, count: int = 6) -> None:
    """Offer machines of 4 cpu at $1 and of 16 cpu at $3."""
    kind = CapacityType.ON_DEMAND
    provider.add(*(machine(f"s{n}", S.SPECULATIVE, capacity_type=kind) for n in range(count)))
    large = {"instance_type": "t16", "allocatable": {"cpu": "16", "memory": "64Gi"}, "price_usd_per_hour": 3.0}
    provider.add(*(machine(f"x{n}", S.SPECULATIVE, capacity_type=kind, **large) for n in range(count)))


def bound(world: World) -> int:
    """Return how many machines are not on offer."""
    return sum(one.state is not S.SPECULATIVE for one in world.provider.records.values())


@pytest.mark.rule("shard 4.1/1")
async def test_a_cluster_takes_nothing_until_its_plan_is_there() -> None:
    provider = ScriptedProvider(synchronous=True)
    offers(provider)
    workers = Workers(3.0)
    world = World(provider, plan_workers=workers)
    world.connect("c1").report(pods("c1", ("2", 8)))
    await world.settle(2)
    assert (bound(world), world.metric("clusters_awaiting_plan")) == (0, 1)

    await asyncio.sleep(4)
    await world.settle()
    assert [world.state(name) for name in ("x0", "x1", "s0")] == [S.CONFIGURED, S.SPECULATIVE, S.SPECULATIVE]
    assert (len(workers.problems), world.metric("plans_total", outcome="made")) == (1, 1)
    assert world.metric("clusters_awaiting_plan") == 0


@pytest.mark.rule("shard 4.1/1")
async def test_a_late_planner_delays_no_longer_than_the_wait() -> None:
    provider = ScriptedProvider(synchronous=True)
    offers(provider)
    world = World(provider, plan_workers=Workers(10_000.0), settings=ShardSettings(plan_wait_seconds=5.0))
    world.connect("c1").report(pods("c1", ("2", 8)))
    await world.settle(2)
    assert bound(world) == 0

    await asyncio.sleep(6)
    await world.settle()
    assert bound(world) > 0
    await world.shard.plans.close()


@pytest.mark.rule("shard 4.1/2")
@pytest.mark.parametrize(
    ("fault", "outcome"), [(RuntimeError("the worker died"), "failed"), (ProblemFault("too many pods"), "too_large")]
)
async def test_a_failed_plan_is_counted_and_the_decision_goes_on_without(fault: Exception, outcome: str) -> None:
    provider = ScriptedProvider(synchronous=True)
    offers(provider)
    world = World(provider, plan_workers=Workers(0.1, fault))
    world.connect("c1").report(pods("c1", ("2", 8)))
    await world.settle(1)
    await asyncio.sleep(1)
    await world.settle()

    assert bound(world) > 0
    assert world.metric("plans_total", outcome=outcome) == 1


@pytest.mark.parametrize(("free", "effort"), [(2, THOROUGH), (1, DEFAULT)], ids=["all at once", "one waits"])
async def test_clusters_are_planned_thoroughly_when_none_waits_for_a_worker(free: int, effort: Effort) -> None:
    provider, workers = ScriptedProvider(synchronous=True), Workers(0.1)
    offers(provider)
    workers.free = free
    world = World(provider, plan_workers=workers)
    for name in ("c1", "c2"):
        world.connect(name).report(pods(name, ("2", 8)))
    await world.settle(1)

    assert workers.efforts[:free] == [effort] * free
    await world.shard.plans.close()


async def test_an_outdated_plan_keeps_no_machines_when_no_newer_one_arrives() -> None:
    """The planner is dead; what the demand of before needed is excess when the wait is over."""
    provider, workers = ScriptedProvider(synchronous=True), Workers(0.1)
    offers(provider, 12)
    settings = ShardSettings(plan_wait_seconds=5.0, reclaim_after_seconds=0.0, reclaim_cap_fraction=1.0)
    world = World(provider, plan_workers=workers, settings=settings)
    operator = world.connect("c1")
    operator.report(pods("c1", ("3", 12)))
    await world.settle(2)
    await asyncio.sleep(1)
    await world.settle()
    before = bound(world)

    workers.seconds = 10_000.0
    operator.report(pods("c1", ("3", 3)))
    await world.settle(2)
    await asyncio.sleep(20)
    await world.settle()
    kept = sum(one.state is S.CONFIGURED for one in world.provider.records.values())
    assert before >= 3 * kept
    assert world.metric("plans_total", outcome="outdated") == 1


async def test_what_runs_already_waits_for_no_plan() -> None:
    """A cluster whose demand grows keeps everything, and another cluster's cycle goes on."""
    provider = ScriptedProvider(synchronous=True)
    offers(provider)
    world = World(provider, plan_workers=Workers(1.0))
    operator = world.connect("c1")
    operator.report(pods("c1", ("2", 8)))
    await world.settle(1)
    await asyncio.sleep(2)
    await world.settle()
    before = bound(world)
    operator.report(pods("c1", ("2", 16)), at_unix_nanos=2)
    await world.settle(1)

    assert (before, bound(world)) == (1, 1)
    await asyncio.sleep(2)
    await world.settle()
    assert bound(world) == 2


@pytest.mark.rule("shard 4.1/1")
async def test_demand_that_never_stands_still_is_served_all_the_same() -> None:
    """Each plan that comes is acted on, though demand has changed by then."""
    provider = ScriptedProvider(synchronous=True)
    offers(provider, 40)
    world = World(provider, plan_workers=Workers(3.0), settings=ShardSettings(plan_wait_seconds=3600.0))
    operator = world.connect("c1")
    seen = []
    for number in range(40):
        operator.report(pods("c1", ("2", 8 + 4 * number)), at_unix_nanos=number + 1)
        await world.cycle()
        world.provider.settle()
        await asyncio.sleep(1)
        seen.append(bound(world))
    assert seen[10] > 1
    assert seen[-1] > seen[20] > seen[10]


@pytest.mark.rule("shard 4.1/1")
async def test_a_little_change_waits_for_no_plan() -> None:
    provider = ScriptedProvider(synchronous=True)
    offers(provider)
    world = World(provider, plan_workers=Workers(50.0), settings=ShardSettings(plan_wait_seconds=3600.0))
    operator = world.connect("c1")
    operator.report(pods("c1", ("400m", 40)))
    await world.settle(1)
    await asyncio.sleep(60)
    await world.settle()
    before = bound(world)
    operator.report(pods("c1", ("400m", 42)), at_unix_nanos=2)
    await world.settle(2)

    assert bound(world) == before + 1
    await world.shard.plans.close()


@pytest.mark.rule("shard 4.1/2")
@pytest.mark.parametrize(
    "policy", [ClusterPolicy(scheduler=SchedulerOrder.MOST_ALLOCATED), ClusterPolicy(spot_pool_max=70)], ids=str
)
async def test_a_changed_policy_has_its_clusters_planned_again(policy: ClusterPolicy) -> None:
    provider = ScriptedProvider(synchronous=True)
    offers(provider)
    workers = Workers(0.1)
    world = World(provider, plan_workers=workers)
    world.connect("c1").report(pods("c1", ("2", 8)))
    await world.settle(1)
    await asyncio.sleep(1)
    await world.settle()
    world.shard.policies = ClusterPolicies(by_cluster={"c1": policy})
    await world.settle(1)
    await asyncio.sleep(1)
    await world.settle()

    settings = [PlanSettings(), world.shard.policies.plan_settings("c1")]
    assert [(one.order, one.pool_percent_max) for one in workers.problems] == [
        (each.order, each.spot_pool_percent_max) for each in settings
    ]


async def test_targets_are_recorded_as_what_differs_from_the_cycle_before() -> None:
    provider = ScriptedProvider(synchronous=True)
    offers(provider)
    world = World(provider)
    world.connect("c1").report(pods("c1", ("2", 8)))
    await world.settle()
    decided_on = world.shard.view.decided_on
    assert decided_on is not None
    options = decided_on.options
    assert options.targets["c1"].claims
    limited = replace(options.targets["c1"], limited_pools=("m5.large/a",))
    options = replace(options, targets={**options.targets, "c1": limited})

    none = Options(now_seconds=0.0, reported=frozenset())
    assert options_of(options_delta(options, none), none) == options
    assert options_delta(options, options).targets is None
    assert options_of(options_delta(none, options), options).targets == {}


@pytest.mark.rule("shard 10.7/6")
async def test_a_cluster_that_awaits_its_plan_hears_of_no_shortfall() -> None:
    """Twice: before its first machines, and when it grows."""
    provider = ScriptedProvider()
    offers(provider, 12)
    world = World(provider, plan_workers=Workers(1.5))
    operator = world.connect("c1", CAPABILITY_NEED_STATUS)
    for number, count in enumerate((10, 20), start=1):
        operator.report(pods("c1", ("2", count)), at_unix_nanos=number)
        for _ in range(10):
            await world.cycle()
            assert world.metric("shortfalls") == 0
            provider.settle()
            await asyncio.sleep(1)

    verdicts = operator.verdicts()
    assert [update.rows for update in verdicts if update.rows] == []
    assert {update.rollup_timestamp_unix_nanos for update in verdicts} == {1, 2}
    assert any(update.coming for update in verdicts)


async def test_a_row_that_was_short_before_stays_a_shortfall_while_its_cluster_awaits_a_plan() -> None:
    """Its age is not lost with every change of demand."""
    provider = ScriptedProvider(synchronous=True)
    offers(provider, 1)
    world = World(provider, plan_workers=Workers(0.5), settings=ShardSettings(plan_wait_seconds=3600.0))
    operator = world.connect("c1", CAPABILITY_NEED_STATUS)
    operator.report(pods("c1", ("2", 40)))
    for _ in range(10):
        await world.cycle()
        await asyncio.sleep(1)
    before = max(world.shard._ages.rows.values())
    operator.report(pods("c1", ("2", 80)), at_unix_nanos=2)
    await world.cycle()

    assert world.metric("clusters_awaiting_plan") == 1
    assert max(world.shard._ages.rows.values()) == before + 1
    await world.shard.plans.close()
