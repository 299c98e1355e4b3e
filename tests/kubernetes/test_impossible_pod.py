"""A pod that no machine of the fleet could host: it is named as such, and harms no other pod."""

from pathlib import Path

import pytest

from bigfleet.operator.kubernetes.resources import CAPACITY_REQUESTS, PODS
from tests.kubernetes.cluster import ClusterUnderTest, eventually
from tests.kubernetes.fleet import ZONES, FleetUnderTest, pool
from tests.kubernetes.kinds import DEPLOYMENTS, EVENTS, deployment, pod, pod_template

pytestmark = pytest.mark.kubernetes


async def test_a_pod_that_no_machine_can_host_is_named_with_the_largest_and_harms_no_neighbour(
    cluster: ClusterUnderTest, tmp_path: Path
) -> None:
    pools = [pool("std.4x16", zone, 3) for zone in ZONES]
    async with FleetUnderTest(tmp_path / "fleet", {"one": cluster}, pools=pools) as fleet:
        namespace = await cluster.make_namespace()
        await cluster.api.create(DEPLOYMENTS, deployment("neighbour", 6, pod_template()), namespace=namespace)
        await fleet.running("one", namespace, 6)
        await fleet.at_rest()
        before = {machine.id for machine in await fleet.machines_of("one")}
        await cluster.api.create(PODS, pod("giant", pod_template(requests={"cpu": "1000"})), namespace=namespace)
        giant = await cluster.api.get(PODS, "giant", namespace=namespace)
        subjects = {"Pod": "giant", "CapacityRequest": f"cr-{giant.metadata.uid}"}

        async def named() -> dict[str, str] | None:
            events = (await cluster.api.list_page(EVENTS, namespace=namespace, limit=0)).items
            large = [each for each in events if each.reason == "RequestTooLarge"]
            messages = {each.involved_object.kind: each.message for each in large}
            names = {each.involved_object.kind: each.involved_object.name for each in large}
            return messages if names == subjects else None

        messages = await eventually(named, "pod and CapacityRequest have no Event RequestTooLarge")
        request = await cluster.api.get(CAPACITY_REQUESTS, subjects["CapacityRequest"], namespace=namespace)
        neighbours = [each for each in await cluster.pods(namespace) if each.metadata.name != "giant"]

        # The largest machine has 3840m of CPU for pods.
        assert all("the largest" in message and "3840m" in message for message in messages.values()), messages
        conditions = {each.type: (each.status, each.reason) for each in request.status.conditions or ()}
        assert conditions["Shortfall"] == ("True", "RequestTooLarge")
        assert {machine.id for machine in await fleet.machines_of("one")} == before
        assert len(neighbours) == 6
        assert {each.status.phase for each in neighbours} == {"Running"}
        assert fleet.complaints() == []
