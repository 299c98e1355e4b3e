"""The charts of deploy/charts: what helm makes of them, what they refuse, and that manifests and chart agree."""

import json
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from bigfleet.cli.provider import process as provider_process
from tests.deploy.charts import (
    CASE_NAMES,
    CASES,
    CHARTS,
    NAMES,
    NAMESPACE,
    ROOT,
    by_name,
    case_objects,
    command_of,
    golden_text,
    needs_helm,
    pod_templates,
    refusal,
    rendered,
    run_program,
)
from tests.deploy.command_lines import parsed_flags

#: Each rendering is a process of a third of a second.
pytestmark = pytest.mark.slow

IMAGE = ("--set", "image.repository=r,image.tag=t")
OPERATOR = (*IMAGE, "--set", "clusterId=blue,shardAddr=shard-0.example.com:7780")
#: Values that each chart accepts.
ACCEPTED = {
    "bigfleet": (*IMAGE, "--set", "shards[0].id=a,shards[0].providerAddr=p:1"),
    "bigfleet-provider": (*IMAGE, "--set", "backend={simulated}"),
    "bigfleet-operator": (*OPERATOR, "--set", "bootstrap.template=x"),
}
CERT_MANAGER = "tls.certManager.enabled=true"


@needs_helm
@pytest.mark.parametrize("case", CASE_NAMES)
def test_a_chart_makes_of_values_what_it_made_before(case: str) -> None:
    """After a change that is meant: python -m tests.deploy.charts."""
    assert golden_text(case) == (CASES / case / "expected.yaml").read_text(encoding="utf-8")


@needs_helm
@pytest.mark.parametrize("chart", NAMES)
def test_helm_has_nothing_to_say_of_a_chart(chart: str) -> None:
    done = run_program("helm", "lint", "--strict", str(CHARTS / chart), *ACCEPTED[chart])

    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 chart(s) failed" in done.stdout


