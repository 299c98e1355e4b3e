"""Rows that are larger than ordinary ones are read, and are not remembered: caches are bounded in bytes."""

import tracemalloc
from collections.abc import Callable

import pytest

from bigfleet.model.need import Need
from bigfleet.rpc.wire.convert_need import ReceivedRollUp
from bigfleet.rpc.wire.gen import capacity_pb2, shard_pb2

#: Roll-ups that are read, each with another value; with caches that count entries each would take 60 KB or more.
ROLLUPS = 40
GROWN_BYTES_MAX = 600_000


def row_with_many_values(number: int) -> capacity_pb2.CapacityNeed:
    """Return a row of 130 KB with 64 requirements, the last value of which is another one each time."""
    values = [f"{value:03}-{'v' * 245}" for value in range(8)]
    requirements = [
        capacity_pb2.NodeSelectorRequirement(
            key=f"example.com/label-{label}",
            operator=capacity_pb2.NodeSelectorRequirement.Operator.ValueType(2),
            values=[*values[:-1], f"{number:03}-{'w' * 245}"],
        )
        for label in range(64)
    ]
    return capacity_pb2.CapacityNeed(requirements=requirements, aggregate_resources={"cpu": "1"})


def row_with_long_names(number: int) -> capacity_pb2.CapacityNeed:
    """Return a row with 32 resources of 1,000 bytes, of another amount each time, and with 16 shapes of them."""
    resources = {f"{name:02}{'r' * 998}": str(1 + number) for name in range(32)}
    shapes = [capacity_pb2.PodShape(resources=resources, count=count) for count in range(1, 17)]
    return capacity_pb2.CapacityNeed(min_unit=resources, shapes=shapes)


def read(row: capacity_pb2.CapacityNeed) -> Need:
    """Return what a roll-up of this row says."""
    message = capacity_pb2.ClusterCapacityNeeds(cluster_id="c", needs=[row])
    (need,) = ReceivedRollUp(capacity_pb2.ClusterCapacityNeeds.FromString(message.SerializeToString())).needs()
    return need


@pytest.mark.parametrize("row_of", [pytest.param(row_with_many_values, marks=pytest.mark.slow), row_with_long_names])
def test_large_rows_that_change_again_and_again_take_no_memory(
    row_of: Callable[[int], capacity_pb2.CapacityNeed],
) -> None:
    """A tenant that edits one large request each second would otherwise end the shard of all clusters by memory."""
    read(row_of(0))
    tracemalloc.start()
    for number in range(1, ROLLUPS):
        read(row_of(number))
    grown_bytes, _peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert grown_bytes < GROWN_BYTES_MAX


@pytest.mark.parametrize("row_of", [row_with_many_values, row_with_long_names])
def test_a_large_row_is_read_as_it_is(row_of: Callable[[int], capacity_pb2.CapacityNeed]) -> None:
    """Twice the same, and with all that it says."""
    sent, need = row_of(1), read(row_of(1))

    assert need == read(row_of(1))
    assert len(need.profile.requirements) == len(sent.requirements)
    assert sum(len(each.values) for each in need.profile.requirements) == sum(len(e.values) for e in sent.requirements)
    assert sum(shape.count for shape in need.shapes) == sum(shape.count for shape in sent.shapes)


def test_the_size_of_a_roll_up_is_known_before_it_is_parsed() -> None:
    """A shard decides by it where the roll-up is read."""
    message = capacity_pb2.ClusterCapacityNeeds(cluster_id="c", timestamp_unix_nanos=1, needs=[row_with_many_values(1)])
    unread = ReceivedRollUp.unread(shard_pb2.OperatorMessage(rollup=message).SerializeToString())

    assert unread is not None
    assert unread.size_bytes == ReceivedRollUp(message).size_bytes == message.ByteSize() > 100_000
