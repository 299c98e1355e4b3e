"""Maintains the demand of one cluster from its CapacityRequests, and builds its roll-ups.

docs/spec/operator.md §3. Watch events change running sums, so the cost of a roll-up grows with the rows and not with
the requests. A recount at each session start and every 10 min must agree with the sums, and replaces them if it does
not. The recount runs in slices between other work. Objects that cannot be mapped are left out with their reason and
never affect others. A roll-up is never built from a view that may be partial.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Final, NamedTuple, Protocol

import msgspec
import structlog

from bigfleet.model.clock import Clock
from bigfleet.model.frames import RollUp
from bigfleet.model.ids import ClusterId
from bigfleet.model.profile import Operator, Requirement
from bigfleet.model.shapes import Overhead
from bigfleet.model.vector import Vector
from bigfleet.operator.demand.capacity_requests import (
    REQUIREMENTS_MAX,
    RESOURCES_MAX,
    VALUES_MAX,
    request_id,
    request_of_spec,
)
from bigfleet.operator.demand.entries import ObjectKey, PodKey, RequestEntry, RequestFault, RequestRow, RowId
from bigfleet.operator.kubernetes.objects import CapacityRequestObject, CapacityRequestSpec
from bigfleet.operator.kubernetes.views import ObjectView
from bigfleet.operator.requests import CapacityRequest, MappedRequest, UnmappableReason, UnmappableRequest, map_request
from bigfleet.operator.rollup import RollUpBuilder

log = structlog.get_logger(__name__)

#: A view that has been failing for longer may be too old to speak for the cluster.
FAILING_SECONDS_MAX: Final = 60.0
RECOUNT_SECONDS: Final = 600.0
#: How often it is asked whether a recount is due.
_RECOUNT_LOOK_SECONDS: Final = 1.0
#: Requests that are recounted before other tasks run: some milliseconds.
_RECOUNT_SLICE: Final = 250
_MAPPINGS_MAX: Final = 16_384
#: Bytes of a spec whose mapping is remembered; an ordinary one has some hundred. Each change of a spec is another one.
_MAPPED_BYTES_MAX: Final = 4_096


class DemandListener(Protocol):
    """Is notified of each change of the requests; called on the event loop, never waits."""

    def request_changed(self, entry: RequestEntry, former: RequestEntry | None) -> None:
        """Hear that a request is new, or that the object behind it has changed in any way."""
        ...

    def request_removed(self, entry: RequestEntry) -> None:
        """Hear that a request is gone or is being deleted."""
        ...

    def rolled_up(self, stamp_nanos: int, entries: list[RequestEntry]) -> None:
        """Hear that a roll-up was built, and which entries it is the first to contain."""
        ...


class DomainSource(Protocol):
    """Says where the pods of a gang run already; see `bigfleet.operator.demand.gang_domains`."""

    def domains(self, topology_key: str, pods: Iterable[PodKey]) -> tuple[str, ...]:
        """Return the values of a node label where some of these pods, by namespace and uid, run, in order."""
        ...


class OverheadSource(Protocol):
    """Provides the overheads of DaemonSets on the nodes."""

    @property
    def is_synced(self) -> bool:
        """Return whether all DaemonSets have been read since the process started."""
        ...

    def overheads(self) -> tuple[Overhead, ...]:
        """Return the overheads in canonical order."""
        ...


class _Gang(NamedTuple):
    """The requests that share a group, in all rows."""

    topology_key: str
    #: In the order in which they were counted; the values mean nothing.
    members: dict[ObjectKey, None]


class _Crowded(UnmappableRequest):
    """A request that does not fit into its row, or into the roll-up, with the others that are there."""


class _RequestMapper:
    """Maps specs; equal specs of one namespace give one object, for replicas are many and alike."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._mapped: dict[tuple[str, tuple[str, ...], bytes], MappedRequest] = {}

    def map(self, spec: CapacityRequestSpec, namespace: str, domains: tuple[str, ...] = ()) -> MappedRequest:
        """Return the mapped request, that of a gang in these domains if there are any. Raises UnmappableRequest."""
        encoded = self._encoder.encode(spec)
        if len(encoded) + sum(map(len, domains)) > _MAPPED_BYTES_MAX:
            return _mapped_in(spec, namespace, domains)
        key = (namespace, domains, encoded)
        mapped = self._mapped.get(key)
        if mapped is None:
            mapped = _mapped_in(spec, namespace, domains)
            if len(self._mapped) >= _MAPPINGS_MAX:
                self._mapped.clear()
            self._mapped[key] = mapped
        return mapped


