"""Stores the objects of one simulated API server, numbers their changes, and publishes each change to watches.

A stored object is never changed in place, so that lists, watches and readers may share it.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from bigfleet.sim.kubernetes.field_ownership import FieldOwners
from bigfleet.sim.kubernetes.kinds import KindKey, Stored
from bigfleet.sim.kubernetes.refusals import expired

#: (namespace, name); the namespace is "" for kinds of the cluster.
ObjectKey = tuple[str, str]


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """One object, and which managers own its fields."""

    object: Stored
    owners: FieldOwners = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredChange:
    """One change of one object: None before it was created, None after it was removed."""

    version: int
    before: Stored | None
    after: Stored | None


@dataclass(frozen=True, slots=True)
class ListedPage:
    """One page of a list, and the token of the next one, "" on the last."""

    items: list[Stored]
    version: int
    continue_token: str


#: Lists that may be continued; the oldest is forgotten first.
_CONTINUED_MAX = 1_000

#: Hears a change of one kind.
Subscriber = Callable[[StoredChange], None]


class ObjectStore:
    """The objects by kind and key, with one counter of versions for all of them.

    The last `history_max` changes of each kind are retained for watches that resume, until `compact` is called.
    """

    def __init__(self, history_max: int) -> None:
        self._history_max = history_max
        #: The version of the last change.
        self.version = 1
        #: Versions before this one cannot be watched from, nor lists of them continued.
        self._compacted_version = 0
        #: The same by kind: the last change that its history has lost.
        self._lost: dict[KindKey, int] = {}
        self._records: dict[KindKey, dict[ObjectKey, StoredRecord]] = {}
        self._changes: dict[KindKey, deque[StoredChange]] = {}
        self._subscribers: dict[KindKey, list[Subscriber]] = {}
        self._continued: dict[str, tuple[int, list[Stored]]] = {}
        self._tokens_made = 0

    def get(self, kind: KindKey, key: ObjectKey) -> StoredRecord | None:
        """Return one object, None when it is absent."""
        return self._records.get(kind, {}).get(key)

    def records(self, kind: KindKey, namespace: str = "") -> list[StoredRecord]:
        """Return the objects of a kind, of all namespaces for "", by namespace and name."""
        records = self._records.get(kind, {})
        return [record for key, record in sorted(records.items()) if not namespace or key[0] == namespace]

    def all_objects(self) -> Iterable[tuple[KindKey, ObjectKey, Stored]]:
        """Return the objects of all kinds, by kind, namespace and name."""
        return [
            (kind, key, record.object)
            for kind, records in sorted(self._records.items())
            for key, record in sorted(records.items())
        ]

    def put(self, kind: KindKey, key: ObjectKey, stored: Stored, owners: FieldOwners) -> Stored:
        """Store an object under the next version and publish the change; return it as stored."""
        records = self._records.setdefault(kind, {})
        former = records.get(key)
        stored = self._next_version(stored)
        records[key] = StoredRecord(stored, owners)
        self._publish(kind, StoredChange(self.version, former.object if former else None, stored))
        return stored

    def remove(self, kind: KindKey, key: ObjectKey) -> None:
        """Remove an object that exists and publish the change."""
        former = self._records[kind].pop(key)
        self._publish(kind, StoredChange(self.version + 1, self._next_version(former.object), None))

    def _next_version(self, stored: Stored) -> Stored:
        self.version += 1
        return {**stored, "metadata": {**stored["metadata"], "resourceVersion": str(self.version)}}

    def _publish(self, kind: KindKey, change: StoredChange) -> None:
        changes = self._changes.setdefault(kind, deque())
        changes.append(change)
        if len(changes) > self._history_max:
            self._lost[kind] = changes.popleft().version
        for subscriber in list(self._subscribers.get(kind, ())):
            subscriber(change)

    def compact(self) -> None:
        """Forget the history: watches from versions before the present one are too old, and so are continue tokens."""
        self._compacted_version = self.version
        self._changes.clear()
        self._continued.clear()

    def first_page(self, selected: list[Stored], limit: int) -> ListedPage:
        """Return the first page of a list; `limit` 0 means all."""
        return self._page(self.version, selected, limit)

    def next_page(self, token: str, limit: int) -> ListedPage:
        """Return the page that a token asks for: of the same list, without later changes. Raises ApiError 410."""
        version, left = self._continued.get(token, (-1, []))
        if version < self._compacted_version:
            raise expired(
                "The provided continue parameter is too old to display a consistent list result. You can start a new "
                "list without the continue parameter."
            )
        return self._page(version, left, limit)

    def _page(self, version: int, left: list[Stored], limit: int) -> ListedPage:
        if not limit or len(left) <= limit:
            return ListedPage(left, version, "")
        self._tokens_made += 1
        token = f"continue-{self._tokens_made}"
        self._continued[token] = (version, left[limit:])
        if len(self._continued) > _CONTINUED_MAX:
            del self._continued[next(iter(self._continued))]
        return ListedPage(left[:limit], version, token)

    def changes_after(self, kind: KindKey, version: int) -> list[StoredChange]:
        """Return the changes of a kind after a version. Raises ApiError 410 when some of them are forgotten."""
        oldest = max(self._compacted_version, self._lost.get(kind, 0))
        if version < oldest:
            raise expired(f"too old resource version: {version} ({oldest})")
        return [change for change in self._changes.get(kind, ()) if change.version > version]

    def subscribe(self, kind: KindKey, subscriber: Subscriber) -> Callable[[], None]:
        """Call a subscriber with each later change of a kind; the result ends that."""
        subscribers = self._subscribers.setdefault(kind, [])
        subscribers.append(subscriber)
        return lambda: subscribers.remove(subscriber)
