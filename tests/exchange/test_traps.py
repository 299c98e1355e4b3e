"""Situations in which a careless exchange loses money or pods, each with its figures."""

from dataclasses import replace
from itertools import chain

import pytest

from bigfleet.engine.decision import CapacityPool
from bigfleet.exchange.values import (
    BlockReason,
    ClusterExchanges,
    ExchangeKind,
    ExchangeProposal,
    ExchangeSettings,
    ExclusionReason,
    WaitReason,
)
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need
from bigfleet.model.profile import Operator, Requirement, SpreadMode, TopologySpread
from bigfleet.model.states import CapacityType, MachineState
from tests.exchange.building import OPTIONS, asked, held, idle, need, offers, pods

SPOT = CapacityType.SPOT
RACK = "example.com/rack"


def summary(proposal: ExchangeProposal) -> tuple[dict[str, int], dict[str, int]]:
    """Return what goes and what comes, by instance type."""
    goes: dict[str, int] = {}
    comes: dict[str, int] = {}
    for counts, pairs in ((goes, proposal.goes), (comes, proposal.comes)):
        for kind, count in pairs:
            counts[kind.instance_type] = counts.get(kind.instance_type, 0) + count
    return goes, comes


def only(found: ClusterExchanges) -> ExchangeProposal:
    """Return the single proposal."""
    assert found.blocked is None
    assert len(found.proposals) == 1
    return found.proposals[0]


def test_machines_bought_while_spot_was_sold_out_go_when_it_is_back() -> None:
    """Two machines at $3.00 go for one of $0.10: $5.90 an hour, against $2.51 once."""
    machines = held(2, "dear", 4, 3.0) + offers(4, "spot", 8, 0.10, capacity_type=SPOT, interruption_probability=0.0001)

    found = only(asked(machines, [need(pods(500, 1, 10))]))

    assert summary(found) == ({"t4": 2}, {"t8": 1})
    assert found.kind is ExchangeKind.MANY_FOR_FEWER
    assert found.waits_for is None
    gate = found.gate
    assert (gate.goes_usd_per_hour, gate.comes_usd_per_hour) == (6.0, 0.10)
    assert gate.saving_usd_per_hour == pytest.approx(5.90)
    # The budget of two machines is one at a time: 10 min of reclaim delay, then 10 and 20 min of draining.
    assert found.waves == 2
    assert gate.double_running_usd == pytest.approx(6.0 * (600 + 900) / 3600)
    assert gate.boot_usd == pytest.approx(0.10 * 300 / 3600)
    assert gate.gain_usd == pytest.approx(4 * 5.90)
    assert gate.required_usd == pytest.approx(1.25 * (2.5 + 0.10 / 12))
    assert gate.break_even_seconds == pytest.approx((2.5 + 0.10 / 12) / 5.90 * 3600)


def test_a_sold_out_pool_attracts_nothing() -> None:
    """A pool without stock offers one machine as a probe. It finds out whether there is stock, and promises none."""
    spot = offers(4, "spot", 8, 0.10, capacity_type=SPOT)
    pool = OPTIONS.sold_out | {CapacityPool.of(spot[0])}
    options = replace(OPTIONS, sold_out=pool, probes=frozenset({spot[0].id}))

    found = asked(held(2, "dear", 4, 3.0) + spot, [need(pods(500, 1, 10))], options=options)

    assert (found.blocked, found.proposals) == (None, ())


def test_sixty_four_small_machines_where_one_large_would_do() -> None:
    """They go three at a time: 22 drains one after the other, in which both fleets run."""
    demand = [need(pods(900, 1, 64))]

    dear = only(asked(held(64, "small", 1, 0.05) + offers(2, "large", 64, 1.60), demand))
    cheap = only(asked(held(64, "small", 1, 0.05) + offers(2, "large", 64, 0.80), demand))

    assert summary(dear) == summary(cheap) == ({"t1": 64}, {"t64": 1})
    assert (dear.waves, cheap.waves) == (22, 22)
    # $1.60 an hour over 4 h are $6.40; 2 h 5 min of 64 machines and 5 min of the large one are $6.80, times 1.25.
    assert dear.gate.gain_usd == pytest.approx(6.40)
    assert dear.gate.required_usd == pytest.approx(1.25 * (3.20 * 125 / 60 + 1.60 / 12))
    assert dear.waits_for is WaitReason.DOES_NOT_PAY
    assert cheap.gate.gain_usd == pytest.approx(9.60)
    assert cheap.gate.required_usd == pytest.approx(1.25 * (3.20 * 125 / 60 + 0.80 / 12))
    assert cheap.waits_for is None


