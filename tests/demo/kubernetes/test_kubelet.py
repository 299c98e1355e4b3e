"""The fake kubelet on a simulated API server, at virtual time: what each machine and each pod does, and when."""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

from bigfleet.demo.kubernetes.fake_node import RUN_SECONDS, TERMINATION_SECONDS, FakeNode
from bigfleet.demo.kubernetes.kubelet import FakeKubelet, KubeletSettings
from bigfleet.operator.kubernetes.api import ApiError, JsonObject, PatchKind
from bigfleet.operator.kubernetes.objects import NodeObject, NodeTaint, PodObject
from bigfleet.operator.kubernetes.resources import LEASES, NODES, PODS
from bigfleet.sim.kernel.virtual_time import LoopClock
from bigfleet.sim.kubernetes.client import InMemoryApi
from bigfleet.sim.kubernetes.faults import fail_times
from bigfleet.sim.kubernetes.server import InMemoryApiServer

pytestmark = pytest.mark.virtual_time

LEASE_NAMESPACE = "kube-node-lease"
SETTINGS = KubeletSettings(heartbeat_seconds=10.0, start_seconds=2.0, termination_seconds_max=5.0)


class World:
    """A simulated cluster with one fake kubelet."""

    def __init__(self) -> None:
        self.clock = LoopClock()
        self.server = InMemoryApiServer(self.clock)
        self.api = InMemoryApi(self.server)
        self.kubelet = FakeKubelet(self.api, clock=self.clock, rng=random.Random(1), settings=SETTINGS)

    def put_pod(self, name: str, *, node: str = "n", annotations: Mapping[str, str] | None = None) -> PodObject:
        """Store a pod that is bound to a node, as the scheduler leaves it."""
        return self.server.put(
            PODS,
            {
                "metadata": {"name": name, "namespace": "default", "annotations": dict(annotations or {})},
                "spec": {"nodeName": node, "containers": [{"name": "main"}], "terminationGracePeriodSeconds": 30},
                "status": {"phase": "Pending"},
            },
        )

    def pod(self, name: str) -> PodObject | None:
        """Return a pod as stored."""
        return self.server.read(PODS, name, "default")

    def phase(self, name: str) -> str:
        """Return the phase of a pod, "gone" when it is absent."""
        pod = self.pod(name)
        return "gone" if pod is None else pod.status.phase

    def node(self, name: str = "n") -> NodeObject | None:
        """Return a Node as stored."""
        return self.server.read(NODES, name)

    def renewed_at(self, name: str = "n") -> str | None:
        """Return when a node's Lease was last renewed."""
        lease = self.server.read(LEASES, name, LEASE_NAMESPACE)
        return None if lease is None else lease.spec.renew_time

    async def after(self, seconds: float) -> None:
        """Let virtual time pass."""
        await self.clock.sleep(seconds)


@asynccontextmanager
async def world(*nodes: FakeNode) -> AsyncIterator[World]:
    """Run a cluster whose machines have just booted."""
    made = World()
    running = asyncio.create_task(made.kubelet.run())
    for node in nodes:
        made.kubelet.add_node(node)
    await made.after(1.0)
    yield made
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def machine(
    name: str = "n", *, joins_after_seconds: float | None = 0.0, ready_after_seconds: float | None = 0.0
) -> FakeNode:
    """Return a small machine."""
    return FakeNode(
        name=name,
        resources={"cpu": "4", "memory": "16Gi"},
        joins_after_seconds=joins_after_seconds,
        ready_after_seconds=ready_after_seconds,
    )


# ---- machines ------------------------------------------------------------------------------------------------------


