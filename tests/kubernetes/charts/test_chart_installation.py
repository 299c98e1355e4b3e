"""The charts of deploy/charts on a control plane of their own: everything is accepted, and what they install works."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from bigfleet.cli.runtime.system import SystemClock
from bigfleet.cli.up.kubernetes.run import ProviderMachines
from bigfleet.demo.kubernetes.control_plane import ControlPlane
from bigfleet.demo.kubernetes.fake_node import FakeNode
from bigfleet.demo.kubernetes.machine_nodes import nodes_of
from bigfleet.model.ids import ClusterId
from bigfleet.operator.kubernetes.access import missing_rights
from bigfleet.operator.kubernetes.resources import CAPACITY_REQUESTS, UPCOMING_NODES
from bigfleet.operator.kubernetes.rights import operator_rights, pod_controller_rights
from bigfleet.rpc.clients.provider import GrpcProvider
from bigfleet.rpc.security.tls import TlsFiles, TlsPaths
from tests.deploy.charts import CASE_NAMES, CHARTS, NAMESPACE, case_objects, needs_helm
from tests.kubernetes.charts.installation import Installation
from tests.kubernetes.cluster import DEFINITIONS_FOLDER, ClusterUnderTest, definitions_in, eventually, new_plane
from tests.kubernetes.kinds import DEPLOYMENTS, deployment, pod_template
from tests.processes import free_port, run_bigfleet

pytestmark = [pytest.mark.kubernetes, needs_helm]

IMAGE = ("--set", "image.repository=registry.example.com/bigfleet,image.tag=trial")
CLUSTER = "blue"
#: Of which the control plane has no definitions: cert-manager's and Prometheus Operator's.
FOREIGN = ("cert-manager.io/", "monitoring.coreos.com/")
OPERATOR, POD_CONTROLLER = "bigfleet-operator", "bigfleet-pod-controller"
REQUEST = {
    "apiVersion": "bigfleet.lucy.sh/v1alpha1",
    "kind": "CapacityRequest",
    "metadata": {"name": "kept", "namespace": NAMESPACE},
    "spec": {"priority": 100, "resources": {"cpu": "500m", "memory": "1Gi"}},
}


@pytest.fixture(scope="module")
def plane(control_plane_program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane for the charts: they install objects that a cluster has once."""
    made = new_plane(control_plane_program, tmp_path_factory.mktemp("charts") / "plane")
    asyncio.run(made.start())
    yield made
    asyncio.run(made.stop())


@pytest.fixture
async def cluster(plane: ControlPlane) -> AsyncIterator[ClusterUnderTest]:
    """That plane, with machines that end with the test."""
    async with ClusterUnderTest(plane) as opened:
        yield opened


@pytest.fixture
async def installation(
    cluster: ClusterUnderTest, control_plane_program: Path, tmp_path: Path
) -> AsyncIterator[Installation]:
    """The namespace of the charts in it; what the test installs is uninstalled, but definitions stay."""
    made = Installation(cluster.plane, control_plane_program, tmp_path)
    await made.make_namespace()
    yield made
    await made.stop()
    await made.uninstall_all()


# ---- all charts ------------------------------------------------------------------------------------------------------


async def test_charts_on_an_empty_cluster_lead_to_a_bound_machine_that_upgrades_keep(
    cluster: ClusterUnderTest, installation: Installation
) -> None:
    provider, shard = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    await install_all(installation, provider, shard)
    await start_all(installation, provider, shard)
    async with machines(installation, cluster, provider):
        namespace = await cluster.make_namespace()
        template = pod_template(requests={"cpu": "500m", "memory": "512Mi"})
        await cluster.api.create(DEPLOYMENTS, deployment("web", 3, template), namespace=namespace)
        await cluster.running_pods(namespace, 3)
        bound = await bound_machines(cluster)
        assert bound

        # A shard is upgraded when its pod is deleted, and not before.
        await installation.upgrade("bigfleet", "bigfleet", "--set", "shard.extraArgs={--cycle-interval=3s}")
        installation.check_running()
        assert await is_connected(installation, shard)
        await installation.upgrade(OPERATOR, OPERATOR, "--set", "operator.extraArgs={--rollup-interval=5s}")
        await replace(installation, f"deployment/{OPERATOR}", OPERATOR_FLAGS)
        assert "--rollup-interval=5s" in installation.processes[OPERATOR].words
        await replace(installation, "statefulset/bigfleet-shard-shard-0", shard_flags(shard))
        assert "--cycle-interval=3s" in installation.processes["bigfleet-shard-shard-0"].words
        await eventually(lambda: is_connected(installation, shard), "the session did not open again")

        await installation.helm("rollback", OPERATOR, "1")
        await installation.helm("rollback", "bigfleet", "1")
        await replace(installation, f"deployment/{OPERATOR}", OPERATOR_FLAGS)
        await replace(installation, "statefulset/bigfleet-shard-shard-0", shard_flags(shard))
        assert "--cycle-interval=2s" in installation.processes["bigfleet-shard-shard-0"].words
        await eventually(lambda: is_connected(installation, shard), "the session did not open again")
        assert set(await bound_machines(cluster)) >= set(bound)
        await cluster.running_pods(namespace, 3)
    installation.check_running()