def test_one_large_machine_goes_for_many_small_ones() -> None:
    """The other direction: sixty machines at $0.04 host what one of $3.20 does."""
    found = only(asked(held(1, "large", 64, 3.20) + offers(80, "small", 1, 0.04), [need(pods(900, 1, 60))]))

    assert found.kind is ExchangeKind.ONE_FOR_MANY
    assert summary(found) == ({"t64": 1}, {"t1": 60})
    assert found.gate.saving_usd_per_hour == pytest.approx(0.80)
    assert found.waits_for is None


def test_idle_reserved_machines_replace_rented_ones_one_at_a_time() -> None:
    """They are paid for anyway: each saves the whole price of a rented one. The budget of three machines is one."""
    reserved = idle(3, "own", 8, 0.30, capacity_type=CapacityType.RESERVED, instance_type="own8")

    found = asked(held(3, "rented", 8, 0.40) + reserved, [need(pods(1000, 1, 20))])

    assert [summary(each) for each in found.proposals] == [({"t8": 1}, {"own8": 1})] * 3
    assert [each.waits_for for each in found.proposals] == [None, WaitReason.BUDGET, WaitReason.BUDGET]
    assert [each.gate.saving_usd_per_hour for each in found.proposals] == [pytest.approx(0.40)] * 3
    assert found.promised_usd_per_hour == pytest.approx(0.40)


def test_a_machine_whose_pods_fit_nowhere_else_stays() -> None:
    """One pod wants a label that a dear machine alone has; the other dear machine goes."""
    special = held(1, "special", 4, 3.0, labels={"disk": "local"}, instance_type="special")
    here = Requirement("disk", Operator.IN, ("local",))
    demand = [need(pods(3500, 1, 1), requirements=(here,)), need(pods(500, 1, 6))]

    found = only(asked([*special, *held(1, "dear", 4, 3.0), *offers(4, "cheap", 8, 0.10)], demand))

    assert summary(found) == ({"t4": 1}, {"t8": 1})
    assert found.machine_ids == ("dear-000",)


def test_a_machine_that_the_operator_kept_stays() -> None:
    """An operator that answered WOULD_NOT_FIT knows of more than the claims."""
    machines = held(2, "dear", 4, 3.0) + offers(4, "cheap", 8, 0.10)

    found = asked(machines, [need(pods(500, 1, 14))], exclude={"dear-000": ExclusionReason.WOULD_NOT_FIT})

    assert found.excluded == ((ExclusionReason.WOULD_NOT_FIT, 1),)
    assert only(found).machine_ids == ("dear-001",)


def gang(**profile: object) -> Need:
    """Return a gang of four pods that each fill a machine, in one rack."""
    return need(pods(3500, 2, 4), requirements=(Requirement(RACK, Operator.SAME),), **profile)


def racked(machines: list[Machine], rack: str) -> list[Machine]:
    """Return the machines in a rack."""
    return [replace(machine, labels={RACK: rack}) for machine in machines]


def test_a_gang_on_dear_machines_moves_whole() -> None:
    """All four machines go at once, for four in another rack. Half a gang would be no gang."""
    here, there = racked(held(4, "dear", 4, 3.0), "r1"), racked(offers(6, "cheap", 4, 1.0), "r2")

    found = only(asked([*here, *there], [gang()]))

    assert found.is_gang
    assert found.machine_ids == tuple(machine.id for machine in here)
    assert sum(count for _, count in found.comes) == 4
    assert found.waits_for is None


def test_a_gang_that_cannot_move_whole_stays() -> None:
    """Three machines in the other rack host three quarters of it."""
    here, there = racked(held(4, "dear", 4, 3.0), "r1"), racked(offers(3, "cheap", 4, 1.0), "r2")

    assert asked([*here, *there], [gang()]).proposals == ()


def test_a_gang_of_which_one_machine_is_kept_stays() -> None:
    """The machines of its other pods are excluded as well."""
    here, there = racked(held(4, "dear", 4, 3.0), "r1"), racked(offers(6, "cheap", 4, 1.0), "r2")

    found = asked([*here, *there], [gang()], exclude={here[0].id: ExclusionReason.COOLING})

    assert (found.proposals, found.excluded) == ((), ((ExclusionReason.COOLING, 1), (ExclusionReason.GANG, 3)))


