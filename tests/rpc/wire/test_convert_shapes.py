"""Shapes, waiting pods, overheads and node loads on the wire: what is taken, refused, and follows."""

from collections.abc import Mapping, Sequence

import pytest

from bigfleet.model.frames import MalformedMessage, NodeStatus
from bigfleet.model.need import Need
from bigfleet.model.profile import Operator, Requirement
from bigfleet.model.shapes import COUNT_MAX, OVERHEADS_MAX, SHAPES_MAX, DemandShape, Overhead
from bigfleet.rpc.wire.convert_session import (
    ReceivedRollUp,
    need_to_wire,
    operator_frame_from_bytes,
    operator_frame_from_wire,
)
from bigfleet.rpc.wire.gen import capacity_pb2, shard_pb2

WireRequirement = capacity_pb2.NodeSelectorRequirement


def shape(count: int = 1, limit: int = 0, **resources: str) -> capacity_pb2.PodShape:
    return capacity_pb2.PodShape(resources=resources, count=count, max_per_machine=limit)


def row(
    *shapes: capacity_pb2.PodShape,
    aggregate: Mapping[str, str] | None = None,
    min_unit: Mapping[str, str] | None = None,
    waiting: Sequence[capacity_pb2.PodShape] = (),
) -> capacity_pb2.CapacityNeed:
    return capacity_pb2.CapacityNeed(shapes=shapes, aggregate_resources=aggregate, min_unit=min_unit, waiting=waiting)


def overhead(*requirements: WireRequirement, **resources: str) -> capacity_pb2.NodeOverhead:
    return capacity_pb2.NodeOverhead(requirements=requirements, resources=resources)


def rollup(
    *needs: capacity_pb2.CapacityNeed, overheads: Sequence[capacity_pb2.NodeOverhead] = ()
) -> capacity_pb2.ClusterCapacityNeeds:
    return capacity_pb2.ClusterCapacityNeeds(
        cluster_id="blue", timestamp_unix_nanos=7, needs=needs, overheads=overheads
    )


def frame_of(message: capacity_pb2.ClusterCapacityNeeds) -> bytes:
    return shard_pb2.OperatorMessage(rollup=message).SerializeToString(deterministic=True)


def received(message: capacity_pb2.ClusterCapacityNeeds) -> ReceivedRollUp:
    offer = operator_frame_from_bytes(frame_of(message), None)
    assert isinstance(offer, ReceivedRollUp)
    return offer


def read(*needs: capacity_pb2.CapacityNeed) -> Need:
    """Return the first row as the shard reads it."""
    return received(rollup(*needs)).needs()[0]


def fault(message: capacity_pb2.ClusterCapacityNeeds) -> tuple[str, str]:
    """Return place and fault for which the roll-up is refused."""
    with pytest.raises(MalformedMessage) as caught:
        received(message).needs()
    with pytest.raises(MalformedMessage):
        received(message).overheads()
    return caught.value.place, caught.value.fault


