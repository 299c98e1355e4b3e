"""The limits of the cluster policy: what a cluster that asks for everything gets, and which status it sees."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from bigfleet.engine.decision import Decision
from bigfleet.engine.fleet_engine import FleetEngine
from bigfleet.model.frames import CAPABILITY_DRAIN_RESULT, CAPABILITY_NEED_STATUS, NeedStatus, UnmetReason
from bigfleet.model.need import Need
from bigfleet.model.penalty import PINNED, bucket_for_dollars
from bigfleet.model.shapes import DemandShape
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.model.vector import parse_vector
from bigfleet.recording.hook import CycleInput
from bigfleet.shard.cluster_policy import ClusterLimits, ClusterPolicies, ClusterPolicy, read_policies
from bigfleet.shard.cycle.demand_limits import limited_rows
from tests.shard.world import FakeOperator, World, machine, need

pytestmark = pytest.mark.virtual_time

S = MachineState
#: What a cluster asked for that took a whole fleet.
HIGHEST = 2**31 - 1


def fleet(machines: int, **policies: ClusterPolicy) -> World:
    """Return a world with free machines of 4 cpu at $1, in which patterns have these policies."""
    world = World()
    world.provider.add(*(machine(f"m{number:03d}", S.IDLE) for number in range(machines)))
    world.shard.policies = ClusterPolicies(by_pattern={name.replace("_", "*"): each for name, each in policies.items()})
    return world


def connected(world: World, cluster: str) -> FakeOperator:
    return world.connect(cluster, CAPABILITY_DRAIN_RESULT, CAPABILITY_NEED_STATUS)


def machines_of(world: World, cluster: str) -> list[str]:
    return [each.id for each in world.provider.records.values() if each.cluster == cluster]


async def rested(world: World, cycles: int = 8) -> None:
    for _ in range(cycles):
        await world.cycle()
        world.provider.settle()
        await asyncio.sleep(10)
    await world.cycle()


def last_status(operator: FakeOperator) -> Sequence[NeedStatus]:
    return operator.verdicts()[-1].rows


def pods(cluster: str, count: int, *, priority: int) -> Need:
    """Return a row of pods that want 3 cpu each, one to a machine."""
    plain = need(cluster, str(3 * count), priority=priority)
    shape = DemandShape(parse_vector({"cpu": "3"}), count)
    return Need(
        cluster=plain.cluster,
        profile=plain.profile,
        aggregate=plain.aggregate,
        min_unit=shape.resources,
        families=plain.families,
        shapes=(shape,),
    )


async def test_without_a_policy_the_highest_priority_takes_the_fleet() -> None:
    world = fleet(20)
    connected(world, "honest").report(need("honest", "20"))
    await rested(world)
    connected(world, "greedy").report(need("greedy", "80", priority=HIGHEST))
    await rested(world)

    assert len(machines_of(world, "greedy")) == 20


@pytest.mark.rule("shard 1.1/2")
async def test_a_limited_priority_takes_nothing_from_those_who_may_have_more() -> None:
    world = fleet(20, g_=ClusterPolicy(priority_max=50))
    connected(world, "honest").report(need("honest", "20"))
    await rested(world)
    greedy = connected(world, "greedy")
    greedy.report(asked := need("greedy", "80", priority=HIGHEST))
    await rested(world)

    assert (len(machines_of(world, "honest")), len(machines_of(world, "greedy"))) == (5, 15)
    (status,) = last_status(greedy)
    assert (status.fingerprint, status.reason) == (asked.fingerprint, UnmetReason.PRIORITY_STARVED)
    assert status.message.endswith(f"the cluster policy lowers its priority {HIGHEST} to 50")
    assert world.metric("demand_limited_rows", limit="priority") == 1


@pytest.mark.rule("shard 1.1/2")
@pytest.mark.parametrize(
    "asked", [need("greedy", "80", priority=HIGHEST), pods("greedy", 20, priority=HIGHEST)], ids=["amounts", "pods"]
)
@pytest.mark.parametrize(
    ("policy", "message", "limit"),
    [
        (ClusterPolicy(machines_max=4), "at most 4 machines", "machines"),
        (ClusterPolicy(dollars_per_hour_max=4.5), "at most $4.50 per hour", "dollars"),
    ],
)
async def test_machines_beyond_a_limit_stay_with_the_others(
    policy: ClusterPolicy, message: str, limit: str, asked: Need
) -> None:
    world = fleet(20, g_=policy)
    greedy, honest = connected(world, "greedy"), connected(world, "honest")
    greedy.report(asked)
    honest.report(need("honest", "40"))
    await rested(world)

    assert (len(machines_of(world, "greedy")), len(machines_of(world, "honest"))) == (4, 10)
    honest.report(need("honest", "80"))
    await rested(world)
    assert (len(machines_of(world, "greedy")), len(machines_of(world, "honest"))) == (4, 16)
    (status,) = last_status(greedy)
    assert (status.fingerprint, status.reason) == (asked.fingerprint, UnmetReason.CLUSTER_LIMIT)
    assert status.message.endswith(message)
    assert world.metric("demand_limited_rows", limit=limit) == 1


@pytest.mark.rule("shard 1.1/2")
async def test_a_cluster_at_its_limit_preempts_nothing() -> None:
    world = fleet(10, g_=ClusterPolicy(machines_max=3))
    connected(world, "honest").report(need("honest", "40"))
    await rested(world)
    connected(world, "greedy").report(need("greedy", "400", priority=HIGHEST))
    await rested(world, 20)

    assert (len(machines_of(world, "greedy")), len(machines_of(world, "honest"))) == (3, 7)
    assert world.metric("actions_total", kind="Preempt") == 3


@pytest.mark.rule("shard 1.1/2")
async def test_machines_that_are_being_created_count() -> None:
    world = fleet(0, g_=ClusterPolicy(machines_max=3))
    world.provider.add(*(machine(f"m{number:03d}", S.SPECULATIVE) for number in range(20)))
    connected(world, "greedy").report(need("greedy", "80"))
    for _ in range(5):
        await world.cycle()
    assert sum(each.state is not S.SPECULATIVE for each in world.provider.records.values()) == 3
    await rested(world)

    assert len(machines_of(world, "greedy")) == 3
    assert sum(each.state is not S.SPECULATIVE for each in world.provider.records.values()) == 3


@pytest.mark.rule("shard 1.1/3")
async def test_a_limit_holds_across_a_restart_while_machines_are_created() -> None:
    """The new process does not know for which cluster they are created; it binds them when they are Idle."""
    world = fleet(0, g_=ClusterPolicy(machines_max=3))
    world.provider.add(*(machine(f"m{number:03d}", S.SPECULATIVE) for number in range(20)))
    connected(world, "greedy").report(need("greedy", "80"))
    await world.cycle()
    second = World(world.provider, epoch=2)
    second.shard.policies = world.shard.policies
    connected(second, "greedy").report(need("greedy", "80"))
    for _ in range(3):
        await second.cycle()
    assert sum(each.state is not S.SPECULATIVE for each in world.provider.records.values()) == 3
    await rested(second)

    assert len(machines_of(second, "greedy")) == 3
    assert sum(each.state is not S.SPECULATIVE for each in world.provider.records.values()) == 3


@pytest.mark.rule("shard 1.1/3")
@pytest.mark.parametrize("policy", [ClusterPolicy(machines_max=4), ClusterPolicy(dollars_per_hour_max=4.5)])
async def test_idle_machines_that_a_cluster_may_not_have_are_released(policy: ClusterPolicy) -> None:
    """The target composition of the cluster counts 20 machines, however many it may have."""
    world = fleet(0, g_=policy)
    rented = {"capacity_type": CapacityType.ON_DEMAND}
    world.provider.add(*(machine(f"m{number:03d}", S.IDLE, **rented) for number in range(20)))
    connected(world, "greedy").report(pods("greedy", 20, priority=100))
    await rested(world)
    assert len(machines_of(world, "greedy")) == 4
    assert world.shard.limits.refused == frozenset(), "the last decision asks for no more than is allowed"
    await asyncio.sleep(600)
    await rested(world)

    states = Counter(each.state for each in world.provider.records.values())
    assert states == {S.CONFIGURED: 4, S.SPECULATIVE: 16}


@pytest.mark.rule("shard 1.1/2")
async def test_a_gang_gets_all_of_its_machines_or_none() -> None:
    world = fleet(10, g_=ClusterPolicy(machines_max=5))
    connected(world, "greedy").report(
        need("greedy", "32", priority=200, group="eight"), need("greedy", "8", priority=100, group="two")
    )
    await rested(world)

    assert len(machines_of(world, "greedy")) == 2


@pytest.mark.rule("shard 1.1/2")
async def test_rows_beyond_the_limit_are_left_out_lowest_priorities_first() -> None:
    world = fleet(10, g_=ClusterPolicy(rows_max=2))
    greedy = connected(world, "greedy")
    rows = [need("greedy", "4", priority=priority) for priority in (1, 3, 2, 4)]
    greedy.report(*rows)
    await rested(world)

    assert len(machines_of(world, "greedy")) == 2
    assert [(row.fingerprint, row.reason) for row in last_status(greedy)] == [
        (rows[0].fingerprint, UnmetReason.CLUSTER_LIMIT),
        (rows[2].fingerprint, UnmetReason.CLUSTER_LIMIT),
    ]
    assert world.metric("demand_limited_rows", limit="rows") == 2


def test_penalties_are_lowered_to_the_highest_bucket() -> None:
    row = need("c", "4", interruption_bucket=PINNED, reclamation_bucket=bucket_for_dollars(2))
    limited = limited_rows([row], ClusterLimits(penalty_max=bucket_for_dollars(64)))

    (changed,) = limited.rows
    assert changed.profile.interruption_bucket == bucket_for_dollars(64)
    assert changed.profile.reclamation_bucket == bucket_for_dollars(2)
    ((reported,),) = limited.reported.values()
    assert reported.name == (row.fingerprint, "")
    assert reported.note == "the cluster policy lowers its interruption penalty pinned to 64"


def test_rows_within_their_limits_are_the_same_objects() -> None:
    rows = [need("c", "4"), need("c", "8", priority=50)]
    assert limited_rows(rows, ClusterLimits(priority_max=100, penalty_max=3, rows_max=2)).rows is rows


@pytest.mark.rule("shard 1.1/2")
async def test_a_changed_policy_applies_to_the_demand_in_force() -> None:
    world = fleet(10, g_=ClusterPolicy(rows_max=1, priority_max=5))
    greedy = connected(world, "greedy")
    rows = [need("greedy", "4", priority=priority) for priority in (10, 20, 30)]
    greedy.report(*rows)
    await rested(world)
    assert len(machines_of(world, "greedy")) == 1

    world.shard.policies = ClusterPolicies()
    await rested(world)
    assert len(machines_of(world, "greedy")) == 3
    assert [row.fingerprint for row in world.shard.intake.table.rows_of("greedy")] == [row.fingerprint for row in rows]
    assert last_status(greedy) == ()

    world.shard.policies = ClusterPolicies(by_cluster={"greedy": ClusterPolicy(machines_max=1)})
    await rested(world)
    assert len(machines_of(world, "greedy")) == 3, "a lower limit takes nothing away"


@pytest.mark.rule("shard 1.1/2")
@pytest.mark.parametrize(
    "asked_for", [need("greedy", "80", priority=HIGHEST), pods("greedy", 20, priority=HIGHEST)], ids=["amounts", "pods"]
)
async def test_what_is_recorded_gives_the_same_decision_without_the_policy(asked_for: Need) -> None:
    cycles: list[tuple[CycleInput, Decision | None]] = []

    class Taker:
        def take(self, asked: CycleInput, decision: Decision | None, /) -> None:
            cycles.append((asked, decision))

    world = fleet(20, g_=ClusterPolicy(machines_max=4, priority_max=7))
    world.shard.recorder = Taker()
    connected(world, "greedy").report(asked_for)
    connected(world, "honest").report(need("honest", "40"))
    await rested(world)

    engine = FleetEngine(verify_every_cycles=0, on_divergence=lambda _divergence: None)
    assert len(cycles) == 9
    for asked, decision in cycles:
        assert decision is not None
        again = engine.decide(asked.snapshot, asked.demand, asked.options)
        assert (list(again.actions), list(again.rows)) == (list(decision.actions), list(decision.rows))


@pytest.mark.rule("shard 1.1/2")
def test_limits_are_read_from_the_file_and_an_own_entry_lifts_those_of_a_pattern(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(
        "clusters:\n"
        "  batch-1: {machines_max: unlimited}\n"
        "  'batch-*': {priority_max: 1000, penalty_max: 64, machines_max: 50, rows_max: 20,\n"
        "    dollars_per_hour_max: 12.5}\n"
    )
    policies = read_policies(path)

    bucket = bucket_for_dollars(64)
    assert policies.limits("batch-2") == ClusterLimits(
        priority_max=1000, penalty_max=bucket, machines_max=50, rows_max=20, dollars_per_hour_max=12.5
    )
    assert policies.limits("batch-1") == ClusterLimits(
        priority_max=1000, penalty_max=bucket, rows_max=20, dollars_per_hour_max=12.5
    )
    assert policies.limits("other") == ClusterLimits()
