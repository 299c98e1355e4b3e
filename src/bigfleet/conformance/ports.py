"""Defines the six requests of the suite, their answers, and the Protocols that carry them.

docs/spec/wire.md §6. Answers are stored unjudged: an unexpected status or a record that breaks every rule is what the
suite tests for. This module must not raise because of a provider's answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple, Protocol

from bigfleet.model.states import CapacityType, MachineState

_EMPTY: Mapping[str, str] = MappingProxyType({})


class Status(Enum):
    """How a call ended; the names are those of gRPC."""

    OK = "OK"
    CANCELLED = "CANCELLED"
    UNKNOWN = "UNKNOWN"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    ABORTED = "ABORTED"
    OUT_OF_RANGE = "OUT_OF_RANGE"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    INTERNAL = "INTERNAL"
    UNAVAILABLE = "UNAVAILABLE"
    DATA_LOSS = "DATA_LOSS"
    UNAUTHENTICATED = "UNAUTHENTICATED"


class CallToken(NamedTuple):
    """The fencing token of a mutating call; all empty is absent."""

    shard_id: str = ""
    epoch: int = 0
    sequence: int = 0


ABSENT = CallToken()


@dataclass(frozen=True, slots=True)
class Create:
    """Give a slot a host."""

    machine_id: str
    token: CallToken = ABSENT


@dataclass(frozen=True, slots=True)
class Configure:
    """Bind a machine. The map is handed on as it is, so that a provider in process could alias it."""

    machine_id: str
    cluster: str
    metadata: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    blob: bytes = b""
    token: CallToken = ABSENT


@dataclass(frozen=True, slots=True)
class Drain:
    """Take a machine out of its cluster."""

    machine_id: str
    grace_seconds: int = 0
    token: CallToken = ABSENT


@dataclass(frozen=True, slots=True)
class Delete:
    """Give a host back."""

    machine_id: str
    token: CallToken = ABSENT


@dataclass(frozen=True, slots=True)
class Get:
    """Read one machine."""

    machine_id: str


@dataclass(frozen=True, slots=True)
class List:
    """Read many machines. No state is any state, at most 0 results is no cap, no cursor is the full list."""

    states: tuple[MachineState, ...] = ()
    results_max: int = 0
    since: bytes = b""


Mutation = Create | Configure | Drain | Delete
Request = Mutation | Get | List


class HostSeen(NamedTuple):
    """A host as read; the message was present, its fields may still be empty."""

    provider: str
    ref: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSeen:
    """A machine as read, field by field. A state or capacity type that is unknown reads as UNSPECIFIED."""

    id: str
    state: MachineState
    #: None when the message was absent.
    host: HostSeen | None = None
    instance_type: str = ""
    zone: str = ""
    capacity_type: CapacityType = CapacityType.UNSPECIFIED
    price_usd_per_hour: float = 0.0
    interruption_probability: float = 0.0
    resources: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    allocatable: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    labels: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    last_error: str = ""
    cluster: str = ""
    metadata: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    node_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListSeen:
    """An answer of List as read, in the order of the provider."""

    machines: tuple[MachineSeen, ...]
    revision: bytes
    removed_ids: tuple[str, ...] = ()
    tombstones: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The status of a call, and its reply if the status is OK."""

    status: Status
    #: The text of a status that is not OK.
    details: str = ""
    #: Trailing metadata of the call, in the order of the peer.
    trailing: tuple[tuple[str, str], ...] = ()
    #: Of an ack.
    operation_id: str = ""
    #: Of an ack and of Get.
    machine: MachineSeen | None = None
    #: Of List.
    listing: ListSeen | None = None

    @property
    def is_ok(self) -> bool:
        """Return whether the call was taken."""
        return self.status is Status.OK

    @property
    def is_fenced(self) -> bool:
        """Return whether the fence refused it."""
        return self.status is Status.FAILED_PRECONDITION

    @property
    def is_refused(self) -> bool:
        """Return whether something other than the fence refused it."""
        return not self.is_ok and not self.is_fenced


class ProviderClient(Protocol):
    """One connection to a provider."""

    async def call(self, request: Request) -> Answer:
        """Carry a request and return how it ended. A broken connection is a status, never an exception."""
        ...


class ProviderUnderTest(Protocol):
    """A provider under test, and the ways to it."""

    @property
    def address(self) -> str:
        """Where it is, for reports."""
        ...

    @property
    def connections(self) -> Sequence[ProviderClient]:
        """At least two connections that share nothing."""
        ...

    async def restart(self) -> None:
        """Kill the process without warning and start it again over the same state; return once it serves.

        Raises SiteFault when it cannot be restarted or does not come back.
        """
        ...

    async def close(self) -> None:
        """Close the connections, and end the process if the suite started it."""
        ...


class SiteFault(Exception):
    """There is no provider to test, or it does not come up; the text names what to do."""


class SiteMissing(Exception):
    """No flag names such a provider, so its behaviours are skipped. The text names the missing flag."""
