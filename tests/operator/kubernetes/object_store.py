"""Stores objects as an API server does, for tests: versions, a history that is compacted, consistent pages."""

from dataclasses import dataclass, field
from typing import Any

from bigfleet.operator.kubernetes.api import ApiError

Object = dict[str, Any]


def expired(message: str = "too old resource version") -> ApiError:
    return ApiError(410, "Expired", message)


@dataclass
class Change:
    """One line of the history."""

    version: int
    type: str
    object: Object


@dataclass
class ObjectStore:
    """The objects of one kind."""

    version: int = 100
    objects: dict[tuple[str, str], Object] = field(default_factory=dict)
    history: list[Change] = field(default_factory=list)
    #: Versions below this one are forgotten.
    compacted: int = 0
    uids: int = 0
    snapshots: dict[int, list[Object]] = field(default_factory=dict)

    def put(self, name: str, namespace: str = "default", **fields: Any) -> Object:
        """Create an object, or replace its fields."""
        former = self.objects.get((namespace, name))
        if former is None:
            self.uids += 1
        self.version += 1
        metadata = {
            "name": name,
            "namespace": namespace,
            "uid": former["metadata"]["uid"] if former else f"uid-{self.uids}",
            "resourceVersion": str(self.version),
        }
        stored = {"metadata": metadata, **fields}
        self.objects[namespace, name] = stored
        self.history.append(Change(self.version, "MODIFIED" if former else "ADDED", stored))
        return stored

    def delete(self, name: str, namespace: str = "default") -> None:
        """Delete an object that may be absent."""
        former = self.objects.pop((namespace, name), None)
        if former is not None:
            self.version += 1
            last = {**former, "metadata": {**former["metadata"], "resourceVersion": str(self.version)}}
            self.history.append(Change(self.version, "DELETED", last))

    def compact(self) -> None:
        """Forget every version but the current one, and every continue token."""
        self.compacted = self.version
        self.snapshots.clear()

    def page(self, limit: int, token: str) -> tuple[list[Object], int, str]:
        """Return items, version and continue token of a page."""
        version, offset = map(int, token.split(":")) if token else (self.version, 0)
        if token and version not in self.snapshots:
            raise expired("The provided continue parameter is too old")
        items = self.snapshots.setdefault(version, list(self.objects.values()))
        end = offset + limit if limit else len(items)
        return items[offset:end], version, f"{version}:{end}" if end < len(items) else ""

    def position(self, version: int) -> int:
        """Return where in the history a watch from a version begins; raises 410."""
        if version < self.compacted:
            raise expired()
        return sum(change.version <= version for change in self.history)

    def names(self) -> dict[tuple[str, str], str]:
        """Return the resource version of each object."""
        return {key: stored["metadata"]["resourceVersion"] for key, stored in self.objects.items()}
