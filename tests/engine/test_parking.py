"""Parking: which cycles age a class, and what a parked gang still may (docs/spec/engine.md §9)."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from bigfleet.engine.decision import ParkingKey, RowResult
from bigfleet.engine.parking import next_ages, parking_key, stamp_parked
from bigfleet.engine.reference.decide import decide
from bigfleet.model.need import Need
from tests.engine_cases import CaseFleet, fingerprints_of, need_of

GANG = need_of({"t": "SR", "cluster": "k", "group": "g", "agg": {"gpu": "64"}})
KEY = parking_key(GANG)


def short(need: Need = GANG, *, satisfiable: bool = False) -> RowResult:
    return RowResult(
        need=need, members=(need,), deficit=need.aggregate, unresolved=need.aggregate, satisfiable=satisfiable
    )


def test_a_woken_cycle_keeps_an_age_and_starts_none() -> None:
    assert next_ages({KEY: 5}, [short()], advance=False) == {KEY: 5}
    assert next_ages({}, [short()], advance=False) == {}


def test_a_woken_cycle_forgets_as_any_other() -> None:
    assert next_ages({KEY: 5}, [], advance=False) == {}
    assert next_ages({KEY: 5}, [short(satisfiable=True)], advance=False) == {}


def test_ages_are_handed_out_anew_and_the_old_ones_left_alone() -> None:
    ages: Mapping[ParkingKey, int] = {KEY: 1}

    assert next_ages(ages, [short()], advance=True) == {KEY: 2}
    assert ages == {KEY: 1}


def test_a_gang_that_a_drain_is_under_way_for_is_not_stalled() -> None:
    awaiting = replace(short(), unresolved={name: milli // 2 for name, milli in GANG.aggregate.items()})

    assert next_ages({KEY: 7}, [awaiting], advance=True) == {}


def test_rows_without_same_never_age() -> None:
    plain = need_of({"t": "PG", "cluster": "k", "group": "g", "agg": {"gpu": "64"}})

    assert next_ages({}, [short(plain)], advance=True) == {}
    assert stamp_parked([plain], {parking_key(plain): 9}) == [plain]


@pytest.mark.rule("shard 7/2")
@pytest.mark.parametrize(
    ("age", "parked"),
    [(0, False), (7, False), (8, True), (31, True), (32, False), (33, True), (64, False), (96, False)],
)
def test_an_age_parks_from_eight_on_but_not_at_multiples_of_thirty_two(age: int, parked: bool) -> None:
    assert stamp_parked([GANG], {KEY: age})[0].parked is parked


def test_a_row_that_is_parked_stays_parked() -> None:
    (parked,) = stamp_parked([GANG], {KEY: 8})

    assert stamp_parked([parked], {}) == [parked]


def test_decide_parks_by_the_ages_it_is_given() -> None:
    fleet = CaseFleet()
    fleet.add([{"ids": ["b0", "b1"], "t": "G8", "st": "Idle", "labels": {"R": "rb"}}], fingerprints_of([]))

    trying = decide(fleet.snapshot(), [GANG], fleet.options([GANG], {}))
    parked = decide(fleet.snapshot(), [GANG], fleet.options([GANG], {}, parking_ages={KEY: 8}))

    assert [len(decision.actions) for decision in (trying, parked)] == [2, 0]
    assert [decision.rows[0].need.parked for decision in (trying, parked)] == [False, True]


def test_a_gang_that_folds_is_never_parked() -> None:
    small = need_of({"t": "SR", "cluster": "k", "group": "g", "agg": {"gpu": "8"}, "parked": True})
    fleet = CaseFleet()
    fleet.add([{"id": "b0", "t": "G8", "st": "Idle", "labels": {"R": "rb"}}], fingerprints_of([]))

    (row,) = decide(fleet.snapshot(), [small], fleet.options([small], {}, parking_ages={parking_key(small): 8})).rows

    assert (row.folded, row.need.parked, row.bootstraps) == (True, False, ("b0",))
