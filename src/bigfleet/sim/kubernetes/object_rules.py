"""Checks what a request gives, and computes what the server stores for it: metadata, status, generation."""

from bigfleet.sim.kubernetes.kinds import KindKey, Stored, traits_of, with_defaults
from bigfleet.sim.kubernetes.refusals import AnyResource, bad_request, conflict, invalid
from bigfleet.sim.kubernetes.store import ObjectKey, StoredRecord

_ENDED = frozenset({"Succeeded", "Failed"})
#: Set by the server; what a client sends in their place is ignored.
_SERVER_SET = (
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "managedFields",
)


def check_type(resource: AnyResource, given: Stored, *, needs_type: bool) -> None:
    """Check apiVersion and kind; they may be absent unless they are needed. Raises ApiError 400."""
    expected = {"apiVersion": resource.api_version, "kind": resource.kind}
    for name, value in expected.items():
        if name not in given and needs_type:
            raise bad_request(f"Object '{name[0].upper()}{name[1:]}' is missing")
        if given.get(name, value) != value:
            raise bad_request(f"the object provided has {name} {given[name]!r}, not {value!r}")


def check_place(resource: AnyResource, metadata: Stored, key: ObjectKey) -> None:
    """Check that name and namespace are those of the request. Raises ApiError 400."""
    namespace, name = key
    if resource.namespaced != bool(namespace):
        raise bad_request(f"{resource.label} {'needs a' if resource.namespaced else 'has no'} namespace")
    if metadata.get("name", name) != name:
        raise bad_request(f"the name of the object ({metadata['name']}) is not the name on the URL ({name})")
    if metadata.get("namespace", namespace) != namespace:
        text = "the namespace of the provided object does not match the namespace sent on the request"
        raise bad_request(text)


def check_identity(resource: AnyResource, metadata: Stored, record: StoredRecord, *, is_patch: bool = False) -> None:
    """Check the resource version and the uid, where they are given.

    Raises ApiError 409; for the uid of a patch 422, because there it is no precondition but a change.
    """
    current = record.object["metadata"]
    if metadata.get("resourceVersion") not in (None, "", current["resourceVersion"]):
        raise conflict(resource, current["name"])
    if metadata.get("uid") not in (None, "", current["uid"]):
        if is_patch:
            why = f"metadata.uid: Invalid value: {metadata['uid']!r}: field is immutable"
            raise invalid(resource, current["name"], why)
        why = f"Precondition failed: UID in precondition: {metadata['uid']}, UID in object meta: {current['uid']}"
        raise conflict(resource, current["name"], why)


def stamped_as_given(stored: Stored, metadata: Stored) -> Stored:
    """Return an object with the server-set metadata that a test wants to have its own values."""
    stamps = {name: value for name, value in metadata.items() if name in _SERVER_SET and name != "resourceVersion"}
    return {**stored, "metadata": {**stored["metadata"], **stamps}}


def successor(resource: AnyResource, former: Stored, given: Stored, *, keeps_status: bool = True) -> Stored:
    """Return what a write makes of an object: the main path keeps its status, the status path the rest."""
    traits = traits_of(resource)
    if resource.subresource == "status":
        return {**{k: v for k, v in former.items() if k != "status"}, **_part(given, "status")}
    metadata = {name: value for name, value in (given.get("metadata") or {}).items() if name not in _SERVER_SET}
    metadata |= {name: former["metadata"][name] for name in _SERVER_SET if name in former["metadata"]}
    metadata |= {name: former["metadata"][name] for name in ("name", "namespace") if name in former["metadata"]}
    rest = {name: value for name, value in given.items() if name not in ("metadata", "status")}
    status = _part(former if traits.has_status and keeps_status else given, "status")
    stored = {"apiVersion": former["apiVersion"], "kind": former["kind"], **rest, "metadata": metadata, **status}
    if traits.counts_generations and any(
        stored.get(name) != former.get(name) for name in (stored.keys() | former.keys()) - {"metadata", "status"}
    ):
        metadata["generation"] += 1
    return stored


def in_scope(resource: AnyResource, given: Stored) -> Stored:
    """Return the part of a configuration that its path writes."""
    if resource.subresource == "status":
        return _part(given, "status")
    if traits_of(resource).has_status:
        return {name: value for name, value in given.items() if name != "status"}
    return given


def new_object(
    resource: AnyResource, given: Stored, key: ObjectKey, uid: str, timestamp: str, *, keeps_status: bool
) -> Stored:
    """Return a new object with what the server sets."""
    metadata = {name: value for name, value in given["metadata"].items() if name not in _SERVER_SET}
    metadata |= {
        "name": key[1],
        **({"namespace": key[0]} if resource.namespaced else {}),
        "uid": uid,
        "creationTimestamp": timestamp,
        **({"generation": 1} if traits_of(resource).counts_generations else {}),
    }
    rest = {name: value for name, value in given.items() if keeps_status or name != "status"}
    stored = {**rest, "apiVersion": resource.api_version, "kind": resource.kind, "metadata": metadata}
    return with_defaults(resource, stored)


def grace_of(kind: KindKey, stored: Stored, grace_seconds: int | None) -> int:
    """Return how long an object may take to end: 0 but for pods that are on a node and have not ended."""
    spec, status = stored.get("spec", {}), stored.get("status", {})
    if kind != ("", "pods") or not spec.get("nodeName") or status.get("phase") in _ENDED:
        return 0
    return int(spec["terminationGracePeriodSeconds"] if grace_seconds is None else grace_seconds)


def _part(given: Stored, name: str) -> Stored:
    return {name: given[name]} if name in given else {}
