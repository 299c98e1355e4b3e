"""The example program `kwok.sh` on a real control plane: Nodes that stay Ready, and drains that leave nothing.

docs/spec/exec-provider.md §7.
"""

import base64
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bigfleet.demo.kubernetes.control_plane import ControlPlane
from bigfleet.operator.kubernetes.objects import PodObject
from bigfleet.operator.kubernetes.resources import NODES, PODS
from tests.kubernetes.cluster import ClusterUnderTest, eventually
from tests.kubernetes.kinds import pod, pod_template
from tests.kubernetes.kwok.kwok_program import BLOB, KwokProgram
from tests.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.kubernetes


@pytest.fixture
def program(control_plane: ControlPlane, control_plane_program: Path, tmp_path: Path) -> Iterator[KwokProgram]:
    """The example; its machine is deleted with the test."""
    kwok = KwokProgram(control_plane, control_plane_program, tmp_path)
    yield kwok
    kwok.run("delete", kwok.question("op-LAST"))


def configured(program: KwokProgram, cluster: str = "team-a") -> str:
    """Create and configure the machine and return the name of its Node."""
    program.run("create", program.question("op-MADE"))
    answer = json.loads(program.run("configure", program.question("op-01JOIN", cluster)))
    return str(answer["node_name"])


async def running_pod(cluster: ClusterUnderTest, namespace: str, name: str, node: str, **metadata: Any) -> PodObject:
    """Bind a pod to the Node and return it once it is shown as running."""
    body = pod(name, {**pod_template(nodeName=node), "metadata": metadata})
    await cluster.api.create(PODS, body, namespace=namespace)

    async def runs() -> PodObject | None:
        found = await cluster.api.get(PODS, name, namespace=namespace)
        return found if found.status.phase == "Running" else None

    return await eventually(runs, f"the pod {name} was not shown as running")


async def test_a_configured_machine_is_a_ready_node_of_its_type_and_zone(
    cluster: ClusterUnderTest, program: KwokProgram
) -> None:
    name = configured(program)

    node = await cluster.found(NODES, name)
    shown = json.loads(await cluster.plane.kubectl("get", "node", name, "-o", "json"))
    assert shown["status"]["capacity"] == {"cpu": "16", "memory": "64Gi", "pods": "110"}
    assert shown["status"]["allocatable"] == shown["status"]["capacity"]
    expected = {"node.kubernetes.io/instance-type": "kwok.16x64", "topology.kubernetes.io/zone": "zone-b"}
    assert node.metadata.labels is not None
    assert {key: node.metadata.labels[key] for key in (*expected, "rack")} == {**expected, "rack": "b-17"}
    machine_id = f"{program.name}-0001"
    assert program.hosts() == [{"id": machine_id, "host_ref": "op-MADE", "ready_in": "team-a"}]
    assert json.loads(program.run("ready", program.question("op-01JOIN"))) == {"ready": True}
    assert json.loads(program.run("ready", program.question("op-01JOIN", "team-b"))) == {"ready": False}
    assert json.loads(program.run("adopt", program.question(""))) == {"host_ref": "op-MADE", "found": "serving"}


async def test_the_blob_is_in_no_object(cluster: ClusterUnderTest, program: KwokProgram) -> None:
    configured(program)

    objects = await cluster.plane.kubectl("get", "nodes,configmaps,secrets,leases", "-A", "-o", "json")
    assert program.name in objects
    assert BLOB.decode() not in objects
    assert base64.b64encode(BLOB).decode() not in objects


def test_calls_that_come_again_have_their_effect_once(program: KwokProgram) -> None:
    creates = [
        subprocess.Popen(
            [program.path, "create"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=program.environment, text=True
        )
        for _ in range(3)
    ]
    answers = {each.communicate(json.dumps(program.question("op-MADE")))[0] for each in creates}
    assert answers == {'{"host_ref":"op-MADE"}\n'}
    # A Create of before has made the host.
    assert json.loads(program.run("create", program.question("op-LATER"))) == {"host_ref": "op-MADE"}
    assert configured(program) == configured(program)
    for _ in range(2):
        program.run("drain", program.question("op-DRAIN"))
    assert program.hosts() == [{"id": f"{program.name}-0001", "host_ref": "op-MADE"}]
    for _ in range(2):
        program.run("delete", program.question("op-DELETE"))
    assert program.hosts() == []


async def test_the_feed_renews_the_lease_and_makes_a_node_ready_again_after_an_outage(
    cluster: ClusterUnderTest, program: KwokProgram
) -> None:
    name = configured(program)
    unknown = '{"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}'
    await cluster.plane.kubectl("patch", "node", name, "--subresource=status", "--patch", unknown)
    assert not (await cluster.api.get(NODES, name)).is_ready
    assert program.hosts()[0].get("ready_in") is None

    async def renewed() -> str | None:
        lease = await cluster.plane.kubectl(
            "-n", "kube-node-lease", "get", "lease", name, "--ignore-not-found", "-o", "jsonpath={.spec.renewTime}"
        )
        return lease if lease > first else None

    first = ""
    async with program.feeding():
        first = await eventually(renewed, "the Node has no Lease")
        await eventually(renewed, "the Lease was not renewed")
        node = await eventually(lambda: cluster.read(NODES, name), "the Node went")

        async def is_ready() -> bool:
            return (await cluster.api.get(NODES, node.metadata.name)).is_ready

        await eventually(is_ready, "the Node did not become Ready again")


def test_the_feed_fails_when_the_api_server_does_not_answer(control_plane: ControlPlane, program: KwokProgram) -> None:
    # Nothing listens at port 1.
    elsewhere = control_plane.admin_kubeconfig.read_text().replace(control_plane.url, "https://127.0.0.1:1")
    kubeconfig = program.path.with_name("elsewhere")
    kubeconfig.write_text(elsewhere)
    variables = {**program.environment, "KUBECONFIG": str(kubeconfig)}
    with subprocess.Popen([program.path, "feed"], stdin=subprocess.PIPE, env=variables) as feed:
        assert feed.wait(PATIENCE_SECONDS) == 75


async def test_an_evicted_pod_goes_and_a_drain_leaves_neither_node_nor_pods(
    cluster: ClusterUnderTest, namespace: str, program: KwokProgram
) -> None:
    name = configured(program)
    async with program.feeding():
        await running_pod(cluster, namespace, "evicted", name)
        await running_pod(cluster, namespace, "left", name)
        await running_pod(cluster, namespace, "held", name, finalizers=["example.com/holds"])
        await cluster.plane.kubectl("-n", namespace, "delete", "pod", "evicted", "--wait=false")
        await cluster.gone(PODS, "evicted", namespace)

    program.run("drain", program.question("op-DRAIN"))

    assert await cluster.read(NODES, name) is None
    assert await cluster.read(PODS, "left", namespace) is None
    # A finalizer keeps the object, and not the machine: the next Node has another name.
    held = await cluster.api.get(PODS, "held", namespace=namespace)
    assert held.metadata.deletion_timestamp is not None
    assert json.loads(program.run("adopt", program.question(""))) == {"host_ref": "op-MADE", "found": "clean"}
    again = json.loads(program.run("configure", program.question("op-01NEXT", "team-b")))["node_name"]
    assert again != name
    await cluster.plane.kubectl(
        "-n", namespace, "patch", "pod", "held", "--type=merge", "--patch", '{"metadata": {"finalizers": null}}'
    )
    await cluster.gone(PODS, "held", namespace)
