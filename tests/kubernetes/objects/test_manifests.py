"""deploy/kubernetes in a real API server: built by kustomize, accepted word by word, and granting what is asked for."""

import asyncio
import shutil
import string
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from bigfleet.cli.runtime.system import SystemClock, system_rng
from bigfleet.demo.kubernetes.control_plane import ControlPlaneError
from bigfleet.operator.bootstrap.tokens import (
    BOOTSTRAP_GROUP,
    JoinToken,
    SecretTokens,
    ServiceAccountTokens,
    TokenFault,
)
from bigfleet.operator.kubernetes.access import missing_rights
from bigfleet.operator.kubernetes.api import ApiError
from bigfleet.operator.kubernetes.resources import CAPACITY_REQUESTS, SECRETS, UPCOMING_NODES
from bigfleet.operator.kubernetes.rights import TOKEN_SECRET_NAMESPACE, operator_rights, pod_controller_rights
from tests.deploy.test_bootstrap_templates import filled
from tests.kubernetes.cluster import ROOT, ClusterUnderTest, client_of, eventually

pytestmark = pytest.mark.kubernetes

NAMESPACE = "bigfleet-system"
ACCOUNT = ("kube-system", "bigfleet-node")
RIGHTS = {"ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"}
#: What can be installed together; the last has everything.
INSTALLATIONS: tuple[tuple[str, ...], ...] = (
    (),
    ("token-secret", "kubeadm-joining"),
    ("token-request",),
    ("drain-force", "token-secret", "kubeadm-joining"),
)


class SystemCharacters:
    """Draws the characters of tokens for a test; they are not secret."""

    def draw(self, count: int) -> str:
        alphabet = string.ascii_lowercase + string.digits
        rng = system_rng()
        return "".join(alphabet[int(rng.random() * len(alphabet))] for _ in range(count))


