"""Rows that are reported again are not read again, and equal what reading them gives."""

from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.model import vector
from bigfleet.model.frames import MalformedMessage, RollUp
from bigfleet.model.ids import ClusterId
from bigfleet.model.need import Need
from bigfleet.model.profile import Profile
from bigfleet.rpc.wire import convert_need, known_rows
from bigfleet.rpc.wire.convert_need import ReceivedRollUp, rollup_to_wire
from bigfleet.rpc.wire.gen import capacity_pb2
from bigfleet.rpc.wire.known_rows import KnownRows
from tests.engine.proof import in_proportion
from tests.rpc.strategies import rollups


def read(message: capacity_pb2.ClusterCapacityNeeds, rows: KnownRows | None) -> tuple[Need, ...] | str:
    """Read a copy of the message, with these remembered rows or with none, and return its rows or its fault."""
    copy = capacity_pb2.ClusterCapacityNeeds.FromString(message.SerializeToString())
    known_from = 10**9 if rows is None else 0
    with patch.object(convert_need, "_known_rows", rows), patch.object(convert_need, "KNOWN_ROWS_MIN", known_from):
        try:
            return ReceivedRollUp(copy).needs()
        except MalformedMessage as fault:
            return str(fault)


def written(needs: tuple[Need, ...] | str) -> object:
    """Return all that the rows say, how their quantities are printed included."""
    return needs if isinstance(needs, str) else [(need, need.families, need.cluster) for need in needs]


@settings(max_examples=in_proportion(200), deadline=None)
@given(sent=st.lists(rollups(), min_size=1, max_size=4), data=st.data())
def test_remembered_rows_equal_rows_that_are_read(sent: list[RollUp], data: st.DataObject) -> None:
    """Over a random course of roll-ups of two clusters that mix each other's rows, with generations of few rows."""
    messages = [rollup_to_wire(rollup) for rollup in sent]
    pool = [row for message in messages for row in message.needs]
    rows = KnownRows()
    with patch.object(known_rows, "GENERATION_ROWS_MAX", data.draw(st.integers(1, 8))):
        for _ in range(data.draw(st.integers(2, 6))):
            picked = data.draw(st.lists(st.sampled_from(pool), max_size=6)) if pool else []
            cluster = data.draw(st.sampled_from(["blue", "green"]))
            message = capacity_pb2.ClusterCapacityNeeds(cluster_id=cluster, needs=picked)
            for row in message.needs:
                match data.draw(st.sampled_from(["as it was", "priority", "group", "sum", "bucket"])):
                    case "priority":
                        row.priority = data.draw(st.integers(0, 3))
                    case "group":
                        row.group = data.draw(st.sampled_from(["", "g"]))
                    case "sum":
                        row.aggregate_resources["cpu"] = data.draw(st.sampled_from(["1", "1000m", "nonsense"]))
                    case "bucket":
                        row.interruption_penalty_bucket = capacity_pb2.PenaltyBucket.ValueType(99)
                    case _:
                        pass
            assert written(read(message, rows)) == written(read(message, None))


def need_of(number: int) -> Need:
    """Return some row."""
    return Need(ClusterId("blue"), Profile(requirements=(), priority=number), vector.ZERO, vector.ZERO, 0)


def test_a_row_that_is_reported_again_is_the_same_object() -> None:
    """Of a large roll-up in which one row changed, only that row is read."""
    first = [capacity_pb2.CapacityNeed(priority=number) for number in range(5)]
    second = [*first[:4], capacity_pb2.CapacityNeed(priority=9)]
    rows = KnownRows()
    before = read(capacity_pb2.ClusterCapacityNeeds(cluster_id="blue", needs=first), rows)
    after = read(capacity_pb2.ClusterCapacityNeeds(cluster_id="blue", needs=second), rows)
    assert [old is new for old, new in zip(before, after, strict=True)] == [True] * 4 + [False]


@pytest.mark.parametrize(("rows_max", "bytes_max"), [(4, 10**6), (10**6, 4)])
def test_what_is_remembered_is_bounded(rows_max: int, bytes_max: int) -> None:
    """Two generations of so many rows or bytes; as many rows as one generation has are always found again."""
    rows = KnownRows()
    with (
        patch.object(known_rows, "GENERATION_ROWS_MAX", rows_max),
        patch.object(known_rows, "GENERATION_BYTES_MAX", bytes_max),
    ):
        for number in range(50):
            rows.remember(ClusterId("blue"), bytes([number]), need_of(number))
            assert len(rows) <= 8
        for _ in range(3):
            for number in range(46, 50):
                assert rows.find(ClusterId("blue"), bytes([number])) == need_of(number)
        assert rows.find(ClusterId("blue"), bytes([0])) is None
        assert rows.find(ClusterId("green"), bytes([49])) is None


def test_a_row_that_is_too_large_is_not_remembered() -> None:
    """What one row holds in memory is bounded too."""
    rows = KnownRows()
    rows.remember(ClusterId("blue"), bytes(known_rows.ROW_BYTES_MAX + 1), need_of(1))
    assert len(rows) == 0


def test_a_row_of_another_cluster_or_with_one_other_field_is_read() -> None:
    """What is remembered of one row is never taken for another one, however little they differ."""
    rows = KnownRows()
    for cluster in ("blue", "green"):
        for priority, cpu in ((3, "1"), (4, "1"), (3, "2")):
            row = capacity_pb2.CapacityNeed(priority=priority)
            row.aggregate_resources["cpu"] = cpu
            message = capacity_pb2.ClusterCapacityNeeds(cluster_id=cluster, needs=[row])
            assert written(read(message, rows)) == written(read(message, None))
