"""Defines what the operator stores about each CapacityRequest, and about each row that requests share.

A cluster may have 50,000 requests, so an entry is small and requests share one object for everything they have in
common. An entry never outlives its stored object: an object that is created again under the same name gets a new entry.
"""

from typing import NamedTuple

from bigfleet.operator.kubernetes.objects import CapacityRequestObject, ObjectMeta
from bigfleet.operator.kubernetes.resources import OWNED_BY_POD
from bigfleet.operator.requests import UnmappableReason

#: (namespace, name).
ObjectKey = tuple[str, str]
#: (fingerprint, group).
RowId = tuple[str, str]
#: (namespace, uid) of a pod. A request must not speak for the pods of another namespace.
PodKey = tuple[str, str]


class RequestFault(NamedTuple):
    """Why a request is not counted."""

    reason: UnmappableReason
    message: str
    #: It could be counted if others were not.
    is_crowded: bool = False


class OwnerPod(NamedTuple):
    """The pod that a request stands for."""

    uid: str
    #: "" when the request names the uid alone.
    name: str


class RequestRow:
    """The requests of one (fingerprint, group)."""

    __slots__ = ("id", "members")

    def __init__(self, row_id: RowId) -> None:
        self.id = row_id
        #: In the order in which they joined; the values mean nothing.
        self.members: dict[ObjectKey, None] = {}


class RequestEntry:
    """One stored CapacityRequest."""

    __slots__ = (
        "fault",
        "first_stamp_nanos",
        "generation",
        "is_acknowledged",
        "key",
        "pod_uid",
        "row",
        "seen_seconds",
        "uid",
    )

    def __init__(self, stored: CapacityRequestObject, *, seen_seconds: float) -> None:
        metadata = stored.metadata
        pod = owner_pod(metadata)
        self.key: ObjectKey = metadata.key
        self.uid = metadata.uid
        self.generation = metadata.generation
        self.pod_uid = pod.uid if pod is not None else ""
        #: When this generation was first seen, on the monotonic clock.
        self.seen_seconds = seen_seconds
        #: None while the request is not counted.
        self.row: RequestRow | None = None
        self.fault: RequestFault | None = None
        #: Timestamp of the first roll-up that contained this generation; 0 while there is none.
        self.first_stamp_nanos = 0
        #: The shard has put a roll-up into force that contained this generation.
        self.is_acknowledged = False

    @property
    def pod(self) -> PodKey:
        """The pod that it stands for, if it has a `pod_uid`: one of its own namespace."""
        return (self.key[0], self.pod_uid)


def pod_key(metadata: ObjectMeta) -> PodKey:
    """Return the key of a pod by its metadata."""
    return (metadata.namespace, metadata.uid)


def owner_pod(metadata: ObjectMeta) -> OwnerPod | None:
    """Return the pod that owns a CapacityRequest, by owner reference or by label; None for a request without one."""
    labelled = (metadata.labels or {}).get(OWNED_BY_POD, "")
    pods = [owner for owner in metadata.owner_references or () if owner.kind == "Pod" and owner.api_version == "v1"]
    for owner in pods:
        if not labelled or owner.uid == labelled:
            return OwnerPod(owner.uid, owner.name)
    return OwnerPod(labelled, "") if labelled else None