@needs_helm
@pytest.mark.parametrize(
    ("chart", "values", "fault"),
    [
        ("bigfleet", "shards[0].idd=3", "additional properties 'idd' not allowed"),
        ("bigfleet", "shard.persistance.size=1Gi", "additional properties 'persistance' not allowed"),
        ("bigfleet", "coordinater.enabled=true", "additional properties 'coordinater' not allowed"),
        ("bigfleet", "shards[0].id=A_b", "at '/shards/0/id'"),
        ("bigfleet", "shards[0].providerAddr=http://p", "at '/shards/0/providerAddr'"),
        ("bigfleet", "shards[1].id=b", "missing property 'providerAddr'"),
        ("bigfleet", "shards[1].id=a,shards[1].providerAddr=q:1", "the id a is there twice"),
        ("bigfleet", "shards=null", "name a shard with id and providerAddr"),
        ("bigfleet", "shard.extraArgs={-x}", "at '/shard/extraArgs/0'"),
        ("bigfleet", "shard.updateStrategy=Never", "at '/shard/updateStrategy'"),
        ("bigfleet", "shard.persistence.size=10", "at '/shard/persistence/size'"),
        ("bigfleet", "shard.service.type=Public", "at '/shard/service/type'"),
        ("bigfleet", "coordinator.store=sqlite:///x", "at '/coordinator/store'"),
        ("bigfleet", "coordinator.replicas=0", "at '/coordinator/replicas'"),
        ("bigfleet", "coordinator.enabled=true,coordinator.replicas=2", "several replicas need coordinator.store"),
        ("bigfleet", "clusterPolicy=clusters", "at '/clusterPolicy': got string, want object"),
        ("bigfleet", "clusterPolicy={a}", "at '/clusterPolicy': got array, want object"),
        ("bigfleet", "clusterPolicy.cluster.a.rows_max=1", "additional properties 'cluster' not allowed"),
        ("bigfleet", "clusterPolicy.clusters.a.rows=1", "additional properties 'rows' not allowed"),
        ("bigfleet", "clusterPolicy.clusters.a.penalty_max=3", "at '/clusterPolicy/clusters/a/penalty_max'"),
        ("bigfleet", "alerts.kind=Rule", "at '/alerts/kind'"),
        ("bigfleet", "image.tag=", "at '/image/tag'"),
        ("bigfleet", "image.pullPolicy=Sometimes", "at '/image/pullPolicy'"),
        ("bigfleet", CERT_MANAGER, "at '/tls/certManager/issuer/name'"),
        ("bigfleet", "serviceMonitor.interval=soon", "at '/serviceMonitor/interval'"),
        ("bigfleet-provider", "backend=null", "missing property 'backend'"),
        ("bigfleet-provider", "backends={x}", "additional properties 'backends' not allowed"),
        ("bigfleet-provider", "files.a=1", "at '/files/a'"),
        ("bigfleet-provider", "serviceAccount.annotation.a=b", "additional properties 'annotation' not allowed"),
        ("bigfleet-provider", "envFrom[0].secret.name=a", "additional properties 'secret' not allowed"),
        ("bigfleet-provider", "envFrom[0].secretRef.optional=true", "missing property 'name'"),
        ("bigfleet-provider", "backend={libvirt}", "libvirt: the pod has neither libvirt's client library nor keys"),
        ("bigfleet-provider", "persistence.enable=false", "additional properties 'enable' not allowed"),
        ("bigfleet-provider", "tls.secret=x", "additional properties 'secret' not allowed"),
        ("bigfleet-provider", CERT_MANAGER, "at '/tls/certManager/issuer/name'"),
        ("bigfleet-operator", "clusterId=", "at '/clusterId'"),
        ("bigfleet-operator", "shardAddr=shard", "at '/shardAddr'"),
        ("bigfleet-operator", "bootstrap.template=", "at '/bootstrap/template'"),
        ("bigfleet-operator", "bootstrap.token=password", "at '/bootstrap/token'"),
        ("bigfleet-operator", "bootstrap.tokenTtl=1y", "at '/bootstrap/tokenTtl'"),
        ("bigfleet-operator", "operator.replicas=two", "at '/operator/replicas'"),
        ("bigfleet-operator", "networkPolicy.apiServerPorts={0}", "at '/networkPolicy/apiServerPorts/0'"),
        ("bigfleet-operator", "podController.priorityClassDefaults.a.penalty=1", "'penalty' not allowed"),
        ("bigfleet-operator", "operator.resources.request.cpu=1", "additional properties 'request' not allowed"),
        ("bigfleet-operator", CERT_MANAGER, "at '/tls/certManager/issuer/name'"),
    ],
)
def test_a_wrong_value_is_refused_by_name(chart: str, values: str, fault: str) -> None:
    assert fault in refusal(chart, (*ACCEPTED[chart], "--set", values))


@pytest.mark.parametrize("chart", NAMES)
def test_every_value_is_in_the_schema_and_no_object_takes_unknown_keys(chart: str) -> None:
    schema = json.loads((CHARTS / chart / "values.schema.json").read_text(encoding="utf-8"))
    values = yaml.safe_load((CHARTS / chart / "values.yaml").read_text(encoding="utf-8"))

    assert missing_keys(values, schema, schema) == []
    assert set(schema["properties"]) == set(values)


def missing_keys(values: Any, schema: Mapping[str, Any], root: Mapping[str, Any], place: str = "") -> list[str]:
    """Return the keys of values that the schema does not name, and the objects that it leaves open."""
    if "$ref" in schema:
        schema = root["definitions"][schema["$ref"].rpartition("/")[2]]
    if not isinstance(values, dict):
        return []
    named, others = schema.get("properties", {}), schema.get("additionalProperties")
    if isinstance(others, dict):
        return []
    found = [] if others is False else [f"{place} takes any key"]
    for key, value in values.items():
        found += missing_keys(value, named[key], root, f"{place}/{key}") if key in named else [f"{place}/{key}"]
    return found


