"""Sums a cluster's capacity requests up to the rows that its shard decides on (docs/spec/operator.md §3).

The sums are running: a request that comes or goes touches one row, so the cost of a roll-up grows with the rows and
their shapes, not with the requests. Pods of equal requests are one shape; a row with more than 64 shapes has requests
rounded up until 64 remain (`bigfleet.model.shapes.merged_upwards`), and its aggregate stays the exact sum. For shards
that do not know shapes, min units merge by per-dimension maximum; there, requests that must not raise one another's min
unit (a large CPU pod, a small GPU pod) need profiles that differ. `bigfleet.operator.session` sends what
`RollUpBuilder.rows` returns. Nothing else here rounds: a recount from scratch always gives the same sums.
"""

import heapq
from collections import Counter
from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from bigfleet.model.ids import ClusterId
from bigfleet.model.need import Need
from bigfleet.model.profile import Profile
from bigfleet.model.shapes import DemandShape, merged_upwards
from bigfleet.model.vector import Vector, vector_key
from bigfleet.operator.requests import CapacityRequest, MappedRequest, map_request
from bigfleet.operator.rollup_size import RequestKind, RollUpSize

#: A heap is rebuilt when it holds this many entries more than twice the distinct values that are alive.
_STALE_SLACK = 64

_RowId = tuple[str, str]


class _Multiset:
    """Positive integers of one dimension, with their maximum under removal.

    A heap with lazy removal: each value is pushed when it first appears and dropped when it surfaces without being
    alive, so that add and remove are amortised O(log distinct), and the maximum O(1) after that.
    """

    __slots__ = ("_alive", "_heap")

    def __init__(self) -> None:
        self._alive: Counter[int] = Counter()
        #: Negated values; contains each alive value at least once.
        self._heap: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._alive)

    def add(self, value: int) -> None:
        self._alive[value] += 1
        if self._alive[value] == 1:
            heapq.heappush(self._heap, -value)

    def remove(self, value: int) -> None:
        self._alive[value] -= 1
        if self._alive[value] == 0:
            del self._alive[value]
            if len(self._heap) > 2 * len(self._alive) + _STALE_SLACK:
                self._heap = [-alive for alive in self._alive]
                heapq.heapify(self._heap)

    def maximum(self) -> int:
        while -self._heap[0] not in self._alive:
            heapq.heappop(self._heap)
        return -self._heap[0]


class _RowSum:
    """Everything that the roll-up knows of one (fingerprint, group)."""

    __slots__ = ("aside", "aside_names", "count", "group", "need", "pods", "profile", "sums", "units", "waiting")

    def __init__(self, profile: Profile, group: str) -> None:
        self.profile = profile
        self.group = group
        #: Requests in the row that are reported; without any the row is not.
        self.count = 0
        #: Requests that are set aside, and how many of them name each resource. The row is forgotten with its last
        #: request of either kind.
        self.aside = 0
        self.aside_names: Counter[str] = Counter()
        #: Exact totals, milli-units; no dimension is zero.
        self.sums: dict[str, int] = {}
        #: Values of every request by dimension; a key here is a key of `sums`, and the other way round.
        self.units: dict[str, _Multiset] = {}
        #: Requests by what makes them one shape: vector, group that excludes itself, its limit.
        self.pods: Counter[RequestKind] = Counter()
        #: Those of them that wait although the row is called met.
        self.waiting: Counter[RequestKind] = Counter()
        #: The row as last built; None after a change.
        self.need: Need | None = None

    def add(self, request: MappedRequest) -> None:
        self.count += 1
        self.need = None
        self.pods[_kind_of(request)] += 1
        for name, milli in request.vector.items():
            self.sums[name] = self.sums.get(name, 0) + milli
            units = self.units.get(name)
            if units is None:
                units = self.units[name] = _Multiset()
            units.add(milli)

    def remove(self, request: MappedRequest) -> None:
        self.count -= 1
        self.need = None
        kind = _kind_of(request)
        self.pods[kind] -= 1
        if not self.pods[kind]:
            del self.pods[kind]
        for name, milli in request.vector.items():
            units = self.units[name]
            units.remove(milli)
            if units:
                self.sums[name] -= milli
            else:
                del self.sums[name], self.units[name]

    def wait(self, request: MappedRequest, change: int) -> None:
        """Count a request among the waiting ones (1), or no longer (-1)."""
        self.need = None
        kind = _kind_of(request)
        self.waiting[kind] += change
        if not self.waiting[kind]:
            del self.waiting[kind]

    def set_aside(self, request: MappedRequest, change: int) -> None:
        """Count a request among those that are set aside (1), or no longer (-1)."""
        self.aside += change
        for name in request.vector:
            self.aside_names[name] += change
            if not self.aside_names[name]:
                del self.aside_names[name]

    def build(self, cluster: ClusterId) -> Need:
        if self.need is None:
            self.need = Need(
                cluster=cluster,
                profile=self.profile,
                aggregate=dict(self.sums),
                min_unit={name: units.maximum() for name, units in self.units.items()},
                group=self.group,
                shapes=_shapes(self.pods),
                waiting=_shapes(self.waiting) if self.waiting else (),
            )
        return self.need


