"""The demand that a shard holds: its order, and which rows stay the same objects (docs/spec/model.md §8)."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.engine.folding import folded_need
from bigfleet.model.ids import ClusterId
from bigfleet.model.labels import ZONE
from bigfleet.model.need import Need, RowKey
from bigfleet.model.profile import Operator, Profile, Requirement
from bigfleet.model.quantity import Family
from bigfleet.model.shapes import DemandShape, Overhead
from bigfleet.model.vector import families
from bigfleet.shard.sessions import demand
from bigfleet.shard.sessions.demand import NeedsTable
from tests.engine.proof import in_proportion
from tests.shard.world import need

#: (arrival, rank) of a row's first sight.
Rank = tuple[int, int]

PROFILES = [
    replace(need("c1", "1").profile, priority=priority, interruption_bucket=bucket)
    for priority, bucket in ((50, 0), (100, 3), (100, 27))
]
table_rows = st.lists(
    st.builds(
        lambda profile, cpu, group: replace(need("c1", cpu), profile=profile, group=group),
        st.sampled_from(PROFILES),
        st.sampled_from(["1", "2"]),
        st.sampled_from(["", "g"]),
    ),
    max_size=4,
)


@pytest.mark.rule("shard 4/9")
@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), table_rows, st.booleans()), max_size=12),
    st.sampled_from([0, 3, demand.MOVES_MAX]),
)
@settings(max_examples=in_proportion(300), deadline=None)
def test_the_order_is_that_of_one_sort_of_everything(story: list[tuple[str, list[Need], bool]], moves_max: int) -> None:
    """However clusters are replaced, whenever somebody looks, and whether rows are moved one by one or merged."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demand, "MOVES_MAX", moves_max)
        check_order(story)


def first_sight(row: Need, left: list[tuple[Rank, RowKey]], taken: set[RowKey], now: Rank) -> Rank:
    """Return arrival and rank of a new row: one of a group takes the earliest that a row of its group has left."""
    same = [(rank, key) for rank, key in left if row.group and key[2] == row.group]
    for rank, key in same:
        if key not in taken:
            taken.add(key)
            return rank
    return (same[0][0][0], now[1]) if same else now


def check_order(story: list[tuple[str, list[Need], bool]]) -> None:
    """Replace as told, and compare the order with one sort of everything."""
    table = NeedsTable()
    ranks: dict[RowKey, Rank] = {}
    for moment, (cluster, reported, looks) in enumerate(story, start=1):
        said = [replace(row, cluster=ClusterId(cluster)) for row in reported]
        table.replace(cluster, said, now_unix_nanos=moment)
        reported_keys = {row.key for row in said}
        left = sorted((rank, key) for key, rank in ranks.items() if key[0] == cluster and key not in reported_keys)
        ranks = {key: rank for key, rank in ranks.items() if key[0] != cluster or key in reported_keys}
        taken: set[RowKey] = set()
        for row in said:
            if row.key not in ranks:
                ranks[row.key] = first_sight(row, left, taken, (moment, len(ranks) + 1000 * moment))
        if looks:
            table.in_list_order()
    everything = [row for cluster in ("a", "b", "c") for row in table.rows_of(cluster)]

    def order(row: Need) -> tuple[object, ...]:
        arrival, rank = ranks[row.key]
        return (-row.profile.priority, arrival, row.cluster, rank)

    in_order = table.in_list_order()
    assert list(in_order) == sorted(everything, key=order)
    assert table.buckets_in_list_order() == bytes(row.profile.interruption_bucket for row in in_order)
    assert {id(row) for row in in_order} == {id(row) for row in everything}
    assert all(ranks[row.key][0] == row.arrival_unix_nanos for row in everything)
    assert table.in_list_order() is table.in_list_order()


@pytest.mark.parametrize(
    ("shapes", "waiting"),
    [
        ((DemandShape({"cpu": 2000}, 2),), ()),
        ((DemandShape({"cpu": 1000}, 4, 1),), ()),
        ((), ()),
        ((DemandShape({"cpu": 1000}, 4),), (DemandShape({"cpu": 1000}, 1),)),
    ],
)
def test_a_row_whose_pods_changed_is_another_object(
    shapes: tuple[DemandShape, ...], waiting: tuple[DemandShape, ...]
) -> None:
    """Also when their sum stays what it was."""
    table = NeedsTable()
    first = replace(need("c1", "4"), shapes=(DemandShape({"cpu": 1000}, 4),))
    table.replace("c1", [first], now_unix_nanos=1)
    table.in_list_order()
    (kept,) = table.rows_of("c1")
    table.replace("c1", [replace(first, shapes=shapes, waiting=waiting)], now_unix_nanos=2)

    (row,) = table.in_list_order()
    assert row is not kept
    assert row == replace(first, arrival_unix_nanos=1, shapes=shapes, waiting=waiting)


def test_overheads_are_replaced_with_the_rows_of_their_cluster() -> None:
    """The mapping that was handed out stays as it was, and is the same object while nothing changes."""
    table = NeedsTable()
    daemons = (Overhead((), {"cpu": 100}),)
    table.replace("c1", [need("c1", "4")], overheads=daemons, now_unix_nanos=1)
    table.replace("c2", [need("c2", "4")], now_unix_nanos=1)
    before = table.overheads_by_cluster()
    table.replace("c1", [need("c1", "5")], overheads=(Overhead((), {"cpu": 100}),), now_unix_nanos=2)

    assert table.overheads_by_cluster() is before
    assert before == {"c1": daemons}
    table.replace("c1", [need("c1", "5")], now_unix_nanos=3)
    assert table.overheads_by_cluster() == {}
    assert before == {"c1": daemons}


def test_a_row_that_is_reported_as_it_was_stays_the_same_object() -> None:
    """Whoever works on rows may remember them by identity; a changed one is another object, and twins stay apart."""
    table = NeedsTable()
    first, second = need("c1", "4"), need("c1", "4", priority=900)
    table.replace("c1", [first, second, first], now_unix_nanos=1)
    before = table.rows_of("c1")
    table.replace("c1", [replace(first), need("c1", "5", priority=900), replace(first)], now_unix_nanos=2)
    after = table.rows_of("c1")

    assert [old is new for old, new in zip(before, after, strict=True)] == [True, False, True]
    assert before[0] is not before[2]
    rewritten = replace(first, families=families({"cpu": "4000m"}) | {"memory": Family.BINARY})
    table.replace("c1", [rewritten], now_unix_nanos=3)
    assert table.rows_of("c1")[0] is not before[0]


def test_a_row_is_wanted_as_it_was_reported_and_as_it_folds() -> None:
    """A gang that one machine can host is decided on under another key."""
    table = NeedsTable()
    profile = Profile(requirements=(Requirement(ZONE, Operator.SAME),), priority=100)
    gang = replace(need("c1", "4"), profile=profile, group="g")
    table.replace("c1", [gang, need("c1", "4")], now_unix_nanos=1)

    assert [table.wants(key) for key in (gang.key, need("c1", "9").key, folded_need(gang).key)] == [True] * 3
    assert not table.wants(("c2", gang.fingerprint, "g"))
    assert not table.wants(("c1", need("c1", "4", priority=7).fingerprint, ""))
    assert not table.wants(("c1", folded_need(gang).fingerprint, "g"))