def test_a_strict_spread_of_which_one_machine_is_kept_stays() -> None:
    """Its pods are counted over all zones: those that move could not go where they are allowed."""
    zones = list(chain.from_iterable(held(1, f"z{zone}", 4, 3.0, zone=zone) for zone in "ab"))
    spread = TopologySpread("topology.kubernetes.io/zone", 1, SpreadMode.DO_NOT_SCHEDULE)
    demand = [need(pods(500, 1, 8), spreads=(spread,))]
    cheap = [*offers(2, "ca", 8, 0.1, zone="a"), *offers(2, "cb", 8, 0.1, zone="b")]

    free = asked([*zones, *cheap], demand)
    bound = asked([*zones, *cheap], demand, exclude={"za-000": ExclusionReason.COOLING})

    assert sum(len(each.machine_ids) for each in free.proposals) == 2
    assert (bound.proposals, bound.excluded) == ((), ((ExclusionReason.COOLING, 1), (ExclusionReason.SPREAD, 1)))


def test_reclamation_penalties_count_in_full() -> None:
    """$256 of evictions for $1.40 an hour: it would pay after a week, and is shown as not paying."""
    machines = held(2, "dear", 8, 0.80) + offers(4, "spot", 8, 0.10, capacity_type=SPOT, instance_type="s8")

    found = only(asked(machines, [need(pods(500, 1, 24), reclamation_bucket=10)]))

    assert found.gate.reclamation_usd == 2 * 128
    assert found.waits_for is WaitReason.DOES_NOT_PAY
    assert found.gate.break_even_seconds > 180 * 3600


@pytest.mark.parametrize("field", ["reclamation_bucket", "interruption_bucket"])
def test_pinned_pods_are_not_moved(field: str) -> None:
    """Their machine is excluded; the other one goes."""
    demand = [need(pods(3500, 1, 1), **{field: 27}), need(pods(3500, 1, 1), priority=50)]

    found = asked(held(2, "dear", 4, 3.0) + offers(4, "cheap", 4, 1.0, instance_type="cheap"), demand)

    assert found.excluded == ((ExclusionReason.PINNED, 1),)
    assert len(only(found).machine_ids) == 1


def test_a_saving_below_the_threshold_is_no_reason() -> None:
    """9 % less is nothing: prices move as much in an hour."""
    demand = [need(pods(3500, 1, 1))]

    little = asked(held(1, "dear", 4, 1.00) + offers(4, "cheap", 4, 0.91, instance_type="c4"), demand)
    enough = asked(held(1, "dear", 4, 1.00) + offers(4, "cheap", 4, 0.85, instance_type="c4"), demand)

    assert little.proposals == ()
    assert only(enough).waits_for is None
    assert only(enough).gate.saving_fraction == pytest.approx(0.15)


def test_a_gang_that_saves_little_is_shown_and_waits() -> None:
    """Its machines are compared with those on offer as a whole, at true prices."""
    here, there = racked(held(4, "dear", 4, 1.0), "r1"), racked(offers(6, "cheap", 4, 0.91), "r2")

    found = asked([*here, *there], [gang()])

    assert only(found).gate.saving_fraction == pytest.approx(0.09)
    assert only(found).waits_for is WaitReason.SAVES_TOO_LITTLE
    assert found.promised_usd_per_hour == 0


def test_an_interruptible_offer_is_charged_its_interruptions() -> None:
    """$0.30 of price and 1 % of $64 an hour are not cheaper than $0.80."""
    demand = [need(pods(3500, 1, 1), interruption_bucket=9)]
    spot = offers(4, "spot", 4, 0.30, capacity_type=SPOT, interruption_probability=0.01)

    assert asked(held(1, "dear", 4, 0.80, instance_type="d4") + spot, demand).proposals == ()
    calm = [replace(machine, interruption_probability=0.001) for machine in spot]
    found = only(asked(held(1, "dear", 4, 0.80, instance_type="d4") + calm, demand))
    # 3.5 of 4 cpu: 0.875 × 0.001 × $64.
    assert found.gate.interruptions_after_usd_per_hour == pytest.approx(0.056, rel=0.01)


