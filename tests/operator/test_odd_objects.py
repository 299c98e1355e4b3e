"""Objects with absent, empty, null, huge and unreadable parts end neither the operator nor the pod controller.

API servers refuse most of them; what is in front of one, a webhook or an older schema may let them through. Objects
that do not fit their types are decoded to their metadata, as from HTTP.
"""

import asyncio
import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from bigfleet.model.frames import NodeStateUpdate, ReclaimInstruction
from bigfleet.model.states import MachineState
from bigfleet.operator.kubernetes.api import ApiError, Resource
from bigfleet.operator.kubernetes.reflector import Reflector
from bigfleet.operator.kubernetes.resources import (
    AVAILABLE_CAPACITIES,
    CAPACITY_REQUESTS,
    DAEMON_SETS,
    FIELD_MANAGER,
    MACHINE_ID,
    MANAGED_BY,
    NODES,
    OWNED_BY_POD,
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    PODS,
    RECLAIM_ANNOTATION,
    UPCOMING_NODES,
)
from bigfleet.operator.pods.controller import ClusterViews, PodController
from bigfleet.operator.pods.unmanaged_nodes import reduced_node, reduced_upcoming_node
from bigfleet.sim.kubernetes.client import InMemoryApi
from tests.operator.fake_shard import FakeStream
from tests.operator.test_agent import World

pytestmark = pytest.mark.virtual_time

Path = tuple[str | int, ...]

