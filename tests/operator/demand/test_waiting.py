"""Which pods are asked for once more, and which no longer."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.model.frames import UnmetReason
from bigfleet.operator.demand.joined_nodes import JOINING_SECONDS
from bigfleet.operator.demand.scheduling_messages import pod_reasons_of, reasons_of, waits_for_capacity
from bigfleet.operator.demand.waiting import (
    LOOK_SECONDS,
    SEARCH_SECONDS,
    PodWait,
)
from bigfleet.operator.kubernetes.objects import PodObject
from tests.operator.demand.objects import NO_CPU, need_status, pod, request
from tests.operator.demand.waiting_cluster import Cluster


def test_a_pod_that_waits_for_a_minute_though_its_row_is_met_is_asked_for_once_more() -> None:
    cluster = Cluster()
    cluster.add(pod("a"))
    cluster.report()
    cluster.clock.seconds += 59
    assert cluster.asked() == []

    cluster.clock.seconds += 1
    assert cluster.asked() == ["cr-a"]
    assert cluster.wait_of("pod-a") is PodWait.ASKED_FOR
    roll_up = cluster.demand.roll_up(cluster.waiting.waiting_requests)
    assert roll_up is not None
    assert [shape.count for shape in roll_up.needs[0].waiting] == [1]


def test_a_pod_whose_row_is_unmet_is_not_asked_for() -> None:
    cluster = Cluster()
    cluster.add(pod("a"))
    cluster.pass_time(600, met=False)

    assert cluster.asked() == []


def test_a_pod_whose_machines_are_coming_is_not_asked_for() -> None:
    cluster = Cluster()
    cluster.add(pod("a"))
    for _ in range(20):
        cluster.clock.seconds += 10
        roll_up = cluster.demand.roll_up(cluster.waiting.waiting_requests)
        assert roll_up is not None
        coming = tuple((need.fingerprint, need.group) for need in roll_up.needs)
        cluster.waiting.need_status(need_status(coming=coming, stamp=roll_up.timestamp_unix_nanos))

    assert cluster.asked() == []


def test_a_truncated_verdict_calls_no_row_met() -> None:
    cluster = Cluster()
    cluster.add(pod("a"))
    cluster.pass_time(30)
    cluster.waiting.need_status(need_status(truncated=True))
    cluster.clock.seconds += 600

    assert cluster.asked() == []


def test_a_row_that_lacks_only_what_no_machine_can_hold_is_met_for_its_other_pods() -> None:
    cluster = Cluster()
    cluster.add(pod("a"))
    roll_up = cluster.demand.roll_up(cluster.waiting.waiting_requests)
    assert roll_up is not None
    row = (roll_up.needs[0].fingerprint, "")
    cluster.waiting.need_status(need_status(row, reason=UnmetReason.REQUEST_TOO_LARGE))
    cluster.clock.seconds += 60

    assert cluster.asked() == ["cr-a"]


def test_a_pod_that_no_machine_can_hold_is_not_asked_for_again() -> None:
    """The shard would set it aside once more; its neighbours are asked for."""
    cluster = Cluster()
    cluster.requests.put(request("cr-a", pod_uid="pod-a", resources={"cpu": "1000"}))
    cluster.pods.put(pod("a"))
    cluster.add(pod("b"))
    roll_up = cluster.demand.roll_up(cluster.waiting.waiting_requests)
    assert roll_up is not None
    row = (roll_up.needs[0].fingerprint, "")
    message = "1 pod wants cpu 1k, the largest machine for it has 96"
    cluster.waiting.need_status(need_status(row, reason=UnmetReason.REQUEST_TOO_LARGE, message=message))
    cluster.clock.seconds += 60

    assert cluster.asked() == ["cr-b"]


def test_a_verdict_on_a_roll_up_without_the_request_says_nothing_of_it() -> None:
    cluster = Cluster()
    roll_up = cluster.demand.roll_up(cluster.waiting.waiting_requests)
    assert roll_up is not None
    cluster.add(pod("a"))
    cluster.demand.roll_up(cluster.waiting.waiting_requests)
    cluster.waiting.need_status(need_status(stamp=roll_up.timestamp_unix_nanos))
    cluster.clock.seconds += 600

    assert cluster.asked() == []


def test_a_pod_is_not_asked_for_while_a_machine_that_came_for_it_is_not_complete() -> None:
    """Its node is not Ready, or its device plugin has not started."""
    cluster = Cluster()
    cluster.nodes.is_machine_coming = True
    cluster.add(pod("a"))
    cluster.pass_time(300)
    assert cluster.asked() == []
    assert cluster.wait_of("pod-a") is PodWait.REQUESTED

    cluster.nodes.is_machine_coming = False
    cluster.pass_time(LOOK_SECONDS)
    assert cluster.asked() == ["cr-a"]


def test_machines_that_come_one_after_the_other_hold_a_pod_up_no_longer_than_one() -> None:
    cluster = Cluster()
    cluster.nodes.is_machine_coming = True
    cluster.add(pod("a"))
    cluster.pass_time(JOINING_SECONDS - 20)
    assert cluster.asked() == []

    cluster.pass_time(40)
    assert cluster.asked() == ["cr-a"]


def add_kinds(cluster: Cluster, count: int) -> None:
    """Add pods of which each requests another amount, and let them be due."""
    for number in range(count):
        requests = {"cpu": str(number + 1)}
        cluster.add(pod(f"p{number}", containers=[{"name": "c", "resources": {"requests": requests}}]))
    cluster.report()
    cluster.clock.seconds += 60


def test_the_nodes_are_searched_once_for_pods_that_are_alike() -> None:
    cluster = Cluster()
    for number in range(100):
        cluster.add(pod(f"p{number}"))
    cluster.report()
    cluster.clock.seconds += 60

    assert len(cluster.asked()) == 100
    assert len(cluster.nodes.searched) == 1

    cluster.nodes.ready_seconds = cluster.clock.seconds
    cluster.clock.seconds += 301
    assert cluster.asked() == []
    assert len(cluster.nodes.searched) == 2


def test_the_nodes_are_searched_for_a_bounded_time_and_for_each_pod_in_some_pass() -> None:
    """Seconds in one go would cost the operator its Lease; its successor would do the same a minute later."""
    cluster = Cluster()
    add_kinds(cluster, 10)
    cluster.nodes.search_seconds = SEARCH_SECONDS / 2
    counts = []
    for _ in range(7):
        began_seconds = cluster.clock.seconds
        counts.append(len(cluster.asked()))
        assert cluster.clock.seconds - began_seconds <= 1.5 * SEARCH_SECONDS
        cluster.clock.seconds += 1

    assert counts == [2, 4, 6, 8, 10, 10, 10]
    assert sorted(cluster.nodes.searched) == sorted(f"p{number}" for number in range(10))


def test_pods_are_given_up_in_some_pass_although_there_is_no_time_for_all_in_one() -> None:
    cluster = Cluster()
    add_kinds(cluster, 4)
    assert len(cluster.asked()) == 4
    cluster.nodes.ready_seconds = cluster.clock.seconds
    cluster.nodes.search_seconds = SEARCH_SECONDS
    cluster.clock.seconds += 301
    counts = []
    for _ in range(4):
        counts.append(len(cluster.asked()))
        cluster.clock.seconds += 1

    assert counts == [3, 2, 1, 0]


def test_pods_that_wait_for_a_machine_are_searched_for_after_those_that_were_not_yet() -> None:
    cluster = Cluster()
    add_kinds(cluster, 4)
    cluster.nodes.is_machine_coming = True
    cluster.nodes.search_seconds = SEARCH_SECONDS
    for _ in range(8):
        assert cluster.asked() == []
        cluster.clock.seconds += LOOK_SECONDS

    assert cluster.nodes.searched == ["p0", "p1", "p2", "p3"] * 2


def test_a_pod_for_which_there_is_never_time_is_asked_for_after_a_quarter_of_an_hour() -> None:
    cluster = Cluster()
    add_kinds(cluster, 2)
    cluster.nodes.is_machine_coming = True
    cluster.nodes.search_seconds = JOINING_SECONDS
    assert cluster.asked() == []

    assert len(cluster.asked()) == 2


def test_the_minute_begins_anew_when_the_row_was_unmet_in_between() -> None:
    cluster = Cluster()
    cluster.add(pod("a"))
    cluster.pass_time(50)
    cluster.report(met=False)
    cluster.pass_time(50)

    assert cluster.asked() == []
    cluster.pass_time(20)
    assert cluster.asked() == ["cr-a"]


def test_a_pod_stays_asked_for_while_the_shard_acquires_its_machine() -> None:
    cluster = Cluster()
    cluster.add(pod("a"))
    cluster.pass_time(80)
    cluster.pass_time(600, met=False)

    assert cluster.asked() == ["cr-a"]


@pytest.mark.parametrize(
    "running",
    [
        pod("a", node="n", message=None),
        pod("a", message=None),
        pod("a", deleting=True),
        pod("a", reason="SchedulingGated"),
    ],
)
def test_a_pod_that_is_no_longer_unschedulable_is_not_asked_for(running: PodObject) -> None:
    cluster = Cluster()
    cluster.add(pod("a"))
    cluster.pass_time(80)
    assert cluster.asked() == ["cr-a"]

    cluster.pods.put(running)

    assert cluster.asked() == []
    assert len(cluster.waiting) == 0
    assert cluster.heard.keys[-1] == ("ns", "cr-a")


def test_a_pod_without_a_message_is_unschedulable_all_the_same() -> None:
    cluster = Cluster()
    cluster.add(pod("a", message=""))

    assert len(cluster.waiting) == 1
    assert cluster.wait_of("pod-a") is PodWait.REQUESTED


def test_a_pod_without_a_request_does_not_count() -> None:
    cluster = Cluster()
    cluster.pods.put(pod("a"))
    cluster.pass_time(600)

    assert cluster.asked() == []


def test_a_request_cannot_speak_for_a_pod_of_another_namespace() -> None:
    cluster = Cluster()
    cluster.requests.put(request("cr", namespace="other", pod_uid="pod-a"))
    cluster.pods.put(pod("a"))
    cluster.pass_time(600)

    assert cluster.asked() == []


def test_a_request_of_another_namespace_changes_nothing_for_a_pod_that_has_one() -> None:
    """The label of any request may hold the uid of any pod."""
    cluster = Cluster()
    cluster.add(pod("a"))
    evil = cluster.requests.put(request("cr", namespace="evil", pod_uid="pod-a"))
    cluster.pass_time(70)
    entry = cluster.demand.get(("evil", "cr"))
    assert entry is not None

    assert cluster.asked() == ["cr-a"]
    assert cluster.waiting.get(entry.pod) is None
    assert set(cluster.heard.keys) == {("ns", "cr-a")}

    cluster.requests.remove(evil)
    assert cluster.asked() == ["cr-a"]
    cluster.pods.put(pod("a", message="0/3 nodes are available: 3 Insufficient memory."))
    assert cluster.heard.keys[-1] == ("ns", "cr-a")


def test_nobody_begins_to_be_asked_for_while_the_pods_may_be_out_of_date() -> None:
    cluster = Cluster()
    cluster.add(pod("a"))
    cluster.pass_time(50)
    cluster.pods.failing = 61
    cluster.pass_time(600)
    assert cluster.asked() == []

    cluster.pods.failing = 0
    assert cluster.asked() == ["cr-a"]


# ---- the scheduler's messages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        NO_CPU,
        "0/1 nodes are available: 1 Too many pods.",
        "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector.",
        "0/2 nodes are available: 2 node(s) didn't match pod anti-affinity rules.",
        "0/2 nodes are available: 2 node(s) didn't satisfy existing pods anti-affinity rules.",
        "0/2 nodes are available: 2 node(s) didn't match pod topology spread constraints.",
        "0/2 nodes are available: 2 node(s) had untolerated taint(s).",
        "0/2 nodes are available: 1 node(s) had untolerated taint {a: b}, 1 Insufficient nvidia.com/gpu.",
        "0/2 nodes are available: 1 node(s) had volume node affinity conflict, 1 Insufficient memory.",
        "0/2 nodes are available: 2 node(s) were unschedulable.",
        "0/2 nodes are available: 2 node(s) didn't have free ports for the requested pod ports.",
        "no nodes available to schedule pods",
    ],
)
def test_messages_that_name_capacity(message: str) -> None:
    assert waits_for_capacity(message)


@pytest.mark.parametrize(
    "message",
    [
        "",
        "running Reserve plugin: timed out",
        'persistentvolumeclaim "data" not found',
        "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims. preemption: 0/3 nodes.",
        "0/3 nodes are available: 2 Insufficient cpu, 1 node(s) didn't find available persistent volumes to bind.",
        "waiting for ephemeral volume controller to create the persistentvolumeclaim",
        "0/3 nodes are available: 3 cannot allocate all claims.",
        # What preemption would need says nothing of capacity.
        "0/3 nodes are available: 3 something new. preemption: 0/3 nodes are available: 3 Insufficient cpu.",
    ],
)
def test_messages_that_name_something_else(message: str) -> None:
    assert not waits_for_capacity(message)


def test_a_pod_that_waits_for_a_volume_is_not_asked_for_until_it_waits_for_capacity() -> None:
    cluster = Cluster()
    cluster.add(pod("a", message='persistentvolumeclaim "data" not found'))
    cluster.pass_time(600)
    assert cluster.asked() == []

    cluster.pods.put(pod("a"))
    cluster.pass_time(50)
    assert cluster.asked() == []
    cluster.pass_time(10)
    assert cluster.asked() == ["cr-a"]


@pytest.mark.parametrize(
    ("message", "reasons"),
    [
        (NO_CPU, set()),
        ("no nodes available to schedule pods", set()),
        ("0/0 nodes are available: no nodes available to schedule pods.", set()),
        ("0/3 nodes are available: 3 cannot allocate all claims, 1 something new.", set()),
        ("0/3 nodes are available: 3 node(s) unavailable due to pvc(s) bound to non-existent pv(s).", set()),
        (
            "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims.",
            {"pod has unbound immediate PersistentVolumeClaims"},
        ),
        (
            "0/3 nodes are available: 3 pod has unbound immediate PersistentVolumeClaims.",
            {"pod has unbound immediate PersistentVolumeClaims"},
        ),
        (
            "0/3 nodes are available: request d: device class nope does not exist.",
            {"request d: device class nope does not exist"},
        ),
        ('persistentvolumeclaim "data" not found', {'persistentvolumeclaim "data" not found'}),
    ],
)
def test_reasons_of_the_pod_itself_are_separate_from_those_of_nodes(message: str, reasons: set[str]) -> None:
    assert pod_reasons_of(message) == reasons


def test_reasons_have_no_numbers_and_one_order() -> None:
    one = "0/5 nodes are available: 2 Insufficient cpu, 3 node(s) had untolerated taint {a: b}. preemption: 0/5 nodes."
    other = "0/9 nodes are available: 8 node(s) had untolerated taint {a: b}, 1 Insufficient cpu."

    assert reasons_of(one) == reasons_of(other) == "Insufficient cpu, node(s) had untolerated taint {a: b}"


_EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("waits"), st.sampled_from("abc")),
        st.tuples(st.just("runs"), st.sampled_from("abc")),
        st.tuples(st.just("gone"), st.sampled_from("abc")),
        st.tuples(st.just("request gone"), st.sampled_from("abc")),
        st.tuples(st.just("node"), st.just("")),
        st.tuples(st.sampled_from(["met", "unmet"]), st.just("")),
    ),
    max_size=60,
)


@given(_EVENTS)
def test_the_waiting_never_exceed_the_unschedulable_pods(events: list[tuple[str, str]]) -> None:
    """After any events in any order, and each is asked for under its own request."""
    cluster = Cluster()
    for kind, name in events:
        known = cluster.pods.get(name, "ns")
        if kind == "waits":
            cluster.add(pod(name))
        elif kind == "runs" and known is not None:
            cluster.pods.put(msgspec.structs.replace(known, spec=msgspec.structs.replace(known.spec, node_name="n")))
        elif kind == "gone" and known is not None:
            cluster.pods.remove(known)
        elif kind == "request gone" and cluster.requests.get(f"cr-{name}", "ns") is not None:
            cluster.requests.remove(request(f"cr-{name}"))
        elif kind == "node":
            cluster.nodes.ready_seconds = cluster.clock.seconds
        elif kind in ("met", "unmet"):
            cluster.pass_time(70, met=kind == "met")

        unschedulable = {f"cr-{each.metadata.name}" for each in cluster.pods if not each.spec.node_name}
        roll_up = cluster.demand.roll_up(cluster.waiting.waiting_requests)
        assert roll_up is not None
        assert set(cluster.asked()) <= unschedulable
        waiting = sum(shape.count for need in roll_up.needs for shape in need.waiting)
        assert waiting == len(cluster.asked())
