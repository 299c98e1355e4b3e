"""Defines what an author of a provider implements, and the values that pass between the author's code and the kit.

docs/spec/provider.md §16. A backend creates and deletes hosts and reports facts; it is idempotent by operation id. It
must never know tokens, states, revisions, timeouts or stores: those are the kit's.
"""

from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from bigfleet.model.machine import Machine
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.provider.records.kinds import TIMEOUT_SECONDS, Kind

T = TypeVar("T")
Result: TypeAlias = T | Awaitable[T]

#: A machine as a backend sees it: a frozen value whose maps are read-only.
MachineView = Machine

_EMPTY: Mapping[str, str] = MappingProxyType({})


def _no_entries() -> Mapping[str, str]:
    return _EMPTY


class Reset(Enum):
    """How a Drain removes the former cluster's data from a machine: credentials, volumes, images."""

    #: Nothing. The machine returns only to the cluster that it came from, or is deleted.
    NONE = "none"
    #: It starts again from a disk that the cluster could not write to.
    REBOOT = "reboot"
    #: It gets a new disk, or is installed again.
    REIMAGE = "reimage"


class Transient(Exception):
    """The substrate may succeed if asked again with the same operation id."""

    def __init__(self, text: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(text)
        self.retry_after_seconds = retry_after_seconds


class Stockout(Exception):
    """The substrate has no capacity of this kind now. Final for the operation."""

    def __init__(self, text: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(text)
        self.retry_after_seconds = retry_after_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation as the backend sees it; `id` is the idempotency key towards the substrate."""

    id: str
    kind: Kind
    #: 1 for the first, one more after each restart of the provider.
    attempt: int
    #: On the clock that the kit was given.
    deadline_monotonic_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """An offer: a machine that can be created. docs/spec/provider.md §9 has the rules of the fields."""

    id: str
    instance_type: str
    zone: str
    capacity_type: CapacityType
    resources: Mapping[str, str] = field(default_factory=_no_entries)
    allocatable: Mapping[str, str] = field(default_factory=_no_entries)
    labels: Mapping[str, str] = field(default_factory=_no_entries)
    price_usd_per_hour: float = 0.0
    #: Within one hour, in [0, 1].
    interruption_probability: float = 0.0
    #: A machine that can never be deleted.
    fixed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExistingHost(Slot):
    """A host that the substrate runs for a machine id."""

    host_ref: str
    node_name: str = ""
    #: The cluster that the substrate says the host serves, "" if it says none or does not know. Such a host is never
    #: IDLE, also if the record of its machine says so: the state may be older than the host.
    in_cluster: str = ""

    @classmethod
    def of(cls, slot: Slot, *, host_ref: str, node_name: str = "", in_cluster: str = "") -> "ExistingHost":
        """Return the host that a slot has, with every fact as the slot declares it."""
        return cls(**_facts_of(slot), host_ref=host_ref, node_name=node_name, in_cluster=in_cluster)

    @property
    def slot(self) -> Slot:
        """The slot that offers what the host has."""
        return Slot(**_facts_of(self))


def _facts_of(slot: Slot) -> dict[str, Any]:
    return {each.name: getattr(slot, each.name) for each in fields(Slot)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What `create` made; None leaves a fact as the slot declared it."""

    ref: str
    node_name: str = ""
    resources: Mapping[str, str] | None = None
    allocatable: Mapping[str, str] | None = None
    labels: Mapping[str, str] | None = None
    price_usd_per_hour: float | None = None


class FoundKind(Enum):
    """What `adopt` can prove about a failed machine."""

    NO_HOST = "no_host"
    #: Proven to be in no cluster.
    CLEAN = "clean"
    #: Proven Ready in the bound cluster.
    SERVING = "serving"
    #: Unknown: it may run pods.
    DIRTY = "dirty"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The answer of `adopt`; `host` is set for every kind but NO_HOST."""

    kind: FoundKind
    host: Host | None = None

    def __post_init__(self) -> None:
        if (self.host is None) != (self.kind is FoundKind.NO_HOST):
            raise ValueError(f"Found({self.kind.name}) {'needs' if self.host is None else 'must not have'} a host")


@dataclass(frozen=True, slots=True, kw_only=True)
class LateResult:
    """An effect that arrived after its verdict. `host` is set for a Create that made one."""

    op: Op
    host: Host | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KindLimits:
    """How one kind of call is driven (docs/spec/provider.md §6, §15)."""

    timeout_seconds: float
    #: Backend calls at a time; None is 1,000 for a coroutine, and `Limits.threads_max` for a plain function.
    concurrency_max: int | None = None
    queue_max: int = 10_000
    #: Backend calls begun, retries included; None is no limit.
    rate_per_second: float | None = None
    #: How many may begin at once after a pause.
    burst: int = 1

    def __post_init__(self) -> None:
        if self.rate_per_second is not None and self.rate_per_second <= 0:
            raise ValueError(f"rate_per_second is {self.rate_per_second}, it must be above 0")
        if self.burst < 1 or (self.concurrency_max is not None and self.concurrency_max < 1):
            raise ValueError("burst and concurrency_max must be at least 1")


def _default_kinds() -> Mapping[Kind, KindLimits]:
    return MappingProxyType({kind: KindLimits(timeout_seconds=seconds) for kind, seconds in TIMEOUT_SECONDS.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a backend declares about how it wants to be driven."""

    kinds: Mapping[Kind, KindLimits] = field(default_factory=_default_kinds)
    #: Kinds that may be driven again with the same operation id after a restart.
    resumable: frozenset[Kind] = frozenset()
    #: Threads of each kind for methods that are plain functions, and as many for the methods that are no call's.
    threads_max: int = 64
    #: What a Drain leaves of the former cluster; None is not declared. The kit shows it as label `bigfleet.dev/reset`.
    reset: Reset | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialFacts:
    """An inventory of which a part could not be read: nothing follows from the absence of an id in that part."""

    facts: tuple[Slot, ...]
    #: Machines whose id begins with one of these are left as they are.
    unread_prefixes: tuple[str, ...] = ()
    #: Machines of which hosts could not be read: their slots count, and that they show no host says nothing.
    unread_host_prefixes: tuple[str, ...] = ()
    #: Facts that were not taken: id and why.
    refused: tuple[tuple[str, str], ...] = ()


Facts = Iterable[Slot] | AsyncIterable[Slot] | PartialFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What comes with a step: it is committed in the same transaction."""

    #: New SPECULATIVE machines; one that is known already is left as it is.
    add: tuple[Slot, ...] = ()
    #: SPECULATIVE machines that are no longer offered; one in another state is left as it is.
    remove: tuple[str, ...] = ()
    #: For the log line of the acceptance.
    note: str = ""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The backend has no room for the call now; the text goes to the caller."""

    text: str


class Backend(Protocol):
    """The substrate's driver. Each method may be a plain function (run in a bounded pool) or a coroutine."""

    #: HostRef.provider.
    provider: str
    limits: Limits

    def inventory(self) -> Result[Facts]:
        """Return every slot and host; an exception discards the whole pass."""
        ...

    def create(self, machine: MachineView, op: Op) -> Result[Host]:
        """Make the host and return it once it runs. Raises Transient, Stockout, or any other exception for good."""
        ...

    def configure(self, machine: MachineView, cluster: str, blob: bytes, op: Op) -> Result[str | None]:
        """Boot the host into a cluster; return the node name when it is known."""
        ...

    def drain(self, machine: MachineView, grace_seconds: int, op: Op) -> Result[None]:
        """Take the host out of its cluster."""
        ...


@runtime_checkable
class Deletes(Protocol):
    """A backend that can give hosts back."""

    def delete(self, machine: MachineView, op: Op) -> Result[None]:
        """Delete the host and return when it does not exist any more; a missing host is a success."""
        ...


@runtime_checkable
class Adopts(Protocol):
    """A backend that can report the state of a failed machine."""

    def adopt(self, machine: MachineView) -> Result[Found]:
        """Return the state of the machine's host. It must change nothing. Raises Transient: it is asked again later."""
        ...


@runtime_checkable
class MarksOutOfService(Protocol):
    """A backend whose inventory gets `in_cluster` from a mark that the backend set itself, such as a tag."""

    def mark_out_of_service(self, machine: MachineView) -> Result[None]:
        """Remove the mark: an administrator stated that the host serves no cluster. A missing host is a success.

        Called before the machine leaves FAILED. If it raises, the machine stays FAILED, and the administrator sees the
        text: it should say what to do. Nothing but the mark may change.
        """
        ...


@runtime_checkable
class Compensates(Protocol):
    """A backend that undoes effects which arrived after their verdict."""

    def compensate(self, machine: MachineView, late: LateResult) -> Result[None]:
        """Undo the effect."""
        ...


@runtime_checkable
class Admits(Protocol):
    """A backend whose slots are alternatives for the same room. Both methods are plain, in memory, under 1 ms."""

    def admit(self, machine: MachineView, kind: Kind) -> Admission | Refusal:
        """Say at acceptance whether there is room, and take it. The next `admit` waits for the commit."""
        ...

    def settle(self, machine: MachineView, reached: MachineState) -> Admission:
        """Hear where a machine arrived: a settlement, a recovery, a loss; UNSPECIFIED is its removal.

        Also called with the state that the machine never left when the commit of its acceptance failed. A step whose
        commit failed is reported again, so the same news twice must give the same answer.
        """
        ...


class Feed(Protocol):
    """Pushes from the backend; each returns after its commit (docs/spec/provider.md §13)."""

    async def report_price(self, ids: Iterable[str], usd_per_hour: float) -> None:
        """Serve this price until the next push, or until the inventory changes its own."""
        ...

    async def report_interruption(self, id: str, probability: float, reclaim_at_unix_nanos: int | None = None) -> None:
        """Serve the higher of this and the declared probability until the host is gone; 0.99 is a reclaim notice."""
        ...

    async def report_lost(self, id: str, reason: str) -> None:
        """Positive evidence that the host is gone: the machine fails at once; a slot is removed."""
        ...


@runtime_checkable
class Feeds(Protocol):
    """A backend that pushes facts while the provider serves."""

    async def feed(self, feed: Feed) -> None:
        """Run until cancelled."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownMachine:
    """A machine as the provider's state has it."""

    machine: MachineView
    #: Of its latest operation, "" for none.
    operation_id: str = ""


#: Returns what the state says of a machine id now, None for an unknown one; to be called on the loop's thread.
MachineLookup: TypeAlias = Callable[[str], KnownMachine | None]


@runtime_checkable
class Consults(Protocol):
    """A backend that reads the state, to distinguish the host of a machine from an orphan of the same machine."""

    def consult(self, lookup: MachineLookup) -> None:
        """Take the lookup; called once, before every other method."""
        ...


#: Returns the machines that have a host, as the state has them now; to be called on the loop's thread.
HostsLookup: TypeAlias = Callable[[], Iterable[MachineView]]


@runtime_checkable
class ConsultsHosts(Protocol):
    """A backend that looks for the hosts that the state has, also for those that its own inventory does not show."""

    def consult_hosts(self, hosts: HostsLookup) -> None:
        """Take the lookup; called once, before every other method."""
        ...


@runtime_checkable
class Identifies(Protocol):
    """A backend whose hosts are in one place, such as an account: with another one, all of them would look lost."""

    def identify(self, stored: Mapping[str, str]) -> Mapping[str, str]:
        """Return what the state stores about the place; `stored` is what it has, empty at the first start.

        Plain and in memory; called once, after the state was loaded and before anything is asked of the backend. Raises
        StartRefused if the state belongs to another place.
        """
        ...


@runtime_checkable
class ScopesHosts(Protocol):
    """A backend of several substrates, in which equal refs may be different hosts."""

    def host_scope(self, machine_id: str) -> str:
        """Return the name space of a machine's host_ref: always the same for one id, in memory, under 1 ms."""
        ...


class Ready(Protocol):
    """Says whether a machine's node is Ready in its cluster, through the author's own eyes."""

    #: Seconds between two looks.
    interval_seconds: float

    def ready(self, machine: MachineView, cluster: str, op: Op) -> Result[bool]:
        """Return True once the node is Ready. Transient counts as False; another exception fails the Configure."""
        ...


@dataclass(frozen=True, slots=True)
class ConfigureWaits:
    """The declaration that `configure` itself returns only when the node is Ready."""


CONFIGURE_WAITS = ConfigureWaits()
