"""Machines of the fake kubelet in a real cluster: the scheduler binds pods to them, and they run, end and vanish."""

import asyncio
from collections.abc import Mapping

import pytest

from bigfleet.demo.kubernetes.fake_node import NODE_LEASE_NAMESPACE, RUN_SECONDS, TERMINATION_SECONDS, FakeNode
from bigfleet.operator.kubernetes.api import ApiError, PatchKind
from bigfleet.operator.kubernetes.objects import NodeTaint, PodObject
from bigfleet.operator.kubernetes.resources import EVICTIONS, LEASES, NODES, PODS
from tests.kubernetes.cluster import ClusterUnderTest, eventually, is_ready
from tests.kubernetes.kinds import (
    DEPLOYMENTS,
    DISRUPTION_BUDGETS,
    JOBS,
    deployment,
    disruption_budget,
    eviction,
    job,
    pod,
    pod_template,
)

pytestmark = pytest.mark.kubernetes


def machine(
    name: str,
    *,
    cpu: str = "4",
    taints: tuple[NodeTaint, ...] = (),
    provider_id: str = "",
    labels: Mapping[str, str] | None = None,
    joins_after_seconds: float | None = 0.0,
    ready_after_seconds: float | None = 0.0,
) -> FakeNode:
    """Return a machine with 64 GiB."""
    return FakeNode(
        name=name,
        resources={"cpu": cpu, "memory": "64Gi"},
        taints=taints,
        provider_id=provider_id,
        labels=labels or {},
        joins_after_seconds=joins_after_seconds,
        ready_after_seconds=ready_after_seconds,
    )


# ---- binding -------------------------------------------------------------------------------------------------------


async def test_a_pod_is_bound_to_a_machine_and_runs_there(cluster: ClusterUnderTest, namespace: str) -> None:
    cluster.machine_booted(machine("m"))
    await cluster.api.create(PODS, pod("p", pod_template()), namespace=namespace)

    (running,) = await cluster.running_pods(namespace, 1)

    assert running.spec.node_name == "m"
    assert running.status.start_time is not None


async def test_a_pod_without_room_is_unschedulable_until_a_machine_joins(
    cluster: ClusterUnderTest, namespace: str
) -> None:
    cluster.machine_booted(machine("small", cpu="2"))
    await cluster.ready_node("small")
    await cluster.api.create(PODS, pod("p", pod_template(requests={"cpu": "3"})), namespace=namespace)
    (waiting,) = await cluster.unschedulable_pods(namespace, 1)
    cluster.machine_booted(machine("large", cpu="4"))
    (running,) = await cluster.running_pods(namespace, 1)

    assert waiting.spec.node_name == ""
    assert running.spec.node_name == "large"


async def test_labels_and_taints_of_a_machine_decide_which_pods_it_gets(
    cluster: ClusterUnderTest, namespace: str
) -> None:
    taint = NodeTaint(key="dedicated", value="gpu", effect="NoSchedule")
    cluster.machine_booted(machine("plain"))
    cluster.machine_booted(machine("gpu", taints=(taint,), labels={"pool": "gpu"}))
    for name in ("plain", "gpu"):
        await cluster.ready_node(name)
    tolerated = pod_template(
        nodeSelector={"pool": "gpu"}, tolerations=[{"key": "dedicated", "operator": "Exists", "effect": "NoSchedule"}]
    )
    await cluster.api.create(PODS, pod("a", tolerated), namespace=namespace)
    await cluster.api.create(PODS, pod("b", pod_template()), namespace=namespace)
    await cluster.api.create(PODS, pod("c", pod_template(nodeSelector={"pool": "gpu"})), namespace=namespace)
    await cluster.unschedulable_pods(namespace, 1)

    async def bound() -> dict[str, str] | None:
        found = {each.metadata.name: each.spec.node_name for each in await cluster.pods(namespace)}
        return found if found["a"] and found["b"] else None

    assert await eventually(bound, "the pods are not bound") == {"a": "gpu", "b": "plain", "c": ""}


