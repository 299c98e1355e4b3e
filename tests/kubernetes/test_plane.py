"""The control plane itself: what it serves, what it forgets and what it remembers when its components die."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bigfleet.demo.kubernetes.components import Component, write_kubeconfig
from bigfleet.demo.kubernetes.control_plane import ControlPlane, ControlPlaneError
from bigfleet.operator.kubernetes.api import ApiError, JsonObject
from bigfleet.operator.kubernetes.resources import NODES, PODS, SECRETS
from tests.kubernetes.cluster import ROOT, ClusterUnderTest, client_of, eventually
from tests.kubernetes.kinds import ROLE_BINDINGS, ROLES, SERVICE_ACCOUNTS, pod, pod_template, role, role_binding, secret
from tests.patience import PATIENCE_SECONDS, wait_until
from tools.build_controlplane import KUBERNETES_VERSION

pytestmark = pytest.mark.kubernetes

#: Starts a plane, prints the ids of its processes, and waits to be killed.
STARTER = """
import asyncio, json, sys
from pathlib import Path
from bigfleet.demo.kubernetes.components import Component
from tests.kubernetes.cluster import new_plane

async def main():
    plane = new_plane(Path(sys.argv[1]), Path(sys.argv[2]))
    await plane.start()
    print(json.dumps([plane.pid(each) for each in Component]), flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


def state_of(pid: int) -> str:
    """Return the state of a process as /proc has it, such as S or T; "gone" when it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return "gone"
    state = stat.rpartition(")")[2].split()[0]
    return "gone" if state == "Z" else state


# ---- what it serves ------------------------------------------------------------------------------------------------


async def test_the_api_server_reports_the_version_that_was_built(control_plane: ControlPlane) -> None:
    answer = await control_plane.request("GET", "/version")

    assert (answer.status, answer.json()["gitVersion"]) == (200, KUBERNETES_VERSION)


async def test_kubectl_of_the_same_version_reads_the_cluster(control_plane: ControlPlane) -> None:
    versions = json.loads(await control_plane.kubectl("version", "--output=json"))

    assert versions["clientVersion"]["gitVersion"] == KUBERNETES_VERSION
    assert versions["serverVersion"]["gitVersion"] == KUBERNETES_VERSION


async def test_kubectl_that_fails_says_why(control_plane: ControlPlane) -> None:
    with pytest.raises(ControlPlaneError, match=r'get pods/absent failed with exit 1: .*pods "absent" not found'):
        await control_plane.kubectl("get", "pods/absent")


async def test_a_watch_from_a_version_that_is_too_old_ends_with_410(cluster: ClusterUnderTest) -> None:
    """A restarted API server remembers no event from before its start."""
    await cluster.plane.restart(Component.API_SERVER)

    async def watch_to_its_end() -> None:
        async with cluster.api.watch(NODES, resource_version="1", timeout_seconds=60) as events:
            async for _event in events:
                pass

    with pytest.raises(ApiError) as raised:
        await watch_to_its_end()

    assert raised.value.is_expired


async def test_a_stale_replacement_is_a_conflict(cluster: ClusterUnderTest, namespace: str) -> None:
    stored = await cluster.api.create(SECRETS, secret("s"), namespace=namespace)
    version = stored.metadata.resource_version
    await cluster.api.replace(SECRETS, "s", secret("s", version=version, value="1"), namespace=namespace)

    with pytest.raises(ApiError) as raised:
        await cluster.api.replace(SECRETS, "s", secret("s", version=version, value="2"), namespace=namespace)

    assert raised.value.is_conflict


async def test_a_service_account_may_do_what_a_role_grants_and_nothing_else(
    cluster: ClusterUnderTest, namespace: str
) -> None:
    await cluster.api.create(
        SERVICE_ACCOUNTS,
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "reader"}},
        namespace=namespace,
    )
    async with cluster.as_service_account(namespace, "reader") as reader:

        async def may_list() -> bool:
            try:
                await reader.list_page(PODS, namespace=namespace)
            except ApiError as error:
                if error.is_forbidden:
                    return False
                raise
            return True

        before = await may_list()
        rule: JsonObject = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
        await cluster.api.create(ROLES, role("r", [rule]), namespace=namespace)
        binding = role_binding("r", role_name="r", account="reader", namespace=namespace)
        await cluster.api.create(ROLE_BINDINGS, binding, namespace=namespace)
        await eventually(may_list, "the role was not granted")
        with pytest.raises(ApiError) as raised:
            await reader.list_page(PODS)

    assert not before
    assert raised.value.is_forbidden


async def test_a_kubeconfig_of_a_service_account_is_that_service_account(
    cluster: ClusterUnderTest, namespace: str
) -> None:
    path = await cluster.plane.service_account_kubeconfig(namespace, "default")
    said = await cluster.plane.kubectl("auth", "whoami", "--output=json", f"--kubeconfig={path}")

    assert json.loads(said)["status"]["userInfo"]["username"] == f"system:serviceaccount:{namespace}:default"


async def test_a_token_that_nobody_has_is_refused(control_plane: ControlPlane, tmp_path: Path) -> None:
    path = tmp_path / "stranger.kubeconfig"
    certificate = control_plane.files.certificate.read_bytes()
    write_kubeconfig(path, url=control_plane.url, certificate=certificate, token="unknown")
    async with client_of(path) as stranger:
        with pytest.raises(ApiError) as raised:
            await stranger.list_page(PODS)

    assert raised.value.status == 401


async def test_changes_are_audited_with_their_users_and_answers(cluster: ClusterUnderTest, namespace: str) -> None:
    await cluster.api.create(SECRETS, secret("audited"), namespace=namespace)
    with pytest.raises(ApiError):
        await cluster.api.create(SECRETS, secret("audited"), namespace=namespace)

    async def both() -> list[tuple[str, str, int]] | None:
        found = [
            (each.verb, each.user.username, each.response_status.code)
            for each in cluster.audited()
            if (each.object_ref.namespace, each.object_ref.resource) == (namespace, "secrets")
        ]
        return found if len(found) == 2 else None

    assert await eventually(both, "the requests are not audited") == [
        ("create", "admin", 201),
        ("create", "admin", 409),
    ]


# ---- faults --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("component", [Component.API_SERVER, Component.ETCD])
async def test_objects_survive_the_crash_of_a_component(
    cluster: ClusterUnderTest, namespace: str, component: Component
) -> None:
    stored = await cluster.api.create(SECRETS, secret("precious"), namespace=namespace)
    pid = cluster.plane.pid(component)

    await cluster.plane.kill(component)
    died = state_of(pid)
    await cluster.plane.restart(component)
    await cluster.plane.wait_ready(Component.API_SERVER)

    async def same() -> bool:
        try:
            found = await cluster.read(SECRETS, "precious", namespace)
        except ApiError as error:
            if error.is_transient:
                return False
            raise
        assert found is not None
        return found.metadata.uid == stored.metadata.uid

    assert died == "gone"
    assert cluster.plane.pid(component) != pid
    await eventually(same, "the Secret was not read again")


async def test_without_its_api_server_a_request_is_not_answered(cluster: ClusterUnderTest) -> None:
    await cluster.plane.kill(Component.API_SERVER)
    try:
        with pytest.raises(ApiError) as raised:
            await cluster.api.list_page(NODES)
        with pytest.raises(ControlPlaneError, match="was not answered"):
            await cluster.plane.request("GET", "/version")
    finally:
        await cluster.plane.restart(Component.API_SERVER)

    assert (raised.value.status, raised.value.is_transient) == (0, True)


async def test_a_paused_api_server_answers_once_it_is_resumed(cluster: ClusterUnderTest) -> None:
    pid = cluster.plane.pid(Component.API_SERVER)
    cluster.plane.pause(Component.API_SERVER)
    await eventually(lambda: _is(pid, "T"), "the API server does not pause")
    request = asyncio.create_task(cluster.api.list_page(NODES))
    cluster.plane.resume(Component.API_SERVER)
    await request

    assert state_of(pid) != "T"


async def _is(pid: int, state: str) -> bool:
    return state_of(pid) == state


async def test_pods_wait_while_the_scheduler_is_down_and_are_bound_by_the_next_one(
    cluster: ClusterUnderTest, namespace: str
) -> None:
    await cluster.plane.kill(Component.SCHEDULER)
    try:
        await cluster.api.create(PODS, pod("p", pod_template()), namespace=namespace)
        (waiting,) = await cluster.pods(namespace)
    finally:
        await cluster.plane.restart(Component.SCHEDULER)
    await cluster.unschedulable_pods(namespace, 1)

    assert waiting.status.conditions is None


def test_no_component_outlives_the_process_that_started_it(control_plane_program: Path, tmp_path: Path) -> None:
    """Also not when that one is killed and can stop nothing."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(control_plane_program), str(tmp_path / "plane")],
        stdout=subprocess.PIPE,
        env=environment,
        cwd=ROOT,
    )
    try:
        assert starter.stdout is not None
        pids = json.loads(starter.stdout.readline())
        alive = [state_of(pid) for pid in pids]
    finally:
        starter.send_signal(signal.SIGKILL)
        starter.wait(PATIENCE_SECONDS)

    wait_until(lambda: [state_of(pid) for pid in pids] == ["gone"] * 4, "components outlive their parent")
    assert "gone" not in alive
