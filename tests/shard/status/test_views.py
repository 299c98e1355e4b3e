"""What readers are shown of the last cycle: every row as reported, and why it is short (docs/spec/shard.md §12)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from bigfleet.model import vector
from bigfleet.model.frames import BootstrapRequest, BootstrapResponse, UnmetReason
from bigfleet.model.labels import INSTANCE_TYPE, ZONE
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need
from bigfleet.model.profile import Operator, Profile, Requirement, SpreadMode, TopologySpread
from bigfleet.model.states import MachineState
from bigfleet.model.vector import parse_vector
from bigfleet.shard.ports import ShardSettings
from bigfleet.shard.status.views import MATCHING_MAX, NeedView, split_residual
from tests.shard.world import ScriptedProvider, World, machine, need

pytestmark = pytest.mark.virtual_time

S = MachineState


def gang(group: str, cpu: str, *, cluster: str = "c1", priority: int = 100) -> Need:
    """Return a row whose machines must share a zone; one that a single machine can host folds."""
    row = need(cluster, cpu, priority=priority)
    profile = Profile(requirements=(Requirement(ZONE, Operator.SAME),), priority=priority)
    return replace(row, profile=profile, group=group)


async def view_of(*rows: Need, machines: tuple[Machine, ...] = (), cycles: int = 1, **settings: Any) -> list[NeedView]:
    """Return what is shown of these rows of c1 after some cycles that carry nothing out."""
    provider = ScriptedProvider()
    provider.add(*machines)
    world = World(provider, settings=ShardSettings(actuation_paused=True, **settings))
    for cluster in sorted({row.cluster for row in rows}):
        world.connect(cluster).report(*(row for row in rows if row.cluster == cluster))
    for _ in range(cycles):
        await world.cycle()
    return list(world.shard.view.needs)


def refusing(request: BootstrapRequest) -> BootstrapResponse:
    """Answer that this need cannot be bootstrapped."""
    return BootstrapResponse(request_id=request.request_id, error="no template for arm64")


async def test_a_met_row_says_what_it_got() -> None:
    """Counts of what it holds, what is newly bound and what is newly made; no reason, no supply, no residual."""
    machines = (
        machine("held", S.CONFIGURED, cluster="c1"),
        machine("idle", S.IDLE),
        machine("slot", S.SPECULATIVE),
    )
    (row,) = await view_of(need("c1", "12"), machines=machines)

    assert (row.satisfied, row.claimed_machines, row.bootstraps, row.provisions) == (True, 3, 1, 1)
    assert (row.reason, row.matching, row.unmet_age_cycles) == (UnmetReason.UNSPECIFIED, None, 0)


@pytest.mark.rule("shard 11.1/5", "shard 12/3")
async def test_a_folded_row_is_split_over_the_rows_that_were_reported() -> None:
    """In list order: as many met as the covered amount pays for, the next one in part, the rest not at all."""
    rows = [gang(name, "3", priority=100) for name in ("a", "b", "c")]
    machines = (machine("m1", S.IDLE), machine("m2", S.CONFIGURED, cluster="c1"))
    first, second, third = await view_of(*rows, machines=machines, cycles=2)

    assert [view.need.group for view in (first, second, third)] == ["a", "b", "c"]
    # Two machines of four pay for eight of the nine.
    assert [dict(view.residual) for view in (first, second, third)] == [{}, {}, {"cpu": 1000}]
    assert [(view.claimed_machines, view.bootstraps) for view in (first, second, third)] == [(2, 1), (0, 0), (0, 0)]
    assert [view.unmet_age_cycles for view in (first, second, third)] == [0, 0, 2]
    assert [view.need.min_unit for view in (first, second, third)] == [parse_vector({"cpu": "1"})] * 3


@pytest.mark.rule("shard 12/3")
async def test_rows_come_in_list_order_whatever_was_folded() -> None:
    """Priority, arrival, cluster, and then as they stood in the message."""
    rows = (
        gang("a", "3"),
        need("c1", "4"),
        gang("b", "3"),
        need("c1", "4", priority=900),
        gang("x", "3", cluster="b0"),
    )
    shown = await view_of(*rows, machines=(machine("m1", S.IDLE),))

    assert [(view.need.cluster, view.need.profile.priority, view.need.group) for view in shown] == [
        ("c1", 900, ""),
        ("b0", 100, "x"),
        ("c1", 100, "a"),
        ("c1", 100, ""),
        ("c1", 100, "b"),
    ]


def test_splitting_pays_in_every_dimension() -> None:
    """A row is met when all of it is paid for; what one dimension leaves is not spent on another row twice."""
    rows = tuple(replace(need("c1", "4"), aggregate=parse_vector({"cpu": "4", "memory": "8"})) for _ in range(3))
    covered = parse_vector({"cpu": "9", "memory": "12"})
    residuals = [dict(residual) for _member, residual in split_residual(rows, covered)]

    assert residuals == [{}, {"memory": 4000}, {"cpu": 3000, "memory": 8000}]
    assert vector.subtract(parse_vector({"cpu": "12", "memory": "24"}), covered) == {"cpu": 3000, "memory": 12000}


def strict(key: str, *requirements: Requirement) -> Profile:
    spreads = (TopologySpread(key, 1, SpreadMode.DO_NOT_SCHEDULE),)
    return Profile(requirements=requirements, spreads=spreads, priority=100)


REASONS: dict[str, tuple[Need, tuple[Machine, ...], UnmetReason]] = {
    "nothing fits": (need("c1", "4"), (machine("m1", S.IDLE, instance_type="other"),), UnmetReason.NO_MATCHING_SUPPLY),
    "what fits has failed": (
        need("c1", "4"),
        (machine("m1", S.FAILED, last_error="broken"),),
        UnmetReason.NO_MATCHING_SUPPLY,
    ),
    "what fits belongs to an equal": (
        need("c1", "4"),
        (machine("m1", S.CONFIGURED, cluster="c2", assigned_priority=100),),
        UnmetReason.PRIORITY_STARVED,
    ),
    "what fits is drained for somebody": (
        need("c1", "4"),
        (machine("m1", S.DRAINING, cluster="c2"),),
        UnmetReason.PRIORITY_STARVED,
    ),
    "all of it is claimed and it is not enough": (
        need("c1", "8"),
        (machine("m1", S.IDLE),),
        UnmetReason.PRIORITY_STARVED,
    ),
    "no machine has the label of the spread": (
        replace(need("c1", "4"), profile=strict("rack")),
        (machine("m1", S.IDLE),),
        UnmetReason.TOPOLOGY_UNSATISFIABLE,
    ),
    "no machine that fits has the label of the spread": (
        replace(need("c1", "4"), profile=strict("rack", Requirement(INSTANCE_TYPE, Operator.IN, ("c4",)))),
        (machine("m1", S.IDLE, instance_type="c4"), machine("m2", S.IDLE, instance_type="d", labels={"rack": "r"})),
        UnmetReason.TOPOLOGY_UNSATISFIABLE,
    ),
    "the machine with the label of the spread belongs to an equal": (
        replace(need("c1", "4"), profile=strict("rack")),
        (machine("m1", S.CONFIGURED, cluster="c2", assigned_priority=100, labels={"rack": "r"}),),
        UnmetReason.PRIORITY_STARVED,
    ),
    "nothing fits, with or without the label of the spread": (
        replace(need("c1", "4"), profile=strict("rack", Requirement(INSTANCE_TYPE, Operator.IN, ("x",)))),
        (machine("m1", S.IDLE, labels={"rack": "r"}),),
        UnmetReason.NO_MATCHING_SUPPLY,
    ),
    "victims are found": (
        need("c1", "8"),
        (machine("m1", S.CONFIGURED, cluster="c2"),),
        UnmetReason.PREEMPTION_EXHAUSTED,
    ),
    "no domain holds the gang": (
        gang("g", "8"),
        (machine("m1", S.IDLE), machine("m2", S.IDLE, zone="zb")),
        UnmetReason.TOPOLOGY_UNSATISFIABLE,
    ),
}


@pytest.mark.rule("shard 12/14")
@pytest.mark.parametrize(("row", "machines", "reason"), REASONS.values(), ids=REASONS)
async def test_the_first_reason_that_holds_is_shown(
    row: Need, machines: tuple[Machine, ...], reason: UnmetReason
) -> None:
    """With the supply that could host the row's least unit, whoever holds it."""
    shown = (await view_of(row, machines=machines))[0]

    assert (shown.satisfied, shown.reason) == (False, reason)
    assert shown.matching is not None


