"""What a drain does to pods that a disruption budget protects, and to pods that fit nowhere else.

Judged by the API server's audit log of evictions and by a watch of pods, never by what our programs count.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bigfleet.demo.kubernetes.components import Component
from bigfleet.operator.kubernetes.api import JsonObject
from bigfleet.operator.kubernetes.resources import NODES, PODS, UPCOMING_NODES
from tests.kubernetes.cluster import ClusterUnderTest, eventually
from tests.kubernetes.fleet import SHARD, ZONES, FleetUnderTest, operator_of, pool
from tests.kubernetes.kinds import (
    DEPLOYMENTS,
    DISRUPTION_BUDGETS,
    PRIORITY_CLASSES,
    deployment,
    disruption_budget,
    pod_template,
    priority_class,
)
from tests.kubernetes.ready_pods import watched_pods

pytestmark = pytest.mark.kubernetes

VICTIM, WINNER = "one", "two"
INSTANCE_TYPE = "node.kubernetes.io/instance-type"
#: There is one of these, and it is paid for anyway: pods that may run anywhere get it first.
CONTESTED = "mem.8x64"
#: Far below and far above a gap of 900,000: a notice of 10 min, and one of 10 s.
CALM, URGENT = ("calm", 1_000), ("urgent", 1_000_000)
ACCEPTED = 201


@pytest.fixture
async def fleet(
    cluster: ClusterUnderTest, second_cluster: ClusterUnderTest, tmp_path: Path
) -> AsyncIterator[FleetUnderTest]:
    """Two clusters; the first has the contested machine as soon as it has pods."""
    pools = [
        pool(CONTESTED, ZONES[0], 1, capacity_type="reserved"),
        *(pool("std.4x16", zone, 4) for zone in ZONES),
    ]
    clusters = {VICTIM: cluster, WINNER: second_cluster}
    async with FleetUnderTest(tmp_path / "fleet", clusters, pools=pools) as opened:
        for name, value in (CALM, URGENT):
            await second_cluster.api.apply(
                PRIORITY_CLASSES, name, priority_class(name, value), field_manager="bigfleet-tests"
            )
        yield opened


async def guarded(fleet: FleetUnderTest, *, pods: int, min_available: int) -> str:
    """Return the namespace of guarded pods, all of them on the contested machine."""
    cluster = fleet.clusters[VICTIM]
    namespace = await cluster.make_namespace()
    budget = disruption_budget("guarded", "guarded", min_available=min_available)
    await cluster.api.create(DISRUPTION_BUDGETS, budget, namespace=namespace)
    template = pod_template(requests={"cpu": "1", "memory": "4Gi"})
    await cluster.api.create(DEPLOYMENTS, deployment("guarded", pods, template), namespace=namespace)
    running = await fleet.running(VICTIM, namespace, pods)
    (machine,) = await fleet.machines_of(VICTIM)
    assert machine.instance_type == CONTESTED
    assert {pod.spec.node_name for pod in running} == {machine.node_name}
    return namespace


async def contest(fleet: FleetUnderTest, priority: str) -> str:
    """Let a pod of the other cluster want the contested machine; return its namespace."""
    cluster = fleet.clusters[WINNER]
    namespace = await cluster.make_namespace()
    template = pod_template(
        requests={"cpu": "4", "memory": "8Gi"}, nodeSelector={INSTANCE_TYPE: CONTESTED}, priorityClassName=priority
    )
    await cluster.api.create(DEPLOYMENTS, deployment("wanted", 1, template), namespace=namespace)
    return namespace


def evictions(cluster: ClusterUnderTest, namespace: str, code: int) -> list[str]:
    """Return the pods of a namespace whose eviction was answered so, in that order."""
    asked = [each for each in cluster.audited(is_eviction=True) if each.object_ref.namespace == namespace]
    return [each.object_ref.name for each in asked if each.response_status.code == code]


def outcomes(fleet: FleetUnderTest, cluster: str) -> list[str]:
    """Return how the drains of a cluster ended, as its operator said it."""
    return [line["outcome"] for line in fleet.program(operator_of(cluster)).events("drain.ended")]


async def test_a_budget_that_allows_one_at_a_time_is_never_exceeded_by_a_preemption(fleet: FleetUnderTest) -> None:
    cluster = fleet.clusters[VICTIM]
    namespace = await guarded(fleet, pods=5, min_available=4)
    async with watched_pods(cluster, namespace, "guarded", 5) as healthy:
        wanted = await contest(fleet, CALM[0])
        await fleet.running(WINNER, wanted, 1)
        await fleet.running(VICTIM, namespace, 5)

    evicted = set(evictions(cluster, namespace, ACCEPTED))
    assert healthy.lowest_left(evicted) == 4
    assert len(evicted) == 5
    assert outcomes(fleet, VICTIM) == ["DRAINED"]
    assert fleet.complaints() == []


@pytest.mark.slow
async def test_a_budget_is_not_exceeded_while_its_controller_sees_nothing(fleet: FleetUnderTest) -> None:
    """Its status still counts pods that have gone, and the API server grants evictions by the status."""
    cluster = fleet.clusters[VICTIM]
    namespace = await guarded(fleet, pods=5, min_available=2)

    async def allowed() -> str:
        query = ("get", "pdb", "guarded", "--namespace", namespace, "--output", "jsonpath={.status.disruptionsAllowed}")
        return await cluster.plane.kubectl(*query)

    async def allows_three() -> bool:
        return await allowed() == "3"

    async def expired() -> bool:
        return outcomes(fleet, VICTIM) == ["GRACE_EXPIRED"]

    await eventually(allows_three, "the budget does not count five pods")
    cluster.plane.pause(Component.CONTROLLER_MANAGER)
    try:
        for gone in (await cluster.pods(namespace))[:2]:
            await cluster.api.delete(PODS, gone.metadata.name, namespace=namespace)
            await cluster.gone(PODS, gone.metadata.name, namespace)
        await contest(fleet, URGENT[0])
        await eventually(expired, "the drain has no result")
        still_allowed = await allowed()
    finally:
        cluster.plane.resume(Component.CONTROLLER_MANAGER)

    assert still_allowed == "2"
    assert len(evictions(cluster, namespace, ACCEPTED)) == 1


async def test_a_budget_of_none_lets_the_grace_expire_and_nothing_is_evicted(fleet: FleetUnderTest) -> None:
    cluster = fleet.clusters[VICTIM]
    namespace = await guarded(fleet, pods=3, min_available=3)
    wanted = await contest(fleet, URGENT[0])

    async def expired() -> bool:
        return outcomes(fleet, VICTIM) == ["GRACE_EXPIRED"]

    await eventually(expired, "the drain has no result")

    assert evictions(cluster, namespace, ACCEPTED) == []
    # The shard goes on with the provider: the machine serves the other cluster, and the pods get another one.
    await fleet.running(WINNER, wanted, 1)
    await fleet.running(VICTIM, namespace, 3)
    assert evictions(cluster, namespace, ACCEPTED) == []


async def test_a_node_whose_pods_fit_nowhere_else_is_not_reclaimed(cluster: ClusterUnderTest, tmp_path: Path) -> None:
    """Two pods exclude each other, by a rule that no CapacityRequest can say, and a third one that needed room goes."""
    pools = [pool("std.4x16", ZONES[0], 4)]
    async with FleetUnderTest(tmp_path / "fleet", {"one": cluster}, pools=pools) as fleet:
        namespace = await cluster.make_namespace()
        requests = {"cpu": "1", "memory": "1Gi"}
        # Both say it: what only the rule of another pod keeps off, kube-scheduler does not try again when a Node joins.
        templates = {
            "left": pod_template(requests=requests, affinity=_apart_from("right")),
            "right": pod_template(requests=requests, affinity=_apart_from("left")),
            "filler": pod_template(requests={"cpu": "2500m", "memory": "1Gi"}),
        }
        for name, template in templates.items():
            await cluster.api.create(DEPLOYMENTS, deployment(name, 1, template), namespace=namespace)
        before = await fleet.running("one", namespace, 3)
        await cluster.api.patch(DEPLOYMENTS, "filler", {"spec": {"replicas": 0}}, namespace=namespace)
        after = await fleet.running("one", namespace, 2)

        async def answered() -> bool:
            ended = fleet.program(SHARD).events("action.finished")
            return any(line["outcome"] == "would_not_fit" for line in ended)

        await eventually(answered, "no reclaim was answered with WOULD_NOT_FIT")

        async def conditions() -> list[str]:
            page = await cluster.api.list_page(UPCOMING_NODES)
            found = [each for stored in page.items for each in stored.status.conditions or ()]
            return [each.reason for each in found if each.type == "Drained"]

        assert await eventually(conditions, "no UpcomingNode shows it") == ["WouldNotFit"]
        nodes = {each.metadata.name: each for each in (await cluster.api.list_page(NODES)).items}
        assert len(nodes) == 2
        assert not any(node.spec.unschedulable for node in nodes.values())
        assert {pod.metadata.uid for pod in after} <= {pod.metadata.uid for pod in before}
        assert evictions(cluster, namespace, ACCEPTED) == []


async def would_not_fit(fleet: FleetUnderTest) -> list[str]:
    """Return what the shard noted of reclaims that were answered so, once there is one."""

    async def noted() -> list[str]:
        ended = fleet.program(SHARD).events("drain.rejected")
        return [line["reason"] for line in ended]

    return await eventually(noted, "no reclaim was answered with WOULD_NOT_FIT")


async def test_pods_with_one_host_port_have_a_node_each_and_are_not_evicted(
    cluster: ClusterUnderTest, tmp_path: Path
) -> None:
    """They are counted as if they shared a machine, because they request different amounts; one waits for a minute."""
    async with FleetUnderTest(tmp_path / "fleet", {"one": cluster}, pools=[pool("std.4x16", ZONES[0], 4)]) as fleet:
        # The API server makes the container port of the second one a host port.
        ports: list[JsonObject] = [{"containerPort": 8080, "hostPort": 8080}, {"containerPort": 8080}]
        running = []
        for number, port in enumerate(ports):
            namespace = await cluster.make_namespace()
            requests = {"cpu": f"{number + 1}", "memory": "1Gi"}
            container: JsonObject = {
                "name": "main",
                "image": "fake",
                "resources": {"requests": requests},
                "ports": [port],
            }
            template = pod_template(containers=[container], hostNetwork=number == 1)
            await cluster.api.create(DEPLOYMENTS, deployment("web", 1, template), namespace=namespace)
            running.append(namespace)
        before = [pod for namespace in running for pod in await fleet.running("one", namespace, 1)]
        reasons = await would_not_fit(fleet)
        after = [pod for namespace in running for pod in await cluster.pods(namespace)]

        assert "host port 8080/TCP taken" in reasons[0]
        assert len({pod.spec.node_name for pod in after}) == 2
        assert {pod.metadata.uid for pod in after} == {pod.metadata.uid for pod in before}
        assert [name for namespace in running for name in evictions(cluster, namespace, ACCEPTED)] == []
        assert not any(node.spec.unschedulable for node in (await cluster.api.list_page(NODES)).items)


async def test_a_pod_that_its_budget_never_lets_go_is_left_where_it_is_by_a_reclaim(
    cluster: ClusterUnderTest, tmp_path: Path
) -> None:
    async with FleetUnderTest(tmp_path / "fleet", {"one": cluster}, pools=[pool("std.4x16", ZONES[0], 4)]) as fleet:
        namespace = await cluster.make_namespace()
        for count, (name, cpu) in enumerate((("left", "1"), ("filler", "2500m"), ("right", "1")), 1):
            budget = disruption_budget(name, name, min_available=1)
            await cluster.api.create(DISRUPTION_BUDGETS, budget, namespace=namespace)
            template = pod_template(requests={"cpu": cpu, "memory": "1Gi"})
            await cluster.api.create(DEPLOYMENTS, deployment(name, 1, template), namespace=namespace)
            await fleet.running("one", namespace, count)
        await cluster.api.patch(DEPLOYMENTS, "filler", {"spec": {"replicas": 0}}, namespace=namespace)
        before = await fleet.running("one", namespace, 2)
        reasons = await would_not_fit(fleet)
        after = await cluster.pods(namespace)

        assert "can never be evicted: the disruption budget" in reasons[0]
        assert {pod.metadata.uid for pod in after} == {pod.metadata.uid for pod in before}
        assert [each for each in cluster.audited(is_eviction=True) if each.object_ref.namespace == namespace] == []
        assert not any(node.spec.unschedulable for node in (await cluster.api.list_page(NODES)).items)


def _apart_from(app: str) -> JsonObject:
    """Return the affinity of a pod that shares no node with those of an app."""
    term: JsonObject = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"app": app}}}
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
