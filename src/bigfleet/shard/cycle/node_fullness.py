"""Computes how full nodes of the shapes of excess machines are, so that the emptiest of equal machines is reclaimed.

Other clusters are left out: their decisions would be computed again whenever pods come and go (docs/spec/shard.md
§9.3). So are other shapes of these clusters: only equal machines exchange their places.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Set
from typing import Final

import numpy as np
import numpy.typing as npt

from bigfleet.engine.columns.objects import example_of
from bigfleet.engine.columns.store import ColumnSnapshot
from bigfleet.model import vector
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.need import RowKey
from bigfleet.model.shapes import Overhead
from bigfleet.model.states import MachineState
from bigfleet.model.vector import Vector
from bigfleet.shard.inventory.ingest import NodeLoad

#: A full node, in quarters of its room.
FULL: Final = 4
#: A machine that stays for now, because the pods on its node would not fit elsewhere or its row is short: another one
#: of its kind is to be reclaimed first.
HELD: Final = FULL + 1

Overheads = Mapping[str, tuple[Overhead, ...]]


class NodeFullness:
    """Reads the fullness of nodes; a machine's is computed once for each status of its node."""

    def __init__(self, load_of: Callable[[MachineId], NodeLoad | None]) -> None:
        self._load_of = load_of
        self._levels: dict[MachineId, tuple[NodeLoad, int]] = {}

    def read(
        self,
        snapshot: ColumnSnapshot,
        excess: Collection[MachineId],
        *,
        held: Set[MachineId],
        short: Set[RowKey],
        overheads: Overheads,
    ) -> dict[str, int]:
        """Return the fullness of the Configured nodes of a cluster and shape that have one of these excess machines.

        1 to 4 quarters of the machine's room without `overheads`, rounded up, by the resource that is used most; `HELD`
        for machines that are `held` or stamped for a row of `short`, which stay in any case: in the place of an excess
        machine such a one would end the excess, and in the next cycle it would begin again. An excess machine counts a
        quarter less, so that it stays the one while pods come and go: its delay would begin again otherwise. Empty and
        unknown nodes are absent. May run off the loop.
        """
        columns, vocabulary = snapshot.columns, snapshot.vocabulary
        known = {machine_id: row for machine_id in excess if (row := snapshot.rows.get(machine_id)) is not None}
        rooms: dict[tuple[int, int], tuple[Vector, Vector]] = {}
        levels: dict[MachineId, tuple[NodeLoad, int]] = {}
        found: dict[str, int] = {}
        for row in _rows_like(snapshot, known.values()).tolist():
            machine_id = snapshot.ids[row]
            if machine_id in held or _stamp_of(snapshot, row) in short:
                found[machine_id] = HELD
                continue
            load = self._load_of(machine_id)
            if load is None:
                continue
            before = self._levels.get(machine_id)
            if before is not None and before[0] is load:
                level = before[1]
            else:
                kind = (int(columns.cluster[row]), int(columns.shape[row]))
                if kind not in rooms:
                    cluster = str(vocabulary.clusters[kind[0]])
                    rooms[kind] = room_of(example_of(vocabulary, kind[1]), overheads.get(cluster, ()))
                level = fullness(load.requested, *rooms[kind])
            levels[machine_id] = (load, level)
            effective = level - (machine_id in known)
            if effective > 0:
                found[machine_id] = effective
        self._levels = levels
        return found


def _stamp_of(snapshot: ColumnSnapshot, row: int) -> RowKey:
    columns, vocabulary = snapshot.columns, snapshot.vocabulary
    stamp = vocabulary.stamps[columns.stamp[row]]
    cluster = ClusterId(str(vocabulary.clusters[columns.cluster[row]]))
    return (cluster, stamp.assigned_need_fingerprint, stamp.assigned_group)


def _rows_like(snapshot: ColumnSnapshot, rows: Iterable[int]) -> npt.NDArray[np.int64]:
    """Return the Configured machines of a cluster that have the shape of one of its machines in these rows."""
    columns = snapshot.columns
    given = np.fromiter(rows, np.int64)
    given = given[columns.cluster[given] > 0]
    configured = columns.state == MachineState.CONFIGURED
    found = np.flatnonzero(configured & np.isin(columns.cluster, np.unique(columns.cluster[given])))
    shapes = len(snapshot.vocabulary.shapes)
    kind_of = columns.cluster[found].astype(np.int64) * shapes + columns.shape[found]
    kinds = columns.cluster[given].astype(np.int64) * shapes + columns.shape[given]
    return found[np.isin(kind_of, kinds)]


def room_of(machine: Machine, overheads: Iterable[Overhead]) -> tuple[Vector, Vector]:
    """Return a machine's supply and the overheads that it has."""
    total = vector.ZERO
    for overhead in overheads:
        if overhead.applies(machine.attribute):
            total = vector.add(total, overhead.resources)
    return machine.supply, total


def fullness(requested: Vector, supply: Vector, overhead: Vector) -> int:
    """Return how many quarters of a machine its pods request, 0 to 4, rounded up, DaemonSets apart."""
    most = 0
    for name, milli in requested.items():
        pods_milli, room_milli = milli - overhead.get(name, 0), supply.get(name, 0) - overhead.get(name, 0)
        if pods_milli > 0:
            most = max(most, FULL if room_milli <= 0 else min(FULL, -(-FULL * pods_milli // room_milli)))
    return most
