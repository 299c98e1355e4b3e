"""Describes how an API server treats each kind: subresources, generations, defaults, selectable fields."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from bigfleet.operator.kubernetes import resources as known
from bigfleet.operator.kubernetes.api import Resource

#: An object as it is stored: nothing but what JSON can express. A stored one is never changed in place.
Stored = dict[str, Any]
#: What is unique among the kinds of one server: group and plural.
KindKey = tuple[str, str]

POD_DISRUPTION_BUDGETS = Resource(
    group="policy", version="v1", plural="poddisruptionbudgets", kind="PodDisruptionBudget", namespaced=True, type=dict
)
SERVICE_ACCOUNTS = Resource(
    group="", version="v1", plural="serviceaccounts", kind="ServiceAccount", namespaced=True, type=dict
)
REPLICA_SETS = Resource(group="apps", version="v1", plural="replicasets", kind="ReplicaSet", namespaced=True, type=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class KindTraits:
    """How one kind differs from a plain object such as a Secret."""

    #: Has a status subresource: the main path ignores status, the status path everything else.
    has_status: bool = False
    #: A status that comes with a creation is stored (nodes).
    accepts_status_on_create: bool = False
    #: Counts generations: the changes outside of metadata and status.
    counts_generations: bool = False
    #: A replacement must name the resource version.
    requires_version: bool = False
    #: Understands strategic merge patches; custom resources do not.
    is_built_in: bool = True
    #: Selectable fields beside `metadata.name` and `metadata.namespace`.
    fields: frozenset[str] = frozenset()


_CUSTOM = KindTraits(has_status=True, counts_generations=True, requires_version=True, is_built_in=False)
_TRAITS: Mapping[KindKey, KindTraits] = {
    ("", "pods"): KindTraits(
        has_status=True,
        counts_generations=True,
        fields=frozenset({"status.phase", "spec.nodeName", "spec.schedulerName", "spec.restartPolicy"}),
    ),
    ("", "nodes"): KindTraits(has_status=True, accepts_status_on_create=True, fields=frozenset({"spec.unschedulable"})),
    ("", "events"): KindTraits(
        fields=frozenset(
            {
                "involvedObject.kind",
                "involvedObject.namespace",
                "involvedObject.name",
                "involvedObject.uid",
                "reason",
                "type",
            }
        )
    ),
    ("", "secrets"): KindTraits(fields=frozenset({"type"})),
    ("", "persistentvolumes"): KindTraits(has_status=True),
    ("", "persistentvolumeclaims"): KindTraits(has_status=True),
    ("apps", "daemonsets"): KindTraits(has_status=True, counts_generations=True),
    ("apps", "replicasets"): KindTraits(has_status=True, counts_generations=True),
    ("policy", "poddisruptionbudgets"): KindTraits(has_status=True, counts_generations=True),
    ("coordination.k8s.io", "leases"): KindTraits(requires_version=True),
    (known.GROUP, "capacityrequests"): KindTraits(
        has_status=True,
        counts_generations=True,
        requires_version=True,
        is_built_in=False,
        fields=frozenset({"status.phase"}),
    ),
    (known.GROUP, "upcomingnodes"): _CUSTOM,
    (known.GROUP, "availablecapacities"): _CUSTOM,
}
_PLAIN = KindTraits()
#: How long a pod that says nothing may take to end.
_GRACE_SECONDS_DEFAULT = 30


def kind_key(resource: Resource[Any]) -> KindKey:
    """Return what identifies the kind of a resource, with any subresource."""
    return (resource.group, resource.plural)


def traits_of(resource: Resource[Any]) -> KindTraits:
    """Return how the server treats a kind; an unknown one is a plain object."""
    return _TRAITS.get(kind_key(resource), _PLAIN)


def with_defaults(resource: Resource[Any], stored: Stored) -> Stored:
    """Return a new object with the defaults that a server fills in and that are read."""
    if kind_key(resource) != ("", "pods"):
        return stored
    spec = {"terminationGracePeriodSeconds": _GRACE_SECONDS_DEFAULT, **stored.get("spec", {})}
    status = {"phase": "Pending", **stored.get("status", {})}
    return {**stored, "spec": spec, "status": status}


def plain(value: Any, *, keep_nulls: bool = False) -> Any:
    """Return a deep copy of plain dicts and lists; a null in a mapping is left out, as servers do.

    Raises TypeError for what JSON cannot express.
    """
    if isinstance(value, Mapping):
        items = ((str(key), plain(each, keep_nulls=keep_nulls)) for key, each in value.items())
        return {key: each for key, each in items if keep_nulls or each is not None}
    if isinstance(value, list | tuple):
        return [plain(each, keep_nulls=keep_nulls) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{value!r} of type {type(value).__name__} is no JSON value")


def field_of(stored: Stored, path: str) -> str:
    """Return a field as selectors compare it; "" when it is absent."""
    value: Any = stored
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def copy_of(stored: Stored) -> Stored:
    """Return a copy that may be changed."""
    return deepcopy(stored)
