"""Whether a node that joined while a pod waited could have taken it."""

from collections.abc import Mapping
from typing import Any

import pytest

from bigfleet.operator.demand.joined_nodes import JoinedNodes
from bigfleet.operator.kubernetes.objects import PodObject
from tests.operator.demand.objects import HandClock, node, pod


class OnNode:
    def __init__(self, *pods: PodObject, cpu_milli: int = 0) -> None:
        self.pods: Mapping[tuple[str, str], PodObject] = {each.metadata.key: each for each in pods}
        self.requested: Mapping[str, int] = {"cpu": cpu_milli}


class Cluster:
    """Nodes, and what runs on each."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.pods: dict[str, OnNode] = {}
        self.nodes = JoinedNodes(pods=self, clock=self.clock)

    def could_have_run(self, after_seconds: float = 0.0, before_seconds: float = 10**9) -> bool:
        return self.nodes.could_have_run(pod(), after_seconds=after_seconds, before_seconds=before_seconds)

    def on(self, node: str) -> OnNode:
        return self.pods.get(node, OnNode())


def test_a_node_with_room_that_became_ready_since_could_have_taken_the_pod() -> None:
    cluster = Cluster()
    asked = cluster.clock.seconds
    cluster.nodes.put(node("n", ready=False), None)
    assert not cluster.could_have_run()

    cluster.clock.seconds += 30
    cluster.nodes.put(node("n"), None)
    cluster.clock.seconds += 30
    cluster.nodes.put(node("n"), None)

    assert cluster.could_have_run(asked, asked + 30)
    assert not cluster.could_have_run(asked + 31)
    assert not cluster.could_have_run(asked, asked + 29)


def test_a_node_that_was_not_ready_counts_from_when_it_is_again() -> None:
    cluster = Cluster()
    asked = cluster.clock.seconds
    cluster.nodes.put(node("n"), None)
    cluster.nodes.put(node("n", ready=False), None)
    cluster.clock.seconds += 5
    cluster.nodes.put(node("n"), None)

    assert cluster.could_have_run(asked + 5)
    assert not cluster.could_have_run(asked, asked + 4)


@pytest.mark.parametrize(
    "other",
    [
        node("n", machine=False),
        node("n", unschedulable=True),
        node("n", taints=[{"key": "k", "effect": "NoSchedule"}]),
        node("n", allocatable={"cpu": "500m", "pods": "10"}),
    ],
)
def test_a_node_that_could_not_take_the_pod_says_nothing(other: Any) -> None:
    cluster = Cluster()
    cluster.nodes.put(other, None)

    assert not cluster.could_have_run()


def test_a_node_that_other_pods_have_filled_says_nothing() -> None:
    cluster = Cluster()
    cluster.nodes.put(node("n"), None)
    cluster.pods["n"] = OnNode(pod("other"), cpu_milli=3500)
    assert not cluster.could_have_run()

    cluster.pods["n"] = OnNode(pod("other"), cpu_milli=3000)
    assert cluster.could_have_run()


def test_a_node_with_as_many_pods_as_it_takes_has_no_room() -> None:
    cluster = Cluster()
    cluster.nodes.put(node("n", allocatable={"cpu": "4", "pods": "2"}), None)
    cluster.pods["n"] = OnNode(pod("b"), pod("c"))

    assert not cluster.could_have_run()


def test_an_empty_node_that_holds_less_than_its_capacity_said_could_have_taken_the_pod() -> None:
    """What daemons and the kubelet take was not known when it was acquired, and would not be the next time either."""
    cluster = Cluster()
    small = node("n", allocatable={"cpu": "900m", "pods": "10"}, capacity={"cpu": "1"})
    cluster.nodes.put(small, None)
    cluster.pods["n"] = OnNode(pod("agent", owner="DaemonSet"), cpu_milli=100)
    assert cluster.could_have_run()

    cluster.pods["n"] = OnNode(pod("web", owner="ReplicaSet"), cpu_milli=100)
    assert not cluster.could_have_run()


def test_a_node_that_is_gone_is_forgotten() -> None:
    cluster = Cluster()
    cluster.nodes.put(node("n"), None)
    cluster.nodes.remove(node("n"))

    assert not cluster.could_have_run()
