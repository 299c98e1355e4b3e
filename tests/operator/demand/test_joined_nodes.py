"""Whether a node that joined while a pod waited could have taken it."""

from collections.abc import Mapping
from typing import Any

import pytest

from bigfleet.model.frames import NodeStateUpdate, Taint
from bigfleet.model.states import MachineState
from bigfleet.model.vector import Vector, covers
from bigfleet.operator.demand import joined_nodes
from bigfleet.operator.demand.joined_nodes import JOINING_SECONDS, JoinedNodes, scheduling_key
from bigfleet.operator.kubernetes.objects import NodeObject, PodObject
from tests.operator.demand.objects import HandClock, node, pod


class OnNode:
    def __init__(self, *pods: PodObject, cpu_milli: int = 0) -> None:
        self.pods: Mapping[tuple[str, str], PodObject] = {each.metadata.key: each for each in pods}
        self.requested: Mapping[str, int] = {"cpu": cpu_milli}


class Cluster:
    """Nodes, and what runs on each."""

    def __init__(self, *, resynced: bool = True) -> None:
        """`resynced` says whether the shard has named all machines to this process; none so far."""
        self.clock = HandClock()
        self.pods: dict[str, OnNode] = {}
        self.nodes = JoinedNodes(pods=self, clock=self.clock)
        if resynced:
            self.nodes.resynced(frozenset())

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


# ---- what the shard says of machines --------------------------------------------------------------------------------


def reported(
    machine_id: str = "n", *, cluster_id: str = "c", state: MachineState = MachineState.CONFIGURED, **facts: Any
) -> NodeStateUpdate:
    return NodeStateUpdate(machine_id=machine_id, cluster_id=cluster_id, state=state, **facts)


def test_an_empty_node_that_holds_less_than_the_shard_said_could_have_taken_the_pod() -> None:
    """The kubelet finds less memory than the machine is sold with, and so it will of the next one."""
    cluster = Cluster()
    wanted = pod(containers=[{"name": "c", "resources": {"requests": {"memory": "31Gi"}}}])
    cluster.nodes.put(node("n", allocatable={"memory": "29Gi", "pods": "10"}, capacity={"memory": "30Gi"}), None)
    assert not cluster.nodes.could_have_run(wanted, after_seconds=0.0, before_seconds=10**9)

    cluster.nodes.node_state(reported(resources={"memory": "32Gi"}))
    assert cluster.nodes.could_have_run(wanted, after_seconds=0.0, before_seconds=10**9)

    cluster.nodes.resynced(frozenset({"another"}))
    assert not cluster.nodes.could_have_run(wanted, after_seconds=0.0, before_seconds=10**9)


def test_a_node_whose_device_plugin_never_started_could_have_taken_the_pod() -> None:
    cluster = Cluster()
    wanted = pod(containers=[{"name": "c", "resources": {"requests": {"nvidia.com/gpu": "1"}}}])
    cluster.nodes.put(node("n"), None)
    cluster.nodes.node_state(reported(resources={"cpu": "4", "nvidia.com/gpu": "8"}))

    assert cluster.nodes.could_have_run(wanted, after_seconds=0.0, before_seconds=10**9)


WANTS_GPU = pod(
    containers=[{"name": "c", "resources": {"requests": {"nvidia.com/gpu": "8"}}}], nodeSelector={"pool": "g"}
)
GPU_MACHINE: dict[str, Any] = {"resources": {"cpu": "4", "nvidia.com/gpu": "8"}, "labels": {"pool": "g"}}
GPU_NODE: dict[str, Any] = {"labels": {"pool": "g"}, "allocatable": {"cpu": "4", "pods": "10", "nvidia.com/gpu": "8"}}


@pytest.mark.parametrize(
    "seen",
    [
        None,
        node("n", ready=False, labels={"pool": "g"}),
        node("n", labels={"pool": "g"}),
        node("n", labels={"pool": "g"}, allocatable={"cpu": "4", "pods": "10", "nvidia.com/gpu": "0"}),
        node("n", **GPU_NODE, taints=[{"key": "node.cilium.io/agent-not-ready", "effect": "NoSchedule"}]),
    ],
    ids=["no node", "not ready", "no device plugin", "device plugin without devices", "startup taint"],
)
def test_a_machine_whose_node_is_not_complete_yet_is_coming_for_a_quarter_of_an_hour(seen: NodeObject | None) -> None:
    cluster = Cluster()
    cluster.nodes.node_state(reported(**GPU_MACHINE))
    if seen is not None:
        cluster.nodes.put(seen, None)
    assert cluster.nodes.is_coming(WANTS_GPU)

    cluster.clock.seconds += JOINING_SECONDS - 1
    # The time counts from the first of the machine's frames.
    cluster.nodes.node_state(reported(**GPU_MACHINE))
    assert cluster.nodes.is_coming(WANTS_GPU)
    cluster.clock.seconds += 1
    assert not cluster.nodes.is_coming(WANTS_GPU)


