"""Which pods are given up, so that their requests leave the demand, and when they count again."""

from itertools import pairwise

import pytest

from bigfleet.operator.demand.waiting import HELPLESS_SECONDS, RETRY_SECONDS, PodWait
from tests.operator.demand.objects import pod, request
from tests.operator.demand.waiting_cluster import Cluster


def given_up() -> Cluster:
    """Return a cluster whose pod was given up: it still waits 5 min after a node came for it."""
    cluster = Cluster()
    cluster.add(pod("a"))
    cluster.pass_time(80)
    cluster.nodes.ready_seconds = cluster.clock.seconds
    cluster.pass_time(290)
    assert cluster.asked() == ["cr-a"]
    cluster.pass_time(30)
    assert cluster.asked() == []
    assert cluster.wait_of("pod-a") is PodWait.NOT_FOR_WANT_OF_CAPACITY
    return cluster


def test_a_pod_that_waits_beside_a_node_that_came_for_it_is_no_longer_asked_for() -> None:
    cluster = given_up()
    cluster.pass_time(3600)

    assert cluster.asked() == []


def test_a_node_that_came_before_the_pod_was_asked_for_proves_nothing() -> None:
    cluster = Cluster()
    cluster.nodes.ready_seconds = cluster.clock.seconds
    cluster.add(pod("a"))
    cluster.pass_time(3600)

    assert cluster.asked() == ["cr-a"]


ON_NODES = [
    "0/4 nodes are available: 4 Insufficient cpu.",
    "0/4 nodes are available: 4 Insufficient memory.",
    "0/4 nodes are available: 1 node(s) were unschedulable, 3 Insufficient cpu.",
    "0/4 nodes are available: 1 node(s) had untolerated taint {node.kubernetes.io/not-ready: }, 3 Insufficient cpu.",
    "0/4 nodes are available: 1 Too many pods, 3 Insufficient cpu.",
    "0/4 nodes are available: 4 node(s) didn't match Pod's node affinity/selector.",
    "0/4 nodes are available: 4 something that this version does not know.",
    "0/0 nodes are available: .",
]


@pytest.mark.parametrize("message", ON_NODES)
def test_reasons_about_nodes_do_not_make_a_pod_count_again(message: str) -> None:
    """The drain of the machine that did not help changes them, and would have the next one bought."""
    cluster = given_up()
    cluster.pods.put(pod("a", message=message))
    cluster.pass_time(600)
    cluster.pods.put(pod("a"))
    cluster.pass_time(600)

    assert cluster.asked() == []
    assert cluster.wait_of("pod-a") is PodWait.NOT_FOR_WANT_OF_CAPACITY


def test_a_pod_counts_again_when_its_spec_changes() -> None:
    cluster = given_up()
    cluster.pods.put(pod("a", tolerations=[{"key": "gpu", "operator": "Exists"}]))
    assert cluster.wait_of("pod-a") is PodWait.REQUESTED
    cluster.pass_time(50)
    assert cluster.asked() == []

    cluster.pass_time(20)

    assert cluster.asked() == ["cr-a"]


def test_a_pod_that_was_given_up_is_no_part_of_the_demand() -> None:
    """Or the machine that does not help it would be held for ever."""
    cluster = given_up()
    cluster.add(pod("other", message=None, node="n"))
    assert cluster.requested() == 1
    assert cluster.demand.recount()
    assert cluster.requested() == 1

    cluster.pods.put(pod("a", tolerations=[{"key": "gpu", "operator": "Exists"}]))
    assert cluster.requested() == 2
    assert cluster.demand.recount()


def test_a_pod_that_was_given_up_and_runs_is_part_of_the_demand() -> None:
    cluster = given_up()
    cluster.pods.put(pod("a", message=None, node="n"))

    assert cluster.requested() == 1


def test_a_request_that_was_left_out_can_go() -> None:
    cluster = given_up()
    cluster.requests.remove(request("cr-a"))

    assert cluster.roll_up().needs == ()
    assert cluster.demand.recount()


def test_a_node_that_came_for_a_pod_and_does_not_suit_it_has_it_given_up() -> None:
    cluster = Cluster()
    cluster.add(pod("a"))
    cluster.pass_time(80)
    cluster.nodes.vain_seconds = cluster.clock.seconds
    cluster.pass_time(330, met=False)
    assert cluster.asked() == ["cr-a"], "a machine that suits it may be on its way"
    cluster.pass_time(40)

    assert cluster.wait_of("pod-a") is PodWait.NOT_FOR_WANT_OF_CAPACITY


# ---- tried again ----------------------------------------------------------------------------------------------------


