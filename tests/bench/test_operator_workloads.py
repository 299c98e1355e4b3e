"""W17 computes what it says, at a size that takes a moment; its objects are what the operator takes them for."""

import json

import msgspec
import pytest

from bench.cluster_objects import WORKLOADS, pod, request
from bench.processes.api_server import ApiServer
from bench.workloads.catalogue import MEASUREMENTS
from bench.workloads.operator import counted_view, roll_up_times_ms
from bigfleet.operator.kubernetes.objects import CapacityRequestObject, PodObject
from bigfleet.operator.pods.comparison import has_metadata_of, has_spec
from bigfleet.operator.pods.mapping import map_pod


@pytest.mark.parametrize("index", [0, 1, 799, 12_345])
def test_a_request_is_the_one_that_the_pod_controller_makes(index: int) -> None:
    its_pod = msgspec.convert(pod(index, 10), PodObject)
    mapping = map_pod(its_pod)
    stored = msgspec.convert(request(index, 10), CapacityRequestObject)

    assert mapping.spec is not None
    assert not mapping.findings
    assert has_spec(stored, mapping.spec)
    assert has_metadata_of(stored, its_pod)


def test_a_request_has_the_size_that_the_page_names() -> None:
    sizes = [len(msgspec.json.encode(request(index, 1_000))) for index in range(100)]

    assert all(1_000 < size < 1_300 for size in sizes)


def test_every_request_is_counted_and_the_rows_do_not_depend_on_their_number() -> None:
    for count in (WORKLOADS, 3 * WORKLOADS):
        view, stored = counted_view(count)
        times_ms, rows = roll_up_times_ms(view, stored)

        assert (len(view), rows, view.invalid_count) == (count, WORKLOADS, 0)
        assert len(times_ms) == 100
        assert view.recount()


def test_a_new_pod_has_no_node() -> None:
    found = msgspec.convert(pod(3, 0), PodObject)

    assert found.spec.node_name == ""
    assert found.status.phase == "Pending"


async def test_the_api_server_says_which_requests_are_behind() -> None:
    server = ApiServer()
    server.seed("capacityrequests", [request(index, 1) for index in range(5)])
    before = server.count_behind()

    await server.change("capacityrequests", 2, lambda found: found["metadata"].update(generation=2))

    assert (before, server.count_behind()) == (0, 2)
    events = [json.loads(line) for line in server.collections["capacityrequests"].history]
    assert [event["type"] for event in events] == ["MODIFIED", "MODIFIED"]
    assert [event["object"]["metadata"]["resourceVersion"] for event in events] == ["2", "3"]


def test_the_measurements_of_the_operator_are_run_with_the_others() -> None:
    names = {measurement.name for measurement in MEASUREMENTS}

    assert {"W17 operator", "W17 pod controller", "W17 roll-ups"} <= names