async def test_a_machine_registers_a_ready_node_with_everything_that_it_says() -> None:
    taint = NodeTaint(key="dedicated", value="gpu", effect="NoSchedule")
    node = FakeNode(
        name="n",
        resources={"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "2"},
        labels={"zone": "a"},
        annotations={"note": "b"},
        taints=(taint,),
        provider_id="fake://m-1",
    )

    async with world(node) as cluster:
        stored = cluster.node()

    assert stored is not None
    assert stored.is_ready
    assert stored.metadata.labels == {
        "kubernetes.io/hostname": "n",
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
        "zone": "a",
    }
    assert stored.metadata.annotations == {"note": "b"}
    assert stored.spec.provider_id == "fake://m-1"
    assert stored.spec.taints == [taint]
    assert stored.status.allocatable == {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "2", "pods": "110"}
    assert stored.status.capacity == stored.status.allocatable


async def test_a_machine_that_boots_slowly_joins_then() -> None:
    async with world(machine(joins_after_seconds=60.0)) as cluster:
        await cluster.after(50.0)
        before = cluster.node()
        await cluster.after(20.0)

        assert before is None
        assert cluster.node() is not None


async def test_a_machine_that_never_joins_leaves_no_node_and_no_lease() -> None:
    async with world(machine(joins_after_seconds=None)) as cluster:
        await cluster.after(3600.0)

        assert (cluster.node(), cluster.renewed_at()) == (None, None)


async def test_a_machine_that_is_late_becomes_ready_after_it_has_joined() -> None:
    async with world(machine(ready_after_seconds=60.0)) as cluster:
        joined = cluster.node()
        await cluster.after(70.0)
        later = cluster.node()

        assert joined is not None
        assert not joined.is_ready
        assert later is not None
        assert later.is_ready


async def test_a_machine_that_is_never_ready_stays_so() -> None:
    async with world(machine(ready_after_seconds=None)) as cluster:
        await cluster.after(3600.0)
        stored = cluster.node()

        assert stored is not None
        assert not stored.is_ready


async def test_each_joined_machine_renews_its_lease() -> None:
    async with world(machine("a"), machine("b")) as cluster:
        first = [cluster.renewed_at(name) for name in ("a", "b")]
        await cluster.after(11.0)
        second = [cluster.renewed_at(name) for name in ("a", "b")]

    assert first == ["2026-01-01T00:00:00.000000Z"] * 2
    assert second == ["2026-01-01T00:00:10.000000Z"] * 2


async def test_a_silent_machine_renews_nothing_and_leaves_its_pods_alone_until_it_is_back() -> None:
    async with world(machine()) as cluster:
        cluster.kubelet.silence_node("n")
        silent_since = cluster.renewed_at()
        cluster.put_pod("p")
        await cluster.after(60.0)
        cut_off = (cluster.renewed_at(), cluster.phase("p"))
        await cluster.kubelet.restore_node("n")
        await cluster.after(60.0)

        assert cut_off == (silent_since, "Pending")
        assert cluster.renewed_at() != silent_since
        assert cluster.phase("p") == "Running"


async def test_a_machine_that_is_removed_takes_its_node_its_lease_and_its_pods_along() -> None:
    async with world(machine("n"), machine("other")) as cluster:
        cluster.put_pod("p")
        cluster.put_pod("q", node="other")
        await cluster.after(10.0)
        await cluster.kubelet.remove_node("n")
        await cluster.after(30.0)

        assert (cluster.node("n"), cluster.renewed_at("n"), cluster.pod("p")) == (None, None, None)
        assert cluster.phase("q") == "Running"
        assert list(cluster.kubelet.nodes) == ["other"]


async def test_a_machine_that_is_removed_before_it_joined_never_joins() -> None:
    async with world(machine(joins_after_seconds=60.0)) as cluster:
        await cluster.kubelet.remove_node("n")
        await cluster.after(120.0)

        assert cluster.node() is None


async def test_a_machine_that_is_removed_while_it_registers_leaves_nothing() -> None:
    async with world() as cluster:
        cluster.server.faults.latency_seconds = 5.0
        cluster.kubelet.add_node(machine())
        await cluster.after(2.0)
        await cluster.kubelet.remove_node("n")
        await cluster.after(60.0)

        assert (cluster.node(), cluster.renewed_at()) == (None, None)


async def test_a_machine_that_is_removed_while_the_api_server_is_down_leaves_nothing() -> None:
    async with world() as cluster:
        cluster.server.go_down()
        cluster.kubelet.add_node(machine())
        await cluster.after(10.0)
        removing = asyncio.create_task(cluster.kubelet.remove_node("n"))
        await cluster.after(10.0)
        before = len(cluster.api.calls)
        cluster.server.come_up()
        await removing
        await cluster.after(60.0)

        assert (cluster.node(), cluster.renewed_at()) == (None, None)
        assert {call.verb for call in list(cluster.api.calls)[before:] if call.resource != "pods"} == {"delete"}


async def test_readiness_can_be_lost_and_regained() -> None:
    async with world(machine()) as cluster:
        await cluster.kubelet.set_ready("n", ready=False)
        lost = cluster.node()
        await cluster.kubelet.set_ready("n", ready=True)
        regained = cluster.node()

        assert lost is not None
        assert not lost.is_ready
        assert regained is not None
        assert regained.is_ready


async def test_a_node_that_exists_already_is_brought_to_what_the_machine_says() -> None:
    async with world() as cluster:
        cluster.server.put(NODES, {"metadata": {"name": "n", "labels": {"mine": "yes"}}})
        cluster.kubelet.add_node(FakeNode(name="n", resources={"cpu": "8"}, provider_id="fake://m-1"))
        await cluster.after(1.0)
        stored = cluster.node()

        assert stored is not None
        assert stored.is_ready
        assert stored.spec.provider_id == "fake://m-1"
        assert (stored.metadata.labels or {})["mine"] == "yes"


async def test_a_name_is_added_once() -> None:
    async with world(machine()) as cluster:
        with pytest.raises(ValueError, match="node n was added already"):
            cluster.kubelet.add_node(machine())


# ---- pods ----------------------------------------------------------------------------------------------------------


async def test_a_bound_pod_runs_and_is_ready_after_the_start_time() -> None:
    async with world(machine()) as cluster:
        cluster.put_pod("p")
        await cluster.after(1.0)
        before = cluster.phase("p")
        await cluster.after(2.0)
        pod = cluster.pod("p")

        assert before == "Pending"
        assert pod is not None
        assert (pod.status.phase, pod.status.start_time) == ("Running", "2026-01-01T00:00:03Z")
        assert {each.type: each.status for each in pod.status.conditions or ()}["Ready"] == "True"


async def test_a_pod_that_changes_before_it_starts_is_started_once() -> None:
    async with world(machine()) as cluster:
        cluster.put_pod("p")
        await cluster.after(1.0)
        await cluster.api.patch(PODS, "p", {"metadata": {"labels": {"changed": "yes"}}}, namespace="default")
        await cluster.after(30.0)
        starts = [call for call in cluster.api.calls if (call.verb, call.resource) == ("patch", "pods/status")]

        assert (cluster.phase("p"), len(starts)) == ("Running", 1)


async def test_a_pod_whose_machine_was_cut_off_before_it_started_starts_later() -> None:
    async with world(machine()) as cluster:
        cluster.put_pod("p")
        await cluster.after(1.0)
        cluster.kubelet.silence_node("n")
        await cluster.after(30.0)
        before = cluster.phase("p")
        await cluster.kubelet.restore_node("n")
        await cluster.after(10.0)

        assert (before, cluster.phase("p")) == ("Pending", "Running")


async def test_a_pod_of_a_node_that_is_not_ours_is_left_alone() -> None:
    async with world(machine()) as cluster:
        cluster.put_pod("p", node="elsewhere")
        await cluster.after(60.0)

        assert cluster.phase("p") == "Pending"


async def test_pods_that_were_bound_before_their_machine_joined_are_run() -> None:
    async with world() as cluster:
        cluster.put_pod("p")
        await cluster.after(60.0)
        cluster.kubelet.add_node(machine())
        await cluster.after(10.0)

        assert cluster.phase("p") == "Running"


async def test_a_pod_with_a_duration_succeeds_after_it() -> None:
    async with world(machine()) as cluster:
        cluster.put_pod("p", annotations={RUN_SECONDS: "30"})
        await cluster.after(25.0)
        before = cluster.phase("p")
        await cluster.after(10.0)

        assert (before, cluster.phase("p")) == ("Running", "Succeeded")


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf", ""])
async def test_a_duration_that_is_no_number_means_none(text: str) -> None:
    async with world(machine()) as cluster:
        cluster.put_pod("p", annotations={RUN_SECONDS: text})
        await cluster.after(3600.0)

        assert cluster.phase("p") == "Running"


@pytest.mark.parametrize(("annotations", "seconds"), [({}, 5.0), ({TERMINATION_SECONDS: "20"}, 20.0)])
async def test_a_pod_that_is_deleted_is_gone_after_its_grace(annotations: Mapping[str, str], seconds: float) -> None:
    """The pod asks for 30 s, and the kubelet grants 5 s at most; an annotation says otherwise."""
    async with world(machine()) as cluster:
        cluster.put_pod("p", annotations=annotations)
        await cluster.after(10.0)
        await cluster.api.delete(PODS, "p", namespace="default")
        await cluster.after(seconds - 1.0)
        before = cluster.phase("p")
        await cluster.after(2.0)

        assert (before, cluster.phase("p")) == ("Running", "gone")


async def test_a_pod_that_is_deleted_before_it_started_never_starts() -> None:
    async with world(machine()) as cluster:
        cluster.put_pod("p")
        await cluster.after(1.0)
        await cluster.api.delete(PODS, "p", namespace="default")
        await cluster.after(3.0)
        before = cluster.phase("p")
        await cluster.after(60.0)

        assert (before, cluster.phase("p")) == ("Pending", "gone")


async def test_a_pod_that_never_ends_stays_until_it_is_deleted_with_no_grace() -> None:
    async with world(machine()) as cluster:
        cluster.put_pod("p", annotations={TERMINATION_SECONDS: "never"})
        await cluster.after(10.0)
        await cluster.api.delete(PODS, "p", namespace="default")
        await cluster.after(3600.0)
        before = cluster.phase("p")
        await cluster.api.delete(PODS, "p", namespace="default", grace_seconds=0)

        assert (before, cluster.phase("p")) == ("Running", "gone")


async def test_a_second_pod_of_the_same_name_is_served_like_the_first() -> None:
    async with world(machine()) as cluster:
        cluster.put_pod("p")
        await cluster.after(10.0)
        await cluster.api.delete(PODS, "p", namespace="default", grace_seconds=0)
        second = cluster.put_pod("p")
        await cluster.after(10.0)
        pod = cluster.pod("p")

        assert pod is not None
        assert (pod.metadata.uid, pod.status.phase) == (second.metadata.uid, "Running")


# ---- failures ------------------------------------------------------------------------------------------------------


async def test_a_request_that_fails_is_repeated() -> None:
    async with world(machine()) as cluster:
        refusal = ApiError(500, "InternalError", "patch pods: the server is not well")
        cluster.server.faults.refuse = fail_times(3, refusal, verb="patch")
        cluster.put_pod("p")
        await cluster.after(30.0)

        assert cluster.phase("p") == "Running"


async def test_the_kubelet_outlives_an_api_server_that_is_down() -> None:
    async with world(machine()) as cluster:
        cluster.server.go_down()
        cluster.kubelet.add_node(machine("late"))
        await cluster.after(300.0)
        cluster.put_pod("p")
        cluster.server.come_up()
        await cluster.after(120.0)

        assert cluster.phase("p") == "Running"
        assert cluster.node("late") is not None


def not_ready(condition_status: str) -> JsonObject:
    """Return a patch as the node controller writes it while heartbeats are missing."""
    return {"status": {"conditions": [{"type": "Ready", "status": condition_status}]}}


async def test_a_machine_whose_heartbeats_were_late_and_its_pods_are_ready_again() -> None:
    """The node controller gives both up, and never takes that back by itself."""
    async with world(machine()) as cluster:
        cluster.put_pod("p")
        await cluster.after(5.0)
        cluster.server.go_down()
        await cluster.after(60.0)
        cluster.server.come_up()
        await cluster.api.patch(NODES.status, "n", not_ready("Unknown"), kind=PatchKind.STRATEGIC)
        await cluster.api.patch(PODS.status, "p", not_ready("False"), namespace="default", kind=PatchKind.STRATEGIC)
        await cluster.after(30.0)
        node, pod = cluster.node(), cluster.pod("p")

        assert node is not None
        assert node.is_ready
        assert pod is not None
        assert {each.type: each.status for each in pod.status.conditions or ()}["Ready"] == "True"


async def test_pods_of_a_machine_that_is_not_ready_stay_so() -> None:
    async with world(machine()) as cluster:
        cluster.put_pod("p")
        await cluster.after(5.0)
        await cluster.kubelet.set_ready("n", ready=False)
        await cluster.api.patch(PODS.status, "p", not_ready("False"), namespace="default", kind=PatchKind.STRATEGIC)
        await cluster.after(60.0)
        pod = cluster.pod("p")

        assert pod is not None
        assert {each.type: each.status for each in pod.status.conditions or ()}["Ready"] == "False"