OPERATOR_FLAGS = {"--metrics-addr": "off"}


def shard_flags(shard: str) -> dict[str, str]:
    return {"--listen": shard, "--metrics-addr": "off"}


async def install_all(installation: Installation, provider: str, shard: str) -> None:
    """Install the three charts with addresses of this machine, and the Secrets that they expect."""
    installation.make_certificates(CLUSTER)
    await installation.make_secret("bigfleet-provider-tls", "provider-simulated")
    await installation.make_secret("bigfleet-shard-shard-0-tls", "shard-shard-0")
    await installation.make_secret("bigfleet-operator-tls", f"cluster-{CLUSTER}")
    backend = "backend={simulated,--calm,--time-scale=0.05}"
    await installation.install("bigfleet-provider", "bigfleet-provider", *IMAGE, "--set", backend)
    one_shard = f"shards[0].id=shard-0,shards[0].providerAddr={provider},shards[0].advertiseAddr={shard}"
    flags = "shard.extraArgs={--cycle-interval=2s}"
    await installation.install("bigfleet", "bigfleet", *IMAGE, "--set", one_shard, "--set", flags)
    await installation.install(OPERATOR, OPERATOR, *operator_values(shard))


async def start_all(installation: Installation, provider: str, shard: str) -> None:
    """Run what the pods run, until the shard has its session with the cluster."""
    await installation.start("statefulset/bigfleet-provider", {"--addr": provider, "--metrics-addr": "off"})
    await installation.start("statefulset/bigfleet-shard-shard-0", shard_flags(shard))
    for name in (OPERATOR, POD_CONTROLLER):
        await installation.start(f"deployment/{name}", OPERATOR_FLAGS, f"--namespace={NAMESPACE}")
    await eventually(lambda: is_connected(installation, shard), "the operator has no session with the shard")


async def replace(installation: Installation, workload: str, flags: dict[str, str]) -> None:
    """Do what happens after an upgrade: the old pod ends, one of the new template starts."""
    await installation.processes[workload.rpartition("/")[2]].stop()
    more = [f"--namespace={NAMESPACE}"] if workload.startswith("deployment/") else []
    await installation.start(workload, flags, *more)


async def is_connected(installation: Installation, shard: str) -> bool:
    """Return whether the shard answers and has a session with the cluster."""
    installation.check_running()
    words = ("get", "sessions", f"--addr={shard}", *installation.reader())
    done = await asyncio.to_thread(run_bigfleet, *words)
    return any(CLUSTER in line and "connected" in line for line in done.stdout.splitlines())


async def bound_machines(cluster: ClusterUnderTest) -> list[str]:
    """Return the machines that have joined the cluster."""
    return sorted(each.metadata.name for each in (await cluster.api.list_page(UPCOMING_NODES, limit=0)).items)


@asynccontextmanager
async def machines(installation: Installation, cluster: ClusterUnderTest, provider: str) -> AsyncIterator[None]:
    """Boot what the provider calls Configured, while the context lasts."""
    certs = installation.certs
    paths = TlsPaths(certificate=certs / "readonly.crt", key=certs / "readonly.key", authority=certs / "ca.crt")
    client = GrpcProvider(provider, clock=SystemClock(), tls=TlsFiles(paths))
    listed = ProviderMachines(client, SystemClock())

    async def read() -> dict[str, FakeNode]:
        return nodes_of(await listed.read(), ClusterId(CLUSTER))

    following = asyncio.create_task(cluster.follow_machines(read))
    try:
        yield
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await client.close()


# ---- what the API server says of the charts -------------------------------------------------------------------------


def test_every_chart_has_cases() -> None:
    assert {case.partition("/")[0] for case in CASE_NAMES} == {path.name for path in CHARTS.iterdir()}


async def test_the_api_server_accepts_every_rendering_and_warns_of_nothing(installation: Installation) -> None:
    """Unknown fields are refused, and the namespace admits restricted pods only."""
    for case in CASE_NAMES:
        objects = [found for found in case_objects(case) if not found["apiVersion"].startswith(FOREIGN)]
        said = await installation.kubectl(
            *("apply", "--server-side", "--dry-run=server", "--validate=strict", "--filename=-"),
            standard_input=yaml.safe_dump_all(objects),
        )
        assert len(said.splitlines()) == len(objects), f"{case}: {said}"


