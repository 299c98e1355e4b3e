"""What a demand table reads of its rows as they arrive is what reading all of them at once gives."""

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from bigfleet.engine.demand_order import ListedRows
from bigfleet.engine.shapes.columns import listed as listed_module
from bigfleet.engine.shapes.columns import rows as row_reading
from bigfleet.engine.shapes.columns.listed import ClustersInList
from bigfleet.engine.shapes.columns.rows import (
    RowsInColumns,
    ShapeColumns,
    ValueNumbers,
    columns_with,
    in_order,
    row_columns,
)
from bigfleet.model.ids import ClusterId
from bigfleet.model.need import Need
from bigfleet.model.profile import Profile
from bigfleet.model.shapes import DemandShape
from bigfleet.shard.sessions import demand, demand_columns
from bigfleet.shard.sessions.demand import NeedsTable

Content = list[tuple[object, ...]]


def _content(rows: RowsInColumns) -> Content:
    """Return what the columns say of each row, by its place in the demand."""
    found: Content = []
    first = rows.first.tolist()
    for number, place in enumerate(rows.positions.tolist()):
        shapes = slice(first[number], first[number + 1])
        columns = (rows.number[shapes].tolist(), rows.counts[shapes].tolist(), rows.limits[shapes].tolist())
        requests = [(list(rows.resources[n].items()), count, limit) for n, count, limit in zip(*columns, strict=True)]
        need = rows.needs[int(rows.places[number])]
        known = (rows.clusters[rows.cluster[number]], rows.profiles[rows.profile[number]].fingerprint)
        found.append((place, id(need), *known, bool(rows.has_pods[number]), int(rows.running[number]), requests))
    return sorted(found)


def _row(rng: random.Random, cluster: str, group: int) -> Need:
    def shapes(most: int) -> tuple[DemandShape, ...]:
        sizes = rng.sample(range(1, 9), rng.randrange(most))
        return tuple(
            DemandShape({"cpu": 500 * size, **({"gpu": 1000} if rng.random() < 0.1 else {})}, size, rng.choice((0, 2)))
            for size in sizes
        )

    running, waiting = shapes(4), shapes(3) if rng.random() < 0.2 else ()
    aggregate = {"cpu": 4000, "disk": 1} if running or rng.random() < 0.8 else {}
    profile = Profile(priority=rng.choice((100, 2000)))
    return Need(ClusterId(cluster), profile, aggregate, {}, group=str(group), shapes=running, waiting=waiting)


def _assert_read(listed: ListedRows, rng: random.Random) -> None:
    columns = listed.columns
    assert columns is not None
    clusters = ClustersInList(columns, listed, are_stamped=False)
    full, names = row_columns(listed), in_order(columns.names())
    assert names == full.names
    assert list(clusters) == list(full.clusters)
    assert _content(clusters.columns_of(list(clusters), names)) == _content(full)
    some = rng.sample(list(clusters), rng.randrange(1, len(clusters) + 1))
    expected = [each for each in _content(full) if each[2] in some]
    assert _content(clusters.columns_of(some, names)) == expected
    stamped = ClustersInList(columns, listed, are_stamped=True)
    for name in clusters:
        expected_rows = [(place, need) for place, need in enumerate(listed) if need.cluster == name]
        assert list(clusters[name]) == list(stamped[name]) == expected_rows
        assert clusters[name][0] == expected_rows[0]


@pytest.mark.parametrize(
    ("moves_max", "at_once_max", "slice_rows"),
    [(0, 256, 1024), (256, 256, 2), (256, 0, 2)],
    ids=["merged", "patched", "read later"],
)
def test_columns_that_follow_the_table_say_what_its_rows_say(
    monkeypatch: pytest.MonkeyPatch, moves_max: int, at_once_max: int, slice_rows: int
) -> None:
    monkeypatch.setattr(demand, "MOVES_MAX", moves_max)
    monkeypatch.setattr(demand_columns, "ROWS_AT_ONCE_MAX", at_once_max)
    monkeypatch.setattr(row_reading, "SLICE_ROWS", slice_rows)
    for seed in range(20):
        rng, table = random.Random(seed), NeedsTable()
        reported: dict[str, list[Need]] = {}
        for step in range(12):
            name = f"c{rng.randrange(4)}"
            rows = reported.setdefault(name, [])
            if rng.random() < 0.1:
                rows.clear()
            for _ in range(rng.randrange(4)):
                rows.insert(rng.randrange(len(rows) + 1), _row(rng, name, step))
            if rows and rng.random() < 0.5:
                rows.pop(rng.randrange(len(rows)))
            table.replace(name, list(rows), now_unix_nanos=1 + step)
            unread = table.unread_rows_of(name)
            if unread is not None and rng.random() < 0.3:
                unread.read()
                assert table.unread_rows_of(name) is None
            listed = table.in_list_order()
            if any(row.shapes or row.waiting for row in listed) and (at_once_max or rng.random() < 0.5):
                _assert_read(listed, rng)