class TestShapes:
    """Rows that say which pods they consist of."""

    def test_what_is_not_said_follows_from_the_shapes(self) -> None:
        """The aggregate is their sum, the min unit the largest request in each dimension."""
        need = read(row(shape(3, cpu="500m", memory="1Gi"), shape(1, cpu="2")))

        assert need.shapes == (DemandShape({"cpu": 2000}, 1), DemandShape({"cpu": 500, "memory": 1000 << 30}, 3))
        assert need.aggregate == {"cpu": 3500, "memory": 3000 << 30}
        assert need.min_unit == {"cpu": 2000, "memory": 1000 << 30}
        assert need_to_wire(need).aggregate_resources == {"cpu": "3500m", "memory": "3Gi"}

    def test_what_is_said_stays(self) -> None:
        """Requests that were rounded up add up to more than the aggregate."""
        need = read(row(shape(4, cpu="1"), aggregate={"cpu": "3900m"}, min_unit={"cpu": "3"}))

        assert (need.aggregate, need.min_unit) == ({"cpu": 3900}, {"cpu": 3000})

    def test_a_row_without_shapes_is_as_ever(self) -> None:
        need = read(row(aggregate={"cpu": "4"}))

        assert (need.shapes, need.waiting, need.aggregate, need.min_unit) == ((), (), {"cpu": 4000}, {})

    def test_waiting_pods_are_no_part_of_the_aggregate(self) -> None:
        need = read(row(shape(4, cpu="1"), waiting=[shape(1, cpu="1")]))

        assert need.waiting == (DemandShape({"cpu": 1000}, 1),)
        assert need.aggregate == {"cpu": 4000}

    def test_the_order_of_shapes_means_nothing(self) -> None:
        """Rows that differ in the order of their shapes are equal, and equal shapes without a limit are one."""
        one = read(row(shape(1, cpu="2"), shape(2, cpu="1"), shape(3, cpu="1"), shape(5, 1, cpu="1")))
        other = read(row(shape(5, 1, cpu="1"), shape(5, cpu="1000m"), shape(1, cpu="2")))

        assert one == other
        assert [found.count for found in one.shapes] == [1, 5, 5]

    @pytest.mark.parametrize(
        ("message", "place", "text"),
        [
            (row(shape(0, cpu="1")), "shapes[0].count", "is 0, a shape has 1 to 1,000,000,000 pods"),
            (row(shape(-1, cpu="1")), "shapes[0].count", "is -1, a shape has 1 to 1,000,000,000 pods"),
            (
                row(shape(1, cpu="1"), shape(COUNT_MAX + 1, cpu="2")),
                "shapes[1].count",
                "is 1000000001, a shape has 1 to 1,000,000,000 pods",
            ),
            (row(shape(1, -2, cpu="1")), "shapes[0].max_per_machine", "is -2, and must not be negative"),
            (row(shape(1, cpu="-1")), "shapes[0].resources['cpu']", "'-1' is negative"),
            (
                row(shape(1, cpu="many")),
                "shapes[0].resources['cpu']",
                "'many' is no quantity: a number such as 4, 1.5, 500m or 16Gi is expected",
            ),
            (row(waiting=[shape(0, cpu="1")]), "waiting[0].count", "is 0, a shape has 1 to 1,000,000,000 pods"),
            (
                row(shape(2, cpu="1"), aggregate={"cpu": "2001m"}),
                "shapes",
                "add up to cpu 2, aggregate_resources says 2001m",
            ),
            (
                row(shape(2, cpu="1"), aggregate={"cpu": "2", "memory": "1Gi"}),
                "shapes",
                "add up to memory 0, aggregate_resources says 1Gi",
            ),
            (
                row(shape(2, cpu="1", memory="1Gi"), aggregate={"cpu": "2"}),
                "shapes",
                "add up to memory 2Gi, aggregate_resources says 0",
            ),
        ],
    )
    def test_what_makes_no_sense_refuses_the_rollup(
        self, message: capacity_pb2.CapacityNeed, place: str, text: str
    ) -> None:
        """The fault names row, field and value; the rows beside it are not taken alone."""
        good = row(shape(1, cpu="1"))

        assert fault(rollup(good, message)) == (f"needs[1].{place}", text)

    def test_sixty_four_shapes_pass_and_one_more_is_refused(self) -> None:
        shapes = [shape(1, cpu=f"{n + 1}m") for n in range(SHAPES_MAX)]

        need = read(row(*shapes, waiting=shapes))

        assert (len(need.shapes), len(need.waiting)) == (SHAPES_MAX, SHAPES_MAX)
        more = [*shapes, shape(1, cpu="1")]
        text = "has 65 shapes, at most 64 are allowed"
        assert fault(rollup(row(*more))) == ("needs[0].shapes", text)
        assert fault(rollup(row(waiting=more))) == ("needs[0].waiting", text)