def test_no_exchange_loses_a_pod_that_had_a_place() -> None:
    """One cheap machine is on offer, which hosts half of the pods: no more than half of the machines go."""
    machines = held(4, "dear", 4, 3.0) + offers(1, "cheap", 8, 0.10)

    found = asked(machines, [need(pods(1000, 1, 14))])

    assert [summary(each) for each in found.proposals] == [({"t4": 2}, {"t8": 1})]


def test_a_cluster_that_is_not_at_rest_is_left_as_it_is() -> None:
    """Shortfalls, waiting pods, machines on their way, silence and what the shard gives as its reason."""
    machines = held(2, "dear", 4, 3.0) + offers(4, "cheap", 8, 0.10)
    demand = [need(pods(500, 1, 10))]
    waiting = [replace(demand[0], waiting=demand[0].shapes)]
    coming = [replace(machines[0], state=MachineState.CONFIGURING), *machines[1:]]
    short = [*demand, need(pods(3500, 1, 90), priority=50)]

    assert asked(machines, demand).proposals
    assert asked(machines, short).blocked is BlockReason.SHORTFALL
    assert asked(machines, waiting).blocked is BlockReason.WAITING_PODS
    assert asked(coming, demand).blocked is BlockReason.MACHINES_CHANGING
    silent = replace(OPTIONS, reported=frozenset())
    assert asked(machines, demand, options=silent).blocked is BlockReason.NOT_REPORTED
    held_back = asked(machines, demand, blocked={"c": BlockReason.QUARANTINED})
    assert (held_back.blocked, held_back.proposals) == (BlockReason.QUARANTINED, ())


@pytest.mark.parametrize("reason", ExclusionReason)
def test_a_machine_that_is_excess_leaves_first_whatever_excludes_it(reason: ExclusionReason) -> None:
    """An exchange would count on it, and end when it has left; one that its operator does not let go stays."""
    machines = held(3, "dear", 4, 3.0) + offers(4, "cheap", 8, 0.10)
    demand = [need(pods(500, 1, 10))]

    found = asked(machines, demand, exclude={machines[2].id: reason})

    is_left = reason is not ExclusionReason.WOULD_NOT_FIT
    assert found.blocked is (BlockReason.MACHINES_CHANGING if is_left else None)


def test_a_pod_that_no_machine_can_host_stops_nothing() -> None:
    """A typing error in one request must not keep a cluster dear."""
    machines = held(2, "dear", 4, 3.0) + offers(4, "cheap", 8, 0.10)

    assert asked(machines, [need(pods(500, 1, 10)), need(pods(1_000_000, 1, 1))]).proposals


def test_the_budget_bounds_how_many_machines_go_at_a_time() -> None:
    """Of forty machines two may go: what is more waits, or goes in waves."""
    found = asked(
        held(40, "dear", 8, 0.80) + offers(80, "cheap", 8, 0.40, instance_type="c8"),
        [need(pods(510, 1, 600))],
    )

    ready = [each for each in found.proposals if each.waits_for is None]
    assert sum(len(each.machine_ids) for each in ready) == 2
    assert {each.waits_for for each in found.proposals[1:]} == {WaitReason.BUDGET}
    ids = [machine_id for each in found.proposals for machine_id in each.machine_ids]
    assert len(ids) == len(set(ids))


def test_equal_questions_have_equal_answers() -> None:
    """The order of machines and rows plays no part."""
    machines = held(6, "dear", 4, 1.0) + held(3, "mid", 8, 0.9) + offers(20, "cheap", 8, 0.40, instance_type="c8")
    demand = [need(pods(700, 2, 45)), need(pods(1500, 1, 6), priority=50)]

    first = asked(machines, demand, settings=ExchangeSettings(budget_fraction=0.5))
    again = asked(machines[::-1], demand, settings=ExchangeSettings(budget_fraction=0.5))

    assert first.proposals
    assert first == again


def test_rows_of_one_profile_count_each() -> None:
    """A machine that hosts the pods of one of them has no room for both."""
    small = offers(2, "cheap", 3, 0.10, allocatable={"cpu": "3500m", "memory": "16Gi", "pods": "110"})
    demand = [need(pods(100, 0.1, 10)), need(pods(3000, 1, 1))]

    assert asked(held(1, "dear", 4, 3.0) + small[:1], demand).proposals == ()
    assert summary(only(asked(held(1, "dear", 4, 3.0) + small, demand))) == ({"t4": 1}, {"t3": 2})
