"""Pods that no machine of the fleet could host, by mistake or as an attack: they are named, and harm no other pod."""

from pathlib import Path

import pytest

from bigfleet.operator.kubernetes.api import Json
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


#: More than any machine has, in the largest numbers that an API server takes.
HUGE = "9223372036854775807"


def hostile_pods() -> dict[str, dict[str, Json]]:
    """Return templates of pods that an API server takes and that are mistakes or attacks, by name."""
    many_devices = {f"example.com/d{n}": "1" for n in range(300)}
    many_tolerations: list[Json] = [{"key": f"example.com/k{n}", "operator": "Exists"} for n in range(2_000)]
    values: list[Json] = [f"z{n}" for n in range(5_000)]
    term: Json = {"matchExpressions": [{"key": "topology.kubernetes.io/zone", "operator": "In", "values": values}]}
    zones: Json = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term] * 5}}
    }
    myself: Json = {"labelSelector": {"matchLabels": {"app": "torn"}}, "topologyKey": "kubernetes.io/hostname"}
    torn: Json = {
        "podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [myself]},
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [myself]},
    }
    spreads: list[Json] = [
        {"maxSkew": 1, "topologyKey": f"example.com/t{n}", "whenUnsatisfiable": "DoNotSchedule"} for n in range(50)
    ]
    return {
        "huge": pod_template(requests={"cpu": HUGE, "memory": HUGE, "ephemeral-storage": HUGE}),
        "huge-device": pod_template(
            requests={"cpu": "1", "example.com/device": HUGE}, limits={"example.com/device": HUGE}
        ),
        "exa": pod_template(requests={"memory": "7Ei"}),
        "nano": pod_template(requests={"cpu": "1n", "memory": "1m"}),
        "nothing": pod_template(requests={"cpu": "0", "memory": "0"}, nodeSelector={"example.com/never": "there"}),
        "many-devices": pod_template(requests=many_devices, limits=many_devices),
        "tolerant": pod_template(tolerations=many_tolerations, nodeSelector={"example.com/never": "there"}),
        "choosy": pod_template(affinity=zones),
        "torn": pod_template(labels={"app": "torn"}, affinity=torn),
        "spread": pod_template(topologySpreadConstraints=spreads),
        "gated": pod_template(schedulingGates=[{"name": "example.com/never"}]),
        "annotated": pod_template(annotations={"example.com/long": "x" * 200_000}, requests={"cpu": HUGE}),
        ".".join(["x" * 61] * 4): pod_template(requests={"cpu": HUGE}),
    }


async def test_pods_that_are_an_attack_are_named_and_harm_no_neighbour(
    cluster: ClusterUnderTest, tmp_path: Path
) -> None:
    """The neighbour keeps its machines and gets more when it grows afterwards."""
    pools = [pool("std.4x16", zone, 6) for zone in ZONES]
    async with FleetUnderTest(tmp_path / "fleet", {"one": cluster}, pools=pools) as fleet:
        namespace, hostile = await cluster.make_namespace(), await cluster.make_namespace()
        await cluster.api.create(DEPLOYMENTS, deployment("neighbour", 6, pod_template()), namespace=namespace)
        await fleet.running("one", namespace, 6)
        await fleet.at_rest()
        before = {machine.id for machine in await fleet.machines_of("one")}
        for name, template in hostile_pods().items():
            await cluster.api.create(PODS, pod(name, template), namespace=hostile)

        async def named() -> set[str] | None:
            events = (await cluster.api.list_page(EVENTS, namespace=hostile, limit=0)).items
            found = {e.involved_object.name: e.message for e in events if e.reason == "RequestTooLarge"}
            return set(found.values()) if found.keys() >= {"huge", "huge-device", "exa"} else None

        messages = await eventually(named, "not every huge pod has an Event RequestTooLarge")
        await cluster.api.create(DEPLOYMENTS, deployment("later", 6, pod_template()), namespace=namespace)
        await fleet.running("one", namespace, 12)
        after = {machine.id for machine in await fleet.machines_of("one")}

        assert any(HUGE in message for message in messages), messages
        assert before <= after
        # Twelve pods of the neighbour, three on a machine, and what of the others can run.
        assert len(after) <= 6, after
        assert fleet.complaints() == []
