"""Which pods are asked for once more, and which no longer."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.model.frames import RollUp, UnmetReason
from bigfleet.model.ids import ClusterId
from bigfleet.operator.demand.demand import DemandView
from bigfleet.operator.demand.entries import ObjectKey
from bigfleet.operator.demand.joined_nodes import JOINING_SECONDS
from bigfleet.operator.demand.scheduling_messages import reasons_of, waits_for_capacity
from bigfleet.operator.demand.waiting import (
    HELPLESS_SECONDS,
    LOOK_SECONDS,
    RETRY_SECONDS,
    SEARCH_SECONDS,
    PodWait,
    UnschedulablePods,
)
from bigfleet.operator.kubernetes.objects import CapacityRequestObject, PodObject
from tests.operator.demand.objects import NO_CPU, HandClock, HandView, need_status, pod, request


class Nodes:
    """Says that a node that became Ready at one moment could have taken any pod."""

    def __init__(self, clock: HandClock) -> None:
        self._clock = clock
        self.ready_seconds: float | None = None
        #: The same of a node that does not suit the pod, though its machine does.
        self.vain_seconds: float | None = None
        self.is_machine_coming = False
        #: How long a search takes.
        self.search_seconds = 0.0
        #: The pods for which the nodes were searched.
        self.searched: list[str] = []

    def could_have_run(self, pod: PodObject, *, after_seconds: float, before_seconds: float) -> bool:
        self._search(pod)
        return self.ready_seconds is not None and after_seconds <= self.ready_seconds <= before_seconds

    def came_in_vain(self, pod: PodObject, *, after_seconds: float, before_seconds: float) -> bool:
        return self.vain_seconds is not None and after_seconds <= self.vain_seconds <= before_seconds

    def is_coming(self, pod: PodObject) -> bool:
        self._search(pod)
        return self.is_machine_coming

    def _search(self, pod: PodObject) -> None:
        self.searched.append(pod.metadata.name)
        self._clock.seconds += self.search_seconds


class Heard:
    def __init__(self) -> None:
        self.keys: list[ObjectKey] = []

    def waiting_changed(self, key: ObjectKey) -> None:
        self.keys.append(key)


class Cluster:
    """Requests and pods of a cluster, each pod with its request."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.requests: HandView[CapacityRequestObject] = HandView()
        self.pods: HandView[PodObject] = HandView()
        self.nodes = Nodes(self.clock)
        self.heard = Heard()
        self.demand = DemandView(cluster=ClusterId("c"), requests=self.requests, clock=self.clock)
        self.requests.listeners.append(self.demand)
        self.waiting = UnschedulablePods(pods=self.pods, requests=self.demand, nodes=self.nodes, clock=self.clock)
        self.waiting.add_listener(self.heard)
        self.pods.listeners.append(self.waiting)

    def add(self, stored: PodObject) -> PodObject:
        name, uid = stored.metadata.name, stored.metadata.uid
        self.requests.put(request(f"cr-{name}", pod_uid=uid))
        return self.pods.put(stored)

    def pass_time(self, seconds: float, *, met: bool = True) -> None:
        """Let time pass, with a roll-up and a verdict every 10 s."""
        end = self.clock.seconds + seconds
        while self.clock.seconds < end:
            self.clock.seconds += 10
            self.report(met=met)

    def report(self, *, met: bool = True) -> None:
        roll_up = self.roll_up()
        rows = [] if met else [(need.fingerprint, need.group) for need in roll_up.needs]
        self.waiting.need_status(need_status(*rows, stamp=roll_up.timestamp_unix_nanos))

    def roll_up(self) -> RollUp:
        found = self.demand.roll_up(self.waiting.waiting_requests, self.waiting.given_up_requests)
        assert found is not None
        return found

    def requested(self) -> int:
        """Return how many pods the demand has."""
        return sum(shape.count for need in self.roll_up().needs for shape in need.shapes)

    def asked(self) -> list[str]:
        return sorted(name for _namespace, name in self.waiting.waiting_requests())

    def wait_of(self, uid: str) -> PodWait | None:
        known = self.waiting.get(("ns", uid))
        return known.wait if known is not None else None


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


# ---- not for want of capacity ---------------------------------------------------------------------------------------


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
