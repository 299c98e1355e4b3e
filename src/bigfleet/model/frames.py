"""Defines the frames that an operator and a shard exchange over a Session (docs/spec/wire.md §8).

Both sides' flows use these; `bigfleet.rpc` turns them into protobuf and back. A frame says nothing about how it
is queued or delivered; that is the outbox's business (`bigfleet.shard.sessions.outbox`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType

from bigfleet.model.need import Need
from bigfleet.model.profile import Requirement
from bigfleet.model.shapes import Overhead
from bigfleet.model.states import MachineState

_EMPTY: Mapping[str, str] = MappingProxyType({})

PROTOCOL_VERSION = "v1alpha1"
CAPABILITY_NODE_STATUS = "node-status"
CAPABILITY_DRAIN_RESULT = "drain-result"
CAPABILITY_NEED_STATUS = "need-status"
CAPABILITY_DRAIN_FORECAST = "drain-forecast"

ECHO_HELLO = "hello"
ECHO_ROLLUP = "rollup"
ECHO_RESYNC = "resync"
ECHO_ROLLUP_REJECTED = "rollup_rejected"
ECHO_ROLLUP_DEFERRED = "rollup_deferred"


class MalformedMessage(ValueError):
    """A message that is invalid: `place` names the row and field, `fault` the mistake."""

    def __init__(self, place: str, fault: str) -> None:
        super().__init__(f"{place}: {fault}")
        self.place = place
        self.fault = fault


class DrainOutcome(IntEnum):
    """How an operator's drain of one node ended. The numbers are those of the wire."""

    UNSPECIFIED = 0
    DRAINED = 1
    GRACE_EXPIRED = 2
    NODE_NOT_FOUND = 3
    FAILED = 4
    #: The evicted pods would not fit on the other nodes, or must not be evicted; the node stays in service.
    WOULD_NOT_FIT = 100


class ForecastOutcome(IntEnum):
    """Whether the pods of nodes that may be drained would find a place. The numbers are those of the wire."""

    #: The operator does not know.
    UNSPECIFIED = 0
    FITS = 1
    WOULD_NOT_FIT = 2


class Confidence(IntEnum):
    """How sure a capacity hint is. The numbers are those of the wire."""

    UNSPECIFIED = 0
    NONE = 1
    LOW = 2
    MEDIUM = 3
    HIGH = 4


