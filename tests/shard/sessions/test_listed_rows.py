"""The demand table tells where a listing differs from the one before: what stays, stays as objects and in order."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.engine.demand_order import ListedRows
from bigfleet.engine.shapes.decide import says_pods
from bigfleet.model.ids import ClusterId
from bigfleet.model.need import Need
from bigfleet.model.profile import Profile
from bigfleet.model.shapes import DemandShape
from bigfleet.model.vector import parse_vector
from bigfleet.shard.sessions.demand import MOVES_MAX, NeedsTable
from bigfleet.shard.sessions.demand_columns import SPARE_CLUSTERS
from tests.engine.proof import in_proportion

PROFILES = [Profile(priority=priority) for priority in (100, 100, 200)]
Report = tuple[str, list[tuple[Profile, str, str]]]
row = st.tuples(st.sampled_from(PROFILES), st.sampled_from(("", "a", "b")), st.sampled_from(("1", "2")))
#: Clusters that report before each listing, and their rows.
reports = st.lists(
    st.lists(st.tuples(st.sampled_from("xyz"), st.lists(row, max_size=6)), min_size=1, max_size=3), max_size=6
)


def stayed(rows: ListedRows, left_out: Sequence[int]) -> list[int]:
    """Return the objects of a listing without those at some places."""
    return [id(need) for place, need in enumerate(rows) if place not in left_out]


@settings(max_examples=in_proportion(200), deadline=None)
@given(reports)
def test_without_what_came_and_went_two_listings_are_one(past: list[list[Report]]) -> None:
    table = NeedsTable()
    former = table.in_list_order()
    for turn, clusters in enumerate(past):
        for cluster, drawn in clusters:
            needs = [
                Need(ClusterId(cluster), profile, parse_vector({"cpu": cpus}), group=group)
                for profile, group, cpus in drawn
            ]
            table.replace(cluster, needs, now_unix_nanos=turn + 1)
        listed = table.in_list_order()
        if listed is not former:
            assert listed.since is former.moment
            assert stayed(former, listed.gone) == stayed(listed, listed.come)
        former = listed


def test_of_very_many_moves_a_listing_says_nothing() -> None:
    table = NeedsTable()
    rows = [
        Need(ClusterId("x"), PROFILES[0], parse_vector({"cpu": "1"}), group=str(number))
        for number in range(MOVES_MAX + 1)
    ]
    table.replace("x", rows, now_unix_nanos=1)

    assert table.in_list_order().since is None


def test_a_listing_follows_the_one_before_also_with_very_many_clusters() -> None:
    """In a demand of 5,000 clusters without shapes every change merged all rows, on the event loop."""
    table, one_row = NeedsTable(), Need(ClusterId("x"), PROFILES[0], parse_vector({"cpu": "1"}))
    clusters = [f"c{number:04}" for number in range(SPARE_CLUSTERS + 100)]
    for cluster in clusters:
        table.replace(cluster, [replace(one_row, cluster=ClusterId(cluster))], now_unix_nanos=1)
    former = table.in_list_order()

    table.replace("c0007", [replace(one_row, cluster=ClusterId("c0007"), group="gang")], now_unix_nanos=2)

    assert table.in_list_order().since is former.moment


@pytest.mark.parametrize("shapes", [(), (DemandShape(parse_vector({"cpu": "1"}), 1),)], ids=["sums", "pods"])
def test_a_listing_knows_whether_its_rows_say_pods(shapes: tuple[DemandShape, ...]) -> None:
    table, cpu = NeedsTable(), parse_vector({"cpu": "1"})
    table.replace("x", [Need(ClusterId("x"), PROFILES[0], cpu, cpu, shapes=shapes)], now_unix_nanos=1)
    with_row = table.in_list_order()
    table.replace("x", [], now_unix_nanos=2)

    assert says_pods(with_row) is says_pods(tuple(with_row)) is bool(shapes)
    assert not says_pods(table.in_list_order())


def test_a_row_that_says_something_else_is_gone_and_comes() -> None:
    table = NeedsTable()
    first, second = (Need(ClusterId("x"), PROFILES[0], parse_vector({"cpu": "1"}), group=group) for group in "ab")
    table.replace("x", [first, second], now_unix_nanos=1)
    table.in_list_order()

    table.replace("x", [first, replace(second, aggregate=parse_vector({"cpu": "2"}))], now_unix_nanos=2)
    listed = table.in_list_order()

    assert (list(listed.gone), list(listed.come)) == ([1], [1])
