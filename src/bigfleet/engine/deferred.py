"""Defines sequences whose elements are made when they are looked at."""

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar, overload

T = TypeVar("T")


class Deferred(Sequence[T]):
    """Equals the tuple that `make` returns; `make` is called once, when an element is asked for."""

    __slots__ = ("_length", "_made", "_make")

    def __init__(self, length: int, make: Callable[[], tuple[T, ...]]) -> None:
        self._length, self._make = length, make
        self._made: tuple[T, ...] | None = None

    def _all(self) -> tuple[T, ...]:
        if self._made is None:
            self._made = self._make()
        return self._made

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[T]:
        return iter(self._all())

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[T, ...]: ...
    def __getitem__(self, place: int | slice) -> T | tuple[T, ...]:
        return self._all()[place]

    def __eq__(self, other: object) -> bool:
        return self._all() == (other._all() if isinstance(other, Deferred) else other)

    def __hash__(self) -> int:
        return hash(self._all())

    def __repr__(self) -> str:
        return repr(self._all())


class LazySequence(Sequence[T], Generic[T]):
    """An immutable sequence that makes each entry on demand and equals any sequence of equal entries."""

    def __init__(self, size: int, make: Callable[[int], T]) -> None:
        self._size = size
        self._make = make

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        """Make one entry, or a tuple of some."""
        if isinstance(index, slice):
            return tuple(self._make(place) for place in range(*index.indices(self._size)))
        return self._make(range(self._size)[index])

    def __iter__(self) -> Iterator[T]:
        return (self._make(place) for place in range(self._size))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # entries hold mappings, as those of the tuples do

    def __repr__(self) -> str:
        return repr(tuple(self))
