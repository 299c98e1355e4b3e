"""Lists kinds of a real API server that tests write and BigFleet does not, and the objects that tests make of them."""

from collections.abc import Mapping, Sequence

import msgspec

from bigfleet.operator.kubernetes.api import Json, JsonObject, Resource
from bigfleet.operator.kubernetes.objects import Condition, KubernetesObject


class ReplicaStatus(msgspec.Struct, rename="camel"):
    """`status` of a Deployment and of a Job."""

    ready_replicas: int = 0
    available_replicas: int = 0
    succeeded: int = 0
    conditions: list[Condition] | None = None


class Workload(KubernetesObject):
    """A Deployment or a Job."""

    status: ReplicaStatus = msgspec.field(default_factory=ReplicaStatus)


class EventSubject(msgspec.Struct, rename="camel"):
    """`involvedObject` of an Event."""

    kind: str = ""
    name: str = ""


class ReadableEvent(KubernetesObject):
    """An Event as a person reads it."""

    involved_object: EventSubject = msgspec.field(default_factory=EventSubject)
    reason: str = ""
    message: str = ""
    type: str = ""


class DefinitionStatus(msgspec.Struct, rename="camel"):
    """`status` of a CustomResourceDefinition."""

    conditions: list[Condition] | None = None


class Definition(KubernetesObject):
    """A CustomResourceDefinition."""

    status: DefinitionStatus = msgspec.field(default_factory=DefinitionStatus)


NAMESPACES = Resource(
    group="", version="v1", plural="namespaces", kind="Namespace", namespaced=False, type=KubernetesObject
)
SERVICE_ACCOUNTS = Resource(
    group="", version="v1", plural="serviceaccounts", kind="ServiceAccount", namespaced=True, type=KubernetesObject
)
EVENTS = Resource(group="", version="v1", plural="events", kind="Event", namespaced=True, type=ReadableEvent)
DEPLOYMENTS = Resource(
    group="apps", version="v1", plural="deployments", kind="Deployment", namespaced=True, type=Workload
)
JOBS = Resource(group="batch", version="v1", plural="jobs", kind="Job", namespaced=True, type=Workload)
DAEMON_SETS = Resource(
    group="apps", version="v1", plural="daemonsets", kind="DaemonSet", namespaced=True, type=KubernetesObject
)
DISRUPTION_BUDGETS = Resource(
    group="policy",
    version="v1",
    plural="poddisruptionbudgets",
    kind="PodDisruptionBudget",
    namespaced=True,
    type=KubernetesObject,
)
PRIORITY_CLASSES = Resource(
    group="scheduling.k8s.io",
    version="v1",
    plural="priorityclasses",
    kind="PriorityClass",
    namespaced=False,
    type=KubernetesObject,
)
ROLES = Resource(
    group="rbac.authorization.k8s.io",
    version="v1",
    plural="roles",
    kind="Role",
    namespaced=True,
    type=KubernetesObject,
)
ROLE_BINDINGS = Resource(
    group="rbac.authorization.k8s.io",
    version="v1",
    plural="rolebindings",
    kind="RoleBinding",
    namespaced=True,
    type=KubernetesObject,
)
DEFINITIONS = Resource(
    group="apiextensions.k8s.io",
    version="v1",
    plural="customresourcedefinitions",
    kind="CustomResourceDefinition",
    namespaced=False,
    type=Definition,
)


def pod_template(
    *,
    requests: Mapping[str, str] | None = None,
    limits: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    **spec: Json,
) -> dict[str, Json]:
    """Return metadata and spec of a pod with one container; `spec` adds fields such as `nodeSelector`."""
    container: JsonObject = {
        "name": "main",
        "image": "fake",
        "resources": {"requests": dict(requests or {"cpu": "1", "memory": "1Gi"}), "limits": dict(limits or {})},
    }
    return {
        "metadata": {"labels": dict(labels or {}), "annotations": dict(annotations or {})},
        "spec": {"containers": [container], **spec},
    }


def pod(name: str, template: Mapping[str, Json]) -> JsonObject:
    """Return a pod of its own."""
    metadata = template["metadata"]
    assert isinstance(metadata, Mapping)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {**metadata, "name": name}, "spec": template["spec"]}


def deployment(name: str, replicas: int, template: Mapping[str, Json]) -> JsonObject:
    """Return a Deployment whose pods have the label `app` with its name."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": name}},
            "template": _labelled(template, name),
        },
    }


def daemon_set(name: str, template: Mapping[str, Json]) -> JsonObject:
    """Return a DaemonSet whose pods have the label `app` with its name, and run on every node."""
    spec = template["spec"]
    assert isinstance(spec, Mapping)
    everywhere: JsonObject = {**_labelled(template, name), "spec": {**spec, "tolerations": [{"operator": "Exists"}]}}
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": name},
        "spec": {"selector": {"matchLabels": {"app": name}}, "template": everywhere},
    }


def job(name: str, completions: int, template: Mapping[str, Json]) -> JsonObject:
    """Return a Job whose pods run side by side."""
    spec = template["spec"]
    assert isinstance(spec, Mapping)
    once = {**_labelled(template, name), "spec": {**spec, "restartPolicy": "Never"}}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {"completions": completions, "parallelism": completions, "template": once},
    }


def disruption_budget(name: str, app: str, *, min_available: int) -> JsonObject:
    """Return a budget for the pods with a label `app`."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": name},
        "spec": {"minAvailable": min_available, "selector": {"matchLabels": {"app": app}}},
    }


def priority_class(name: str, value: int) -> JsonObject:
    """Return a PriorityClass."""
    return {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": name},
        "value": value,
    }


def eviction(name: str, namespace: str) -> JsonObject:
    """Return the request to evict a pod."""
    return {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": namespace}}


def secret(name: str, *, version: str = "", value: str = "") -> JsonObject:
    """Return a Secret with one value, at a resource version if one is given."""
    metadata: JsonObject = {"name": name, "resourceVersion": version} if version else {"name": name}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"value": value}}


def role(name: str, rules: Sequence[JsonObject]) -> JsonObject:
    """Return a Role."""
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": name},
        "rules": list(rules),
    }


def role_binding(name: str, *, role_name: str, account: str, namespace: str) -> JsonObject:
    """Return a RoleBinding of one service account."""
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": role_name},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
    }


def _labelled(template: Mapping[str, Json], app: str) -> dict[str, Json]:
    metadata = template["metadata"]
    assert isinstance(metadata, Mapping)
    labels = metadata["labels"]
    assert isinstance(labels, Mapping)
    return {**template, "metadata": {**metadata, "labels": {**labels, "app": app}}}