@pytest.mark.parametrize("chart", NAMES)
def test_the_version_of_a_chart_is_that_of_the_project(chart: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    described = yaml.safe_load((CHARTS / chart / "Chart.yaml").read_text(encoding="utf-8"))

    assert (described["version"], described["appVersion"]) == (project["version"], project["version"])
    assert described["name"] == chart


@needs_helm
@pytest.mark.parametrize("case", CASE_NAMES)
def test_every_flag_of_a_rendering_is_one_that_the_command_knows(case: str) -> None:
    pods = dict(pod_templates(case_objects(case)))

    assert pods
    for pod in pods.values():
        words = command_of(pod)
        assert len(set(words)) == len(words), "a flag is there twice"
        parsed_flags(words)


@needs_helm
@pytest.mark.parametrize("case", CASE_NAMES)
def test_a_pod_fits_together_and_may_do_nothing_that_the_restricted_level_forbids(case: str) -> None:
    for name, pod in pod_templates(case_objects(case)):
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, name
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert f"--metrics-addr=:{ports['metrics']}" in container["args"]
        assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "metrics"}
        assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "metrics"}


@needs_helm
@pytest.mark.parametrize("case", [case for case in CASE_NAMES if "operator" not in case])
def test_a_process_with_state_has_a_volume_and_time_to_stop(case: str) -> None:
    for found in case_objects(case):
        if found["kind"] != "StatefulSet":
            continue
        spec, pod = found["spec"], found["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        volumes = {each["name"] for each in pod.get("volumes", ())}
        claims = {each["metadata"]["name"] for each in spec.get("volumeClaimTemplates", ())}

        assert {mount["name"] for mount in container["volumeMounts"]} == volumes | claims
        assert not volumes & claims
        assert pod["terminationGracePeriodSeconds"] > provider_process._STOP_SECONDS_MAX
        assert pod["automountServiceAccountToken"] is False
        assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
        assert spec["serviceName"] in {each["metadata"]["name"] for each in case_objects(case)}


@needs_helm
@pytest.mark.parametrize("case", CASE_NAMES)
def test_every_selector_finds_exactly_one_workload_or_all_shards(case: str) -> None:
    """A Service, a budget or a policy that selects nothing protects nothing."""
    objects = case_objects(case)
    labels = {
        found["metadata"]["name"]: found["spec"]["template"]["metadata"]["labels"]
        for found in objects
        if found["kind"] in ("Deployment", "StatefulSet")
    }
    for found in objects:
        spec = found.get("spec", {})
        selector = {
            "Service": lambda spec: spec["selector"],
            "PodDisruptionBudget": lambda spec: spec["selector"]["matchLabels"],
            "NetworkPolicy": lambda spec: spec["podSelector"]["matchLabels"],
        }.get(found["kind"])
        if selector is None:
            continue
        chosen = {name for name, each in labels.items() if selector(spec).items() <= each.items()}
        shards = {name for name in labels if name.startswith("bigfleet-shard-")}
        assert len(chosen) == 1 or chosen == shards, found["metadata"]["name"]


@needs_helm
def test_metrics_are_on_no_service_that_leads_out_of_the_cluster() -> None:
    services = [each for case in CASE_NAMES for each in case_objects(case) if each["kind"] == "Service"]
    outside = [each for each in services if each["spec"].get("type", "ClusterIP") != "ClusterIP"]

    assert outside
    assert {port["name"] for each in outside for port in each["spec"]["ports"]} == {"grpc"}


@needs_helm
def test_shards_dial_the_coordinators_by_the_names_in_their_certificate() -> None:
    objects = by_name(case_objects("bigfleet/cert-manager"))
    shard = objects["StatefulSet", NAMESPACE, "bigfleet-shard-shard-0"]
    coordinators = parsed_flags(command_of(shard["spec"]["template"]["spec"]))["coordinator_addr"].split(",")
    certificate = objects["Certificate", NAMESPACE, "bigfleet-coordinator"]["spec"]

    assert coordinators == [f"bigfleet-coordinator-0.bigfleet-coordinator.{NAMESPACE}.svc:7790"]
    assert f"*.bigfleet-coordinator.{NAMESPACE}.svc" in certificate["dnsNames"]
    assert certificate["uris"] == ["bigfleet://admin"]


@needs_helm
def test_the_ends_of_a_connection_have_the_identities_that_each_may_have() -> None:
    """A client with a host name could pass for a server; a provider makes no calls."""
    found = {
        (case.partition("/")[0], each["metadata"]["name"]): each["spec"]
        for case in CASE_NAMES
        for each in case_objects(case)
        if each["kind"] == "Certificate"
    }

    assert "dnsNames" not in found["bigfleet-operator", "bigfleet-operator"]
    assert found["bigfleet-operator", "bigfleet-operator"]["uris"] == ["bigfleet://cluster/blue"]
    assert "server auth" not in found["bigfleet-operator", "bigfleet-operator"]["usages"]
    assert "uris" not in found["bigfleet-provider", "fleet"]
    assert "client auth" not in found["bigfleet-provider", "fleet"]["usages"]
    assert found["bigfleet", "bigfleet-shard-shard-0"]["uris"] == ["bigfleet://shard/shard-0"]


@needs_helm
def test_alerts_dashboard_and_definitions_are_the_files_of_deploy() -> None:
    monitored = by_name(case_objects("bigfleet/monitored"))
    alerts = monitored["ConfigMap", NAMESPACE, "bigfleet-alerts"]["data"]["bigfleet-alerts.yaml"]
    dashboard = monitored["ConfigMap", NAMESPACE, "bigfleet-dashboard"]["data"]["bigfleet-shard.json"]

    assert alerts == (ROOT / "deploy/prometheus/bigfleet-alerts.yaml").read_text(encoding="utf-8")
    assert dashboard == (ROOT / "deploy/grafana/bigfleet-shard.json").read_text(encoding="utf-8")
    definitions = [each for each in case_objects("bigfleet-operator/minimal") if "Definition" in each["kind"]]
    for found in definitions:
        assert found["metadata"]["annotations"].pop("helm.sh/resource-policy") == "keep"
        if not found["metadata"]["annotations"]:
            del found["metadata"]["annotations"]
    files = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in (ROOT / "deploy/crds").iterdir()]
    assert by_name(definitions) == by_name(files)


