"""How a gang whose pods run already is asked for where they run."""

from typing import Any

import pytest

from bigfleet.model.ids import ClusterId
from bigfleet.model.profile import Operator, Requirement
from bigfleet.operator.demand.demand import DemandView
from bigfleet.operator.demand.gang_domains import GangDomains
from bigfleet.operator.kubernetes.objects import CapacityRequestObject, NodeObject, PodObject
from bigfleet.rpc.wire.convert_need import VALUES_MAX, ReceivedRollUp, rollup_to_wire
from tests.operator.demand.objects import HandClock, HandView, node, pod, request

ZONE = "topology.kubernetes.io/zone"
SELECTOR = {"matchLabels": {"app": "gang"}}
CO_LOCATION = {"topologyKey": ZONE, "labelSelector": SELECTOR}
AFFINITY = {
    "podAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": ZONE, "labelSelector": SELECTOR}]
    }
}
SAME = Requirement(ZONE, Operator.SAME)


class Cluster:
    """Two zones with a node each, and a gang of two pods with their requests."""

    def __init__(self) -> None:
        self.nodes: HandView[NodeObject] = HandView()
        self.domains = GangDomains(self.nodes)
        self.pods: HandView[PodObject] = HandView(self.domains)
        self.requests: HandView[CapacityRequestObject] = HandView()
        self.view = DemandView(cluster=ClusterId("c"), requests=self.requests, clock=HandClock(), domains=self.domains)
        self.requests.listeners.append(self.view)
        for zone in ("z1", "z2"):
            self.nodes.put(node(f"node-{zone}", labels={ZONE: zone}))
        for name in ("a", "b"):
            self.put_pod(name)
            self.requests.put(request(name, pod_uid=f"pod-{name}", coLocation=CO_LOCATION))

    def put_pod(self, name: str, **fields: Any) -> None:
        self.pods.put(pod(name, affinity=AFFINITY, **fields))

    def requirements(self) -> list[tuple[tuple[Requirement, ...], dict[str, int]]]:
        """Return each row's requirements and amounts."""
        roll_up = self.view.roll_up()
        assert roll_up is not None
        return [(need.profile.requirements, dict(need.aggregate)) for need in roll_up.needs]


def zones(*values: str) -> Requirement:
    return Requirement(ZONE, Operator.IN, values)


def test_a_gang_of_which_no_pod_is_bound_may_go_anywhere_together() -> None:
    assert Cluster().requirements() == [((SAME,), {"cpu": 2000})]


def test_the_whole_gang_is_asked_for_where_the_scheduler_has_put_its_first_pod() -> None:
    cluster = Cluster()
    cluster.requirements()
    cluster.put_pod("a", node="node-z2")
    ((requirements, amounts),) = cluster.requirements()

    assert set(requirements) == {SAME, zones("z2")}
    assert amounts == {"cpu": 2000}


def test_a_request_that_comes_later_follows_its_gang() -> None:
    cluster = Cluster()
    cluster.put_pod("a", node="node-z1")
    cluster.requirements()
    cluster.put_pod("c")
    cluster.requests.put(request("c", pod_uid="pod-c", coLocation=CO_LOCATION))
    ((requirements, amounts),) = cluster.requirements()

    assert zones("z1") in requirements
    assert amounts == {"cpu": 3000}


def test_a_gang_is_free_again_when_its_bound_pods_are_going_or_gone_and_another_waits() -> None:
    going, gone = Cluster(), Cluster()
    for cluster in (going, gone):
        cluster.put_pod("a", node="node-z1")
        cluster.requirements()
    going.put_pod("a", node="node-z1", deleting=True)
    gone.pods.remove(gone.pods.objects["ns", "a"])

    assert going.requirements() == gone.requirements() == [((SAME,), {"cpu": 2000})]


def test_what_is_left_of_a_gang_that_ends_is_asked_for_where_it_ran() -> None:
    cluster = Cluster()
    for name in ("a", "b"):
        cluster.put_pod(name, node="node-z2")
    bound = cluster.requirements()
    cluster.put_pod("a", node="node-z2", deleting=True)
    cluster.put_pod("b", node="node-z2", deleting=True)
    assert cluster.requirements() == bound

    # The requests of pods that are gone are deleted one after the other.
    for name in ("a", "b"):
        cluster.pods.remove(cluster.pods.objects["ns", name])
    cluster.requests.remove(cluster.requests.objects["ns", "a"])
    ((requirements, amounts),) = cluster.requirements()

    assert set(requirements) == {SAME, zones("z2")}
    assert amounts == {"cpu": 1000}


def test_the_sums_of_a_gang_that_was_bound_agree_with_a_recount() -> None:
    cluster = Cluster()
    cluster.put_pod("b", node="node-z2")
    before = cluster.requirements()

    assert cluster.view.recount()
    assert cluster.requirements() == before


def test_a_request_that_was_bound_is_first_reported_in_its_new_row() -> None:
    cluster = Cluster()
    cluster.requirements()
    cluster.put_pod("a", node="node-z1")
    roll_up = cluster.view.roll_up()
    entry = cluster.view.get(("ns", "b"))

    assert roll_up is not None
    assert entry is not None
    assert entry.first_stamp_nanos == roll_up.timestamp_unix_nanos
    assert entry.row is not None
    assert list(entry.row.members) == [("ns", "a"), ("ns", "b")]


def test_gangs_that_are_gone_leave_nothing_behind() -> None:
    cluster = Cluster()
    cluster.put_pod("a", node="node-z1")
    cluster.requirements()
    for stored in list(cluster.requests):
        cluster.requests.remove(stored)
    for name in ("a", "b"):
        cluster.pods.remove(cluster.pods.objects["ns", name])
    for name in ("a", "b"):
        cluster.put_pod(name)
        cluster.requests.put(request(name, pod_uid=f"pod-{name}", coLocation=CO_LOCATION))

    assert cluster.requirements() == [((SAME,), {"cpu": 2000})]


def test_a_node_without_the_label_binds_nothing() -> None:
    cluster = Cluster()
    cluster.nodes.put(node("bare", labels={}))
    cluster.put_pod("a", node="bare")

    assert cluster.requirements() == [((SAME,), {"cpu": 2000})]


@pytest.mark.parametrize(("count", "values"), [(VALUES_MAX, VALUES_MAX), (VALUES_MAX + 1, 0)])
def test_a_gang_in_more_domains_than_a_row_may_name_is_asked_for_in_any(count: int, values: int) -> None:
    """Otherwise the shard would refuse the roll-up, and with it the demand of everybody in the cluster."""
    cluster = Cluster()
    for number in range(count):
        name, rack = f"p{number}", f"rack-{number}"
        cluster.nodes.put(node(f"node-{rack}", labels={ZONE: rack}))
        cluster.put_pod(name, node=f"node-{rack}")
        cluster.requests.put(request(name, pod_uid=f"pod-{name}", coLocation=CO_LOCATION))
    roll_up = cluster.view.roll_up()
    assert roll_up is not None

    (need,) = ReceivedRollUp(rollup_to_wire(roll_up)).needs()

    assert dict(need.aggregate) == {"cpu": (2 + count) * 1000}
    assert SAME in need.profile.requirements
    assert sum(len(each.values) for each in need.profile.requirements) == values