@pytest.mark.rule("shard 12/14")
async def test_a_gang_whose_domain_is_too_small_keeps_what_it_takes_there() -> None:
    """Concentrate, then wait: what a peer of higher precedence holds there does not count."""
    machines = (
        machine("m1", S.IDLE),
        machine("m2", S.CONFIGURED, cluster="c2", assigned_priority=500),
    )
    rows = (gang("g", "8"), need("c2", "4", priority=500))
    _peer, shown = await view_of(*rows, machines=machines)

    assert shown.reason is UnmetReason.TOPOLOGY_UNSATISFIABLE
    assert (shown.domain, shown.claimed_machines) == ("za", 1)


async def test_victims_are_counted_with_what_they_free() -> None:
    """The row is still short in this cycle."""
    machines = tuple(machine(f"m{number}", S.CONFIGURED, cluster="c2") for number in range(2))
    (row,) = await view_of(need("c1", "12"), machines=machines)

    assert (row.victims, row.freed["cpu"], row.residual) == (2, 8000, {"cpu": 12000})


async def test_matching_supply_is_counted_up_to_a_bound() -> None:
    """By state, each to 256."""
    machines = (
        *(machine(f"i{number:03d}", S.IDLE) for number in range(300)),
        *(machine(f"s{number:03d}", S.SPECULATIVE) for number in range(7)),
        machine("c", S.CONFIGURED, cluster="c2", assigned_priority=900),
    )
    shown = await view_of(need("c1", "2000"), machines=machines)

    matching = shown[0].matching
    assert matching is not None
    assert (matching.idle, matching.speculative, matching.configured) == (MATCHING_MAX, 7, 1)
    assert (matching.is_capped, matching.total) == (True, 256 + 7 + 1)