@pytest.mark.parametrize(
    "changes",
    [
        {"resources": {"cpu": "4", "nvidia.com/gpu": "4"}},
        {"labels": {"pool": "other"}},
        {"taints": (Taint(key="dedicated", value="", effect="NoSchedule"),)},
        {"state": MachineState.DRAINING},
        {"cluster_id": ""},
    ],
    ids=["too small", "labels", "taints", "draining", "lost"],
)
def test_a_machine_that_does_not_suit_the_pod_is_not_coming_for_it(changes: dict[str, Any]) -> None:
    cluster = Cluster()
    cluster.nodes.node_state(reported(**(GPU_MACHINE | changes)))

    assert not cluster.nodes.is_coming(WANTS_GPU)


@pytest.mark.parametrize(
    "seen",
    [node("n", **GPU_NODE), node("n", labels={"pool": "g"}, unschedulable=True)],
    ids=["complete", "cordoned"],
)
def test_a_machine_whose_node_is_complete_or_cordoned_is_not_coming(seen: NodeObject) -> None:
    cluster = Cluster()
    cluster.nodes.node_state(reported(**GPU_MACHINE))
    cluster.nodes.put(seen, None)

    assert not cluster.nodes.is_coming(WANTS_GPU)


def test_a_machine_that_left_and_was_bound_again_is_coming_again() -> None:
    cluster = Cluster()
    cluster.nodes.node_state(reported(**GPU_MACHINE))
    cluster.clock.seconds += JOINING_SECONDS
    cluster.nodes.node_state(reported(state=MachineState.IDLE))
    cluster.nodes.node_state(reported(**GPU_MACHINE))

    assert cluster.nodes.is_coming(WANTS_GPU)


def test_a_machine_that_was_there_before_the_process_is_not_coming() -> None:
    """Its node may have been NotReady for an hour; its pods would wait for it a quarter of an hour after a restart."""
    cluster = Cluster(resynced=False)
    cluster.nodes.put(node("n", ready=False, labels={"pool": "g"}), None)
    cluster.nodes.node_state(reported(**GPU_MACHINE))
    assert not cluster.nodes.is_coming(WANTS_GPU)

    cluster.nodes.resynced(frozenset({"n"}))
    cluster.nodes.node_state(reported(**GPU_MACHINE))
    assert not cluster.nodes.is_coming(WANTS_GPU)

    cluster.nodes.node_state(reported("new", **GPU_MACHINE))
    assert cluster.nodes.is_coming(WANTS_GPU)


def test_a_resync_that_was_cut_off_makes_no_machine_new() -> None:
    cluster = Cluster(resynced=False)
    cluster.nodes.node_state(reported("a", resources={"cpu": "1"}))
    # The session ends here; the next one begins again.
    for machine_id in ("a", "b"):
        cluster.nodes.node_state(reported(machine_id, **GPU_MACHINE))
    cluster.nodes.resynced(frozenset({"a", "b"}))

    assert not cluster.nodes.is_coming(WANTS_GPU)


def test_a_node_that_loses_its_devices_or_is_not_ready_again_is_coming_again_while_it_is_young() -> None:
    cluster = Cluster()
    cluster.nodes.node_state(reported(**GPU_MACHINE))
    for incomplete in (node("n", labels={"pool": "g"}), node("n", **GPU_NODE, ready=False)):
        cluster.nodes.put(node("n", **GPU_NODE), None)
        assert not cluster.nodes.is_coming(WANTS_GPU)
        cluster.nodes.put(incomplete, None)
        assert cluster.nodes.is_coming(WANTS_GPU)

    cluster.clock.seconds += JOINING_SECONDS
    assert not cluster.nodes.is_coming(WANTS_GPU)


