"""Machines that are paid for anyway move to another cluster where both clusters together become cheaper."""

from dataclasses import replace

import pytest

from bigfleet.engine.targets import class_key
from bigfleet.exchange.between_clusters import (
    CLASSES_MAX,
    GIVERS_MAX,
    TAKERS_MAX,
    ClusterSide,
    Pair,
    best_moves,
    pairs_of,
)
from bigfleet.exchange.values import BlockReason, ExchangeKind, ExchangeProposal, ExclusionReason, WaitReason
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need
from bigfleet.model.penalty import PINNED
from bigfleet.model.profile import Operator, Requirement
from tests.exchange.building import idle, machine, need, offers, pods
from tests.exchange.fleets import RESERVED, in_cluster, moves, own, rented, wants

RACK = "example.com/rack"
#: A pod that fills a machine of 4 cpu.
FULL = pods(3500, 4, 1)


def of_types(*names: str) -> Requirement:
    """Return that a pod runs on these instance types only."""
    return Requirement("node.kubernetes.io/instance-type", Operator.IN, names)


def cheap(count: int, price: float = 0.3) -> list[Machine]:
    """Return machines on offer that the pods of cluster a accept, and those of cluster b do not."""
    return offers(count, "cheap", 4, price, instance_type="cheap4")


def demand(a: int = 1, b: int = 1) -> list[Need]:
    """Return pods that fill so many machines of each cluster; those of b accept no machine on offer."""
    return [
        *wants("a", need(replace(FULL, count=a))),
        *wants("b", need(replace(FULL, count=b), requirements=(of_types("own4", "rented4", "dear4"),))),
    ]


def only(found: dict[str, ExchangeProposal]) -> ExchangeProposal:
    """Return the only move, which cluster a makes."""
    assert list(found) == ["a"]
    return found["a"]


def test_a_machine_moves_instead_of_being_bought() -> None:
    """The giver rents a machine for $0.30 in its place, the taker stops renting one for $3.00: $2.70 an hour."""
    move = only(moves([*own("a", 1), *rented("b", 1), *cheap(2)], demand()))

    assert (move.kind, move.taker, move.waits_for) == (ExchangeKind.BETWEEN_CLUSTERS, "b", None)
    assert move.machine_ids == ("a-own-000",)
    assert [(kind.instance_type, count) for kind, count in move.goes] == [("own4", 1)]
    assert [(kind.instance_type, count) for kind, count in move.comes] == [("cheap4", 1)]
    assert move.taker_part is not None
    assert move.taker_part.machine_ids == ("b-rented-000",)
    assert [(kind.instance_type, kind.is_idle, n) for kind, n in move.taker_part.comes] == [("own4", True, 1)]
    gate = move.gate
    assert [gate.goes_usd_per_hour, gate.comes_usd_per_hour] == pytest.approx([3.0, 0.3])
    assert gate.saving_usd_per_hour == pytest.approx(2.70)
    assert move.own_saving_usd_per_hour == pytest.approx(-0.30)
    assert gate.boot_usd == pytest.approx(0.3 * 300 / 3600)
    # 20 min until the machine has left, 5 min until it serves, 20 min until the rented one has left.
    assert gate.double_running_usd == pytest.approx(3.0 * (1200 + 300 + 1200) / 3600)
    assert gate.gain_usd == pytest.approx(4 * 2.70)
    assert gate.required_usd == pytest.approx(1.25 * (2.25 + 0.025))


def test_a_giver_with_nothing_on_offer_keeps_its_machines() -> None:
    """Its pods would have no place."""
    assert moves([*own("a", 1), *rented("b", 1)], demand()) == {}


def test_a_giver_that_would_pay_more_than_the_taker_saves_keeps_its_machines() -> None:
    """$0.30 an hour in place of $0.25. At $1.00 the saving of $0.75 does not pay within four hours."""
    assert moves([*own("a", 1), *rented("b", 1, 0.25), *cheap(2)], demand()) == {}
    waits = only(moves([*own("a", 1), *rented("b", 1, 3.0), *cheap(2, 2.4)], demand()))
    assert waits.gate.saving_usd_per_hour == pytest.approx(0.6)
    assert waits.waits_for is WaitReason.DOES_NOT_PAY