STEPS = 120
#: The log lines of a handler that raised something else than an ApiError.
FAILURES = {
    "drain.failed",
    "operator.pod_reconcile_failed",
    "operator.status_write_failed",
    "operator.write_failed",
    "rollup.recount_differed",
}
MOMENT = "2026-01-01T00:00:00Z"
SELECTOR = {"matchLabels": {"app": "a"}, "matchExpressions": [{"key": "k", "operator": "In", "values": ["a", "b"]}]}
TERM = {
    "matchExpressions": [{"key": "zone", "operator": "Gt", "values": ["1"]}],
    "matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}],
}
NEAR = {"labelSelector": SELECTOR, "topologyKey": "kubernetes.io/hostname", "namespaces": ["default"]}
SPREAD = {"maxSkew": 1, "topologyKey": "z", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": SELECTOR}
RESOURCES = {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "2"}}
POD_SPEC = {
    "priority": 5,
    "priorityClassName": "high",
    "terminationGracePeriodSeconds": 30,
    "overhead": {"cpu": "100m"},
    "nodeSelector": {"a": "b"},
    "schedulingGates": [{"name": "g"}],
    "resourceClaims": [{"name": "x"}],
    "resources": {"requests": {"cpu": "1"}},
    "tolerations": [{"key": "a", "operator": "Exists", "effect": "NoSchedule", "tolerationSeconds": 3}],
    "containers": [{"name": "c", "resources": RESOURCES, "ports": [{"hostPort": 80, "protocol": "TCP"}]}],
    "initContainers": [{"name": "i", "restartPolicy": "Always", "resources": RESOURCES}],
    "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}],
    "topologySpreadConstraints": [{**SPREAD, "matchLabelKeys": ["app"]}],
    "affinity": {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [TERM]}},
        "podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{**NEAR, "mismatchLabelKeys": ["b"]}]},
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [NEAR]},
    },
}
OWNER = {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u", "controller": True}
CONDITION = {"type": "Ready", "status": "True", "reason": "r", "message": "m", "lastTransitionTime": MOMENT}
OBJECTS: list[tuple[Resource[Any], dict[str, Any]]] = [
    (
        PODS,
        {
            "metadata": {"name": "p", "namespace": "default", "uid": "u", "labels": {"app": "a"}, "annotations": {}},
            "spec": {"nodeName": "n", **POD_SPEC},
            "status": {
                "phase": "Pending",
                "conditions": [{**CONDITION, "type": "PodScheduled", "status": "False", "reason": "Unschedulable"}],
            },
        },
    ),
    (
        CAPACITY_REQUESTS,
        {
            "metadata": {
                "name": "cr",
                "namespace": "default",
                "labels": {OWNED_BY_POD: "u"},
                "ownerReferences": [OWNER],
            },
            "spec": {
                "priority": 0,
                "resources": {"cpu": "1", "memory": "1Gi"},
                "requirements": [{"key": "k", "operator": "In", "values": ["a"]}],
                "coLocation": {"topologyKey": "z", "labelSelector": SELECTOR},
                "exclusion": {"group": "g", "maxPerMachine": 1},
                "topologySpread": [SPREAD],
                "interruptionPenalty": "1",
                "reclamationPenalty": "2",
            },
            "status": {"phase": "Pending", "conditions": [CONDITION], "acknowledgedGeneration": 1},
        },
    ),
    (
        NODES,
        {
            "metadata": {
                "name": "n",
                "labels": {MACHINE_ID: "m"},
                "annotations": {MACHINE_ID: "m", RECLAIM_ANNOTATION: '{"instruction":"i","machine":"m"}'},
            },
            "spec": {"providerID": "sim://m", "taints": [{"key": "a", "value": "b", "effect": "NoSchedule"}]},
            "status": {"allocatable": {"cpu": "8", "pods": "110"}, "conditions": [CONDITION]},
        },
    ),
    (
        DAEMON_SETS,
        {
            "metadata": {"name": "d", "namespace": "kube-system"},
            "spec": {"selector": SELECTOR, "template": {"metadata": {"labels": {"app": "a"}}, "spec": POD_SPEC}},
            "status": {"desiredNumberScheduled": 1},
        },
    ),
    (
        UPCOMING_NODES,
        {
            "metadata": {"name": "m", "labels": {MANAGED_BY: FIELD_MANAGER}},
            "spec": {"machineId": "m", "instanceType": "t", "resources": {"cpu": "8"}, "taints": [{"key": "a"}]},
            "status": {"phase": "Ready", "conditions": [CONDITION], "lastError": "x", "nodeRef": {"name": "n"}},
        },
    ),
    (
        AVAILABLE_CAPACITIES,
        {
            "metadata": {"name": "a", "labels": {MANAGED_BY: FIELD_MANAGER}},
            "spec": {"instanceType": "t"},
            "status": {"expiresAt": MOMENT, "lastUpdated": MOMENT},
        },
    ),
    (
        PERSISTENT_VOLUME_CLAIMS,
        {"metadata": {"name": "c", "namespace": "default"}, "spec": {"volumeName": "pv"}, "status": {"phase": "Bound"}},
    ),
    (
        PERSISTENT_VOLUMES,
        {"metadata": {"name": "pv"}, "spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": [TERM]}}}},
    ),
]
ODD_VALUES: list[Any] = [
    *(None, [], {}, "", True, [None], [{}], [[]], {"": ""}, {"": None}, {"cpu": None}),
    *(-1, 0, 1.5, 2**31, 2**63 - 1, 2**70),
    *("NaN", "1e999999", "1e-999999", "-5", "99999999999999999999999Ei", "0x10", "٣"),
    *("9999-99-99T99:99:99Z", "0000-01-01T00:00:00Z", "9999-12-31T23:59:59.999999999+99:99"),
    *("{", "[1]", '{"machine":5}', '{"instruction":null,"machine":"m","deadline":1e400}'),
    *("\0a", "🙂", "/", "a/b/c", "x" * 70_000),
]


def paths(value: Any, at: Path = ()) -> Iterator[Path]:
    """Return the path of each part of an object but its root."""
    if at:
        yield at
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in pairs:
        yield from paths(part, (*at, key))


