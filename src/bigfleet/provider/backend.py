"""What an author of a provider writes, and the values that pass between the author and the kit.

docs/spec/provider.md §16. A backend makes hosts real and reports facts; it is idempotent by operation id. It must never
know tokens, states, revisions, timeouts or stores: those are the kit's.
"""

from collections.abc import AsyncIterable, Awaitable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Protocol, TypeAlias, TypeVar, runtime_checkable

from bigfleet.model.machine import Machine
from bigfleet.model.states import CapacityType
from bigfleet.provider.kinds import TIMEOUT_SECONDS, Kind

T = TypeVar("T")
Result: TypeAlias = T | Awaitable[T]

#: A machine as a backend sees it: a frozen value whose maps are read-only.
MachineView = Machine

_EMPTY: Mapping[str, str] = MappingProxyType({})


def _no_entries() -> Mapping[str, str]:
    return _EMPTY


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
    #: Cannot tell: it may run pods.
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
    concurrency_max: int = 1000
    queue_max: int = 10_000


def _default_kinds() -> Mapping[Kind, KindLimits]:
    return MappingProxyType({kind: KindLimits(timeout_seconds=seconds) for kind, seconds in TIMEOUT_SECONDS.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a backend declares about how it wants to be driven."""

    kinds: Mapping[Kind, KindLimits] = field(default_factory=_default_kinds)
    #: Kinds that may be driven again with the same operation id after a restart.
    resumable: frozenset[Kind] = frozenset()
    #: Threads for methods that are plain functions.
    threads_max: int = 64


Facts = Iterable[Slot] | AsyncIterable[Slot]


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
        """Return once the host is gone; a host that is gone already is a success."""
        ...


@runtime_checkable
class Adopts(Protocol):
    """A backend that can say what became of a failed machine."""

    def adopt(self, machine: MachineView) -> Result[Found]:
        """Say what is there. It must change nothing."""
        ...


@runtime_checkable
class Compensates(Protocol):
    """A backend that undoes effects which arrived after their verdict."""

    def compensate(self, machine: MachineView, late: LateResult) -> Result[None]:
        """Undo the effect."""
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