def test_a_saving_of_less_than_a_tenth_waits() -> None:
    """Of what the taker rents, not of what moves."""
    waits = only(moves([*own("a", 1), *rented("b", 1, 3.0), *cheap(2, 2.8)], demand()))
    assert waits.waits_for is WaitReason.SAVES_TOO_LITTLE


def test_equal_fleets_have_equal_moves_in_any_order() -> None:
    """Machines and rows are listed in another order."""
    machines, rows = [*own("a", 3), *rented("b", 3), *cheap(4)], demand(3, 3)
    found = moves(machines, rows)
    assert found == moves(machines[::-1], rows[::-1])
    assert only(found).waits_for is None


def test_an_idle_machine_of_the_class_is_taken_without_a_move() -> None:
    """The taker's own exchange takes it, and saves more."""
    spare = idle(1, "spare", 4, 0.5, capacity_type=RESERVED, instance_type="own4")
    assert class_key(spare[0]) == class_key(own("a", 1)[0])
    assert moves([*own("a", 1), *rented("b", 1), *cheap(2), *spare], demand()) == {}


def test_a_class_on_offer_can_be_bought_by_the_taker() -> None:
    """Also when the giver has some of it."""
    fresh = offers(1, "fresh", 4, 0.5, capacity_type=RESERVED, instance_type="own4")
    assert moves([*own("a", 1), *rented("b", 1), *cheap(2), *fresh], demand()) == {}


def test_a_cluster_exchanges_its_own_machines_first() -> None:
    """The taker may use what is on offer, so it needs no machine of another cluster."""
    rows = [*demand()[:1], *wants("b", need(FULL))]
    assert moves([*own("a", 1), *rented("b", 1), *cheap(2)], rows) == {}


def test_rented_machines_do_not_move() -> None:
    """Both clusters rent: what the giver would save by letting its own go is its own exchange."""
    given = rented("a", 1, 0.9)
    rows = [
        *wants("a", need(FULL)),
        *wants("b", need(FULL, requirements=(of_types("rented4"),))),
    ]
    dear = in_cluster("b", [replace(each, instance_type="rented4") for each in rented("b", 1, 3.0)])
    assert moves([*given, *dear, *cheap(2, 0.88)], rows) == {}


@pytest.mark.parametrize("reason", [ExclusionReason.COOLING, ExclusionReason.UNAVAILABLE, ExclusionReason.FORECAST])
@pytest.mark.parametrize("machine_id", ["a-own-000", "b-rented-000"])
def test_an_excluded_machine_never_moves(machine_id: str, reason: ExclusionReason) -> None:
    """Neither that of the giver, nor that which the taker would let go."""
    machines = [*own("a", 1), *rented("b", 1), *cheap(2)]
    assert moves(machines, demand(), exclude={machine_id: reason}) == {}


@pytest.mark.parametrize("cluster", ["a", "b"])
def test_a_blocked_cluster_neither_gives_nor_takes(cluster: str) -> None:
    """Such as one whose operator has no session."""
    machines = [*own("a", 1), *rented("b", 1), *cheap(2)]
    assert moves(machines, demand(), blocked={cluster: BlockReason.OPERATOR_AWAY}) == {}


@pytest.mark.parametrize("cluster", ["a", "b"])
def test_machines_of_pinned_pods_never_move(cluster: str) -> None:
    """An interruption of such pods costs more than anything saves."""
    rows = [
        replace(each, profile=replace(each.profile, reclamation_bucket=PINNED)) if each.cluster == cluster else each
        for each in demand()
    ]
    assert moves([*own("a", 1), *rented("b", 1), *cheap(2)], rows) == {}


@pytest.mark.parametrize("cluster", ["a", "b"])
def test_machines_of_gangs_never_move(cluster: str) -> None:
    """A gang moves as a whole, within its cluster."""
    same = Requirement(RACK, Operator.SAME)
    rows = [
        replace(each, profile=replace(each.profile, requirements=(*each.profile.requirements, same)))
        if each.cluster == cluster
        else each
        for each in demand()
    ]
    machines = [replace(each, labels={RACK: "r1"}) for each in (*own("a", 1), *rented("b", 1), *cheap(2))]
    assert len(moves(machines, demand())) == 1
    assert moves(machines, rows) == {}


def test_no_more_than_both_budgets_move_at_a_time() -> None:
    """5 % of forty machines are two; a taker of six lets one go."""
    machines = [*own("a", 40), *rented("b", 40), *cheap(8)]
    assert len(only(moves(machines, demand(40, 40))).machine_ids) == 2
    machines = [*own("a", 40), *rented("b", 6), *cheap(8)]
    assert len(only(moves(machines, demand(40, 6))).machine_ids) == 1


