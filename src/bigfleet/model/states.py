"""Defines the states of a machine, and the table of legal transitions with a reason per edge.

The table applies to transitions that BigFleet makes, not to states that it observes: a state that a provider reports is
accepted as it is (docs/spec/model.md §2, docs/spec/shard.md §5.3). Any other transition is refused.
"""

from enum import IntEnum
from types import MappingProxyType
from typing import Final


class MachineState(IntEnum):
    """Where a machine is in its life. The numbers are those of the wire."""

    UNSPECIFIED = 0
    SPECULATIVE = 1
    CREATING = 2
    IDLE = 3
    CONFIGURING = 4
    CONFIGURED = 5
    DRAINING = 6
    DELETING = 7
    FAILED = 8

    @property
    def label(self) -> str:
        """The name that people and metrics read, such as `Configured`."""
        return self.name.capitalize()


class CapacityType(IntEnum):
    """How a machine is paid for. The numbers are those of the wire."""

    UNSPECIFIED = 0
    BARE_METAL = 1
    RESERVED = 2
    ON_DEMAND = 3
    SPOT = 4

    @property
    def label(self) -> str:
        """The name that people and metrics read, such as `OnDemand`."""
        return "".join(part.capitalize() for part in self.name.split("_"))


#: All and only the states in which a machine may stay without a call.
RESTING_STATES: Final = frozenset({MachineState.SPECULATIVE, MachineState.IDLE, MachineState.CONFIGURED})
#: All and only the states that a provider's own work ends.
TRANSITIONAL_STATES: Final = frozenset(
    {MachineState.CREATING, MachineState.CONFIGURING, MachineState.DRAINING, MachineState.DELETING}
)
#: All and only the states in which a machine carries a cluster by rule.
BOUND_STATES: Final = frozenset({MachineState.CONFIGURING, MachineState.CONFIGURED, MachineState.DRAINING})
#: All and only the states whose arrival ends the cluster and every stamp (docs/spec/engine.md §11).
UNBOUND_STATES: Final = frozenset({MachineState.IDLE, MachineState.SPECULATIVE, MachineState.DELETING})

_S = MachineState
TRANSITIONS: Final = MappingProxyType(
    {
        (_S.SPECULATIVE, _S.CREATING): "a row wants the machine: Create was asked of the provider",
        (_S.CREATING, _S.IDLE): "the machine has a host and serves no cluster yet",
        (_S.CREATING, _S.FAILED): "the provider could not make the host",
        (_S.IDLE, _S.CONFIGURING): "a row wants the machine: it is being bound to the row's cluster",
        (_S.IDLE, _S.DELETING): "no row needs the machine and its hold is over",
        (_S.CONFIGURING, _S.CONFIGURED): "its node is Ready in the cluster",
        (_S.CONFIGURING, _S.IDLE): "rolled back before the provider knew: no blob, or the provider refused",
        (_S.CONFIGURING, _S.FAILED): "the node never became Ready, or Configure failed",
        (_S.CONFIGURED, _S.DRAINING): "reclaimed as excess, or preempted by a higher priority",
        (_S.DRAINING, _S.IDLE): "the drain ended: binding and stamps are gone",
        (_S.DRAINING, _S.FAILED): "the drain failed; the machine never falls back to Configured",
        (_S.DELETING, _S.SPECULATIVE): "the host is gone, the slot can be made real again",
        (_S.DELETING, _S.FAILED): "the provider could not delete the host",
    }
)


def is_legal_transition(source: MachineState, target: MachineState) -> bool:
    """Return whether BigFleet may drive a machine from `source` to `target`; staying in a state is always legal."""
    return source == target or (source, target) in TRANSITIONS


def transition_reason(source: MachineState, target: MachineState) -> str:
    """Return the sentence of a legal edge. Raises KeyError for any other pair, staying included."""
    return TRANSITIONS[(source, target)]