def _mapped_in(spec: CapacityRequestSpec, namespace: str, domains: tuple[str, ...]) -> MappedRequest:
    request = request_of_spec(spec, namespace, "")
    bound = _in_domains(request, domains)
    if bound is request:
        return map_request(request)
    try:
        return map_request(bound)
    except UnmappableRequest:
        # With the domains its requirements may be too long: then it is asked for in any.
        return map_request(request)


def _in_domains(request: CapacityRequest, domains: tuple[str, ...]) -> CapacityRequest:
    """Return the request with its co-location bound to domains; as it is when its row would exceed a bound."""
    # One more is appended by the co-location itself.
    if request.co_location is None or not domains or len(request.requirements) + 2 > REQUIREMENTS_MAX:
        return request
    if len(domains) > VALUES_MAX:
        key = request.co_location.topology_key
        log.info("operator.gang_in_too_many_domains", topology_key=key, domains=len(domains), domains_max=VALUES_MAX)
        return request
    here = Requirement(request.co_location.topology_key, Operator.IN, domains)
    return replace(request, requirements=(*request.requirements, here))


class _Recount:
    """What a recount has found so far."""

    def __init__(self, builder: RollUpBuilder) -> None:
        self.builder = builder
        #: Entries whose object is gone.
        self.stale: dict[ObjectKey, RequestEntry] = {}
        #: Objects of which the view has not heard in this generation.
        self.missed: dict[ObjectKey, CapacityRequestObject] = {}

    def forget(self, key: ObjectKey) -> None:
        """Take back what was found of one request."""
        self.builder.remove(request_id(*key))
        self.stale.pop(key, None)
        self.missed.pop(key, None)


