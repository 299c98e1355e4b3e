"""Says how full the nodes of clusters with excess machines are, so that the emptiest of like machines is reclaimed.

Other clusters are not looked at: their decisions would be computed again whenever pods come and go (docs/spec/shard.md
§9.3).
"""

from collections.abc import Iterable, Mapping, Set
from typing import Final

from bigfleet.model import vector
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.shapes import Overhead
from bigfleet.model.vector import Vector
from bigfleet.shard.inventory.ingest import Ingest, NodeLoad
from bigfleet.shard.inventory.inventory import Inventory

#: A full node, in quarters of its room.
FULL: Final = 4
#: A node whose pods would not fit elsewhere: another machine of its kind is to be reclaimed first.
HELD: Final = FULL + 1


class NodeFullness:
    """Reads the fullness of nodes for each cycle; a machine's is computed once for each status of its node."""

    def __init__(self, *, inventory: Inventory, ingest: Ingest) -> None:
        self._inventory, self._ingest = inventory, ingest
        self._levels: dict[MachineId, tuple[NodeLoad, int]] = {}

    def read(
        self, excess: Iterable[MachineId], *, held: Set[MachineId], overheads: Mapping[str, tuple[Overhead, ...]]
    ) -> dict[str, int]:
        """Return the fullness of the nodes of all clusters that have one of these excess machines.

        1 to 4 quarters of the machine's room without `overheads`, rounded up, by the resource that is used most; `HELD`
        for machines that are `held`. An excess machine counts a quarter less, so that it stays the one while pods come
        and go: its delay would begin again otherwise. Empty and unknown nodes are absent.
        """
        inventory = self._inventory
        known = {machine_id: machine for machine_id in excess if (machine := inventory.get(machine_id)) is not None}
        levels: dict[MachineId, tuple[NodeLoad, int]] = {}
        found: dict[str, int] = {}
        for cluster in {machine.cluster for machine in known.values() if machine.cluster}:
            for machine_id in inventory.bound_to(cluster):
                load = self._ingest.node_load(machine_id)
                if load is None:
                    continue
                level = self._level(machine_id, load, overheads.get(cluster, ()))
                levels[machine_id] = (load, level)
                effective = HELD if machine_id in held else level - (machine_id in known)
                if effective > 0:
                    found[machine_id] = effective
        self._levels = levels
        return found

    def _level(self, machine_id: MachineId, load: NodeLoad, overheads: Iterable[Overhead]) -> int:
        before = self._levels.get(machine_id)
        if before is not None and before[0] is load:
            return before[1]
        machine = self._inventory.known(machine_id)
        return fullness(load.requested, machine.supply, _overhead_of(machine, overheads))


def _overhead_of(machine: Machine, overheads: Iterable[Overhead]) -> Vector:
    total = vector.ZERO
    for overhead in overheads:
        if overhead.applies(machine.attribute):
            total = vector.add(total, overhead.resources)
    return total


def fullness(requested: Vector, supply: Vector, overhead: Vector) -> int:
    """Return how many quarters of a machine its pods request, 0 to 4, rounded up, DaemonSets apart."""
    most = 0
    for name, milli in requested.items():
        pods_milli, room_milli = milli - overhead.get(name, 0), supply.get(name, 0) - overhead.get(name, 0)
        if pods_milli > 0:
            most = max(most, FULL if room_milli <= 0 else min(FULL, -(-FULL * pods_milli // room_milli)))
    return most