async def test_a_machine_takes_as_many_pods_as_it_allows(cluster: ClusterUnderTest, namespace: str) -> None:
    cluster.machine_booted(FakeNode(name="m", resources={"cpu": "64", "memory": "64Gi", "pods": "3"}))
    await cluster.api.create(
        DEPLOYMENTS, deployment("d", 5, pod_template(requests={"cpu": "100m"})), namespace=namespace
    )
    await cluster.unschedulable_pods(namespace, 2)

    async def bound() -> bool:
        return len([each for each in await cluster.pods(namespace) if is_ready(each)]) == 3

    await eventually(bound, "three pods do not run")


# ---- machines ------------------------------------------------------------------------------------------------------


async def test_no_pod_is_bound_to_a_machine_before_it_is_ready(cluster: ClusterUnderTest, namespace: str) -> None:
    cluster.machine_booted(machine("late", ready_after_seconds=None))
    joined = await cluster.found(NODES, "late")
    await cluster.api.create(PODS, pod("p", pod_template()), namespace=namespace)
    await cluster.unschedulable_pods(namespace, 1)
    await cluster.kubelet.set_ready("late", ready=True)
    (running,) = await cluster.running_pods(namespace, 1)

    assert not joined.is_ready
    assert running.spec.node_name == "late"


async def test_a_machine_that_never_joins_has_no_node(cluster: ClusterUnderTest) -> None:
    cluster.machine_booted(machine("never", joins_after_seconds=None))
    cluster.machine_booted(machine("witness"))
    await cluster.ready_node("witness")

    assert await cluster.read(NODES, "never") is None


async def test_a_node_has_the_provider_id_of_its_machine_right_or_wrong(cluster: ClusterUnderTest) -> None:
    cluster.machine_booted(machine("m", provider_id="fake:///zone-a/of-another-machine"))
    node = await cluster.ready_node("m")

    assert node.spec.provider_id == "fake:///zone-a/of-another-machine"


async def test_each_machine_renews_its_lease(cluster: ClusterUnderTest) -> None:
    cluster.machine_booted(machine("m"))
    first = (await cluster.found(LEASES, "m", NODE_LEASE_NAMESPACE)).spec.renew_time

    async def renewed() -> bool:
        lease = await cluster.read(LEASES, "m", NODE_LEASE_NAMESPACE)
        return lease is not None and lease.spec.renew_time != first

    await eventually(renewed, "the Lease is not renewed")


async def test_pods_of_a_machine_that_vanishes_are_replaced_elsewhere(
    cluster: ClusterUnderTest, namespace: str
) -> None:
    cluster.machine_booted(machine("first"))
    await cluster.api.create(DEPLOYMENTS, deployment("d", 3, pod_template()), namespace=namespace)
    before = await cluster.running_pods(namespace, 3)
    cluster.machine_booted(machine("second"))
    await cluster.ready_node("second")
    await cluster.machine_gone("first")
    await cluster.gone(NODES, "first")

    async def moved() -> list[PodObject] | None:
        pods = await cluster.pods(namespace)
        done = len(pods) == 3 and all(is_ready(each) and each.spec.node_name == "second" for each in pods)
        return pods if done else None

    after = await eventually(moved, "the pods do not run on the second machine")

    assert {each.spec.node_name for each in before} == {"first"}
    assert not {each.metadata.uid for each in before} & {each.metadata.uid for each in after}


async def test_machines_follow_what_a_provider_reads(cluster: ClusterUnderTest, namespace: str) -> None:
    machines = {name: machine(name) for name in ("a", "b")}

    async def read() -> Mapping[str, FakeNode]:
        return dict(machines)

    following = asyncio.create_task(cluster.follow_machines(read))
    await cluster.ready_node("a")
    await cluster.ready_node("b")
    del machines["a"]
    machines["c"] = machine("c")
    await cluster.gone(NODES, "a")
    await cluster.ready_node("c")
    following.cancel()

    assert sorted(cluster.kubelet.nodes) == ["b", "c"]


# ---- the life of pods ----------------------------------------------------------------------------------------------


async def test_a_deployment_becomes_available_and_scales_down(cluster: ClusterUnderTest, namespace: str) -> None:
    cluster.machine_booted(machine("m", cpu="16"))
    await cluster.api.create(DEPLOYMENTS, deployment("d", 6, pod_template()), namespace=namespace)
    await cluster.running_pods(namespace, 6)

    async def available() -> bool:
        found = await cluster.api.get(DEPLOYMENTS, "d", namespace=namespace)
        return found.status.available_replicas == 6

    await eventually(available, "the Deployment is not available")
    await cluster.api.patch(DEPLOYMENTS, "d", {"spec": {"replicas": 2}}, namespace=namespace, kind=PatchKind.MERGE)
    remaining = await cluster.running_pods(namespace, 2)

    assert all(each.metadata.deletion_timestamp is None for each in remaining)