@needs_helm
@pytest.mark.parametrize("kind", ["ConfigMap", "PrometheusRule"])
def test_both_kinds_of_alerts_hold_exactly_the_rules_of_deploy(kind: str) -> None:
    """Prometheus Operator reads no ConfigMap: it selects PrometheusRules by their labels."""
    words = ("--set", f"alerts.enabled=true,alerts.kind={kind},alerts.labels.release=prometheus")
    found = by_name(rendered("bigfleet", (*ACCEPTED["bigfleet"], *words)))
    (name,) = [each for each in found if each[2] == "bigfleet-alerts"]
    alerts = found[name]
    content = yaml.safe_load(alerts["data"]["bigfleet-alerts.yaml"]) if kind == "ConfigMap" else alerts["spec"]

    assert name == (kind, NAMESPACE, "bigfleet-alerts")
    assert alerts["apiVersion"] == {"ConfigMap": "v1", "PrometheusRule": "monitoring.coreos.com/v1"}[kind]
    assert alerts["metadata"]["labels"] == {"release": "prometheus"}
    assert content == yaml.safe_load((ROOT / "deploy/prometheus/bigfleet-alerts.yaml").read_text(encoding="utf-8"))
    assert sum(len(group["rules"]) for group in content["groups"]) > 50


@needs_helm
def test_values_of_an_older_chart_make_a_config_map_of_alerts() -> None:
    words = ("--set", "alerts.enabled=true,alerts.kind=null,alerts.labels=null")

    assert ("ConfigMap", NAMESPACE, "bigfleet-alerts") in by_name(rendered("bigfleet", (*ACCEPTED["bigfleet"], *words)))


@needs_helm
@pytest.mark.parametrize("case", [case for case in CASE_NAMES if case.startswith("bigfleet/")])
def test_the_notes_delete_each_pod_that_waits_for_it_and_no_other(case: str) -> None:
    """One after another, and none of another release: providers are released by themselves."""
    chart, values = case.partition("/")[0], str(CASES / case / "values.yaml")
    words = ("--namespace", NAMESPACE, "--dry-run=client", "--values", values)
    done = run_program("helm", "install", "fleet", str(CHARTS / chart), *words)
    assert done.returncode == 0, done.stderr
    lines = [line.strip() for line in done.stdout.partition("NOTES:")[2].splitlines()]
    deleted = [line for line in lines if line.startswith("kubectl ") and " delete " in line]
    waiting = {
        f"kubectl -n {NAMESPACE} delete pod {each['metadata']['name']}-{number}": each["metadata"]["name"]
        for each in case_objects(case)
        if each["kind"] == "StatefulSet" and each["spec"]["updateStrategy"]["type"] == "OnDelete"
        for number in range(each["spec"]["replicas"])
    }

    assert sorted(deleted) == sorted(waiting)
    for line in deleted:
        after = lines[lines.index(line) + 1]
        assert after.startswith(f"kubectl -n {NAMESPACE} wait statefulset/{waiting[line]} ")