def several_given_up(count: int) -> Cluster:
    cluster = Cluster()
    for number in range(count):
        cluster.add(pod(f"p{number}"))
    cluster.pass_time(80)
    cluster.nodes.ready_seconds = cluster.clock.seconds
    cluster.pass_time(400)
    assert cluster.requested() == 0
    return cluster


def test_one_pod_of_each_row_is_tried_again_after_an_hour_and_then_ever_more_rarely() -> None:
    cluster = several_given_up(3)
    began_seconds = cluster.clock.seconds
    former: list[str] = []
    tried: list[tuple[int, str]] = []
    while cluster.clock.seconds < began_seconds + 24 * 3600:
        cluster.pass_time(60)
        asked = cluster.asked()
        assert len(asked) <= 1
        if asked and not former:
            # A machine comes for it, and does not help.
            cluster.nodes.ready_seconds = cluster.clock.seconds
            tried.append((int((cluster.clock.seconds - began_seconds) / 3600), asked[0]))
        former = asked

    assert [name for _hour, name in tried] == ["cr-p0", "cr-p1", "cr-p2", "cr-p0", "cr-p1"]
    assert [later - former for (former, _), (later, _) in pairwise(tried)] == [2, 4, 6, 6]


def test_all_pods_of_a_row_count_again_once_the_one_that_is_tried_runs() -> None:
    cluster = several_given_up(3)
    cluster.pass_time(RETRY_SECONDS)
    assert cluster.requested() == 1
    cluster.pods.put(pod("p0", message=None, node="n"))

    assert cluster.requested() == 3
    assert cluster.wait_of("pod-p1") is PodWait.REQUESTED


# ---- what no node can change ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        "0/3 nodes are available: request d: device class nope does not exist. preemption: 0/3 nodes are available.",
        "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims. preemption: 0/3 nodes.",
        "0/3 nodes are available: 3 node(s) didn't find available persistent volumes to bind.",
    ],
)
def test_a_pod_that_no_node_can_help_is_given_up_after_a_quarter_of_an_hour(message: str) -> None:
    cluster = Cluster()
    cluster.add(pod("a", message=message))
    cluster.pass_time(HELPLESS_SECONDS - 20)
    assert cluster.requested() == 1
    cluster.pass_time(40)

    assert cluster.requested() == 0
    assert cluster.wait_of("pod-a") is PodWait.NOT_FOR_WANT_OF_CAPACITY


def test_a_pod_that_no_node_can_help_is_not_given_up_while_its_row_is_unmet() -> None:
    cluster = Cluster()
    cluster.add(pod("a", message='persistentvolumeclaim "data" not found'))
    cluster.pass_time(2 * HELPLESS_SECONDS, met=False)

    assert cluster.requested() == 1


def test_a_pod_counts_again_once_what_it_waited_for_is_there() -> None:
    cluster = Cluster()
    cluster.add(pod("a", message='0/3 nodes are available: persistentvolumeclaim "data" not found.'))
    cluster.pass_time(2 * HELPLESS_SECONDS)
    assert cluster.requested() == 0
    cluster.pods.put(pod("a", message='0/9 nodes are available: persistentvolumeclaim "data" not found.'))
    assert cluster.requested() == 0

    cluster.pods.put(pod("a"))
    assert cluster.requested() == 1


def test_a_volume_that_no_node_has_is_a_reason_about_nodes() -> None:
    """It vanishes with the nodes that were looked at."""
    cluster = Cluster()
    cluster.add(
        pod("a", message="0/3 nodes are available: 3 node(s) didn't find available persistent volumes to bind.")
    )
    cluster.pass_time(2 * HELPLESS_SECONDS)
    cluster.pods.put(pod("a"))

    assert cluster.requested() == 0


def test_a_pod_of_a_scheduler_of_which_nothing_is_seen_is_given_up_until_it_is() -> None:
    cluster = Cluster()
    cluster.add(pod("a", message=None, schedulerName="other"))
    cluster.add(pod("b", message=None, schedulerName="default-scheduler"))
    cluster.pass_time(HELPLESS_SECONDS + 20)
    assert cluster.requested() == 1
    assert cluster.wait_of("pod-a") is PodWait.NOT_FOR_WANT_OF_CAPACITY

    cluster.pods.put(pod("c", message=None, node="n", schedulerName="other"))
    assert cluster.requested() == 2
    assert cluster.wait_of("pod-a") is None
    cluster.pods.put(pod("a", message=None, schedulerName="other"))
    cluster.pass_time(HELPLESS_SECONDS + 20)
    assert cluster.requested() == 2


def test_the_requests_of_pods_hear_of_each_change() -> None:
    cluster = given_up()

    assert cluster.heard.keys == [("ns", "cr-a")] * 3
