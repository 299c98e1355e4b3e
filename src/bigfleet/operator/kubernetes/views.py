"""Defines how flows see the objects of one kind: a read-only view, and a listener that is called for each change.

`bigfleet.operator.kubernetes.reflector` keeps a view up to date and calls the listeners; tests and the simulation may
do so directly. A listener is called on the event loop and never waits.
"""

from collections.abc import Iterator
from typing import Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


class ObjectListener(Protocol[T_contra]):
    """Hears every change of the objects of one kind, each once and in order."""

    def put(self, stored: T_contra, former: T_contra | None) -> None:
        """Hear that an object was added, or that `former` has become `stored`."""
        ...

    def remove(self, former: T_contra) -> None:
        """Hear that an object is gone, also when a new list no longer has it."""
        ...


class ObjectView(Protocol[T_co]):
    """The objects of one kind as last seen."""

    @property
    def is_synced(self) -> bool:
        """Return whether a complete list has been read since the process started."""
        ...

    def failing_seconds(self) -> float:
        """Return for how long the view may have been out of date: 0 while the watch is healthy."""
        ...

    def get(self, name: str, namespace: str = "") -> T_co | None:
        """Return one object, None when it is absent."""
        ...

    def __iter__(self) -> Iterator[T_co]:
        """Iterate over all objects, in no particular order."""
        ...

    def __len__(self) -> int:
        """Return how many objects there are."""
        ...
