"""Indexes pods by UID and by Node, their requests, and the claims that they use, as listeners of the caches.

Each change names the pods whose requests may have to change. Changes of a pod that its request does not depend on, such
as a condition of its status, name none.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from bigfleet.operator.kubernetes.objects import (
    CapacityRequestObject,
    PersistentVolume,
    PersistentVolumeClaim,
    PodObject,
)
from bigfleet.operator.kubernetes.resources import OWNED_BY_POD
from bigfleet.operator.kubernetes.views import ObjectView
from bigfleet.operator.pods.volumes import claims_of

_Key = tuple[str, str]
_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V", bound=Hashable)


class PodIndex:
    """The pods and requests of a cluster by the pod's UID; calls `on_change` with each UID to look at."""

    def __init__(
        self,
        on_change: Callable[[str], None],
        *,
        claims: ObjectView[PersistentVolumeClaim],
        volumes: ObjectView[PersistentVolume],
    ) -> None:
        self._on_change = on_change
        self._claims = claims
        self._volumes = volumes
        self._pods: dict[str, PodObject] = {}
        self._requests: dict[str, dict[_Key, CapacityRequestObject]] = {}
        self._pods_by_node: dict[str, set[str]] = {}
        self._pods_by_claim: dict[_Key, set[str]] = {}
        self._claims_by_volume: dict[str, set[_Key]] = {}
        self.pods_listener = PodListener(self)
        self.requests_listener = OwnedRequestListener(self)
        self.claims_listener = ClaimListener(self)
        self.volumes_listener = VolumeListener(self)

    def pod(self, uid: str) -> PodObject | None:
        """Return a pod, None when it is not in the cache."""
        return self._pods.get(uid)

    def requests_of(self, uid: str) -> list[CapacityRequestObject]:
        """Return the requests that carry the pod's UID as label, by namespace and name."""
        return [stored for _key, stored in sorted(self._requests.get(uid, {}).items())]

    def uids(self) -> set[str]:
        """Return the UIDs of all pods, and of all pods that requests name."""
        return {*self._pods, *self._requests}

    # ---- volumes, as the mapping reads them ---------------------------------------------------------------------

    def claim(self, namespace: str, name: str) -> PersistentVolumeClaim | None:
        """Return a claim, None when it is not in the cache."""
        return self._claims.get(name, namespace)

    def volume(self, name: str) -> PersistentVolume | None:
        """Return a volume, None when it is not in the cache."""
        return self._volumes.get(name)

    # ---- changes ------------------------------------------------------------------------------------------------

    def put_pod(self, stored: PodObject, former: PodObject | None) -> None:
        """Take a pod in."""
        uid = stored.metadata.uid
        known = self._pods.get(uid)
        self._pods[uid] = stored
        node_name = stored.spec.node_name
        if known is not None and known.spec.node_name != node_name:
            _discard(self._pods_by_node, known.spec.node_name, uid)
        if node_name:
            self._pods_by_node.setdefault(node_name, set()).add(uid)
        if known is None or known.spec.volumes != stored.spec.volumes:
            if known is not None:
                self._forget_claims(known)
            for name in claims_of(stored):
                self._pods_by_claim.setdefault((stored.metadata.namespace, name), set()).add(uid)
        if former is None or known is None or _differs(stored, known):
            self._on_change(uid)

    def remove_pod(self, former: PodObject) -> None:
        """Drop a pod."""
        uid = former.metadata.uid
        known = self._pods.pop(uid, None)
        if known is not None:
            _discard(self._pods_by_node, known.spec.node_name, uid)
            self._forget_claims(known)
        self._on_change(uid)

    def _forget_claims(self, pod: PodObject) -> None:
        for name in claims_of(pod):
            _discard(self._pods_by_claim, (pod.metadata.namespace, name), pod.metadata.uid)

    def put_request(self, stored: CapacityRequestObject, former: CapacityRequestObject | None) -> None:
        """Take a request in."""
        uid = _owner_of(stored)
        if former is not None and _owner_of(former) != uid:
            self.remove_request(former)
        self._requests.setdefault(uid, {})[stored.metadata.key] = stored
        if former is None or _is_tampered_with(stored, former):
            self._on_change(uid)

    def remove_request(self, former: CapacityRequestObject) -> None:
        """Drop a request."""
        uid = _owner_of(former)
        of_pod = self._requests.get(uid, {})
        of_pod.pop(former.metadata.key, None)
        if not of_pod:
            self._requests.pop(uid, None)
        self._on_change(uid)

    def put_claim(self, stored: PersistentVolumeClaim, former: PersistentVolumeClaim | None) -> None:
        """Note which volume a claim is bound to."""
        volume = stored.spec.volume_name
        if former is not None and former.spec.volume_name == volume:
            return
        if former is not None:
            _discard(self._claims_by_volume, former.spec.volume_name, former.metadata.key)
        if volume:
            self._claims_by_volume.setdefault(volume, set()).add(stored.metadata.key)
        self._changed(self._pods_by_claim.get(stored.metadata.key, ()))

    def remove_claim(self, former: PersistentVolumeClaim) -> None:
        """Drop a claim."""
        _discard(self._claims_by_volume, former.spec.volume_name, former.metadata.key)
        self._changed(self._pods_by_claim.get(former.metadata.key, ()))

    def change_volume(self, name: str) -> None:
        """Look at the pods whose claims are bound to a volume."""
        for key in self._claims_by_volume.get(name, ()):
            self._changed(self._pods_by_claim.get(key, ()))

    def change_node(self, name: str) -> None:
        """Look at the pods of a Node."""
        self._changed(self._pods_by_node.get(name, ()))

    def _changed(self, uids: Iterable[str]) -> None:
        for uid in sorted(uids):
            self._on_change(uid)


