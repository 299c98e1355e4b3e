"""Defines the workloads of `bigfleet up --kubernetes`: ordinary Deployments, Jobs, StatefulSets and DaemonSets.

Every cluster gets the same kinds in its own amounts. Their pods become demand by way of the pod controller; nothing
here knows of BigFleet, and nothing does I/O.
"""

from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from bigfleet.demo.kubernetes.fake_node import RUN_SECONDS
from bigfleet.model import labels
from bigfleet.model.ids import Rng
from bigfleet.operator.kubernetes.api import Json, JsonObject, Resource
from bigfleet.operator.kubernetes.objects import KubernetesObject

T = TypeVar("T")

NAMESPACE: Final = "demo"
_HOSTNAME: Final = "kubernetes.io/hostname"


def _resource(group: str, plural: str, kind: str, *, namespaced: bool = True) -> Resource[KubernetesObject]:
    return Resource(group=group, version="v1", plural=plural, kind=kind, namespaced=namespaced, type=KubernetesObject)


NAMESPACES: Final = _resource("", "namespaces", "Namespace", namespaced=False)
CLASSES: Final = _resource("scheduling.k8s.io", "priorityclasses", "PriorityClass", namespaced=False)
DEPLOYMENTS: Final = _resource("apps", "deployments", "Deployment")
STATEFUL_SETS: Final = _resource("apps", "statefulsets", "StatefulSet")
DAEMONS: Final = _resource("apps", "daemonsets", "DaemonSet")
JOBS: Final = _resource("batch", "jobs", "Job")
BUDGETS: Final = _resource("policy", "poddisruptionbudgets", "PodDisruptionBudget")

#: Value by name; pods without a class have priority 0.
PRIORITIES: Final = {"demo-critical": 1000, "demo-batch": -100}


@dataclass(frozen=True, slots=True)
class WorkloadManifest(Generic[T]):
    """One object to be created; cluster-scoped when the namespace is ""."""

    resource: Resource[T]
    name: str
    namespace: str
    body: JsonObject


def initial_manifests(rng: Rng) -> list[WorkloadManifest[KubernetesObject]]:
    """Return what a cluster starts with, in the order of creation."""
    web, api = int(rng.uniform(12, 28)), int(rng.uniform(2, 5))
    return [
        _manifest(NAMESPACES, NAMESPACE, {}, namespace=""),
        *(
            _manifest(CLASSES, name, {"value": value, "description": "bigfleet up --kubernetes"}, namespace="")
            for name, value in PRIORITIES.items()
        ),
        _manifest(DAEMONS, "node-agent", {"spec": _workload("node-agent", _pod("100m", "128Mi", tolerates_all=True))}),
        deployment("web", web, _pod("500m", "1Gi")),
        budget("web", minimum_available="80%"),
        deployment("api", api, _pod("1", "2Gi", priority="demo-critical", one_per_node_of="api")),
        _manifest(
            STATEFUL_SETS,
            "db",
            {
                "spec": {
                    "replicas": 3,
                    "serviceName": "db",
                    "podManagementPolicy": "Parallel",
                    **_workload("db", _pod("2", "8Gi", priority="demo-critical", spread_over_zones_of="db")),
                }
            },
        ),
        gang("training-0", 4),
    ]


def deployment(name: str, replicas: int, pod: JsonObject) -> WorkloadManifest[KubernetesObject]:
    """Return a Deployment of equal pods."""
    return _manifest(DEPLOYMENTS, name, {"spec": {"replicas": replicas, **_workload(name, pod)}})


def budget(name: str, *, minimum_available: str) -> WorkloadManifest[KubernetesObject]:
    """Return the disruption budget of a workload."""
    spec: JsonObject = {"minAvailable": minimum_available, "selector": {"matchLabels": {"app": name}}}
    return _manifest(BUDGETS, name, {"spec": spec})


def gang(name: str, pods: int) -> WorkloadManifest[KubernetesObject]:
    """Return a Job whose pods run together in one zone, and end after a while."""
    pod = _pod("4", "8Gi", together_in_zone_of=name, runs_for_seconds=45)
    return _manifest(JOBS, name, {"spec": _job(name, pods, pod)})


def batch(name: str, pods: int) -> WorkloadManifest[KubernetesObject]:
    """Return a Job of low priority."""
    pod = _pod("1", "1Gi", priority="demo-batch", runs_for_seconds=20)
    return _manifest(JOBS, name, {"spec": _job(name, pods, pod)})


def _manifest(
    resource: Resource[KubernetesObject], name: str, body: JsonObject, *, namespace: str = NAMESPACE
) -> WorkloadManifest[KubernetesObject]:
    metadata: dict[str, Json] = {"name": name}
    if namespace:
        metadata["namespace"] = namespace
    whole: JsonObject = {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": metadata, **body}
    return WorkloadManifest(resource, name, namespace, whole)


def _job(name: str, pods: int, pod: JsonObject) -> JsonObject:
    template = {"metadata": _template_metadata(name, pod), "spec": pod["spec"]}
    return {"completions": pods, "parallelism": pods, "ttlSecondsAfterFinished": 30, "template": template}


def _workload(name: str, pod: JsonObject) -> dict[str, Json]:
    return {
        "selector": {"matchLabels": {"app": name}},
        "template": {"metadata": _template_metadata(name, pod), "spec": pod["spec"]},
    }


def _template_metadata(name: str, pod: JsonObject) -> JsonObject:
    return {"labels": {"app": name}, "annotations": pod["annotations"]}


def _pod(
    cpu: str,
    memory: str,
    *,
    priority: str = "",
    one_per_node_of: str = "",
    spread_over_zones_of: str = "",
    together_in_zone_of: str = "",
    tolerates_all: bool = False,
    runs_for_seconds: int = 0,
) -> JsonObject:
    """Return annotations and spec of a pod; the keywords name the app whose pods are meant."""
    spec: dict[str, Json] = {
        "containers": [{"name": "main", "image": "demo", "resources": {"requests": {"cpu": cpu, "memory": memory}}}]
    }
    if priority:
        spec["priorityClassName"] = priority
    affinity: dict[str, Json] = {}
    if one_per_node_of:
        affinity["podAntiAffinity"] = _required(one_per_node_of, _HOSTNAME)
    if together_in_zone_of:
        affinity["podAffinity"] = _required(together_in_zone_of, labels.ZONE)
    if affinity:
        spec["affinity"] = affinity
    if spread_over_zones_of:
        spec["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": labels.ZONE,
                "whenUnsatisfiable": "DoNotSchedule",
                "labelSelector": {"matchLabels": {"app": spread_over_zones_of}},
            }
        ]
    if tolerates_all:
        spec["tolerations"] = [{"operator": "Exists"}]
    annotations: dict[str, Json] = {}
    if runs_for_seconds:
        spec["restartPolicy"] = "Never"
        annotations[RUN_SECONDS] = str(runs_for_seconds)
    return {"annotations": annotations, "spec": spec}


def _required(app: str, topology_key: str) -> JsonObject:
    term: JsonObject = {"topologyKey": topology_key, "labelSelector": {"matchLabels": {"app": app}}}
    return {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