async def test_a_job_completes_when_its_pods_have_run_for_their_time(cluster: ClusterUnderTest, namespace: str) -> None:
    cluster.machine_booted(machine("m"))
    template = pod_template(annotations={RUN_SECONDS: "0.5"})
    await cluster.api.create(JOBS, job("j", 3, template), namespace=namespace)

    async def complete() -> bool:
        found = await cluster.api.get(JOBS, "j", namespace=namespace)
        return any(each.type == "Complete" and each.status == "True" for each in found.status.conditions or ())

    await eventually(complete, "the Job does not complete")

    assert {each.status.phase for each in await cluster.pods(namespace)} == {"Succeeded"}


async def test_a_pod_that_does_not_end_stays_until_it_is_deleted_by_force(
    cluster: ClusterUnderTest, namespace: str
) -> None:
    cluster.machine_booted(machine("m"))
    stubborn = pod_template(annotations={TERMINATION_SECONDS: "never"})
    await cluster.api.create(PODS, pod("stubborn", stubborn), namespace=namespace)
    await cluster.api.create(PODS, pod("witness", pod_template()), namespace=namespace)
    await cluster.running_pods(namespace, 2)
    for name in ("stubborn", "witness"):
        await cluster.api.delete(PODS, name, namespace=namespace)
    await cluster.gone(PODS, "witness", namespace)
    (remaining,) = await cluster.pods(namespace)
    await cluster.api.delete(PODS, "stubborn", namespace=namespace, grace_seconds=0)
    await cluster.gone(PODS, "stubborn", namespace)

    assert remaining.metadata.deletion_timestamp is not None


# ---- evictions -----------------------------------------------------------------------------------------------------


async def test_an_eviction_that_a_budget_forbids_is_429_until_the_budget_allows_it(
    cluster: ClusterUnderTest, namespace: str
) -> None:
    """A real API server sends no Retry-After then; each answer is in the audit log."""
    cluster.machine_booted(machine("m"))
    await cluster.api.create(DEPLOYMENTS, deployment("d", 2, pod_template()), namespace=namespace)
    await cluster.api.create(DISRUPTION_BUDGETS, disruption_budget("b", "d", min_available=1), namespace=namespace)
    first, second = await cluster.running_pods(namespace, 2)

    async def evict(pod_object: PodObject) -> ApiError | None:
        name = pod_object.metadata.name
        try:
            await cluster.api.create(EVICTIONS, eviction(name, namespace), namespace=namespace, name=name)
        except ApiError as error:
            return error
        return None

    async def was_evicted() -> bool:
        return await evict(first) is None

    # The budget counts nothing before the controller manager has seen it.
    await eventually(was_evicted, "the first pod is not evicted")
    await cluster.gone(PODS, first.metadata.name, namespace)
    await cluster.api.patch(DISRUPTION_BUDGETS, "b", {"spec": {"minAvailable": 2}}, namespace=namespace)

    async def refusal() -> ApiError | None:
        error = await evict(second)
        assert error is not None, "the budget of 2 let the last one go"
        # Until the controller manager has seen the change, the answer asks to come back in 10 s.
        return error if error.causes and error.retry_after_seconds is None else None

    refused = await eventually(refusal, "the budget refuses nothing")
    await cluster.api.patch(DISRUPTION_BUDGETS, "b", {"spec": {"minAvailable": 0}}, namespace=namespace)

    async def second_was_evicted() -> bool:
        return await evict(second) is None

    await eventually(second_was_evicted, "the second pod is not evicted")
    await cluster.gone(PODS, second.metadata.name, namespace)
    codes = [
        each.response_status.code
        for each in cluster.audited(is_eviction=True)
        if each.object_ref.name == second.metadata.name
    ]

    assert (refused.status, refused.causes, refused.retry_after_seconds) == (429, ("DisruptionBudget",), None)
    assert refused.is_transient
    assert codes[0] == 429
    assert codes[-1] == 201