@needs_helm
def test_all_shards_of_a_release_are_one_job_of_prometheus() -> None:
    """BigFleetShardsFewer compares how many there are in a job; Prometheus Operator makes a job of each Service."""
    more = "shards[1].id=b,shards[1].providerAddr=q:1,serviceMonitor.enabled=true"
    found = rendered("bigfleet", (*ACCEPTED["bigfleet"], "--set", more))
    services = [each["metadata"] for each in found if each["kind"] == "Service"]
    monitors = [each["spec"] for each in found if each["kind"] == "ServiceMonitor"]
    jobs = [
        service["labels"][monitor["jobLabel"]]
        for monitor in monitors
        for service in services
        if service["name"].endswith("-metrics")
        and monitor["selector"]["matchLabels"].items() <= service["labels"].items()
    ]

    assert jobs == ["bigfleet-shard", "bigfleet-shard"]


@needs_helm
def test_operator_and_pod_controller_may_dial_the_ports_of_the_api_server_that_are_named() -> None:
    """Those behind its Service: networks compare the port of the endpoint."""
    words = ("--set", "networkPolicy.apiServerPorts={443,16443}")
    found = rendered("bigfleet-operator", (*ACCEPTED["bigfleet-operator"], *words))
    ports = {
        each["metadata"]["name"]: [port["port"] for rule in each["spec"]["egress"] for port in rule["ports"]]
        for each in found
        if each["kind"] == "NetworkPolicy"
    }

    assert ports == {
        "bigfleet-operator": [53, 53, 443, 16443, 7780],
        "bigfleet-pod-controller": [53, 53, 443, 16443],
    }


# ---- other clusters --------------------------------------------------------------------------------------------------

_IDS = ("runAsUser", "runAsGroup", "fsGroup")


@needs_helm
@pytest.mark.parametrize("chart", NAMES)
def test_user_and_groups_are_left_out_where_the_cluster_chooses_them(chart: str) -> None:
    """OpenShift refuses pods with a user or group outside of the range of their namespace."""
    words = (*ACCEPTED[chart], "--set", ",".join(f"podSecurityContext.{name}=null" for name in _IDS))
    pods = dict(pod_templates(rendered(chart, words)))

    assert pods
    for pod in pods.values():
        assert not set(_IDS) & pod["securityContext"].keys()
        assert pod["securityContext"]["runAsNonRoot"] is True


@needs_helm
@pytest.mark.parametrize(
    ("chart", "place"),
    [*((chart, "podSecurityContext") for chart in NAMES), ("bigfleet-operator", "networkPolicy.apiServerPorts")],
)
def test_values_of_an_older_chart_are_refused(chart: str, place: str) -> None:
    """Those that --reuse-values takes: without these the pods could not read Secrets or reach the API server."""
    words = (*ACCEPTED[chart], "--set", f"{place}=null")
    done = run_program("helm", "template", "fleet", str(CHARTS / chart), *words)

    assert done.returncode != 0
    assert f"missing property '{place.rpartition('.')[2]}'" in done.stderr


@needs_helm
@pytest.mark.parametrize("chart", NAMES)
def test_user_and_groups_may_be_large_numbers(chart: str) -> None:
    """As those of OpenShift are; helm reads numbers as floating-point ones."""
    words = (*ACCEPTED[chart], "--set", "podSecurityContext.runAsUser=1000650000")

    for pod in dict(pod_templates(rendered(chart, words))).values():
        assert pod["securityContext"]["runAsUser"] == 1000650000
        assert pod["securityContext"]["runAsGroup"] == 65532


