"""Nodes that BigFleet did not provide: their pods are no demand until the Node is cordoned."""

from pathlib import Path

import pytest

from bigfleet.demo.kubernetes.fake_node import FakeNode
from bigfleet.model.states import MachineState
from bigfleet.operator.kubernetes.resources import CAPACITY_REQUESTS, EVICTIONS, LEASES, NODES
from tests.kubernetes.cluster import ClusterUnderTest, eventually, is_ready
from tests.kubernetes.fleet import SYSTEM_NAMESPACE, ZONES, FleetUnderTest, pool
from tests.kubernetes.kinds import DEPLOYMENTS, deployment, eviction, pod_template

pytestmark = pytest.mark.kubernetes


async def test_pods_of_an_unmanaged_node_are_served_once_it_is_cordoned(
    cluster: ClusterUnderTest, tmp_path: Path
) -> None:
    """The migration of docs/kubernetes.md: cordon, wait for the machines, drain."""
    fleet = FleetUnderTest(
        tmp_path / "fleet",
        {"one": cluster},
        pools=[pool("std.4x16", ZONES[0], 4)],
        pod_controller_flags=("--unmanaged-after", "1s"),
    )
    fleet.unmanaged_nodes["old"] = FakeNode(name="old", resources={"cpu": "4", "memory": "64Gi", "pods": "110"})
    async with fleet:
        await cluster.ready_node("old")
        namespace = await cluster.make_namespace()
        template = pod_template(requests={"cpu": "1", "memory": "1Gi"})

        async def requests() -> int:
            return len((await cluster.api.list_page(CAPACITY_REQUESTS, namespace=namespace, limit=0)).items)

        async def pod_controller_leads() -> bool:
            lease = await cluster.read(LEASES, "bigfleet-pod-controller", SYSTEM_NAMESPACE)
            return lease is not None and bool(lease.spec.holder_identity)

        async def machines() -> int:
            return sum(each.state is MachineState.CONFIGURED for each in await fleet.machines_of("one"))

        async def pods_by_place() -> tuple[int, int]:
            names = [each.spec.node_name for each in await cluster.pods(namespace) if is_ready(each)]
            return names.count("old"), len(names) - names.count("old")

        await cluster.api.create(DEPLOYMENTS, deployment("web", 4, template), namespace=namespace)
        await cluster.running_pods(namespace, 4)
        await eventually(pod_controller_leads, "no pod controller leads")
        assert await requests() == 0
        await cluster.api.patch(DEPLOYMENTS, "web", {"spec": {"replicas": 6}}, namespace=namespace)

        async def only_the_rest_is_served() -> bool:
            return (await requests(), await machines(), await pods_by_place()) == (2, 1, (4, 2))

        await eventually(only_the_rest_is_served, "one machine for the two pods without room")
        await cluster.api.patch(NODES, "old", {"spec": {"unschedulable": True}})

        async def room_for_all() -> bool:
            return (await requests(), await machines()) == (6, 2)

        await eventually(room_for_all, "no machines for the pods of the cordoned Node")
        for each in await cluster.pods(namespace):
            if each.spec.node_name == "old":
                name = each.metadata.name
                await cluster.api.create(EVICTIONS, eviction(name, namespace), namespace=namespace, name=name)

        async def moved() -> bool:
            return (await requests(), await machines(), await pods_by_place()) == (6, 2, (0, 6))

        await eventually(moved, "the pods do not run on machines of the fleet")
        fleet.unmanaged_nodes.clear()
        await cluster.gone(NODES, "old")

        assert await requests() == 6
        assert fleet.complaints() == []
