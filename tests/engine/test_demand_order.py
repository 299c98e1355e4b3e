"""Demand that is handed over as changes is decided as the same rows in a plain list are (docs/adr/0111).

Any history of changes, told by listings that follow each other; now and then one is not decided on, or a plain list
comes between, and the engine has to find out by itself.
"""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.engine.columnar.engine import ColumnarEngine
from bigfleet.engine.demand_order import ListedRows
from bigfleet.model.need import Need
from bigfleet.model.states import MachineState
from tests.engine.changes import History, histories, large_history
from tests.engine.columnar.test_incremental import Life, life_of, machine, row
from tests.engine.proof import Proof, RecordProperty, examples


def listed_after(former: ListedRows, rows: Sequence[Need]) -> ListedRows:
    """Return the listing that follows, with the places at which the two differ: what stayed is found greedily."""
    gone: list[int] = []
    come: list[int] = []
    place_of = {id(need): place for place, need in enumerate(former)}
    stayed = -1
    for place, need in enumerate(rows):
        known = place_of.get(id(need), -1)
        if known <= stayed:
            come.append(place)
            continue
        gone.extend(range(stayed + 1, known))
        stayed = known
    gone.extend(range(stayed + 1, len(former)))
    return former.followed_by(rows, gone=gone, come=come)


def live(past: History, ways: Sequence[str], proof: Proof) -> None:
    """Live through a history; each step's demand comes in one of three ways."""
    life = Life(past.first)
    life.demand = listing = ListedRows(life.demand)
    life.decide()
    for turn, step in enumerate(past.steps):
        for change in step:
            life.change(change)
        # A settled list of objects: changes replace it as a whole.
        rows = tuple(life.demand)
        way = ways[turn % len(ways)]
        if way == "missed":
            listing = listed_after(listing, rows[: len(rows) // 2])
        listing = listed_after(listing, rows)
        life.demand = list(rows) if way == "plain" else listing
        with proof.example():
            life.decide()
            known: Any = life.engine._verified._known
            followed = known._demand
            assert followed is not None
            proof.features[way if followed.followed is None else "followed"] += 1


ways = st.lists(st.sampled_from(("followed", "followed", "followed", "missed", "plain")), min_size=1, max_size=8)


def test_listed_changes_are_decided_like_the_whole_list(record_property: RecordProperty) -> None:
    proof = Proof()

    @examples(400)
    @given(histories(), ways)
    def check(past: History, ways: list[str]) -> None:
        live(past, ways, proof)

    with proof.told(record_property, "incremental decisions"):
        check()
    assert proof.features["followed"] > 0
    proof.assert_features(frozenset({"followed", "missed", "plain"}))


def test_listed_changes_of_a_larger_fleet_are_decided_like_the_whole_list(record_property: RecordProperty) -> None:
    proof = Proof()

    @examples(40)
    @given(st.integers(0, 2**32), ways)
    def check(seed: int, ways: list[str]) -> None:
        live(large_history(seed), ways, proof)

    with proof.told(record_property, "incremental decisions"):
        check()


def test_two_engines_may_follow_one_listing_each_at_its_own_pace() -> None:
    first, second, third = row("c0", 1), row("c1", 1), row("c2", 1)
    listings = [ListedRows([first])]
    listings.append(listings[-1].followed_by([first, second], gone=(), come=(1,)))
    listings.append(listings[-1].followed_by([third, second], gone=(0,), come=(0,)))
    life = life_of([machine("m0", MachineState.IDLE), machine("m1", MachineState.IDLE)], [])
    view, slow = life.store.snapshot(), ColumnarEngine()
    slow.decide(view, listings[0], life.options)
    for listing in listings:
        life.demand = listing
        expected, _ = life.decide()

    assert slow.decide(view, listings[2], life.options) == expected


def test_a_listing_is_a_tuple_and_says_where_it_differs() -> None:
    first, second = row("c0", 1), row("c1", 1)
    former = ListedRows([first])
    later = former.followed_by([second, first], gone=(), come=(0,))

    assert tuple(later) == (second, first)
    assert (later.since is former.moment, later.gone, later.come) == (True, (), (0,))
    assert former.since is None


def test_places_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(AssertionError, match="do not add up"):
        ListedRows([row("c0", 1)]).followed_by([], gone=(), come=())