def quotas(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in found if each["kind"] == "ResourceQuota"]


@needs_helm
def test_a_quota_admits_the_critical_pods_of_the_chart() -> None:
    """GKE admits none outside of kube-system without one, and only Events of the ReplicaSet say so."""
    found = rendered("bigfleet-operator", ACCEPTED["bigfleet-operator"])
    (quota,) = quotas(found)
    (expression,) = quota["spec"]["scopeSelector"]["matchExpressions"]
    specs = [each["spec"] for each in found if each["kind"] == "Deployment"]

    assert quota["metadata"]["namespace"] == NAMESPACE
    assert (expression["scopeName"], expression["operator"]) == ("PriorityClass", "In")
    assert {spec["template"]["spec"]["priorityClassName"] for spec in specs} == set(expression["values"])
    # It counts the pods of others in the namespace as well, which it must never bound.
    assert quota["spec"]["hard"] == {"pods": "1G"}


@needs_helm
@pytest.mark.parametrize(
    "words",
    [
        ("--set", "priorityClassName="),
        ("--set", "priorityClassName=null"),
        ("--set", "priorityClassName=high"),
        ("--set", "resourceQuota.enabled=false"),
        ("--namespace", "kube-system"),
    ],
    ids=" ".join,
)
def test_there_is_no_quota_where_none_is_needed(words: tuple[str, ...]) -> None:
    """Kubernetes admits these pods in kube-system by itself."""
    assert quotas(rendered("bigfleet-operator", (*ACCEPTED["bigfleet-operator"], *words))) == []


# ---- chart and manifests ---------------------------------------------------------------------------------------------

#: Components of deploy/kubernetes, and the values that mean the same.
INSTALLATIONS = {
    (): "crds.install=false",
    ("token-secret", "kubeadm-joining"): "crds.install=false,bootstrap.token=secret,bootstrap.kubeadm=true",
    ("token-request",): "crds.install=false,bootstrap.token=tokenrequest",
    ("token-secret", "drain-force"): "crds.install=false,drainForce=true,bootstrap.token=secret",
}


@needs_helm
@pytest.mark.parametrize("components", INSTALLATIONS, ids="+".join)
def test_the_chart_of_the_operator_installs_what_the_manifests_install(
    tmp_path: Path, components: tuple[str, ...]
) -> None:
    """But for the namespace, which helm is given, and a digest that starts pods again."""
    template = tmp_path / "template.j2"
    template.write_text("#cloud-config\n")
    words = (*OPERATOR, "--set-file", f"bootstrap.template={template}", "--set", INSTALLATIONS[components])
    ours = by_name([without_additions(each) for each in rendered("bigfleet-operator", words)])
    theirs = by_name([each for each in kustomized(tmp_path, components) if each["kind"] != "Namespace"])
    for found in (ours, theirs):
        defaults = found["ConfigMap", NAMESPACE, "bigfleet-priority-classes"]["data"]
        defaults.update({key: yaml.safe_load(text) for key, text in defaults.items()})

    assert ours == theirs


def without_additions(found: dict[str, Any]) -> dict[str, Any]:
    """Return an object without what the chart adds to the pods."""
    copied: dict[str, Any] = json.loads(json.dumps(found))
    if copied["kind"] == "Deployment":
        annotations = copied["spec"]["template"]["metadata"].pop("annotations")
        assert set(annotations) == {"checksum/settings"}
        (container,) = copied["spec"]["template"]["spec"]["containers"]
        assert container.pop("imagePullPolicy") == "IfNotPresent"
    return copied


def kustomized(folder: Path, components: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the objects of an overlay with these components, for the image of the chart."""
    shutil.copytree(ROOT / "deploy/kubernetes", folder / "kubernetes")
    overlay = folder / "kubernetes" / "example"
    kustomization = yaml.safe_load((overlay / "kustomization.yaml").read_text())
    kustomization["components"] = [f"../components/{name}" for name in components]
    (image,) = kustomization["images"]
    image.update(newName="r", newTag="t")
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    (overlay / "template.j2").write_text("#cloud-config\n")
    done = run_program("kubectl", "kustomize", str(overlay))
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]
