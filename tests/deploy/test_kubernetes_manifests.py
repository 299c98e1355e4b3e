"""The manifests of deploy/kubernetes fit together: flags, selectors, volumes, ports, and what pods may do."""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from bigfleet.operator.bootstrap.tokens import BOOTSTRAP_GROUP

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy" / "kubernetes"
SPECIFICATION = ROOT / "docs" / "spec" / "operator.md"
WORKLOADS = ("bigfleet-operator", "bigfleet-pod-controller")
COMPONENTS = sorted(path.name for path in (DEPLOY / "components").iterdir())
FLAG = re.compile(r"--[a-z-]+")


@cache
def documents(folder: str) -> list[dict[str, Any]]:
    return [
        found
        for path in sorted((DEPLOY / folder).glob("*.yaml"))
        for found in yaml.safe_load_all(path.read_text(encoding="utf-8"))
        if found and "kind" in found
    ]


def one(kind: str, name: str, folder: str = "base") -> dict[str, Any]:
    (found,) = [
        found for found in documents(folder) if found["kind"] == kind and found.get("metadata", {}).get("name") == name
    ]
    return found


def container(workload: str) -> dict[str, Any]:
    (found,) = one("Deployment", workload)["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def patched_arguments() -> Iterator[str]:
    """Yield the arguments that components add to the operator."""
    for name in COMPONENTS:
        (kustomization,) = [found for found in documents(f"components/{name}") if found["kind"] == "Component"]
        for patch in kustomization.get("patches", ()):
            assert patch["target"] == {"kind": "Deployment", "name": "bigfleet-operator"}
            for operation in yaml.safe_load(patch["patch"]):
                assert operation["op"] == "add"
                assert operation["path"] == "/spec/template/spec/containers/0/args/-"
                yield operation["value"]


def specified_flags(section: str) -> set[str]:
    text = SPECIFICATION.read_text(encoding="utf-8")
    start = text.index(section)
    return set(FLAG.findall(text[start : text.index("\n---", start)]))


def test_every_flag_of_the_operator_is_in_its_specification() -> None:
    arguments = [*container("bigfleet-operator")["args"], *patched_arguments()]
    flags = [argument.partition("=")[0] for argument in arguments]

    assert set(flags) <= specified_flags("## 1. Processes")
    assert len(set(container("bigfleet-operator")["args"])) == len(container("bigfleet-operator")["args"])
    assert {"--cluster-id", "--shard-addr", "--bootstrap-template"} <= set(flags)
    assert "--bootstrap-token" in flags


def test_every_flag_of_the_pod_controller_is_in_its_specification() -> None:
    flags = {argument.partition("=")[0] for argument in container("bigfleet-pod-controller")["args"]}

    assert flags <= specified_flags("## 11. Pod controller")


@pytest.mark.parametrize("workload", WORKLOADS)
def test_selectors_find_the_pods_of_their_deployment_and_no_others(workload: str) -> None:
    template = one("Deployment", workload)["spec"]["template"]
    selectors = [
        one("Deployment", workload)["spec"]["selector"]["matchLabels"],
        one("PodDisruptionBudget", workload)["spec"]["selector"]["matchLabels"],
        one("NetworkPolicy", workload)["spec"]["podSelector"]["matchLabels"],
        *(spread["labelSelector"]["matchLabels"] for spread in template["spec"]["topologySpreadConstraints"]),
    ]
    (other,) = [name for name in WORKLOADS if name != workload]
    other_labels = one("Deployment", other)["spec"]["template"]["metadata"]["labels"]

    for selector in selectors:
        assert selector.items() <= template["metadata"]["labels"].items()
        assert not selector.items() <= other_labels.items()
    assert len(selectors) == 4


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_pod_may_do_nothing_that_the_restricted_level_forbids(workload: str) -> None:
    pod = one("Deployment", workload)["spec"]["template"]["spec"]
    security = container(workload)["securityContext"]

    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 65532
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert security == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert {next(iter(volume.keys() - {"name"})) for volume in pod["volumes"]} <= {"configMap", "secret", "emptyDir"}
    assert (
        one("Namespace", "bigfleet-system")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    )


@pytest.mark.parametrize("workload", WORKLOADS)
def test_two_replicas_survive_a_drain_and_a_rollout(workload: str) -> None:
    spec = one("Deployment", workload)["spec"]

    assert spec["replicas"] == 2
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert one("PodDisruptionBudget", workload)["spec"]["maxUnavailable"] == 1
    assert spec["template"]["spec"]["priorityClassName"] == "system-cluster-critical"


@pytest.mark.parametrize("workload", WORKLOADS)
def test_probes_ask_the_port_of_the_metrics(workload: str) -> None:
    found = container(workload)
    (port,) = found["ports"]
    (address,) = [argument for argument in found["args"] if argument.startswith("--metrics-addr=")]

    assert address == f"--metrics-addr=:{port['containerPort']}"
    assert found["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": port["name"]}
    assert found["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": port["name"]}
    (ingress,) = one("NetworkPolicy", workload)["spec"]["ingress"]
    assert ingress["ports"] == [{"protocol": "TCP", "port": port["name"]}]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_file_that_a_flag_names_is_in_a_volume_that_is_filled(workload: str) -> None:
    found = container(workload)
    volumes = {volume["name"]: volume for volume in one("Deployment", workload)["spec"]["template"]["spec"]["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in found["volumeMounts"]}
    assert len(mounts) == len(volumes)

    files = [value for argument in found["args"] if (value := argument.partition("=")[2]).startswith("/")]
    assert files
    for file in files:
        folder, _slash, name = file.rpartition("/")
        assert name in keys_of(mounts[folder]), file


def keys_of(volume: Mapping[str, Any]) -> set[str]:
    if "secret" in volume:
        # As cert-manager and `kubectl create secret tls` write them.
        return {"tls.crt", "tls.key", "ca.crt"}
    (generator,) = [
        found
        for found in one_kustomization("base")["configMapGenerator"]
        if found["name"] == volume["configMap"]["name"]
    ]
    keys = set()
    for file in generator["files"]:
        key, _equals, path = file.rpartition("=")
        assert (DEPLOY / "base" / path).is_file()
        keys.add(key or path)
    return keys


def one_kustomization(folder: str) -> dict[str, Any]:
    loaded = yaml.safe_load((DEPLOY / folder / "kustomization.yaml").read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


@pytest.mark.parametrize("workload", WORKLOADS)
def test_variables_in_arguments_come_from_the_config_map(workload: str) -> None:
    found = container(workload)
    named = set(re.findall(r"\$\(([A-Z_]+)\)", " ".join(found["args"])))
    (generator,) = [each for each in one_kustomization("base")["configMapGenerator"] if "literals" in each]
    keys = {literal.partition("=")[0] for literal in generator["literals"]}

    assert named == {variable["name"] for variable in found.get("env", ())}
    for variable in found.get("env", ()):
        reference = variable["valueFrom"]["configMapKeyRef"]
        assert reference["name"] == generator["name"]
        assert reference["key"] in keys


@pytest.mark.parametrize("folder", ["base", "example", *(f"components/{name}" for name in COMPONENTS)])
def test_a_kustomization_names_files_that_exist_and_leaves_none_out(folder: str) -> None:
    kustomization = one_kustomization(folder)
    named = [*kustomization.get("resources", ()), *kustomization.get("components", ())]

    for name in named:
        assert (DEPLOY / folder / name).resolve().exists(), name
    if folder != "example":
        generated = {
            file.rpartition("=")[2]
            for generator in kustomization.get("configMapGenerator", ())
            for file in generator.get("files", ())
        }
        assert {path.name for path in (DEPLOY / folder).iterdir()} == {"kustomization.yaml", *named, *generated}


def test_the_image_is_the_one_that_an_overlay_sets() -> None:
    (image,) = one_kustomization("base")["images"]
    (overlaid,) = one_kustomization("example")["images"]

    assert {container(workload)["image"] for workload in WORKLOADS} == {image["name"]}
    assert overlaid["name"] == image["newName"]


def test_the_group_of_our_tokens_gets_what_kubeadm_gives_its_own() -> None:
    bindings = documents("components/kubeadm-joining")
    roles = {
        found["roleRef"]["name"]
        for found in bindings
        if found["kind"] != "Component"
        and found["subjects"] == [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": BOOTSTRAP_GROUP}]
    }

    assert roles == {
        "system:node-bootstrapper",
        "system:certificates.k8s.io:certificatesigningrequests:nodeclient",
        "kubeadm:get-nodes",
        "kubeadm:nodes-kubeadm-config",
        "kubeadm:kubelet-config",
        "kube-proxy",
    }


def test_a_quota_admits_the_critical_pods() -> None:
    """GKE admits no pod of this class outside of kube-system without it."""
    (expression,) = one("ResourceQuota", "bigfleet-critical-pods")["spec"]["scopeSelector"]["matchExpressions"]
    classes = {one("Deployment", name)["spec"]["template"]["spec"]["priorityClassName"] for name in WORKLOADS}

    assert (expression["scopeName"], expression["operator"]) == ("PriorityClass", "In")
    assert set(expression["values"]) == classes