def _replaced(table: NeedsTable, rows: Sequence[Need]) -> ListedRows:
    table.replace("c", rows, now_unix_nanos=1)
    return table.in_list_order()


def test_nothing_is_read_before_a_row_has_shapes() -> None:
    table, plain = NeedsTable(), Need(ClusterId("c"), Profile(priority=1), {"cpu": 1})
    assert _replaced(table, [plain]).columns is None
    with_pods = Need(ClusterId("d"), Profile(priority=1), {"cpu": 1}, shapes=(DemandShape({"cpu": 1}, 1),))
    table.replace("d", [with_pods], now_unix_nanos=1)
    listed = table.in_list_order().columns
    assert listed is not None
    assert listed.blocks.keys() == {"c", "d"}


def test_requests_that_are_no_longer_made_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand_columns, "NUMBERS_MAX", 10)
    table = NeedsTable()
    for size in range(1, 40):
        shapes = (DemandShape({"cpu": size}, 1),)
        listed = _replaced(table, [Need(ClusterId("c"), Profile(priority=1), {"cpu": size}, shapes=shapes)])
        assert listed.columns is not None
        assert len(listed.columns.numbers.resources) <= 14
        _assert_read(listed, random.Random(1))


def test_clusters_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand_columns, "SPARE_CLUSTERS", 3)
    table = NeedsTable()
    for number in range(30):
        shapes = (DemandShape({"cpu": 1}, 1),)
        row = Need(ClusterId(f"c{number}"), Profile(priority=1), {"cpu": 1}, shapes=shapes)
        table.replace(f"c{number}", [row], now_unix_nanos=1)
        table.replace(f"c{number - 1}", [], now_unix_nanos=1)
        columns = table.in_list_order().columns
        assert columns is not None
        assert len(columns.clusters) <= 6


def _with_pods(cluster: str, count: int) -> list[Need]:
    """Return that many rows of different requests."""
    profile = Profile(priority=1)
    return [
        Need(ClusterId(cluster), profile, {"cpu": n}, group=str(n), shapes=(DemandShape({"cpu": n}, 1),))
        for n in range(1, count + 1)
    ]


def test_many_rows_of_a_cluster_are_left_to_the_first_who_reads_them() -> None:
    table, many = NeedsTable(), demand_columns.ROWS_AT_ONCE_MAX + 1
    table.replace("few", _with_pods("few", many - 1), now_unix_nanos=1)
    assert table.unread_rows_of("few") is None
    table.replace("many", _with_pods("many", many), now_unix_nanos=1)
    unread = table.unread_rows_of("many")
    assert unread is not None
    listed = table.in_list_order()
    assert not unread.is_read
    with ThreadPoolExecutor(4) as threads:
        blocks = list(threads.map(lambda _: unread.read(), range(8)))
    assert all(block is blocks[0] for block in blocks)
    assert table.unread_rows_of("many") is None
    _assert_read(listed, random.Random(1))


def test_rows_of_all_clusters_are_left_unread_when_the_first_row_has_shapes() -> None:
    table = NeedsTable()
    for number in range(3):
        rows = [Need(ClusterId(f"c{number}"), Profile(priority=1), {"cpu": 1}, group=str(n)) for n in range(5)]
        table.replace(f"c{number}", rows, now_unix_nanos=1)
    table.replace("d", _with_pods("d", 1), now_unix_nanos=1)
    assert [table.unread_rows_of(name) is None for name in ("c0", "c1", "c2", "d")] == [False, False, False, True]
    _assert_read(table.in_list_order(), random.Random(1))


def test_taking_rows_in_never_waits_for_another_reader() -> None:
    """A thread that reads many rows holds the lock; the table belongs to the event loop."""
    table = NeedsTable()
    columns = _replaced(table, _with_pods("c", 2)).columns
    assert columns is not None
    assert columns.numbers.lock.acquire()
    table.replace("d", _with_pods("d", 2), now_unix_nanos=1)
    assert table.unread_rows_of("d") is not None
    columns.numbers.lock.release()
    _assert_read(table.in_list_order(), random.Random(1))
    assert table.unread_rows_of("d") is None


def test_what_was_read_of_former_rows_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand_columns, "ROWS_AT_ONCE_MAX", 0)
    table, rows = NeedsTable(), _with_pods("c", 40)
    sizes: list[int] = []

    def counted(needs: Sequence[Need], requests: ValueNumbers) -> ShapeColumns:
        sizes.append(len(needs))
        return columns_with(needs, requests)

    monkeypatch.setattr(listed_module, "columns_with", counted)
    _assert_read(_replaced(table, rows[:30]), random.Random(1))
    assert sizes == [30]
    # Those that no one has read come and go in between.
    _replaced(table, rows[:35])
    _assert_read(_replaced(table, rows[5:36]), random.Random(1))
    assert sizes == [30, 6]
