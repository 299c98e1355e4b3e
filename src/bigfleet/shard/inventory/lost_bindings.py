"""Holds machines that lost their binding without a drain of this shard (docs/spec/shard.md §5.4).

A provider whose state was restored from a backup shows machines as Idle whose nodes still serve a cluster. Until the
operator of that cluster reports that the node is gone, such a machine is neither bound elsewhere nor deleted. A hold
without a reported node ends after a time. Holds are in memory only and end with the process.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from bigfleet.model.clock import Clock
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.states import MachineState

#: A hold ends after so long if no operator reports a node, or if the provider shows no host.
UNREPORTED_SECONDS: Final = 600.0


@dataclass(slots=True)
class _Hold:
    cluster: ClusterId
    #: Whether the newest status of the cluster's operator names a node.
    is_reported: bool
    #: When the machine lost its binding, or was last seen with a host and a reported node.
    since_seconds: float


class LostBindings:
    """The held machines of one shard. Only the loop uses it.

    Invariant: `held` names all and only machines with a hold.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._holds: dict[MachineId, _Hold] = {}
        #: The held machines; replaced, never changed.
        self.held: frozenset[MachineId] = frozenset()
        #: Machines that lost their binding since `take_new`, with the former cluster.
        self._new: dict[MachineId, ClusterId] = {}

    def lost(self, machine_id: MachineId, cluster: ClusterId, node_name: str | None) -> None:
        """Hold a machine that its cluster lost without a drain.

        `node_name` is what the operator last reported, "" when the node is gone, None without a report. A machine that
        is held for another cluster, because its node there is reported, stays held for that one.
        """
        self._new[machine_id] = cluster
        hold = self._holds.get(machine_id)
        if node_name == "" or (hold is not None and hold.is_reported and hold.cluster != cluster):
            return
        self._holds[machine_id] = _Hold(cluster, node_name is not None, self._clock.monotonic_seconds())
        self._refresh()

    def reported(self, machine_id: MachineId, cluster: str, node_name: str) -> bool:
        """Take what an operator reports of a node; return whether the machine is held for its cluster."""
        hold = self._holds.get(machine_id)
        if hold is None or hold.cluster != cluster:
            return False
        if node_name:
            hold.is_reported = True
        else:
            self._end(machine_id)
        return True

    def bound(self, machine_id: MachineId, cluster: str) -> None:
        """End the hold of a machine that is bound to its former cluster again."""
        hold = self._holds.get(machine_id)
        if hold is not None and hold.cluster == cluster:
            self._end(machine_id)

    def expire(self, state_of: Callable[[MachineId], MachineState | None]) -> int:
        """End the holds whose time is over; return how many known machines are held.

        `state_of` returns a machine's state, None when it is not known.
        """
        now_seconds = self._clock.monotonic_seconds()
        known, over = 0, list[MachineId]()
        for machine_id, hold in self._holds.items():
            state = state_of(machine_id)
            if hold.is_reported and state not in (None, MachineState.SPECULATIVE):
                hold.since_seconds = now_seconds
            if now_seconds - hold.since_seconds >= UNREPORTED_SECONDS:
                over.append(machine_id)
            else:
                known += state is not None
        for machine_id in over:
            del self._holds[machine_id]
        if over:
            self._refresh()
        return known

    def take_new(self) -> dict[MachineId, ClusterId]:
        """Return the machines that lost their binding since the last call, with their former clusters."""
        new, self._new = self._new, {}
        return new

    def _end(self, machine_id: MachineId) -> None:
        del self._holds[machine_id]
        self._refresh()

    def _refresh(self) -> None:
        self.held = frozenset(self._holds)