async def test_a_field_that_no_object_has_and_a_pod_that_is_not_restricted_are_found(
    installation: Installation,
) -> None:
    """Otherwise the test of all renderings could not fail."""
    (found,) = [each for each in case_objects("bigfleet-provider/simulated") if each["kind"] == "StatefulSet"]
    words = ("apply", "--server-side", "--dry-run=server", "--validate=strict", "--filename=-")
    misspelt = {**found, "spec": {**found["spec"], "replicaz": 1}}
    with pytest.raises(AssertionError, match="replicaz"):
        await installation.kubectl(*words, standard_input=yaml.safe_dump(misspelt))
    pod = found["spec"]["template"]["spec"]
    template = {**found["spec"]["template"], "spec": {**pod, "hostNetwork": True}}
    with pytest.raises(AssertionError, match=r"(?s)would violate PodSecurity.*host namespaces"):
        await installation.kubectl(
            *words, standard_input=yaml.safe_dump({**found, "spec": {**found["spec"], "template": template}})
        )


# ---- the operator's chart --------------------------------------------------------------------------------------------


def operator_values(shard: str = "shard-0.example.com:7780") -> list[str]:
    return [*IMAGE, "--set", f"clusterId={CLUSTER},shardAddr={shard}", "--set", "bootstrap.template=#!/bin/sh"]


async def missing(cluster: ClusterUnderTest, **options: Any) -> list[str]:
    """Return what operator and pod controller find missing at their starts."""
    async with cluster.as_service_account(NAMESPACE, OPERATOR) as api:
        found = await missing_rights(api, operator_rights(NAMESPACE, **options))
    async with cluster.as_service_account(NAMESPACE, POD_CONTROLLER) as api:
        return found + await missing_rights(api, pod_controller_rights(NAMESPACE))


async def test_a_release_grants_what_its_options_need_and_no_more(
    cluster: ClusterUnderTest, installation: Installation
) -> None:
    account = {"token_service_account": ("kube-system", "bigfleet-node")}
    await installation.install(OPERATOR, OPERATOR, *operator_values())
    for name in definitions_in(DEFINITIONS_FOLDER):
        await established(installation, name)
    assert await missing(cluster) == []
    assert await missing(cluster, drain_force=True) == ["delete pods"]

    await installation.upgrade(OPERATOR, OPERATOR, "--set", "drainForce=true,bootstrap.token=secret")
    await granted(cluster, drain_force=True, token_secret=True)
    assert await missing(cluster, **account) == [
        "create serviceaccounts/token 'bigfleet-node' in namespace kube-system"
    ]

    await installation.upgrade(OPERATOR, OPERATOR, "--set", "bootstrap.token=tokenrequest")
    await granted(cluster, drain_force=True, **account)

    await installation.helm("rollback", OPERATOR, "1")
    await eventually(lambda: _lacks(cluster, "delete pods", drain_force=True), "the rollback takes no rights")
    assert await missing(cluster) == []


async def established(installation: Installation, definition: str) -> None:
    """Return once the API server serves a definition. Raises AssertionError when it does not."""
    await installation.kubectl("wait", "--for=condition=Established", "--timeout=60s", f"crd/{definition}")


async def granted(cluster: ClusterUnderTest, **options: Any) -> None:
    """Return once nothing is missing: the API server knows new rights a moment later."""

    async def are() -> bool:
        return not await missing(cluster, **options)

    await eventually(are, f"rights are missing: {await missing(cluster, **options)}")


async def _lacks(cluster: ClusterUnderTest, right: str, **options: Any) -> bool:
    return right in await missing(cluster, **options)


async def test_a_misspelt_value_is_refused_by_name_and_changes_nothing(installation: Installation) -> None:
    await installation.install(OPERATOR, OPERATOR, *operator_values())
    before = await installation.revision(OPERATOR)
    done = await installation.run(
        *("helm", "upgrade", OPERATOR, str(CHARTS / OPERATOR), "--reuse-values", "--namespace", NAMESPACE),
        *("--set", "operator.replica=3"),
    )

    assert done.returncode != 0
    assert "additional properties 'replica' not allowed" in done.stderr
    assert await installation.revision(OPERATOR) == before


async def test_definitions_and_their_objects_stay_when_the_release_is_uninstalled_and_it_takes_them_again(
    cluster: ClusterUnderTest,
    installation: Installation,
) -> None:
    await installation.install(OPERATOR, OPERATOR, *operator_values())
    await installation.kubectl(
        "wait", "--for=condition=Established", "--timeout=60s", "crd/capacityrequests.bigfleet.lucy.sh"
    )
    await installation.kubectl("apply", "--filename=-", standard_input=yaml.safe_dump(REQUEST))

    await installation.helm("uninstall", OPERATOR)
    await installation.install(OPERATOR, OPERATOR, *operator_values())

    assert await cluster.read(CAPACITY_REQUESTS, "kept", NAMESPACE) is not None