class TestUnchangedRollUps:
    """A roll-up is known by its bytes; what was added is part of them."""

    @pytest.mark.parametrize(
        "other",
        [
            rollup(row(shape(2, cpu="2"), aggregate={"cpu": "4"})),
            rollup(row(shape(4, 1, cpu="1"), aggregate={"cpu": "4"})),
            rollup(row(shape(4, cpu="1"), aggregate={"cpu": "4"}, waiting=[shape(1, cpu="1")])),
            rollup(row(shape(4, cpu="1"), aggregate={"cpu": "4"}), overheads=[overhead(cpu="1")]),
        ],
    )
    def test_every_addition_changes_the_digest(self, other: capacity_pb2.ClusterCapacityNeeds) -> None:
        known = received(rollup(row(shape(4, cpu="1"), aggregate={"cpu": "4"}))).digest
        frame = frame_of(other)

        assert received(other).digest != known
        changed = operator_frame_from_bytes(frame, known)
        assert isinstance(changed, ReceivedRollUp)
        assert not changed.has_digest or changed.digest != known

    def test_a_repeat_is_known_without_parsing(self) -> None:
        message = rollup(row(shape(4, cpu="1")), overheads=[overhead(cpu="100m")])
        known = received(message).digest
        message.timestamp_unix_nanos = 99

        repeat = operator_frame_from_bytes(frame_of(message), known)

        assert isinstance(repeat, ReceivedRollUp)
        assert repeat.has_digest
        assert repeat.timestamp_unix_nanos == 99


class TestOverheads:
    """What DaemonSets take of a cluster's nodes."""

    def test_they_are_read_in_one_form(self) -> None:
        """Equal requirements are added up; a requirement restricts the nodes."""
        gpu = WireRequirement(key="gpu", operator=WireRequirement.OPERATOR_EXISTS)
        message = rollup(overheads=[overhead(gpu, cpu="50m"), overhead(cpu="100m"), overhead(cpu="100m", memory="1Gi")])

        assert received(message).overheads() == (
            Overhead((), {"cpu": 200, "memory": 1000 << 30}),
            Overhead((Requirement("gpu", Operator.EXISTS),), {"cpu": 50}),
        )

    @pytest.mark.parametrize(
        ("message", "place", "text"),
        [
            (overhead(cpu="-1"), "overheads[0].resources['cpu']", "'-1' is negative"),
            (
                overhead(WireRequirement(key="z", operator=WireRequirement.OPERATOR_SAME), cpu="1"),
                "overheads[0].requirements",
                "has the operator Same, which says nothing about one machine",
            ),
            (
                overhead(WireRequirement(operator=WireRequirement.OPERATOR_EXISTS), cpu="1"),
                "overheads[0].requirements[0].key",
                "is empty",
            ),
        ],
    )
    def test_what_makes_no_sense_refuses_the_rollup(
        self, message: capacity_pb2.NodeOverhead, place: str, text: str
    ) -> None:
        assert fault(rollup(overheads=[message])) == (place, text)

    def test_their_number_is_bounded(self) -> None:
        many = [overhead(WireRequirement(key=f"k{n}", operator=WireRequirement.OPERATOR_EXISTS)) for n in range(65)]

        received(rollup(overheads=many[:OVERHEADS_MAX])).overheads()
        assert fault(rollup(overheads=many)) == ("overheads", "has 65 overheads, at most 64 are allowed")


class TestNodeLoads:
    """What the pods on a node request."""

    def test_they_are_read(self) -> None:
        message = shard_pb2.NodeStatus(machine_id="m", node_name="n", requested={"cpu": "3500m"}, pods=12)

        status = operator_frame_from_wire(shard_pb2.OperatorMessage(node_status=message))

        assert isinstance(status, NodeStatus)
        assert (dict(status.requested), status.pods) == ({"cpu": "3500m"}, 12)

    def test_too_many_names_are_refused(self) -> None:
        message = shard_pb2.NodeStatus(machine_id="m", requested={f"r{n}": "1" for n in range(33)})

        with pytest.raises(MalformedMessage, match=r"node_status\.requested: has 33 names, at most 32 are allowed"):
            operator_frame_from_wire(shard_pb2.OperatorMessage(node_status=message))


@pytest.mark.parametrize("needs", [row(shape(1, cpu="1")), row(aggregate={"cpu": "1"}, waiting=[shape(1, cpu="1")])])
def test_shapes_are_found_by_the_bytes_of_a_rollup(needs: capacity_pb2.CapacityNeed) -> None:
    """Whether the digest was asked for before the rows or not; a row with waiting pods alone included."""
    early, late = received(rollup(needs)), received(rollup(needs))

    assert early.digest == ReceivedRollUp(rollup(needs)).digest
    assert early.needs() == late.needs()
    assert early.needs()[0].shapes or early.needs()[0].waiting
