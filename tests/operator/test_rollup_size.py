"""The size of a roll-up as it is estimated: never far below its bytes on the wire, and not far above them."""

import pytest

from bigfleet.model.frames import RollUp
from bigfleet.model.ids import ClusterId
from bigfleet.operator.demand.capacity_requests import request_of_spec
from bigfleet.operator.requests import MappedRequest, map_request
from bigfleet.operator.rollup import RollUpBuilder
from bigfleet.operator.rollup_size import RollUpSize
from bigfleet.rpc.wire.convert_need import rollup_to_wire
from tests.operator.demand.objects import spec_of

CLUSTER = ClusterId("c")
#: The longest quantity that is taken, but for its last digits.
LONG = "9223372036854775"


def mapped(priority: int, **resources: str) -> MappedRequest:
    return map_request(request_of_spec(spec_of(priority=priority, resources=resources), "ns", "ns/a"))


def test_many_rows_with_many_kinds_of_pods_are_not_taken_for_a_roll_up_that_is_too_large() -> None:
    """Pods of which each has its own size, in many gangs: about 3.5 MB without, 7 MB with waiting pods."""
    size = RollUpSize()
    request = mapped(0, cpu="1")
    for row in range(1_500):
        for kind in range(64):
            size.add((f"row-{row}", ""), "ns", request, ((("cpu", kind + 1), ("memory", kind + 1)), "", 0))

    assert size.fault("ns") == ""


@pytest.mark.parametrize("is_waiting", [False, True])
@pytest.mark.parametrize(
    ("names", "kinds"),
    [
        (("cpu",), 1),
        (("cpu", "memory"), 64),
        (tuple(f"r{number}" for number in range(20)), 64),
        (("a", "b"), 100),
    ],
    ids=["one", "many", "many resources", "merged"],
)
def test_a_roll_up_has_at_most_one_and_a_half_times_the_estimate(
    names: tuple[str, ...], kinds: int, is_waiting: bool
) -> None:
    builder = RollUpBuilder(CLUSTER)
    for row in range(20):
        for kind in range(kinds):
            id = f"ns/{row}-{kind}"
            builder.put_mapped(id, mapped(row, **dict.fromkeys(names, f"{LONG}{kind:03}m")))
            builder.set_waiting(id, is_waiting)
    roll_up = RollUp(cluster_id=CLUSTER, timestamp_unix_nanos=1, needs=builder.rows(), overheads=())
    wire_bytes = len(rollup_to_wire(roll_up).SerializeToString())

    assert wire_bytes <= 1.5 * builder.size.size_bytes


def test_the_estimate_is_that_of_the_requests_that_are_left() -> None:
    builder = RollUpBuilder(CLUSTER)
    builder.put_mapped("ns/a", mapped(0, cpu="1"))
    alone_bytes = builder.size.size_bytes
    for number in range(100):
        builder.put_mapped(f"ns/b{number}", mapped(0, cpu=f"{number + 2}", memory="1Gi"))
    for number in range(100):
        builder.remove(f"ns/b{number}")

    assert builder.size.size_bytes == alone_bytes
