"""Implements a simulated API server: what its requests do to objects, one request at a time.

Its methods are synchronous and know no users; `InMemoryApi` adds rights, faults, delays and watches. It knows no
schema: a test that wants objects to be checked gives it `validators`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from bigfleet.model.clock import NANOS_PER_SECOND, Clock
from bigfleet.operator.kubernetes.api import ApiError, Json, JsonObject, PatchKind, Resource
from bigfleet.operator.kubernetes.timestamps import rfc3339
from bigfleet.sim.kubernetes import kinds
from bigfleet.sim.kubernetes.eviction import as_evicted, eviction_refusal
from bigfleet.sim.kubernetes.faults import ApiFaults
from bigfleet.sim.kubernetes.field_ownership import FieldManager, FieldOwners, after_update, apply_configuration
from bigfleet.sim.kubernetes.kinds import KindKey, Stored, kind_key, plain, traits_of
from bigfleet.sim.kubernetes.object_rules import (
    check_identity,
    check_place,
    check_type,
    grace_of,
    in_scope,
    new_object,
    stamped_as_given,
    successor,
)
from bigfleet.sim.kubernetes.patches import json_patch, merge_patch, strategic_merge_patch
from bigfleet.sim.kubernetes.refusals import (
    AnyResource,
    already_exists,
    bad_request,
    conflict,
    invalid,
    kind_not_found,
    not_found,
)
from bigfleet.sim.kubernetes.selectors import select
from bigfleet.sim.kubernetes.store import ListedPage, ObjectKey, ObjectStore, StoredRecord
from bigfleet.sim.kubernetes.watching import WatchStream

T = TypeVar("T")

_TOKEN_SECONDS_DEFAULT, _TOKEN_SECONDS_MIN = 3600, 600
#: Returns what is wrong with an object, given what was stored before.
Validator = Callable[[Stored, Stored | None], Sequence[str]]
#: The manager of what `put` stores.
_OUTSIDE = "outside"
_NO_OWNERS: FieldOwners = {}


class InMemoryApiServer:
    """Stores the objects of one cluster and applies requests to them.

    uids, generated names and tokens come from counters, so that equal runs are equal. Every kind is served but for
    those in `unserved`. `put` and `remove` act as the other components of a cluster would, past every rule.
    """

    def __init__(self, clock: Clock, *, history_max: int = 10_000, bookmark_seconds: float = 60.0) -> None:
        self.clock = clock
        self.bookmark_seconds = bookmark_seconds
        self.store = ObjectStore(history_max)
        #: What goes wrong for all clients.
        self.faults = ApiFaults()
        #: Kinds that answer 404, as those whose definition is not installed.
        self.unserved: set[KindKey] = set()
        #: Say what is wrong with an object of a kind, given what was stored before; a write with faults is refused.
        self.validators: dict[KindKey, Validator] = {}
        self.watches: list[WatchStream[Any]] = []
        self._objects_made = 0

    # ---- past the API: for tests, and for the parts of a cluster that are simulated ---------------------------------

    def put(self, resource: Resource[T], body: Mapping[str, Any]) -> T:
        """Create or replace an object as it is given, status included; return it as stored."""
        given = plain(body)
        metadata = given.setdefault("metadata", {})
        key = (metadata.get("namespace", ""), metadata["name"])
        record = self.store.get(kind_key(resource), key)
        stored = self._new(resource, given, key, keeps_status=True)
        if record is not None:
            stored = successor(resource, record.object, stored, keeps_status=False)
        stored = stamped_as_given(stored, metadata)
        return self.decode(resource, self._write(resource, key, record, stored, _OUTSIDE))

    def remove(self, resource: AnyResource, name: str, namespace: str = "") -> None:
        """Remove an object at once, as a kubelet does with a pod that has ended. Raises ApiError 404."""
        self._existing(resource, (namespace, name))
        self.store.remove(kind_key(resource), (namespace, name))

    def read(self, resource: Resource[T], name: str, namespace: str = "") -> T | None:
        """Return an object, None when it is absent."""
        record = self.store.get(kind_key(resource), (namespace, name))
        return None if record is None else self.decode(resource, record.object)

    def read_all(self, resource: Resource[T], namespace: str = "") -> list[T]:
        """Return the objects of a kind, of all namespaces for "", by namespace and name."""
        return [self.decode(resource, record.object) for record in self.store.records(kind_key(resource), namespace)]

    def raw(self, resource: AnyResource, name: str, namespace: str = "") -> Stored:
        """Return a copy of an object as JSON. Raises ApiError 404."""
        return kinds.copy_of(self._existing(resource, (namespace, name)).object)

    def collect_garbage(self) -> int:
        """Delete the objects whose owners are all gone, and those whose owners that were; return how many."""
        deleted = 0
        while True:
            objects = list(self.store.all_objects())
            uids = {stored["metadata"]["uid"] for _, _, stored in objects}
            orphans = [
                (kind, key, stored)
                for kind, key, stored in objects
                if (owners := stored["metadata"].get("ownerReferences"))
                and not any(owner["uid"] in uids for owner in owners)
                and "deletionTimestamp" not in stored["metadata"]
            ]
            if not orphans:
                return deleted
            for kind, key, stored in orphans:
                self._delete(kind, key, stored, None)
            deleted += len(orphans)

    async def run_garbage_collection(self, interval_seconds: float = 1.0) -> None:
        """Collect garbage again and again, until cancelled."""
        while True:
            await self.clock.sleep(interval_seconds)
            self.collect_garbage()

    def go_down(self) -> None:
        """Refuse connections from now on, and break every open watch."""
        self.faults.is_down = True
        for watch in list(self.watches):
            watch.break_connection("connection reset by peer")

    def come_up(self) -> None:
        """Answer again."""
        self.faults.is_down = False

    def drop_watches(self) -> None:
        """End every open watch, as a server does after a while."""
        for watch in list(self.watches):
            watch.end()

    def decode(self, resource: Resource[T], stored: Stored) -> T:
        """Return an object as the type of its resource; nothing of it is shared with the stored one."""
        return msgspec.convert(kinds.copy_of(stored) if resource.type is dict else stored, resource.type)

    # ---- requests ----------------------------------------------------------------------------------------------------

    def list_objects(
        self,
        resource: AnyResource,
        *,
        namespace: str,
        limit: int,
        continue_token: str,
        resource_version: str,
        label_selector: str,
        field_selector: str,
    ) -> ListedPage:
        """Return a page of objects by namespace and name, all pages as of one version."""
        self.check_served(resource)
        if continue_token:
            return self.store.next_page(continue_token, limit)
        if resource_version and version_number(resource_version) > self.store.version:
            text = f"Too large resource version: {resource_version}, current: {self.store.version}"
            raise ApiError(504, "Timeout", f"Timeout: {text}", retry_after_seconds=1.0)
        selects = select(resource, label_selector, field_selector)
        selected = [r.object for r in self.store.records(kind_key(resource), namespace) if selects(r.object)]
        return self.store.first_page(selected, limit)

    def replay(self, stream: WatchStream[Any], resource: AnyResource, version: int) -> None:
        """Deliver to a watch what has changed since a version, or the error 410 when that is not known any more."""
        try:
            for change in self.store.changes_after(kind_key(resource), version):
                stream.hear(change)
        except ApiError as error:
            stream.fail(error)

    def get(self, resource: AnyResource, key: ObjectKey) -> Stored:
        """Return one object. Raises ApiError 404."""
        self.check_served(resource)
        return self._existing(resource, key).object

    def create(self, resource: AnyResource, body: JsonObject, key: ObjectKey, manager: str) -> Stored:
        """Create an object; the name of the key may be "" when the body has one."""
        self.check_served(resource)
        given = plain(body)
        check_type(resource, given, needs_type=not traits_of(resource).is_built_in)
        metadata = given.setdefault("metadata", {})
        name = metadata.get("name") or key[1] or self._generated_name(metadata)
        if not name:
            raise invalid(resource, "", "metadata.name: Required value: name or generateName is required")
        key = (key[0], name)
        check_place(resource, metadata, key)
        if metadata.get("resourceVersion"):
            raise bad_request("resourceVersion should not be set on objects to be created")
        if self.store.get(kind_key(resource), key) is not None:
            raise already_exists(resource, name)
        traits = traits_of(resource)
        keeps_status = traits.accepts_status_on_create or not traits.has_status
        stored = self._new(resource, given, key, keeps_status=keeps_status)
        return self._write(resource, key, None, stored, manager)

    def replace(self, resource: AnyResource, body: JsonObject, key: ObjectKey, manager: str) -> Stored:
        """Replace an object or its status."""
        self.check_served(resource)
        record = self._existing(resource, key)
        given = plain(body)
        check_type(resource, given, needs_type=not traits_of(resource).is_built_in)
        metadata = given.setdefault("metadata", {})
        check_place(resource, metadata, key)
        if traits_of(resource).requires_version and not metadata.get("resourceVersion"):
            why = "metadata.resourceVersion: Invalid value: 0: must be specified for an update"
            raise invalid(resource, key[1], why)
        check_identity(resource, metadata, record)
        return self._write(resource, key, record, successor(resource, record.object, given), manager)

    def patch(self, resource: AnyResource, body: Json, key: ObjectKey, kind: PatchKind, manager: str) -> Stored:
        """Patch an object or its status."""
        self.check_served(resource)
        record = self._existing(resource, key)
        patch = plain(body, keep_nulls=True)
        if isinstance(patch, list) != (kind is PatchKind.JSON):
            raise bad_request(f"a {kind.value} patch is {'a list' if kind is PatchKind.JSON else 'an object'}")
        if kind is PatchKind.STRATEGIC and not traits_of(resource).is_built_in:
            accepted = "application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml"
            text = f"the body of the request was in an unknown format - accepted media types include: {accepted}"
            raise ApiError(415, "UnsupportedMediaType", text)
        if kind is PatchKind.JSON:
            patched = json_patch(record.object, patch)
        else:
            apply_patch = merge_patch if kind is PatchKind.MERGE else strategic_merge_patch
            patched = apply_patch(record.object, patch)
        patched = plain(patched)
        metadata = patched.get("metadata") or {}
        check_place(resource, metadata, key)
        check_identity(resource, metadata, record, is_patch=True)
        return self._write(resource, key, record, successor(resource, record.object, patched), manager)

    def apply(self, resource: AnyResource, body: JsonObject, key: ObjectKey, manager: str, *, force: bool) -> Stored:
        """Apply a configuration to an object or its status; an absent object is created."""
        self.check_served(resource)
        given = plain(body)
        check_type(resource, given, needs_type=True)
        metadata = given.setdefault("metadata", {})
        check_place(resource, metadata, key)
        record = self.store.get(kind_key(resource), key)
        if record is None and (resource.subresource or metadata.get("uid") or metadata.get("resourceVersion")):
            raise not_found(resource, key[1])
        if record is None:
            record = StoredRecord(self._new(resource, {"metadata": {}}, key, keeps_status=False))
            is_new = True
        else:
            check_identity(resource, metadata, record)
            is_new = False
        owner = FieldManager(manager, True, resource.subresource)
        scoped = in_scope(resource, given)
        applied, owners = apply_configuration(record.object, record.owners, scoped, owner, force=force)
        stored = successor(resource, record.object, applied)
        if is_new:
            generation = {"generation": 1} if traits_of(resource).counts_generations else {}
            stored = kinds.with_defaults(resource, {**stored, "metadata": {**stored["metadata"], **generation}})
        elif stored == record.object and owners == record.owners:
            return record.object
        self._validate(resource, key, stored, None if is_new else record.object)
        return self.store.put(kind_key(resource), key, stored, owners)

    def delete(self, resource: AnyResource, key: ObjectKey, uid: str, grace_seconds: int | None) -> None:
        """Delete an object; a pod on a node goes on terminating until it is deleted with grace 0."""
        self.check_served(resource)
        stored = self._existing(resource, key).object
        found = stored["metadata"]["uid"]
        if uid and found != uid:
            why = f"Precondition failed: UID in precondition: {uid}, UID in object meta: {found}"
            raise conflict(resource, key[1], why)
        self._delete(kind_key(resource), key, stored, grace_seconds)

    def evict(self, resource: AnyResource, body: JsonObject, key: ObjectKey) -> Stored:
        """Evict a pod if the budgets of its namespace allow it."""
        pod = self._existing(resource, key).object
        options = plain(body).get("deleteOptions") or {}
        uid = (options.get("preconditions") or {}).get("uid", "")
        if uid and pod["metadata"]["uid"] != uid:
            why = f"Precondition failed: UID in precondition: {uid}, UID in object meta: {pod['metadata']['uid']}"
            raise conflict(resource, key[1], why)
        budgets = [record.object for record in self.store.records(kind_key(kinds.POD_DISRUPTION_BUDGETS), key[0])]
        pods = [record.object for record in self.store.records(kind_key(resource), key[0])]
        refusal = eviction_refusal(pod, budgets, pods, self._wanted_pods(pod))
        if refusal is not None:
            raise refusal
        if not options.get("dryRun"):
            evicted = as_evicted(pod, self.timestamp())
            self._delete(kind_key(resource), key, evicted, options.get("gracePeriodSeconds"))
        return {"apiVersion": "v1", "kind": "Status", "status": "Success", "code": 201}

    def request_token(self, resource: AnyResource, body: JsonObject, key: ObjectKey) -> Stored:
        """Return a token of a service account that exists."""
        self._existing(resource, key)
        given = plain(body)
        seconds = given.get("spec", {}).get("expirationSeconds", _TOKEN_SECONDS_DEFAULT)
        if seconds < _TOKEN_SECONDS_MIN:
            why = f"Invalid value: {seconds}: may not specify a duration less than 10 minutes"
            raise invalid(resource, "", f"spec.expirationSeconds: {why}")
        self._objects_made += 1
        status = {
            "token": f"token-{self._objects_made}-of-{key[0]}.{key[1]}",
            "expirationTimestamp": self.timestamp(seconds),
        }
        return {**given, "metadata": {"name": key[1], "namespace": key[0]}, "status": status}

    # ---- inside ------------------------------------------------------------------------------------------------------

    def timestamp(self, after_seconds: float = 0.0) -> str:
        """Return the time now, or so many seconds later, as objects carry it: RFC 3339 in whole seconds."""
        return rfc3339(self.clock.unix_nanos() + int(after_seconds) * NANOS_PER_SECOND)

    def check_served(self, resource: AnyResource) -> None:
        """Raise ApiError 404 for a kind that is not served."""
        if kind_key(resource) in self.unserved:
            raise kind_not_found()

    def _existing(self, resource: AnyResource, key: ObjectKey) -> StoredRecord:
        record = self.store.get(kind_key(resource), key)
        if record is None:
            raise not_found(resource, key[1])
        return record

    def _generated_name(self, metadata: Stored) -> str:
        prefix = metadata.get("generateName")
        return f"{prefix}{self._objects_made + 1:05d}" if prefix else ""

    def _new(self, resource: AnyResource, given: Stored, key: ObjectKey, *, keeps_status: bool) -> Stored:
        """Return a new object with what the server sets."""
        self._objects_made += 1
        uid = f"00000000-0000-4000-8000-{self._objects_made:012x}"
        return new_object(resource, given, key, uid, self.timestamp(), keeps_status=keeps_status)

    def _write(
        self, resource: AnyResource, key: ObjectKey, record: StoredRecord | None, stored: Stored, manager: str
    ) -> Stored:
        stored = kinds.with_defaults(resource, stored)
        if record is not None and stored == record.object:
            return record.object
        former, owners = (record.object, record.owners) if record else ({}, _NO_OWNERS)
        if manager != _OUTSIDE:
            self._validate(resource, key, stored, record.object if record else None)
        owner = FieldManager(manager, False, resource.subresource)
        return self.store.put(kind_key(resource), key, stored, after_update(owners, former, stored, owner))

    def _validate(self, resource: AnyResource, key: ObjectKey, stored: Stored, before: Stored | None) -> None:
        validator = self.validators.get(kind_key(resource))
        found = validator(stored, before) if validator else ()
        if found:
            raise invalid(resource, key[1], ", ".join(found))

    def _delete(self, kind: KindKey, key: ObjectKey, stored: Stored, grace_seconds: int | None) -> None:
        grace = grace_of(kind, stored, grace_seconds)
        if grace == 0:
            self.store.remove(kind, key)
            return
        metadata = stored["metadata"]
        running = metadata.get("deletionGracePeriodSeconds")
        if running is not None and running <= grace:
            return
        stamps = {"deletionTimestamp": self.timestamp(grace), "deletionGracePeriodSeconds": grace}
        record = self.store.get(kind, key)
        owners = record.owners if record else _NO_OWNERS
        self.store.put(kind, key, {**stored, "metadata": {**metadata, **stamps}}, owners)

    def _wanted_pods(self, pod: Stored) -> int | None:
        """Return the replicas of the controller of a pod, None when it has none that is stored."""
        uids = {owner["uid"] for owner in pod["metadata"].get("ownerReferences") or [] if owner.get("controller")}
        for _, _, stored in self.store.all_objects():
            if stored["metadata"]["uid"] in uids and "replicas" in stored.get("spec", {}):
                return int(stored["spec"]["replicas"])
        return None


def version_number(text: str) -> int:
    """Return a resource version as a number. Raises ApiError 400."""
    try:
        return int(text)
    except ValueError:
        raise bad_request(f"Invalid value: {text!r}: a resource version is a number") from None
