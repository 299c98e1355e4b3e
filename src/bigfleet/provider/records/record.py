"""Defines the record of a machine, including the fields that readers do not see (docs/spec/provider.md §8, §9).

A record is a frozen value; `bigfleet.provider.records.lifecycle` makes the next one. This module must not do I/O.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from bigfleet.model.machine import Machine
from bigfleet.model.states import MachineState
from bigfleet.provider.backend import Slot
from bigfleet.provider.records.kinds import Kind

NO_METADATA: Mapping[str, str] = MappingProxyType({})


class ErrorCode(Enum):
    """The first word of `last_error`, and a metric label."""

    BACKEND = "BACKEND"
    STOCKOUT = "STOCKOUT"
    TIMEOUT = "TIMEOUT"
    QUEUE_TIMEOUT = "QUEUE_TIMEOUT"
    NOT_READY = "NOT_READY"
    HOST_LOST = "HOST_LOST"
    INTERRUPTED = "INTERRUPTED"
    RESTARTED = "RESTARTED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """The latest accepted call of a machine."""

    id: str
    kind: Kind
    accepted_unix_nanos: int
    attempt: int = 1
    grace_seconds: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """What the backend pushed and what still holds; None was not pushed."""

    price_usd_per_hour: float | None = None
    #: The declared price at the time of the push; a declared price that differs from it ends the push.
    price_baseline_usd_per_hour: float | None = None
    probability: float | None = None
    reclaim_notice: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a machine came to FAILED, as its way out needs it (docs/spec/provider.md §14)."""

    code: ErrorCode
    #: The state it was in before the operation that failed, or when its host was lost.
    source: MachineState
    #: What the substrate asked for, or what a lost host is given; None is the configured hold.
    hold_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One machine as the provider holds it."""

    machine: Machine
    #: What the slot offers: the facts come back when the host goes.
    slot: Slot
    #: The price and probability that inventory or `create` declared last; the machine shows what pushes make of them.
    declared_price_usd_per_hour: float
    declared_probability: float
    #: Stored and echoed verbatim, never read.
    metadata: Mapping[str, str] = field(default_factory=lambda: NO_METADATA)
    state_since_unix_nanos: int = 0
    operation: Operation | None = None
    pushed: Pushed | None = None
    #: The node name that came with the host; the binding's own name hides it.
    host_node_name: str = ""
    #: Failures since the last operation that succeeded.
    failures_in_row: int = 0
    #: Set exactly in FAILED.
    failure: Failure | None = None
    #: The store's number of the last change that a reader can see; 0 before the first commit.
    revision: int = 0
    #: The cluster whose data the host still holds after a Drain that resets nothing; it may serve no other.
    former_cluster: str = ""
    #: The revision of the last change of state.
    state_revision: int = 0
    #: The record as List sends it, in pieces that may be shared; opaque here.
    wire: tuple[bytes, ...] = field(default=(), repr=False, compare=False)

    @property
    def id(self) -> str:
        """The machine's id."""
        return self.machine.id

    @property
    def state(self) -> MachineState:
        """The machine's state."""
        return self.machine.state

    def shows_the_same_as(self, other: "Record") -> bool:
        """Return whether a reader sees no difference."""
        return self.machine == other.machine and self.metadata == other.metadata