async def test_nothing_was_computed_before_the_first_cycle() -> None:
    """Cycle 0 is not an empty demand."""
    world = World()

    assert (world.shard.view.cycle, world.shard.view.needs) == (0, ())


@pytest.mark.rule("shard 9.2/15", "shard 11.1/7", "shard 12/14")
@pytest.mark.parametrize("row", [need("c1", "4"), gang("g", "3")], ids=["plain", "folded"])
async def test_a_row_that_its_operator_cannot_boot_is_short(row: Need) -> None:
    """Machines that it may claim do not help it: the row ages, is left alone for a while, and is no fleet shortfall."""
    provider = ScriptedProvider()
    provider.add(machine("m1", S.IDLE))
    world = World(provider)
    operator = world.connect("c1")
    operator.answer = refusing
    operator.report(row)
    for _ in range(3):
        await world.cycle()

    (shown,) = world.shard.view.needs
    assert (shown.satisfied, shown.reason, shown.residual) == (False, UnmetReason.BOOTSTRAP_REFUSED, row.aggregate)
    assert (shown.unmet_age_cycles, world.shard.shortfall_ledger) == (2, {})
    assert world.outcomes() == [("Bootstrap", "m1", "blob_error")]
    assert world.metric("actions_refused_total") == 2

    await world.shard._clock.sleep(30)
    operator.answer = lambda request: BootstrapResponse(request_id=request.request_id, user_data=b"#")
    await world.settle()
    (shown,) = world.shard.view.needs
    assert (shown.satisfied, shown.reason, shown.unmet_age_cycles) == (True, UnmetReason.UNSPECIFIED, 0)


@pytest.mark.rule("shard 12/2")
async def test_rows_are_made_when_somebody_asks_for_them() -> None:
    """Off the loop, once, and of the cycle that had finished then: most cycles are never looked at."""
    works: list[object] = []

    async def compute(work: Callable[[], Any]) -> Any:
        result = work()
        works.append(result)
        return result

    provider = ScriptedProvider()
    provider.add(machine("m1", S.IDLE))
    world = World(provider, compute=compute)
    world.connect("c1").report(need("c1", "4"))
    await world.cycle()
    assert not any(isinstance(result, tuple) and result and isinstance(result[0], NeedView) for result in works)
    first = await world.shard.inspect()
    (row,) = first.needs
    assert works[-1] is first.needs
    await world.cycle()

    assert (first.needs[0] is row, first.cycle, world.shard.view.cycle) == (True, 1, 2)
    assert (await world.shard.inspect()).cycle == 2
