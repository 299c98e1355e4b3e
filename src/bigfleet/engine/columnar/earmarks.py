"""Stores the earmarks of a decision, so that the next one can find differences (docs/adr/0111).

Earmarks hide free machines from later gangs, cluster after cluster. The next decision carries the old ones out again
beside its own (`replaying`). Where rows or classes of gangs do not correspond nothing is compared, and every open gang
chooses among all domains. This module must not earmark a machine.
"""

from typing import NamedTuple

import numpy as np

from bigfleet.engine.columnar.arrays import Gangs, Int32s, Int64s, Replay, Rows
from bigfleet.engine.columnar.segments import spans


class Earmarks(NamedTuple):
    """What the rows of one decision earmarked, and what was free before the first of them."""

    gangs: Gangs
    #: Class of each row, and its place in processing order.
    gang: Int32s
    place_of: Int64s
    #: Place of the row, and shape of the machine, of each earmark in order.
    place: Int64s
    shape: Int32s
    #: Under which fits were numbered as they are in the classes.
    fits_version: int


def earmarks_of(replay: Replay, gangs: Gangs, rows: Rows, order: Int32s, fits_version: int) -> Earmarks:
    """Return what a finished pass earmarked; `gangs` is as it was before."""
    place_of = np.empty(len(order), np.int64)
    place_of[order] = np.arange(len(order))
    count = int(replay.state[1])
    return Earmarks(gangs, rows.gang, place_of, replay.now_place[:count], replay.now_shape[:count], fits_version)


def start_replay(
    last: Earmarks | None, gangs: Gangs, rows: Rows, source: Int64s, order: Int32s, fits_version: int
) -> Replay:
    """Return the replay of a pass: of the last decision's earmarks where the two can be compared, else of none.

    `source` is the row's number in the last decision, of rows that are not fresh.
    """
    cells, room = len(gangs.members), len(gangs.machines)
    compared = np.zeros((2, cells), np.uint8)
    replay = Replay(
        members=np.zeros(0, np.int64),
        total=np.zeros((0, 1), np.int64),
        place_then=np.zeros(0, np.int64),
        then_place=np.zeros(0, np.int64),
        then_shape=np.zeros(0, np.int32),
        now_place=np.empty(room, np.int64),
        now_shape=np.empty(room, np.int32),
        differs=compared[0],
        listed=compared[1],
        changed=np.empty(cells, np.int32),
        counts=np.zeros(len(gangs.fit), np.int64),
        state=np.zeros(3, np.int64),
    )
    if last is None or last.fits_version != fits_version or not _is_same_classes(last.gangs, gangs):
        return replay
    unchanged = order[rows.is_fresh[order] == 0]
    then = last.place_of[source[unchanged]]
    if (np.diff(then) < 0).any() or not np.array_equal(rows.gang[unchanged], last.gang[source[unchanged]]):
        return replay
    place_then = np.zeros(len(order), np.int64)
    place_then[unchanged] = then
    replay.state[2] = 1
    replay = replay._replace(
        members=last.gangs.members.copy(),
        total=last.gangs.total.copy(),
        place_then=place_then,
        then_place=last.place,
        then_shape=last.shape,
    )
    _compare(gangs, replay)
    return replay


def _compare(gangs: Gangs, replay: Replay) -> None:
    """Note in which cells other machines are free now, before anybody earmarks anything: few ever have any."""
    cells = np.flatnonzero((gangs.members != 0) | (replay.members != 0))
    differs = gangs.members[cells] != replay.members[cells]
    differs |= (gangs.total[cells] != replay.total[cells]).any(axis=1)
    changed = cells[differs]
    replay.differs[changed] = replay.listed[changed] = 1
    gang = np.searchsorted(gangs.base, changed, "right") - 1
    replay.counts[:] = np.bincount(gang, minlength=len(gangs.fit))
    places = spans(gangs.base[:-1], replay.counts)
    replay.changed[places] = changed - gangs.base[gang]


def _is_same_classes(last: Gangs, gangs: Gangs) -> bool:
    names = ("fit", "key", "mask", "bucket", "base")
    return all(np.array_equal(getattr(last, name), getattr(gangs, name)) for name in names)