class PodListener:
    """Hears pods for a `PodIndex`."""

    def __init__(self, index: PodIndex) -> None:
        self._index = index

    def put(self, stored: PodObject, former: PodObject | None) -> None:
        """Take a pod in."""
        self._index.put_pod(stored, former)

    def remove(self, former: PodObject) -> None:
        """Drop a pod."""
        self._index.remove_pod(former)


class OwnedRequestListener:
    """Hears CapacityRequests of pods for a `PodIndex`."""

    def __init__(self, index: PodIndex) -> None:
        self._index = index

    def put(self, stored: CapacityRequestObject, former: CapacityRequestObject | None) -> None:
        """Take a request in."""
        self._index.put_request(stored, former)

    def remove(self, former: CapacityRequestObject) -> None:
        """Drop a request."""
        self._index.remove_request(former)


class ClaimListener:
    """Hears PersistentVolumeClaims for a `PodIndex`."""

    def __init__(self, index: PodIndex) -> None:
        self._index = index

    def put(self, stored: PersistentVolumeClaim, former: PersistentVolumeClaim | None) -> None:
        """Take a claim in."""
        self._index.put_claim(stored, former)

    def remove(self, former: PersistentVolumeClaim) -> None:
        """Drop a claim."""
        self._index.remove_claim(former)


class VolumeListener:
    """Hears PersistentVolumes for a `PodIndex`."""

    def __init__(self, index: PodIndex) -> None:
        self._index = index

    def put(self, stored: PersistentVolume, former: PersistentVolume | None) -> None:
        """Look at the pods of a volume that is new or has another node affinity."""
        if former is None or former.spec != stored.spec:
            self._index.change_volume(stored.metadata.name)

    def remove(self, former: PersistentVolume) -> None:
        """Look at the pods of a volume that is gone."""
        self._index.change_volume(former.metadata.name)


def _owner_of(request: CapacityRequestObject) -> str:
    return (request.metadata.labels or {}).get(OWNED_BY_POD, "")


def _differs(stored: PodObject, former: PodObject) -> bool:
    """Return whether anything differs that a request may depend on."""
    new, old = stored.metadata, former.metadata
    return (
        stored.spec != former.spec
        or stored.status.phase != former.status.phase
        or new.annotations != old.annotations
        or new.labels != old.labels
        or new.deletion_timestamp != old.deletion_timestamp
        or new.owner_references != old.owner_references
    )


def _is_tampered_with(stored: CapacityRequestObject, former: CapacityRequestObject) -> bool:
    """Return whether anything differs that the pod controller writes."""
    new, old = stored.metadata, former.metadata
    return (
        stored.spec != former.spec
        or new.labels != old.labels
        or new.owner_references != old.owner_references
        or not stored.status.phase
    )


def _discard(sets: dict[_K, set[_V]], key: _K, value: _V) -> None:
    found = sets.get(key)
    if found is not None:
        found.discard(value)
        if not found:
            del sets[key]