class UnmetReason(IntEnum):
    """Why a row is short. The numbers are those of the wire; 0 is met."""

    UNSPECIFIED = 0
    PRIORITY_STARVED = 1
    NO_MATCHING_SUPPLY = 2
    TOPOLOGY_UNSATISFIABLE = 3
    PREEMPTION_EXHAUSTED = 4
    BOOTSTRAP_REFUSED = 100
    STOCKOUT = 101
    REQUEST_TOO_LARGE = 102
    CLUSTER_LIMIT = 103
    BOOTSTRAP_FAILED = 104

    @property
    def label(self) -> str:
        """The name in metrics, such as `priority_starved`."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Taint:
    """A Kubernetes taint."""

    key: str
    value: str
    effect: str


# ---- operator to shard ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First frame of a session."""

    cluster_id: str
    protocol_version: str = PROTOCOL_VERSION
    capabilities: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class RollUp:
    """The cluster's complete demand; an empty one is a statement, not silence."""

    cluster_id: str
    timestamp_unix_nanos: int
    needs: tuple[Need, ...]
    #: What DaemonSets take of the cluster's nodes, in canonical order.
    overheads: tuple[Overhead, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapResponse:
    """What boots a machine into the cluster, or why this need cannot be bootstrapped."""

    request_id: str
    user_data: bytes = field(default=b"", repr=False)
    #: From receipt; 0 does not expire.
    ttl_seconds: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReclaimAck:
    """A drain has begun; it is not finished."""

    instruction_id: str
    nodes_started: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """The state of a machine's node in its cluster; an empty name means that the node is gone."""

    machine_id: str
    node_name: str
    ready: bool
    observed_unix_nanos: int
    #: What the pods on the node request in sum, Kubernetes quantities; empty also when that was not said.
    requested: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    #: How many pods are on the node.
    pods: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainResult:
    """How the drain of one machine ended."""

    instruction_id: str
    machine_id: str
    outcome: DrainOutcome
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainForecast:
    """Answers a DrainForecastRequest."""

    request_id: str
    outcome: ForecastOutcome
    #: With WOULD_NOT_FIT: the first machine whose pods have no place.
    machine_id: str = ""
    #: With WOULD_NOT_FIT: the first pod, and why; else why it is not known.
    message: str = ""


# ---- shard to operator ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledgement:
    """Answer to a frame; `echo` is one of the ECHO_ constants."""

    echo: str
    coordinator_term: int = 0
    shard_epoch: int = 0
    rollup_timestamp_unix_nanos: int = 0
    #: Received and quarantined: not in force.
    held: bool = False
    #: With `rollup_rejected`: the first fault with row and field; with `rollup_deferred`: the limit and the wait.
    error: str = ""
    #: With `hello`: what the shard can do.
    capabilities: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapRequest:
    """Requests the bootstrap data of one machine."""

    request_id: str
    cluster_id: str
    requirements: tuple[Requirement, ...] = ()
    machine_id: str = ""
    instance_type: str = ""
    zone: str = ""
    provider_id: str = ""
    labels: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    taints: tuple[Taint, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReclaimInstruction:
    """Asks for nodes to be drained; the three tuples are parallel."""

    instruction_id: str
    #: Node name where known, else the machine id.
    nodes: tuple[str, ...]
    machine_ids: tuple[str, ...]
    provider_ids: tuple[str, ...]
    #: From receipt.
    grace_seconds: int
    #: 0 is voluntary.
    preemptor_priority: int = 0
    #: reclaim, preempt, cross_shard_preempt or unjoined.
    reason: str = "reclaim"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComingNodes:
    """Equal nodes that do not exist yet."""

    count: int
    labels: Mapping[str, str]
    #: What pods may use, Kubernetes quantities: allocatable less what DaemonSets take.
    resources: Mapping[str, str]
    taints: tuple[Taint, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainForecastRequest:
    """Asks whether pods would find a place if nodes were drained, once others have come; coalesces."""

    request_id: str
    #: The machines whose nodes would be drained, in this order.
    machine_ids: tuple[str, ...]
    comes: tuple[ComingNodes, ...] = ()
    #: `least-allocated` or `most-allocated`: the order in which the cluster's scheduler prefers nodes.
    scheduler: str = "least-allocated"

    @property
    def supersedes_key(self) -> str:
        """The key under which a newer frame replaces a queued one."""
        return "forecast"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStateUpdate:
    """The state of a machine that is or was bound to the cluster; coalesces by machine."""

    machine_id: str
    #: "" for a machine that is lost to the cluster: no frame about it follows until it is bound to the cluster again.
    cluster_id: str
    state: MachineState
    node_name: str = ""
    provider_id: str = ""
    last_error: str = ""
    labels: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    #: Effective allocatable, Kubernetes quantities.
    resources: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    taints: tuple[Taint, ...] = ()

    @property
    def supersedes_key(self) -> str:
        """The key under which a newer frame replaces a queued one."""
        return f"node:{self.machine_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AvailableCapacity:
    """A hint, never a reservation: what could serve a need; coalesces by fingerprint."""

    fingerprint: str
    requirements: tuple[Requirement, ...]
    resources: Mapping[str, str]
    available_count: int
    confidence: Confidence
    price_usd_per_hour: float

    @property
    def supersedes_key(self) -> str:
        """The key under which a newer frame replaces a queued one."""
        return f"available:{self.fingerprint}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedStatus:
    """What one unmet need lacks and why."""

    #: As the operator reported them.
    fingerprint: str
    group: str
    #: Kubernetes quantities; never empty.
    residual: Mapping[str, str]
    reason: UnmetReason
    #: Timer cycles for which the row has been a shortfall; 0 while victims cover it.
    age_cycles: int = 0
    parked: bool = False
    #: One sentence for a person.
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedStatusUpdate:
    """The last cycle's verdict on one roll-up: a need of it that is not listed is met, unless `truncated`."""

    cycle: int
    computed_at_unix_nanos: int
    #: Unmet needs alone, highest priority first, at most 1,000.
    rows: tuple[NeedStatus, ...]
    #: The roll-up that was judged.
    rollup_timestamp_unix_nanos: int
    truncated: bool = False
    #: (fingerprint, group) of needs that are met by machines some of which do not serve yet, at most 1,000.
    coming: tuple[tuple[str, str], ...] = ()

    @property
    def supersedes_key(self) -> str:
        """The key under which a newer frame replaces a queued one."""
        return "needs"


ShardFrame = (
    Acknowledgement
    | BootstrapRequest
    | ReclaimInstruction
    | NodeStateUpdate
    | AvailableCapacity
    | NeedStatusUpdate
    | DrainForecastRequest
)
OperatorFrame = Hello | RollUp | BootstrapResponse | ReclaimAck | NodeStatus | DrainResult | DrainForecast