@dataclass
class Installer:
    """Builds installations and applies them; what was applied is deleted in the end."""

    cluster: ClusterUnderTest
    folder: Path
    applied: list[str] = field(default_factory=list)

    async def built(self, components: Sequence[str]) -> list[dict[str, Any]]:
        """Return the objects of an overlay as an administrator writes it."""
        overlay = self.folder / "-".join(("overlay", *components))
        overlay.mkdir(exist_ok=True)
        for name in ("base", "components"):
            shutil.copytree(ROOT / "deploy/kubernetes" / name, self.folder / name, dirs_exist_ok=True)
        kustomization = yaml.safe_load((ROOT / "deploy/kubernetes/example/kustomization.yaml").read_text())
        kustomization["components"] = [f"../components/{name}" for name in components]
        (overlay / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        (overlay / "template.j2").write_text(filled(ROOT / "deploy/bootstrap/kubeadm.cloud-init.j2"))
        text = await self.cluster.plane.kubectl("kustomize", str(overlay))
        return [found for found in yaml.safe_load_all(text) if found]

    async def apply(self, objects: Sequence[dict[str, Any]], *options: str) -> str:
        """Apply objects, strictly: an unknown field is an error."""
        text = yaml.safe_dump_all(objects)
        if not options:
            self.applied.append(text)
        return await self.cluster.plane.kubectl(
            "apply", "--server-side", "--validate=strict", *options, "-f", "-", standard_input=text
        )

    async def remove(self) -> None:
        for text in reversed(self.applied):
            await self.cluster.plane.kubectl(
                "delete", "--ignore-not-found", "--wait=true", "-f", "-", standard_input=text
            )


@pytest.fixture
async def installer(cluster: ClusterUnderTest, definitions: list[str], tmp_path: Path) -> AsyncIterator[Installer]:
    """An installer in a cluster that has our namespace and our kinds."""
    assert definitions
    made = Installer(cluster, tmp_path)
    await made.apply([found for found in await made.built(()) if found["kind"] == "Namespace"])
    # It stays for the next test: the end of a namespace takes seconds.
    made.applied.clear()
    yield made
    await made.remove()


@pytest.mark.parametrize("components", INSTALLATIONS, ids="+".join)
async def test_an_installation_is_accepted_word_by_word(installer: Installer, components: tuple[str, ...]) -> None:
    objects = await installer.built(components)

    said = await installer.apply(objects, "--dry-run=server")

    assert len(said.splitlines()) == len(objects)
    assert {found["metadata"].get("namespace", "") for found in objects} <= {"", NAMESPACE, "kube-system"}
    config = {found["metadata"]["name"]: found["data"] for found in objects if found["kind"] == "ConfigMap"}
    assert config["bigfleet-operator"] == {"cluster-id": "blue", "shard-addr": "shard-0.example.com:7780"}
    assert config["bigfleet-bootstrap"]["template.j2"].startswith("#cloud-config\n")
    deployments = [found for found in objects if found["kind"] == "Deployment"]
    images = {found["spec"]["template"]["spec"]["containers"][0]["image"] for found in deployments}
    assert images == {"registry.example.com/bigfleet:your-tag"}


async def test_a_misspelt_field_is_refused(installer: Installer) -> None:
    (deployment, *_others) = [found for found in await installer.built(()) if found["kind"] == "Deployment"]
    deployment["spec"]["replicaz"] = 3

    with pytest.raises(ControlPlaneError, match="replicaz"):
        await installer.apply([deployment], "--dry-run=server")


async def test_the_pods_pass_the_restricted_level_that_the_namespace_enforces(installer: Installer) -> None:
    objects = await installer.built(())
    await installer.apply([found for found in objects if found["kind"] == "ServiceAccount"])
    templates = [found["spec"]["template"] for found in objects if found["kind"] == "Deployment"]
    assert len(templates) == 2

    for template in templates:
        pod = {"apiVersion": "v1", "kind": "Pod", **template, "metadata": {"name": "p", "namespace": NAMESPACE}}
        await installer.apply([pod], "--dry-run=server")
        pod["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
        with pytest.raises(ControlPlaneError, match="allowPrivilegeEscalation"):
            await installer.apply([pod], "--dry-run=server")


@pytest.mark.parametrize(
    ("components", "options", "beyond"),
    [
        ((), {}, {"drain_force": True, "token_secret": True, "token_service_account": ACCOUNT}),
        (("drain-force",), {"drain_force": True}, {"token_secret": True}),
        (("token-secret",), {"token_secret": True}, {"drain_force": True}),
        (("token-request",), {"token_service_account": ACCOUNT}, {"token_service_account": ("kube-system", "default")}),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else "",
)
async def test_a_service_account_passes_its_check_of_rights_and_no_other(
    installer: Installer, components: tuple[str, ...], options: dict[str, Any], beyond: dict[str, Any]
) -> None:
    plane = installer.cluster.plane
    await installer.apply([found for found in await installer.built(components) if found["kind"] in RIGHTS])
    asked = operator_rights(NAMESPACE, **options)

    async with client_of(await plane.service_account_kubeconfig(NAMESPACE, "bigfleet-operator")) as api:

        async def passes() -> bool:
            # Bindings take effect some milliseconds after they are written.
            return await missing_rights(api, asked) == []

        await eventually(passes, "rights of the operator are missing")
        further = [right for right in operator_rights(NAMESPACE, **beyond) if right not in asked]
        assert further
        assert await missing_rights(api, further) == [right.text(verb) for right in further for verb in right.verbs]
    async with client_of(await plane.service_account_kubeconfig(NAMESPACE, "bigfleet-pod-controller")) as api:
        assert await missing_rights(api, pod_controller_rights(NAMESPACE)) == []
        assert await missing_rights(api, [right for right in asked if right.resource.plural == "nodes"])


async def test_the_rights_of_the_base_suffice_for_what_is_written(installer: Installer) -> None:
    """Server-side apply needs patch, and create for a new object; neither get nor update."""
    plane = installer.cluster.plane
    await installer.apply([found for found in await installer.built(()) if found["kind"] in RIGHTS])
    node: dict[str, Any] = {
        "apiVersion": UPCOMING_NODES.api_version,
        "kind": UPCOMING_NODES.kind,
        "metadata": {"name": "un-rights"},
        "spec": {"machineID": "rights", "resources": {"cpu": "1"}},
    }
    request: dict[str, Any] = {
        "apiVersion": CAPACITY_REQUESTS.api_version,
        "kind": CAPACITY_REQUESTS.kind,
        "metadata": {"name": "cr-rights", "namespace": "default"},
        "spec": {
            "priority": 0,
            "resources": {"cpu": "1"},
            "requirements": [{"key": "node.kubernetes.io/instance-type", "operator": "Exists"}],
        },
    }

    async with client_of(await plane.service_account_kubeconfig(NAMESPACE, "bigfleet-pod-controller")) as api:

        async def applied() -> bool:
            try:
                await api.apply(CAPACITY_REQUESTS, "cr-rights", request, namespace="default", field_manager="t")
            except ApiError as error:
                # Bindings take effect some milliseconds after they are written.
                if not error.is_forbidden:
                    raise
                return False
            return True

        await eventually(applied, "the pod controller could not apply a request")
        phase = {"status": {"phase": "Pending"}}
        await api.patch(CAPACITY_REQUESTS.status, "cr-rights", phase, namespace="default")
    async with client_of(await plane.service_account_kubeconfig(NAMESPACE, "bigfleet-operator")) as api:
        phase = {"status": {"phase": "Acknowledged"}}
        await api.patch(CAPACITY_REQUESTS.status, "cr-rights", phase, namespace="default")
        await api.apply(UPCOMING_NODES, "un-rights", node, field_manager="t")
        status = {**node, "status": {"phase": "Provisioning"}}
        del status["spec"]
        await api.apply(UPCOMING_NODES.status, "un-rights", status, field_manager="t")
        await api.delete(UPCOMING_NODES, "un-rights")
    async with client_of(await plane.service_account_kubeconfig(NAMESPACE, "bigfleet-pod-controller")) as api:
        await api.delete(CAPACITY_REQUESTS, "cr-rights", namespace="default")


async def test_a_bootstrap_token_of_the_operator_authenticates_until_its_node_is_ready(installer: Installer) -> None:
    plane = installer.cluster.plane
    components = ("token-secret", "kubeadm-joining")
    await installer.apply([found for found in await installer.built(components) if found["kind"] in RIGHTS])

    async with client_of(await plane.service_account_kubeconfig(NAMESPACE, "bigfleet-operator")) as api:
        tokens = SecretTokens(api, clock=SystemClock(), characters=SystemCharacters(), ttl_seconds=3600)

        async def minted() -> JoinToken | None:
            try:
                return await tokens.mint("aws/i-1")
            except TokenFault:
                return None

        token = await eventually(minted, "no token could be minted")
        joined = await plane.request("POST", SELF_PATH, SELF, token=token.text)
        assert joined.status == 201, joined.body
        user = yaml.safe_load(joined.body)["status"]["userInfo"]
        assert user["username"] == f"system:bootstrap:{token.text.split('.')[0]}"
        assert BOOTSTRAP_GROUP in user["groups"]
        request = await plane.request("POST", REQUESTS_PATH, certificate_request(), token=token.text)
        assert request.status != 403, request.body

        running = asyncio.create_task(tokens.run())
        tokens.node_ready("aws/i-1")
        await installer.cluster.gone(SECRETS, token.secret_name, TOKEN_SECRET_NAMESPACE)
        running.cancel()


SELF_PATH = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
SELF = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
REQUESTS_PATH = "/apis/certificates.k8s.io/v1/certificatesigningrequests"


def certificate_request() -> dict[str, Any]:
    """Return a request that is not valid: whether it is refused for that or for want of a right is what is asked."""
    return {
        "apiVersion": "certificates.k8s.io/v1",
        "kind": "CertificateSigningRequest",
        "metadata": {"name": "bigfleet-test"},
        "spec": {"request": "", "signerName": "kubernetes.io/kube-apiserver-client-kubelet", "usages": ["client auth"]},
    }


async def test_a_token_of_the_service_account_is_minted_with_the_right_for_this_account_alone(
    installer: Installer,
) -> None:
    plane = installer.cluster.plane
    await installer.apply([found for found in await installer.built(("token-request",)) if found["kind"] in RIGHTS])

    async with client_of(await plane.service_account_kubeconfig(NAMESPACE, "bigfleet-operator")) as api:
        tokens = ServiceAccountTokens(api, namespace=ACCOUNT[0], name=ACCOUNT[1], ttl_seconds=600)

        async def minted() -> JoinToken | None:
            try:
                return await tokens.mint("m")
            except TokenFault:
                return None

        token = await eventually(minted, "no token could be minted")
        joined = await plane.request("POST", SELF_PATH, SELF, token=token.text)
        user = yaml.safe_load(joined.body)["status"]["userInfo"]
        assert user["username"] == "system:serviceaccount:kube-system:bigfleet-node"
        with pytest.raises(TokenFault, match="forbidden"):
            await ServiceAccountTokens(api, namespace="kube-system", name="default", ttl_seconds=600).mint("m")
