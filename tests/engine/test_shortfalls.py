"""The ledger of shortfalls: sums, ages, order and classes (docs/spec/engine.md §10)."""

from collections.abc import Mapping

import pytest

from bigfleet.engine.decision import RowResult
from bigfleet.engine.shortfalls import REPORT_ENTRIES_MAX, age_class, priority_class, record, report, shortfall_of
from bigfleet.model.ids import Fingerprint
from bigfleet.model.profile import Profile
from bigfleet.model.shard_report import Shortfall
from tests.engine_cases import Entry, need_of, vector_of


def unresolved(entry: Entry, quantities: Mapping[str, str]) -> RowResult:
    need = need_of(entry)
    return RowResult(need=need, members=(need,), unresolved=vector_of(quantities))


@pytest.mark.rule("shard 11.1/1")
def test_rows_of_one_fingerprint_add_up_over_clusters_and_groups() -> None:
    ledger = record(
        {},
        [
            unresolved({"t": "SZ", "cluster": "a", "min": {"gpu": "8", "cpu": "1"}}, {"gpu": "8"}),
            unresolved({"t": "SZ", "cluster": "b", "group": "g", "min": {"gpu": "4", "cpu": "2"}}, {"gpu": "16"}),
        ],
        advance=True,
    )

    (shortfall,) = ledger.values()
    assert shortfall.deficit == vector_of({"gpu": "24"})
    assert shortfall.min_unit == vector_of({"gpu": "8", "cpu": "2"})
    assert (shortfall.age_cycles, shortfall.is_topology_constrained) == (1, True)


@pytest.mark.rule("shard 11.1/4")
def test_a_row_without_same_may_travel_and_a_resolved_row_is_no_shortfall() -> None:
    ledger = record({}, [unresolved({"t": "PG"}, {"gpu": "8"}), unresolved({"t": "P4"}, {})], advance=True)

    assert [shortfall.is_topology_constrained for shortfall in ledger.values()] == [False]


@pytest.mark.rule("shard 11.1/2")
def test_only_advancing_cycles_age_and_any_cycle_drops() -> None:
    short = [unresolved({"t": "PG"}, {"gpu": "8"})]
    ledger = record({}, short, advance=False)
    assert [shortfall.age_cycles for shortfall in ledger.values()] == [1]

    ledger = record(ledger, short, advance=False)
    assert [shortfall.age_cycles for shortfall in ledger.values()] == [1]

    ledger = record(ledger, short, advance=True)
    assert [shortfall.age_cycles for shortfall in ledger.values()] == [2]
    assert record(ledger, [], advance=False) == {}


def short(priority: int, age: int, bucket: int = 1) -> Shortfall:
    profile = Profile(priority=priority, interruption_bucket=bucket)
    return shortfall_of(profile, deficit={"cpu": 1}, min_unit={}, age_cycles=age)


@pytest.mark.rule("shard 11.1/3")
def test_the_report_takes_priority_then_age_then_fingerprint() -> None:
    wanted = [short(9, 1), short(5, 7, 2), short(5, 3, 1), short(5, 3, 3)]
    ledger: dict[Fingerprint, Shortfall] = {s.fingerprint: s for s in reversed(wanted)}

    assert report(ledger) == wanted


@pytest.mark.rule("shard 11.1/3")
def test_the_report_has_at_most_a_hundred_entries() -> None:
    many = [short(priority, 1) for priority in range(REPORT_ENTRIES_MAX + 5)]
    ledger = {s.fingerprint: s for s in many}

    assert report(ledger) == many[:4:-1]


@pytest.mark.parametrize(
    ("age", "label"), [(1, "1-9"), (9, "1-9"), (10, "10-59"), (60, "60-299"), (299, "60-299"), (300, "300+")]
)
def test_ages_have_classes(age: int, label: str) -> None:
    assert age_class(age) == label


@pytest.mark.parametrize(
    ("priority", "label"),
    [
        (-5, "other"),
        (99, "other"),
        (100, "batch"),
        (999, "batch"),
        (1000, "service"),
        (999_999, "service"),
        (1_000_000, "critical"),
    ],
)
def test_priorities_have_classes(priority: int, label: str) -> None:
    assert priority_class(priority) == label
