"""One object never harms another: what a roll-up has no room for is left out, and the rest is reported."""

import tracemalloc
from typing import Any

import pytest
from structlog.testing import capture_logs

from bigfleet.operator import rollup_size
from bigfleet.operator.demand.entries import ObjectKey
from bigfleet.rpc.servers.session import FRAME_BYTES_MAX
from bigfleet.rpc.wire.convert_need import rollup_to_wire
from tests.operator.demand.objects import request
from tests.operator.demand.test_demand_view import Cluster


def test_requests_whose_row_would_name_too_many_resources_are_left_out_alone() -> None:
    """The shard refuses a roll-up with such a row, and with it the demand of the whole cluster."""
    cluster = Cluster()
    cluster.objects.put(request("a", resources={f"x{number}": 1 for number in range(20)}))
    cluster.objects.put(request("b", resources={f"y{number}": 1 for number in range(20)}))
    cluster.objects.put(request("c"))

    (row,) = cluster.aggregates()
    entry = cluster.view.get(("ns", "b"))
    assert len(row) == 21
    assert entry is not None
    assert entry.fault is not None
    assert "at most 32 are allowed" in entry.fault.message

    cluster.objects.remove(request("a"))
    cluster.view.recount()
    assert cluster.aggregates() == [{"cpu": 1000} | {f"y{number}": 1000 for number in range(20)}]
    assert cluster.view.recount_mismatches_total == 0


def faults(cluster: Cluster) -> dict[ObjectKey, str]:
    return {entry.key: entry.fault.message for entry in cluster.view if entry.fault is not None}


def test_requests_beyond_the_rows_that_the_shard_takes_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shard would refuse the roll-up, and with it the demand of all namespaces; it is alarmed once a recount."""
    monkeypatch.setattr(rollup_size, "ROWS_MAX", 4)
    cluster = Cluster()
    with capture_logs() as logs:
        for priority in range(5):
            cluster.objects.put(request(f"a{priority}", namespace="greedy", priority=priority))
        cluster.objects.put(request("b", priority=9))
        cluster.objects.put(request("c", priority=10))
        cluster.objects.put(request("same", priority=1))

    assert len(cluster.aggregates()) == 4
    assert set(faults(cluster)) == {("greedy", "a3"), ("greedy", "a4"), ("ns", "c")}
    assert "namespace greedy would have 4 needs, at most 3 are reported" in faults(cluster)["greedy", "a3"]
    assert "the cluster would have 5 needs, at most 4 are reported" in faults(cluster)["ns", "c"]
    assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == ["rollup.full"]

    cluster.objects.remove(request("a0", namespace="greedy"))
    assert cluster.view.recount()
    assert set(faults(cluster)) == {("greedy", "a4"), ("ns", "c")}
    assert cluster.view.recount_mismatches_total == 0


def long_requirements(number: int, values: int = 180) -> list[dict[str, Any]]:
    """Return requirements of 256 bytes a value."""
    texts = [f"{number:04}-{value:04}-{'v' * 245}" for value in range(values)]
    return [{"key": "example.com/host", "operator": "NotIn", "values": texts}]


@pytest.mark.slow
def test_a_namespace_with_long_requirements_ends_no_session_and_leaves_room_for_the_others() -> None:
    """A shard ends the session for a frame of 32 MiB, each time that it is opened: no tenant would have demand."""
    cluster = Cluster()
    for number in range(800):
        cluster.objects.put(request(f"a{number}", namespace="greedy", requirements=long_requirements(number)))
    cluster.objects.put(request("small"))
    roll_up = cluster.view.roll_up()
    assert roll_up is not None

    assert len(rollup_to_wire(roll_up).SerializeToString()) < FRAME_BYTES_MAX / 2
    assert {"cpu": 1000} in [dict(need.aggregate) for need in roll_up.needs if not need.profile.requirements]
    left_out = faults(cluster)
    assert {namespace for namespace, _name in left_out} == {"greedy"}
    assert "bytes, at most 15,728,640 are reported" in left_out["greedy", "a799"]
    assert len(roll_up.needs) + len(left_out) == 801


def test_a_request_that_no_machine_can_store_is_left_out_alone() -> None:
    """Its need would be stored with each machine that it gets, and a provider takes 64 KiB."""
    cluster = Cluster()
    cluster.objects.put(request("long", requirements=long_requirements(0, 200)))
    cluster.objects.put(request("a"))

    assert cluster.aggregates() == [{"cpu": 1000}]
    assert "too long" in faults(cluster)["ns", "long"]


def test_a_large_request_that_changes_again_and_again_takes_no_memory() -> None:
    """What is remembered of specs and requirements is bounded in bytes."""
    cluster = Cluster()
    cluster.objects.put(request("a", requirements=long_requirements(0)))
    cluster.aggregates()
    tracemalloc.start()
    for generation in range(2, 52):
        cluster.objects.put(request("a", generation=generation, requirements=long_requirements(generation)))
        cluster.aggregates()
    grown_bytes, _peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert grown_bytes < 500_000