class DemandView:
    """The demand of one cluster. An ObjectListener of CapacityRequests; feed it every change of `requests`."""

    def __init__(
        self,
        *,
        cluster: ClusterId,
        requests: ObjectView[CapacityRequestObject],
        clock: Clock,
        overheads: OverheadSource | None = None,
        domains: DomainSource | None = None,
        on_demand_changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.cluster = cluster
        self._requests = requests
        self._clock = clock
        self._overheads = overheads
        self._domains = domains
        #: Called when the rows have changed, and a roll-up is worth sending.
        self.on_demand_changed = on_demand_changed
        self._listeners: list[DemandListener] = []
        self._builder = RollUpBuilder(cluster)
        self._mapper = _RequestMapper()
        #: All and only the requests that exist and are not being deleted.
        self._entries: dict[ObjectKey, RequestEntry] = {}
        self._rows: dict[RowId, RequestRow] = {}
        #: The requests of each gang, by group; and where it was found to run when it was counted.
        self._gangs: dict[str, _Gang] = {}
        self._pins: dict[str, tuple[str, ...]] = {}
        #: By namespace and uid: a label speaks for pods of its own namespace only.
        self._by_pod: dict[PodKey, RequestEntry] = {}
        #: Counted requests whose generation no roll-up has contained yet.
        self._unreported: dict[ObjectKey, RequestEntry] = {}
        #: Requests that are counted among the waiting shapes.
        self._marked: set[ObjectKey] = set()
        #: Requests that are left out, because no machine helps their pods.
        self._aside: set[ObjectKey] = set()
        self._stamp_nanos = 0
        #: When the last recount began; None when one is due.
        self._recounted_seconds: float | None = None
        #: Requests that have changed since the recount that is under way began; None without one.
        self._changed_meanwhile: set[ObjectKey] | None = None
        #: The log says since the last recount that requests are left out.
        self._is_alarmed = False
        self.invalid_count = 0
        self.recounts_total = 0
        self.recount_mismatches_total = 0
        self.skipped_unsynced_total = 0
        #: Rows of the last roll-up.
        self.last_rows = 0

    def __len__(self) -> int:
        """Return how many requests there are, those that are not counted among them."""
        return len(self._entries)

    def __iter__(self) -> Iterator[RequestEntry]:
        """Iterate over the entries of all requests."""
        return iter(self._entries.values())

    def add_listener(self, listener: DemandListener) -> None:
        """Have a listener called from now on."""
        self._listeners.append(listener)

    def get(self, key: ObjectKey) -> RequestEntry | None:
        """Return the entry of a request by (namespace, name)."""
        return self._entries.get(key)

    def row(self, row_id: RowId) -> RequestRow | None:
        """Return the requests of a (fingerprint, group); None for a row without any."""
        return self._rows.get(row_id)

    def vector(self, key: ObjectKey) -> Vector | None:
        """Return what a counted request asks for, milli-units; None for one that is not counted."""
        return self._builder.vector(request_id(*key))

    def entry_of_pod(self, pod: PodKey) -> RequestEntry | None:
        """Return the entry of the request that stands for a pod, by namespace and uid."""
        return self._by_pod.get(pod)

    # ---- changes of objects -------------------------------------------------------------------------------------

    def put(self, stored: CapacityRequestObject, former: CapacityRequestObject | None) -> None:
        """Hear of a new or changed request."""
        metadata = stored.metadata
        self._note_change(metadata.key)
        known = self._entries.get(metadata.key)
        if metadata.deletion_timestamp is not None:
            if known is not None:
                self._forget(known)
            return
        entry = known
        if entry is None or entry.uid != metadata.uid or entry.generation != metadata.generation:
            entry = self._replace(known, RequestEntry(stored, seen_seconds=self._clock.monotonic_seconds()))
            if self._count(entry, stored):
                self.on_demand_changed()
        else:
            self._follow_pod(entry, stored)
        for listener in self._listeners:
            listener.request_changed(entry, known)

    def remove(self, former: CapacityRequestObject) -> None:
        """Hear that a request is gone."""
        self._note_change(former.metadata.key)
        known = self._entries.get(former.metadata.key)
        if known is not None:
            self._forget(known)

    def _note_change(self, key: ObjectKey) -> None:
        if self._changed_meanwhile is not None:
            self._changed_meanwhile.add(key)

    def _replace(self, known: RequestEntry | None, entry: RequestEntry) -> RequestEntry:
        """Put a new entry in the place of a known one, which stays counted until the new one is."""
        if known is not None:
            self._drop_pod(known)
            self._unreported.pop(known.key, None)
            self._leave_row(known)
            self.invalid_count -= known.fault is not None
        self._entries[entry.key] = entry
        if entry.pod_uid:
            self._by_pod[entry.pod] = entry
        return entry

    def _forget(self, entry: RequestEntry) -> None:
        del self._entries[entry.key]
        self._drop_pod(entry)
        self._unreported.pop(entry.key, None)
        self._marked.discard(entry.key)
        self._aside.discard(entry.key)
        self._leave_row(entry)
        self.invalid_count -= entry.fault is not None
        if self._builder.remove(request_id(*entry.key)):
            self.on_demand_changed()
        for listener in self._listeners:
            listener.request_removed(entry)

    def _follow_pod(self, entry: RequestEntry, stored: CapacityRequestObject) -> None:
        """Labels and owner references change without a new generation."""
        pod_uid = RequestEntry(stored, seen_seconds=0.0).pod_uid
        if pod_uid != entry.pod_uid:
            self._drop_pod(entry)
            entry.pod_uid = pod_uid
            if pod_uid:
                self._by_pod[entry.pod] = entry

    def _drop_pod(self, entry: RequestEntry) -> None:
        if self._by_pod.get(entry.pod) is entry:
            del self._by_pod[entry.pod]

    def _leave_row(self, entry: RequestEntry) -> None:
        row, entry.row = entry.row, None
        if row is not None:
            row.members.pop(entry.key, None)
            if not row.members:
                self._rows.pop(row.id, None)
            gang = self._gangs.get(row.id[1])
            if gang is not None:
                gang.members.pop(entry.key, None)
                if not gang.members:
                    del self._gangs[row.id[1]]

    def _count(self, entry: RequestEntry, stored: CapacityRequestObject) -> bool:
        """Count an entry, or note why it cannot be; return whether demand has changed."""
        id = request_id(*entry.key)
        was_counted = self._builder.vector(id) is not None
        try:
            mapped = self._map(stored.spec, entry.key[0])
            self._check_names(mapped)
            has_changed = self._put(id, entry.key[0], mapped)
        except UnmappableRequest as error:
            is_crowded = isinstance(error, _Crowded)
            entry.fault = RequestFault(error.reason, str(error), is_crowded=is_crowded)
            self.invalid_count += 1
            log.info("operator.request_left_out", request=id, error=str(error))
            self._builder.remove(id)
            return was_counted
        self._join_row(entry, (mapped.profile.fingerprint, mapped.group))
        if stored.spec.co_location is not None:
            gang = self._gangs.setdefault(mapped.group, _Gang(stored.spec.co_location.topology_key, {}))
            gang.members[entry.key] = None
        self._unreported[entry.key] = entry
        return has_changed

    def _map(self, spec: CapacityRequestSpec, namespace: str) -> MappedRequest:
        mapped = self._mapper.map(spec, namespace)
        domains = self._pins.get(mapped.group, ()) if mapped.group else ()
        return self._mapper.map(spec, namespace, domains) if domains else mapped

    def _check_names(self, mapped: MappedRequest) -> None:
        """Raise UnmappableRequest if the request's row would name more resources than the shard takes of one row."""
        names = self._builder.resource_names((mapped.profile.fingerprint, mapped.group))
        if len(names) + len(mapped.vector) > RESOURCES_MAX and len(names | mapped.vector.keys()) > RESOURCES_MAX:
            raise _Crowded(
                UnmappableReason.INVALID_QUANTITY,
                f"spec.resources: with this request its need would name {len(names | mapped.vector.keys())} resources,"
                f" at most {RESOURCES_MAX} are allowed; give the request a requirement or priority of its own",
            )

    def _put(self, id: str, namespace: str, mapped: MappedRequest) -> bool:
        """Count a request; return whether demand has changed.

        Raises UnmappableRequest if the roll-up would be too large: the shard refuses one with too many rows, and ends
        the session for one with too many bytes.
        """
        if not self._builder.put_mapped(id, mapped):
            return False
        size = self._builder.size
        fault = size.fault(namespace)
        if not fault:
            return True
        if not self._is_alarmed:
            self._is_alarmed = True
            log.error(
                "rollup.full",
                cluster=self.cluster,
                namespace=namespace,
                rows=size.rows,
                size_bytes=size.size_bytes,
                error=fault,
                advice="requests are left out: use fewer distinct requirements, priorities, penalties and requests, or"
                " limit capacityrequests.bigfleet.lucy.sh by a ResourceQuota in the namespace",
            )
        raise _Crowded(
            UnmappableReason.INVALID_REQUIREMENT,
            f"spec: with this request {fault}; give it the requirements and the priority of others, or ask for less",
        )

    def _join_row(self, entry: RequestEntry, row_id: RowId) -> None:
        row = self._rows.get(row_id)
        if row is None:
            row = self._rows[row_id] = RequestRow(row_id)
        row.members[entry.key] = None
        entry.row = row

    # ---- roll-ups -----------------------------------------------------------------------------------------------

    @property
    def is_current(self) -> bool:
        """Return whether the views may speak for the cluster."""
        synced = self._requests.is_synced and (self._overheads is None or self._overheads.is_synced)
        return synced and self._requests.failing_seconds() <= FAILING_SECONDS_MAX

    def session_opened(self) -> None:
        """Recount soon."""
        self._recounted_seconds = None

    def roll_up(
        self,
        waiting: Callable[[], Iterable[ObjectKey]] = tuple,
        given_up: Callable[[], Iterable[ObjectKey]] = tuple,
    ) -> RollUp | None:
        """Return the complete demand with a timestamp that no other roll-up has; None while the view may be partial.

        `waiting` returns the requests whose pods are asked for once more at this moment, `given_up` those that are left
        out; called in this order, and not for None.
        """
        if not self.is_current:
            self.skipped_unsynced_total += 1
            return None
        self._pin_gangs()
        self._mark_waiting(waiting())
        self._set_aside(given_up())
        self._stamp_nanos = max(self._clock.unix_nanos(), self._stamp_nanos + 1)
        needs = self._builder.rows()
        self.last_rows = len(needs)
        reported = [entry for key, entry in self._unreported.items() if key not in self._aside]
        self._unreported = {key: entry for key, entry in self._unreported.items() if key in self._aside}
        for entry in reported:
            entry.first_stamp_nanos = self._stamp_nanos
        for listener in self._listeners:
            listener.rolled_up(self._stamp_nanos, reported)
        return RollUp(
            cluster_id=self.cluster,
            timestamp_unix_nanos=self._stamp_nanos,
            needs=needs,
            overheads=self._overheads.overheads() if self._overheads is not None else (),
        )

    def _pin_gangs(self) -> None:
        """Bind each gang to where its pods run: the scheduler puts the others there or nowhere."""
        if self._domains is None:
            return
        self._pins = {group: pin for group, pin in self._pins.items() if group in self._gangs}
        for group, gang in list(self._gangs.items()):
            members = [self._entries[key] for key in gang.members]
            domains = self._domains.domains(gang.topology_key, [entry.pod for entry in members])
            if domains == self._pins.get(group, ()):
                continue
            self._pins[group] = domains
            for entry in members:
                stored = self._requests.get(entry.key[1], entry.key[0])
                if stored is not None and not self._is_unknown(stored):
                    self._note_change(entry.key)
                    self._leave_row(entry)
                    self._count(entry, stored)
                    for listener in self._listeners:
                        listener.request_changed(entry, entry)

    def _mark_waiting(self, waiting: Iterable[ObjectKey]) -> None:
        asked = set(waiting)
        for key in self._marked - asked:
            self._builder.set_waiting(request_id(*key), False)
        for key in asked:
            # Also those that are marked: a request that changed was counted anew, without the mark.
            self._builder.set_waiting(request_id(*key), True)
        self._marked = asked

    def _set_aside(self, given_up: Iterable[ObjectKey]) -> None:
        aside = set(given_up)
        for key in self._aside - aside:
            self._builder.set_aside(request_id(*key), False)
        for key in aside:
            self._builder.set_aside(request_id(*key), True)
        self._aside = aside

    # ---- recounts -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Recount when a session has opened and every `RECOUNT_SECONDS`, until cancelled; only a leader does."""
        while True:
            await self._clock.sleep(_RECOUNT_LOOK_SECONDS)
            now_seconds = self._clock.monotonic_seconds()
            is_due = self._recounted_seconds is None or now_seconds - self._recounted_seconds >= RECOUNT_SECONDS
            if is_due and self.is_current:
                self._recounted_seconds = now_seconds
                for _ in self._recount_in_slices():
                    await self._clock.sleep(0)

    def recount(self) -> bool:
        """Count all requests of the view again and say whether the running sums agree; if not, the recount wins."""
        mismatches = self.recount_mismatches_total
        for _ in self._recount_in_slices():
            pass
        return self.recount_mismatches_total == mismatches

    def _recount_in_slices(self) -> Iterator[None]:
        """Recount; others may run at each step. What they change is counted once more at the end."""
        self._changed_meanwhile = set()
        try:
            found = _Recount(RollUpBuilder(self.cluster))
            for position, key in enumerate(list(self._entries), 1):
                self._recount_one(found, key)
                if position % _RECOUNT_SLICE == 0:
                    yield
            for position, stored in enumerate(list(self._requests), 1):
                if stored.metadata.key not in self._entries:
                    self._recount_one(found, stored.metadata.key)
                if position % _RECOUNT_SLICE == 0:
                    yield
            for key in self._changed_meanwhile:
                found.forget(key)
                self._recount_one(found, key)
        finally:
            self._changed_meanwhile = None
        self._settle_recount(found)

    def _recount_one(self, found: "_Recount", key: ObjectKey) -> None:
        stored, entry = self._requests.get(key[1], key[0]), self._entries.get(key)
        if stored is None or stored.metadata.deletion_timestamp is not None:
            if entry is not None:
                found.stale[key] = entry
        elif entry is None or self._is_unknown(stored):
            found.missed[key] = stored
        elif entry.row is not None:
            found.builder.put_mapped(request_id(*key), self._map(stored.spec, key[0]))

    def _settle_recount(self, found: "_Recount") -> None:
        """Compare a finished recount with the running sums, and use it if they differ."""
        self.recounts_total += 1
        for key in self._marked:
            found.builder.set_waiting(request_id(*key), True)
        for key in self._aside:
            found.builder.set_aside(request_id(*key), True)
        agrees = not found.stale and not found.missed and found.builder.rows() == self._builder.rows()
        if not agrees:
            self.recount_mismatches_total += 1
            log.error(
                "rollup.recount_differed",
                cluster=self.cluster,
                requests=len(self._requests),
                stale=len(found.stale),
                missed=len(found.missed),
                advice="the recount is used; please report this as a bug",
            )
            self._builder = found.builder
        for entry in found.stale.values():
            self._forget(entry)
        for stored in found.missed.values():
            self.put(stored, None)
        if self.invalid_count:
            self._try_crowded()
        if not agrees:
            self.on_demand_changed()

    def _is_unknown(self, stored: CapacityRequestObject) -> bool:
        entry = self._entries.get(stored.metadata.key)
        metadata = stored.metadata
        return entry is None or (entry.uid, entry.generation) != (metadata.uid, metadata.generation)

    def _try_crowded(self) -> None:
        """Count what could not be counted beside its neighbours, and can be now that they have changed."""
        self._is_alarmed = False
        for entry in [each for each in self._entries.values() if each.fault is not None and each.fault.is_crowded]:
            stored = self._requests.get(entry.key[1], entry.key[0])
            if stored is not None and not self._is_unknown(stored):
                self.invalid_count -= 1
                entry.fault = None
                if self._count(entry, stored):
                    self.on_demand_changed()
                if entry.fault is None:
                    for listener in self._listeners:
                        listener.request_changed(entry, entry)