def test_machines_whose_nodes_are_complete_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands may have joined within a quarter of an hour, and hundreds of kinds of pods may wait."""
    searched = 0

    def covers_counted(have: Vector, want: Vector) -> bool:
        nonlocal searched
        searched += 1
        return covers(have, want)

    monkeypatch.setattr(joined_nodes, "covers", covers_counted)
    cluster = Cluster()
    for number in range(20):
        cluster.nodes.node_state(reported(f"n{number}", resources={"cpu": "4"}))
        cluster.nodes.put(node(f"n{number}"), None)
    cluster.nodes.put(node("n19", unschedulable=True, allocatable={"pods": "10"}), None)
    assert not cluster.nodes.is_coming(pod())
    assert searched == 0

    cluster.nodes.node_state(reported("late", resources={"cpu": "4"}))
    assert cluster.nodes.is_coming(pod())
    assert searched == 1


@pytest.mark.parametrize(
    "other",
    [
        pod("b", nodeSelector={"pool": "g"}),
        pod("b", tolerations=[{"key": "k", "operator": "Exists"}]),
        pod("b", containers=[{"name": "c", "resources": {"requests": {"cpu": "2"}}}]),
        pod("b", overhead={"cpu": "1"}),
        pod(
            "b",
            affinity={
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [{"matchExpressions": [{"key": "pool", "operator": "Exists"}]}]
                    }
                }
            },
        ),
    ],
    ids=["selector", "tolerations", "requests", "overhead", "affinity"],
)
def test_pods_that_differ_in_what_nodes_are_searched_for_have_other_keys(other: PodObject) -> None:
    assert scheduling_key(other.spec) != scheduling_key(pod("a").spec) == scheduling_key(pod("b").spec)


# ---- nodes that came in vain ----------------------------------------------------------------------------------------


def vain(cluster: Cluster, wanted: PodObject, after_seconds: float = 0.0) -> bool:
    return cluster.nodes.came_in_vain(wanted, after_seconds=after_seconds, before_seconds=cluster.clock.seconds)


def affine(key: str, operator: str, *values: str) -> PodObject:
    terms = [{"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return pod(affinity={"nodeAffinity": required})


NOT_AMD64 = affine("kubernetes.io/arch", "NotIn", "amd64")
AMD64_NODE = node("n", labels={"kubernetes.io/arch": "amd64"})
DEDICATED = {"key": "dedicated", "effect": "NoSchedule"}


def test_a_node_with_a_label_that_its_machine_does_not_state_came_in_vain() -> None:
    cluster = Cluster()
    cluster.nodes.node_state(reported(resources={"cpu": "4"}))
    cluster.nodes.put(AMD64_NODE, None)

    assert vain(cluster, NOT_AMD64)
    assert not vain(cluster, NOT_AMD64, after_seconds=cluster.clock.seconds + 1)
    assert not vain(cluster, pod()), "it suits the pod"
    assert not cluster.nodes.could_have_run(NOT_AMD64, after_seconds=0.0, before_seconds=10**9)


def test_a_node_with_a_taint_that_the_shard_names_came_in_vain_for_a_pod_that_does_not_tolerate_it() -> None:
    """The shard reads no tolerations."""
    cluster = Cluster()
    taint = Taint(key="dedicated", value="", effect="NoSchedule")
    cluster.nodes.node_state(reported(resources={"cpu": "4"}, taints=(taint,)))
    cluster.nodes.put(node("n", taints=[DEDICATED]), None)

    assert vain(cluster, pod())
    assert not vain(cluster, pod(tolerations=[{"key": "dedicated", "operator": "Exists"}]))


def test_a_taint_that_the_shard_does_not_name_may_be_one_of_the_start_for_a_quarter_of_an_hour() -> None:
    cluster = Cluster()
    cluster.nodes.node_state(reported(resources={"cpu": "4"}))
    cluster.nodes.put(node("n", taints=[DEDICATED]), None)
    cluster.clock.seconds += JOINING_SECONDS - 1
    assert not vain(cluster, pod())

    cluster.clock.seconds += 1
    assert vain(cluster, pod())


@pytest.mark.parametrize(
    ("frame", "seen", "on_node"),
    [
        (None, AMD64_NODE, OnNode()),
        ({"labels": {"kubernetes.io/arch": "amd64"}}, AMD64_NODE, OnNode()),
        ({}, node("n", labels={"kubernetes.io/arch": "amd64"}, unschedulable=True), OnNode()),
        ({}, AMD64_NODE, OnNode(pod("web", owner="ReplicaSet"))),
        (
            {"resources": {"cpu": "500m"}},
            node("n", labels={"kubernetes.io/arch": "amd64"}, allocatable={"cpu": "500m"}),
            OnNode(),
        ),
    ],
    ids=["unknown machine", "stated label", "cordoned", "used", "too small"],
)
def test_a_node_that_may_have_come_for_others_says_nothing(
    frame: dict[str, Any] | None, seen: NodeObject, on_node: OnNode
) -> None:
    cluster = Cluster()
    if frame is not None:
        cluster.nodes.node_state(reported(**({"resources": {"cpu": "4"}} | frame)))
    cluster.nodes.put(seen, None)
    cluster.pods["n"] = on_node

    assert not vain(cluster, NOT_AMD64)


def test_a_machine_that_does_not_say_its_system_suits_a_pod_for_linux() -> None:
    cluster = Cluster()
    cluster.nodes.node_state(reported(resources={"cpu": "4"}, taints=(Taint("dedicated", "", "NoSchedule"),)))
    cluster.nodes.put(node("n", labels={"kubernetes.io/os": "linux"}, taints=[DEDICATED]), None)

    assert vain(cluster, pod(nodeSelector={"kubernetes.io/os": "linux"}))
    assert not vain(cluster, pod(nodeSelector={"kubernetes.io/os": "windows"}))
