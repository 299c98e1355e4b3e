"""Finds the records of a full List that did not change, by their digests.

Between two Lists a few hundred of half a million machines change. The inventory stores the digest of the last record
that states all that is known of a machine, and deletes it with any change of the machine. So a record with a stored
digest is unchanged and is not read. NumPy over all records, in slices; a record that is not found is read, which is
slower and always correct. This module must not change a machine.
"""

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bigfleet.model.clock import Clock
from bigfleet.model.ids import MachineId
from bigfleet.shard.inventory.inventory import Inventory
from bigfleet.shard.ports import Listing

#: Records that are looked up before other tasks get their turn, a few milliseconds of work.
LOOKED_UP_PER_TURN_MAX: Final = 25_000
#: Rounds of places that a digest is looked for in; a noted one that finds no place of its own is not recognised.
ROUNDS_MAX: Final = 16
#: Times that rows may be numbered again under a look-up before all records are read.
ATTEMPTS_MAX: Final = 3

Rows = npt.NDArray[np.int64]
Digests = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnchangedRecords:
    """What is known of the records of one answer without reading them."""

    #: Row of the machine that each record describes, -1 for a record that must be read.
    rows: Rows
    digests: Digests
    #: The numbering of these rows.
    layout: int
    #: Known machines that no recognised record describes.
    unseen: list[MachineId] = field(default_factory=list)

    @property
    def unread(self) -> list[int]:
        """The places of the records that must be read, ascending."""
        places: list[int] = np.flatnonzero(self.rows < 0).tolist()
        return places


async def recognise(listing: Listing, inventory: Inventory, clock: Clock) -> UnchangedRecords | None:
    """Return which records of a full answer are known, None when it has no digests or rows do not hold still."""
    if not listing.digests or not len(inventory):
        return None
    digests: Digests = np.frombuffer(listing.digests, np.uint64).reshape(-1, 2)
    for _attempt in range(ATTEMPTS_MAX):
        inventory.settle()
        layout = inventory.layout
        rows = await _rows(inventory.noted(), digests, clock)
        if inventory.layout == layout:
            unseen = inventory.ids_without(rows[rows >= 0])
            return UnchangedRecords(rows=rows, digests=digests, layout=layout, unseen=unseen)
    return None


async def doubtful(recognised: UnchangedRecords, inventory: Inventory, marked: Set[str], clock: Clock) -> list[int]:
    """Return the places of recognised records whose machine is marked, or has changed since; ascending."""
    places = np.flatnonzero(recognised.rows >= 0)
    rows, digests, layout = recognised.rows[places], recognised.digests[places], recognised.layout
    if inventory.layout != layout:
        # The answer listed so many new machines that rows were numbered again.
        layout = inventory.layout
        rows = await _rows(inventory.noted(), digests, clock)
    found: list[int] = []
    for turn in _turns(len(places)):
        await clock.sleep(0)
        if inventory.layout != layout:
            # Once more, by a reader: what is left is judged record by record.
            found += places[turn].tolist()
            continue
        is_sure = (rows[turn] >= 0) & _are(inventory.noted(), rows[turn], digests[turn])
        marked_rows = [inventory.row(MachineId(machine_id)) for machine_id in marked]
        is_sure &= ~np.isin(rows[turn], [row for row in marked_rows if row is not None])
        found += places[turn][~is_sure].tolist()
    return found


class _Index:
    """Rows by digest: a table of places, a smaller one for the rows that others have driven from theirs, and so on."""

    def __init__(self, noted: Digests) -> None:
        self._noted = noted
        self._tables: list[npt.NDArray[np.int32]] = []

    @classmethod
    async def of(cls, noted: Digests, clock: Clock) -> "_Index":
        """Return the index of some notes, made in turns. A note that changes meanwhile is perhaps not found."""
        index, tables = cls(noted), list[npt.NDArray[np.int32]]()
        rows = np.flatnonzero(noted[:, 0]).astype(np.int32)
        while len(rows) and len(tables) < ROUNDS_MAX:
            table = np.full(1 << (2 * len(rows)).bit_length(), -1, np.int32)
            places = np.empty(len(rows), np.uint64)
            for turn in _turns(len(rows)):
                await clock.sleep(0)
                places[turn] = _places(noted[rows[turn]], len(tables), len(table))
                table[places[turn]] = rows[turn]
            tables.append(table)
            rows = rows[table[places] != rows]
        index._tables = tables
        return index

    def rows(self, digests: Digests) -> Rows:
        """Return the row whose note each digest is at this moment, -1 for none."""
        found = np.full(len(digests), -1, np.int64)
        left = np.arange(len(digests))
        for turn, table in enumerate(self._tables):
            wanted = digests[left]
            # A place that is empty says -1, and the last row is compared in vain.
            candidates = table[_places(wanted, turn, len(table))]
            is_hit = (candidates >= 0) & _are(self._noted, candidates, wanted)
            found[left[is_hit]] = candidates[is_hit]
            left = left[~is_hit]
        return found


async def _rows(noted: Digests, digests: Digests, clock: Clock) -> Rows:
    """Return the row whose note each digest is, -1 for none, looked up in turns."""
    index = await _Index.of(noted, clock)
    rows = np.full(len(digests), -1, np.int64)
    for turn in _turns(len(digests)):
        await clock.sleep(0)
        rows[turn] = index.rows(digests[turn])
    return rows


def _turns(size: int) -> list[slice]:
    return [slice(first, first + LOOKED_UP_PER_TURN_MAX) for first in range(0, size, LOOKED_UP_PER_TURN_MAX)]


def _are(noted: Digests, rows: npt.NDArray[Any], digests: Digests) -> npt.NDArray[np.bool_]:
    """Say of each row whether its note is the digest."""
    notes = noted[rows]
    same: npt.NDArray[np.bool_] = (notes[:, 0] == digests[:, 0]) & (notes[:, 1] == digests[:, 1])
    return same


def _places(digests: Digests, turn: int, size: int) -> npt.NDArray[np.uint64]:
    # Digests are as good as random: each turn is another place in a table whose size is a power of two.
    places: npt.NDArray[np.uint64] = (digests[:, 0] + np.uint64(turn) * digests[:, 1]) & np.uint64(size - 1)
    return places