def spoiled(manifest: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return an object with some parts replaced or removed, not those that name it."""
    found = copy.deepcopy(manifest)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        kept = {("metadata",), ("metadata", "name"), ("metadata", "namespace")}
        places = [path for path in paths(found) if path not in kept]
        if not places:
            break
        *above, last = rng.choice(places)
        holder: Any = found
        for key in above:
            holder = holder[key]
        if isinstance(holder, dict) and rng.random() < 0.15:
            del holder[last]
        else:
            holder[last] = copy.deepcopy(rng.choice(ODD_VALUES))
    return found


def as_decoded(resource: Resource[Any], manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the object, or what is left of one that does not fit its type."""
    try:
        msgspec.json.decode(json.dumps(manifest), type=resource.type)
    except msgspec.MsgspecError:
        names = ("name", "namespace")
        return {"metadata": {name: value for name, value in manifest["metadata"].items() if name in names}}
    return manifest


async def start_pod_controller(world: World) -> None:
    api, clock = InMemoryApi(world.server), world.clock
    pods = Reflector(api, PODS, clock=clock, rng=random.Random(3))
    requests = Reflector(api, CAPACITY_REQUESTS, clock=clock, rng=random.Random(4), label_selector=OWNED_BY_POD)
    claims = Reflector(api, PERSISTENT_VOLUME_CLAIMS, clock=clock, rng=random.Random(5))
    volumes = Reflector(api, PERSISTENT_VOLUMES, clock=clock, rng=random.Random(6))
    nodes = Reflector(api, NODES, clock=clock, rng=random.Random(8), transform=reduced_node)
    upcoming = Reflector(api, UPCOMING_NODES, clock=clock, rng=random.Random(9), transform=reduced_upcoming_node)
    views = ClusterViews(
        pods=pods, requests=requests, claims=claims, volumes=volumes, nodes=nodes, upcoming_nodes=upcoming
    )
    controller = PodController(api, views, clock=clock, rng=random.Random(7))
    pods.add_listener(controller.index.pods_listener)
    requests.add_listener(controller.index.requests_listener)
    claims.add_listener(controller.index.claims_listener)
    volumes.add_listener(controller.index.volumes_listener)
    nodes.add_listener(controller.unmanaged.nodes_listener)
    upcoming.add_listener(controller.unmanaged.machines_listener)
    followed = (pods, requests, claims, volumes, nodes, upcoming)
    world.tasks += [asyncio.create_task(each.run()) for each in followed]
    world.tasks.append(asyncio.create_task(controller.run()))


def check_running(world: World) -> None:
    for task in world.tasks:
        if task.done():
            task.result()
            raise AssertionError(f"{task.get_name()} has ended")


def say_something(stream: FakeStream, step: int) -> None:
    """Have the machine drained now and then, and put back into service."""
    if step % 20 == 10:
        names = {"nodes": ("n",), "machine_ids": ("m",), "provider_ids": ("sim://m",)}
        stream.say(
            ReclaimInstruction(
                instruction_id=f"i{step}", grace_seconds=60, preemptor_priority=0, reason="reclaim", **names
            )
        )
    if step % 20 == 0:
        stream.say(NodeStateUpdate(machine_id="m", cluster_id="blue", state=MachineState.CONFIGURED))


def change_something(world: World, rng: random.Random) -> None:
    resource, manifest = rng.choice(OBJECTS)
    metadata = manifest["metadata"]
    try:
        if rng.random() < 0.1:
            world.server.remove(resource, metadata["name"], metadata.get("namespace", ""))
        else:
            world.server.put(resource, as_decoded(resource, spoiled(manifest, rng)))
    except (ApiError, AttributeError, KeyError, TypeError, ValueError):
        # Absent, or too odd for the simulated server itself.
        return


@pytest.mark.parametrize("seed", range(6))
async def test_odd_objects_end_nothing(seed: int) -> None:
    rng, world = random.Random(seed), World()
    for resource, manifest in OBJECTS:
        world.server.put(resource, manifest)
    with capture_logs() as logs:
        stream = await world.start()
        await start_pod_controller(world)
        for step in range(STEPS):
            say_something(stream, step)
            change_something(world, rng)
            await asyncio.sleep(rng.choice((0.0, 0.1, 1.0, 15.0)))
            check_running(world)
        # Everything is counted again, and looked at again.
        await asyncio.sleep(700)
        check_running(world)
    await world.stop()

    assert [line for line in logs if line["event"] in FAILURES] == []
