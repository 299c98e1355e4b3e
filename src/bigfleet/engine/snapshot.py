"""Defines an immutable, consistent view of the machines, and its orders (docs/spec/model.md §3).

Built once per cycle by the shard's inventory and read by the engine in a worker thread. Never changed after it is made.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.states import MachineState


def keep_priority_key(machine: Machine) -> tuple[float, float, str]:
    """Sort key of keep-priority: price ascending, reclamation dollars descending, id."""
    return (machine.price_usd_per_hour, -machine.assigned_reclamation_penalty_dollars, machine.id)


def idle_order_key(machine: Machine) -> tuple[float, str]:
    """Sort key of the acquisition order of Idle machines: price, id."""
    return (machine.price_usd_per_hour, machine.id)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Every machine of one moment."""

    #: Every machine by id, ids ascending.
    machines: Mapping[MachineId, Machine]
    #: Seconds on the caller's monotonic clock at which a machine became Idle; Idle machines only, absent is unknown.
    idle_since_seconds: Mapping[MachineId, float]
    #: Machines of each state, ids ascending; states without machines are absent.
    by_state: Mapping[MachineState, tuple[Machine, ...]]
    #: Machines of each (cluster, state) in keep-priority order; unbound machines are absent.
    by_cluster: Mapping[tuple[str, MachineState], tuple[Machine, ...]]

    @classmethod
    def of(cls, machines: Iterable[Machine], idle_since_seconds: Mapping[MachineId, float] | None = None) -> "Snapshot":
        """Build the snapshot of some machines; ids must differ. Cost: one sort of all machines."""
        ordered = sorted(machines, key=lambda machine: machine.id)
        by_state: defaultdict[MachineState, list[Machine]] = defaultdict(list)
        by_cluster: defaultdict[tuple[str, MachineState], list[Machine]] = defaultdict(list)
        for machine in ordered:
            by_state[machine.state].append(machine)
            if machine.cluster:
                by_cluster[(machine.cluster, machine.state)].append(machine)
        return cls(
            machines=MappingProxyType({machine.id: machine for machine in ordered}),
            idle_since_seconds=MappingProxyType(dict(idle_since_seconds or {})),
            by_state=MappingProxyType({state: tuple(group) for state, group in by_state.items()}),
            by_cluster=MappingProxyType(
                {key: tuple(sorted(group, key=keep_priority_key)) for key, group in by_cluster.items()}
            ),
        )

    def of_state(self, state: MachineState) -> tuple[Machine, ...]:
        """Return the machines of a state, ids ascending."""
        return self.by_state.get(state, ())

    def of_cluster(self, cluster: str, state: MachineState) -> tuple[Machine, ...]:
        """Return a cluster's machines of a state in keep-priority order."""
        return self.by_cluster.get((cluster, state), ())