def test_one_machine_moves_where_the_budget_is_not_on_offer() -> None:
    """Two could move, but only one can be replaced."""
    move = only(moves([*own("a", 40), *rented("b", 40), *cheap(1)], demand(40, 40)))
    assert len(move.machine_ids) == 1
    assert move.gate.saving_usd_per_hour == pytest.approx(2.70)


def test_the_move_that_saves_most_is_chosen_and_no_cluster_is_in_two() -> None:
    """Of two takers the dearer one gets the machine; of the giver nothing else is shown."""
    dear = [replace(each, instance_type="dear4") for each in rented("d", 1, 3.0)]
    rows = [*demand(2, 1), *wants("d", *demand()[1:])]
    machines = [*own("a", 2), *rented("b", 1, 2.0), *dear, *cheap(3)]
    assert only(moves(machines, rows)).taker == "d"


def test_both_directions_are_never_proposed_at_once() -> None:
    """Each cluster has a machine of its own that would replace the dear one of the other."""
    small, large = pods(3500, 4, 1), pods(7000, 8, 1)
    rows = [
        *wants("a", need(small), need(large, requirements=(of_types("own8", "rented8"),), priority=50)),
        *wants("b", need(large), need(small, requirements=(of_types("own4", "rented4", "dear4"),), priority=50)),
    ]
    machines = [*own("a", 1), *rented("a", 1, 6.0, 8), *own("b", 1, 1.0, 8), *rented("b", 1, 3.0)]
    offered = [*cheap(2), *offers(2, "cheap8", 8, 0.5, instance_type="cheap8")]
    found = moves([*machines, *offered], rows)

    assert len(found) == 1
    ((giver, move),) = found.items()
    assert {giver, move.taker} == {"a", "b"}


# ---- which pairs ---------------------------------------------------------------------------------------------------


def key(name: str) -> Machine:
    """Return a machine of a class of its own."""
    return machine(name, 4, 0.5, capacity_type=RESERVED, instance_type=name)


def side(cluster: str, *spare: str, offered: float = 1.0, rented: float = 0.0) -> ClusterSide:
    """Return what a cluster gives and takes."""
    return ClusterSide(cluster, tuple(class_key(key(name)) for name in spare), offered, rented)


def test_pairs_with_the_largest_difference_come_first() -> None:
    """Of what one rents and the other could rent."""
    sides = [side("a", "x", offered=0.1), side("b", "x", offered=0.2), side("c", rented=0.5), side("d", rented=0.9)]
    found = pairs_of(sides)
    assert [(pair.giver, pair.taker) for pair in found] == [("a", "d"), ("b", "d"), ("a", "c"), ("b", "c")]
    assert found == pairs_of(sides[::-1])


def test_a_cluster_is_no_pair_with_itself() -> None:
    """What it has of its own it uses already."""
    assert pairs_of([side("a", "x", rented=0.5)]) == []


def test_the_number_of_pairs_is_bounded() -> None:
    """Many clusters and classes make no more pairs than a few."""
    names = [f"t{number:02}" for number in range(CLASSES_MAX + 3)]
    sides = [side(f"g{number:02}", *names) for number in range(GIVERS_MAX + 5)]
    sides += [side(f"t{number:02}", rented=2.0 + number) for number in range(TAKERS_MAX + 5)]
    found = pairs_of(sides)
    assert len(found) == len(set(found)) == CLASSES_MAX * GIVERS_MAX * TAKERS_MAX
    assert isinstance(found[0], Pair)
    assert {pair.taker for pair in found} == {f"t{number:02}" for number in range(5, TAKERS_MAX + 5)}


def test_a_move_that_is_ready_goes_before_one_that_waits() -> None:
    """Although that one would save more."""
    ready = only(moves([*own("a", 1), *rented("b", 1), *cheap(2)], demand()))
    waits = replace(ready, waits_for=WaitReason.DOES_NOT_PACK, gate=replace(ready.gate, goes_usd_per_hour=9.0))
    assert best_moves([("c", waits), ("a", ready)]) == {"a": ready}
    other = replace(waits, taker="d")
    assert best_moves([("c", other), ("a", ready)]) == {"a": ready, "c": other}
