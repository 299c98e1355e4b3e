"""Finds the row of a machine among ids in order: by halving, and by hash where many are looked up.

Binary search needs no extra memory, but among half a million ids its last steps miss the cache: four microseconds per
machine. A table from id to row would take 70 bytes a machine. So rows are noted at a few places that an id's hash
names, 12 bytes a machine, in one pass of NumPy once that has paid for itself; where several ids share their places, one
of them is halved for. This module must not believe a note that it has not compared with the id.
"""

from array import array
from bisect import bisect_left
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bigfleet.model.ids import MachineId

#: Ids that are halved for before their rows are noted: together they take as long as noting half a million.
HALVED_MAX: Final = 4096
#: The bits of a hash that are used, and how many of them each further place leaves out.
_HASH: Final = (1 << 32) - 1
_SHIFTS: Final = (0, 6, 12)


class Finder:
    """The rows of one layout, for who looks up many of them. One thread alone may ask it."""

    __slots__ = ("_halvings", "_hashes", "_ids", "_last_place", "_noted")

    def __init__(self, ids: list[MachineId], hashes: npt.NDArray[np.uint32]) -> None:
        self._ids = ids
        #: Of each row's id.
        self._hashes = hashes
        self._halvings = 0
        #: A row at every place, row 0 where there is none; empty while nothing is noted.
        self._noted = array("i")
        self._last_place = 0

    @classmethod
    def of_none(cls) -> "Finder":
        """Return the rows of no machines."""
        return cls([], np.zeros(0, np.uint32))

    def merged(
        self,
        ids: list[MachineId],
        *,
        retained: Any,
        is_retained: npt.NDArray[np.bool_],
        new_rows: npt.NDArray[np.int64],
    ) -> "Finder":
        """Return the rows of the next layout: some rows of this one at new places, and new ones."""
        hashes = np.empty(len(ids), np.uint32)
        hashes[is_retained] = self._hashes[retained]
        hashes[new_rows] = [hash(ids[row]) & _HASH for row in new_rows.tolist()]
        return Finder(ids, hashes)

    def row(self, machine_id: MachineId) -> int | None:
        """Return the row of an id, None when it has none."""
        ids = self._ids
        if self._noted:
            hashed, last_place = hash(machine_id) & _HASH, self._last_place
            for shift in _SHIFTS:
                row = self._noted[(hashed >> shift) & last_place]
                if ids[row] == machine_id:
                    return row
        found = halved(ids, machine_id)
        if found is not None:
            self._halvings += 1
            if self._halvings == HALVED_MAX:
                self._note()
        return found

    def _note(self) -> None:
        """Note every row at one of its places, as far as they are free."""
        places = 1 << (2 * len(self._ids)).bit_length()
        noted = np.zeros(places, np.int32)
        rows = np.arange(len(self._ids), dtype=np.int32)
        for shift in _SHIFTS:
            wanted = (self._hashes[rows] >> np.uint32(shift)) & np.uint32(places - 1)
            is_free = noted[wanted] == 0
            noted[wanted[is_free]] = rows[is_free]
            rows = rows[noted[wanted] != rows]
        self._noted = array("i", noted.tobytes())
        self._last_place = places - 1


def halved(ids: list[MachineId], machine_id: MachineId) -> int | None:
    """Return the row of an id, None when it has none. O(log n)."""
    row = bisect_left(ids, machine_id)
    return row if row < len(ids) and ids[row] == machine_id else None


def merged_ids(old: list[MachineId], new: list[MachineId], places: list[int]) -> list[MachineId]:
    """Return both in order; each new id stands before the old one of its place. Runs of old ids are copied whole."""
    merged: list[MachineId] = []
    start = 0
    for place, machine_id in zip(places, new, strict=True):
        merged += old[start:place]
        merged.append(machine_id)
        start = place
    merged += old[start:]
    return merged
