"""Defines the four mutating calls: source state, transitional state, target state, timeout.

Read `bigfleet.provider.records.lifecycle` next, which applies these edges to records. This module must not know a
machine.
"""

from enum import Enum
from types import MappingProxyType
from typing import Final, NamedTuple

from bigfleet.model.states import MachineState


class Kind(Enum):
    """What a mutating call asks for; the values are metric labels."""

    CREATE = "create"
    CONFIGURE = "configure"
    DRAIN = "drain"
    DELETE = "delete"

    @property
    def method(self) -> str:
        """The name of the call on the wire, such as `Create`."""
        return self.value.capitalize()


class Edge(NamedTuple):
    """The way of one call."""

    source: MachineState
    transitional: MachineState
    target: MachineState


EDGES: Final = MappingProxyType(
    {
        Kind.CREATE: Edge(MachineState.SPECULATIVE, MachineState.CREATING, MachineState.IDLE),
        Kind.CONFIGURE: Edge(MachineState.IDLE, MachineState.CONFIGURING, MachineState.CONFIGURED),
        Kind.DRAIN: Edge(MachineState.CONFIGURED, MachineState.DRAINING, MachineState.IDLE),
        Kind.DELETE: Edge(MachineState.IDLE, MachineState.DELETING, MachineState.SPECULATIVE),
    }
)
#: All and only the transitional states, each with the kind that enters it.
KIND_IN_FLIGHT: Final = MappingProxyType({edge.transitional: kind for kind, edge in EDGES.items()})

TIMEOUT_SECONDS: Final = MappingProxyType(
    {Kind.CREATE: 300.0, Kind.CONFIGURE: 300.0, Kind.DRAIN: 600.0, Kind.DELETE: 300.0}
)
#: What a drain gets on top of its grace at most, so that eviction at the very end of the grace still counts.
DRAIN_MARGIN_SECONDS_MAX: Final = 60.0


def timeout_seconds(kind: Kind, base_seconds: float, grace_seconds: int) -> float:
    """Return how long the work of one call may take once its backend was called."""
    if kind is not Kind.DRAIN or grace_seconds <= 0:
        return base_seconds
    return max(base_seconds, grace_seconds + min(base_seconds, DRAIN_MARGIN_SECONDS_MAX))