def _shapes(pods: Counter[RequestKind]) -> tuple[DemandShape, ...]:
    return merged_upwards(
        DemandShape(dict(resources), count, limit) for (resources, _group, limit), count in pods.items()
    )


def _kind_of(request: MappedRequest) -> RequestKind:
    return (vector_key(request.vector), request.exclusion, request.max_per_machine)


def _namespace_of(request_id: str) -> str:
    return request_id.partition("/")[0]


class RollUpBuilder:
    """Running sums over one cluster's requests."""

    def __init__(self, cluster: ClusterId) -> None:
        self.cluster = cluster
        #: All and only the requests that are counted, as they were mapped when they came.
        self._requests: dict[str, MappedRequest] = {}
        self._rows: dict[_RowId, _RowSum] = {}
        #: Requests whose pods wait although their row is called met.
        self._waiting: set[str] = set()
        #: Requests that are left out of the rows for now. They count in `size`, so that there is room for their return.
        self._aside: set[str] = set()
        #: Of the requests that are counted, under their namespaces.
        self.size = RollUpSize()

    def __len__(self) -> int:
        return len(self._requests)

    def put(self, request: CapacityRequest) -> bool:
        """Count the request in place of any with its id; say whether that changed the demand.

        Raises UnmappableRequest; the request is then not counted, and no former one with its id either.
        """
        try:
            mapped = map_request(request)
        except ValueError:
            self.remove(request.id)
            raise
        return self.put_mapped(request.id, mapped)

    def put_mapped(self, request_id: str, mapped: MappedRequest) -> bool:
        """Count a request that is mapped already in place of any with its id; say whether that changed the demand."""
        former = self._requests.get(request_id)
        if former is mapped or former == mapped:
            return False
        if former is not None:
            self.remove(request_id)
        row_id = (mapped.profile.fingerprint, mapped.group)
        row = self._rows.get(row_id)
        if row is None:
            row = self._rows[row_id] = _RowSum(mapped.profile, mapped.group)
        elif mapped.profile is not row.profile:
            # Requirements may be long: equal ones are held once.
            mapped = mapped._replace(profile=row.profile)
        self._requests[request_id] = mapped
        row.add(mapped)
        self.size.add(row_id, _namespace_of(request_id), mapped, _kind_of(mapped))
        return True

    def remove(self, request_id: str) -> bool:
        """Stop counting a request; return whether it was counted."""
        self.set_waiting(request_id, False)
        self.set_aside(request_id, False)
        mapped = self._requests.pop(request_id, None)
        if mapped is None:
            return False
        row_id = (mapped.profile.fingerprint, mapped.group)
        row = self._rows[row_id]
        row.remove(mapped)
        self.size.remove(row_id, _namespace_of(request_id), _kind_of(mapped))
        if not row.count and not row.aside:
            del self._rows[row_id]
        return True

    def set_waiting(self, request_id: str, is_waiting: bool) -> bool:
        """Say of a counted request whether its pod waits although its row is called met; say whether that is new.

        Waiting requests are counted as before, and once more among the waiting shapes of their row.
        """
        mapped = self._requests.get(request_id)
        if mapped is None or is_waiting == (request_id in self._waiting) or (is_waiting and request_id in self._aside):
            return False
        if is_waiting:
            self._waiting.add(request_id)
        else:
            self._waiting.discard(request_id)
        self._rows[mapped.profile.fingerprint, mapped.group].wait(mapped, 1 if is_waiting else -1)
        return True

    def set_aside(self, request_id: str, is_aside: bool) -> bool:
        """Leave a counted request out of the rows, or take it back; return whether that is new.

        One that is set aside is not among the waiting ones.
        """
        mapped = self._requests.get(request_id)
        if mapped is None or is_aside == (request_id in self._aside):
            return False
        row = self._rows[mapped.profile.fingerprint, mapped.group]
        if is_aside:
            self.set_waiting(request_id, False)
            self._aside.add(request_id)
            row.set_aside(mapped, 1)
            row.remove(mapped)
        else:
            self._aside.discard(request_id)
            row.set_aside(mapped, -1)
            row.add(mapped)
        return True

    def vector(self, request_id: str) -> Vector | None:
        """Return what a counted request asks for, milli-units; None for one that is not counted."""
        mapped = self._requests.get(request_id)
        return mapped.vector if mapped is not None else None

    def resource_names(self, row_id: tuple[str, str]) -> AbstractSet[str]:
        """Return the names of the resources that the requests of a (fingerprint, group) ask for."""
        row = self._rows.get(row_id)
        if row is None:
            return frozenset()
        return row.sums.keys() | row.aside_names.keys() if row.aside else row.sums.keys()

    def rows(self) -> tuple[Need, ...]:
        """Return the complete demand: priority descending, then fingerprint, then group."""
        return tuple(
            row.build(self.cluster)
            for row in sorted(
                filter(lambda row: row.count, self._rows.values()),
                key=lambda row: (-row.profile.priority, row.profile.fingerprint, row.group),
            )
        )


def recount(cluster: ClusterId, requests: Iterable[CapacityRequest]) -> tuple[Need, ...]:
    """Return the rows of some mappable requests counted from scratch; the running sums must equal it."""
    builder = RollUpBuilder(cluster)
    for request in requests:
        builder.put(request)
    return builder.rows()
