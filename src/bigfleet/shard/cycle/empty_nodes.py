"""Finds machines whose nodes have had no pods for so long that their cluster does not need them.

docs/spec/shard.md §4.2. The operator reports the pods of a node. The cost of a cycle grows with the reports and with
the empty nodes.
"""

from collections.abc import Callable
from typing import Final

from bigfleet.model.clock import Clock
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.shapes import Overhead
from bigfleet.model.states import MachineState
from bigfleet.shard.cycle.node_fullness import fullness, room_of
from bigfleet.shard.inventory.ingest import NodeLoad

#: A scheduler may take so long to place pods on a node that has joined; pods that still wait are reported by then.
SETTLE_SECONDS: Final = 60.0

OverheadsOf = Callable[[str], tuple[Overhead, ...]]


class EmptyNodes:
    """The Configured machines whose nodes host no pods but those of DaemonSets. Touched by the loop alone.

    A cluster whose operator never reported what a node hosts has none.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        load_of: Callable[[MachineId], NodeLoad | None],
        machine_of: Callable[[MachineId], Machine | None],
        overheads_of: OverheadsOf,
        after_seconds: float,
    ) -> None:
        """`load_of` returns the newest report of a machine's node; `after_seconds` is the delay of a reclaim."""
        self._clock = clock
        self._load_of = load_of
        self._machine_of = machine_of
        self._overheads_of = overheads_of
        self._after_seconds = max(after_seconds, SETTLE_SECONDS)
        self._since_seconds: dict[str, dict[MachineId, float]] = {}
        self._disturbed_seconds: dict[str, float] = {}
        #: Clusters whose operators report what nodes host.
        self._reporting: set[str] = set()

    def seen(self, machine: Machine) -> None:
        """Note what was just reported of a machine's node."""
        load = self._load_of(machine.id)
        if load is None or not machine.cluster:
            return
        if load.pods or any(load.requested.values()):
            self._reporting.add(machine.cluster)
        empty = self._since_seconds.setdefault(machine.cluster, {})
        room = room_of(machine, self._overheads_of(machine.cluster))
        if load.node_name and fullness(load.requested, *room) == 0:
            empty.setdefault(machine.id, self._clock.monotonic_seconds())
        else:
            empty.pop(machine.id, None)
        if not empty:
            del self._since_seconds[machine.cluster]

    def disturbed(self, cluster: str) -> None:
        """Start the time of a cluster's empty nodes again: pods wait there."""
        self._disturbed_seconds[cluster] = self._clock.monotonic_seconds()

    def due(self) -> dict[str, list[Machine]]:
        """Return the machines that have been empty for long enough, by cluster, each cluster's by id."""
        now_seconds = self._clock.monotonic_seconds()
        found: dict[str, list[Machine]] = {}
        for cluster, empty in list(self._since_seconds.items()):
            last_seconds = self._disturbed_seconds.get(cluster, float("-inf"))
            for machine_id, since_seconds in sorted(empty.items()):
                machine = self._machine_of(machine_id)
                if machine is None or machine.cluster != cluster or machine.state is not MachineState.CONFIGURED:
                    del empty[machine_id]
                elif (
                    cluster in self._reporting and now_seconds - max(since_seconds, last_seconds) >= self._after_seconds
                ):
                    found.setdefault(cluster, []).append(machine)
            if not empty:
                del self._since_seconds[cluster]
                self._disturbed_seconds.pop(cluster, None)
        return found

    def forget(self, cluster: str) -> None:
        """The cluster has no demand."""
        self._since_seconds.pop(cluster, None)
        self._disturbed_seconds.pop(cluster, None)
        self._reporting.discard(cluster)
