"""Defines the records that the engine reports of a decision, one per fact (docs/spec/aggregates.md §8).

Records come in decision order and equal input gives equal records. Vectors are milli-integers, coverages fractions as
`n/d`, differences are the runner-up's order key less the taken one's. Nothing is ever decided by a record, and without
a reporter none is built. Records contain no time, log level or sentence; the code that shows them adds those.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from bigfleet.engine.decision import ActionKind
from bigfleet.model import vector
from bigfleet.model.need import Need
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.model.vector import Vector

#: Counts of matching machines stop here; the record says so.
MATCHING_COUNT_MAX = 256
#: Domains that a short Same row's record names.
BEST_DOMAINS_MAX = 6
#: Records that a log keeps by default.
LOG_RECORDS_MAX = 100_000


class RowRef(NamedTuple):
    """Which row a record is about."""

    cluster: str
    fingerprint: str
    group: str
    #: Place in the folded list, from 0; of a folded row's members in the list that was given.
    position: int

    @classmethod
    def of(cls, need: Need, position: int) -> "RowRef":
        """Return the reference of a row at its place in the list."""
        return cls(need.cluster, need.fingerprint, need.group, position)


class Stage(StrEnum):
    """The scan in which a machine was looked at."""

    CREDIT = "credit"
    DOMAIN = "domain"
    IDLE = "idle"
    SPECULATIVE = "speculative"
    COMING = "coming"
    VICTIM = "victim"


class Mode(StrEnum):
    """How a row is served."""

    PLAIN = "plain"
    SPREAD = "spread"
    SAME = "same"
    PARKED = "parked"


class Rejection(StrEnum):
    """Why a machine was not taken; of several reasons the first in this order is reported."""

    UNJOINED = "unjoined"
    RESERVED = "reserved"
    SOLD_OUT = "sold_out"
    SET_ASIDE = "set_aside"
    NOT_OWN = "not_own"
    CLAIMED = "claimed"
    EARMARKED = "earmarked"
    TAKEN = "taken"
    ASSIGNED_PRIORITY = "assigned_priority"
    CLAIMED_BY_PEER = "claimed_by_peer"
    PROFILE = "profile"
    MIN_UNIT = "min_unit"
    NOT_USEFUL = "not_useful"
    NO_TOPOLOGY_VALUE = "no_topology_value"
    OTHER_DOMAIN = "other_domain"
    SKEW = "skew"
    COVERED = "covered"


class ReclaimReason(StrEnum):
    """Why a machine is given back; the first that applies."""

    UNJOINED = "unjoined"
    OTHER_DOMAIN = "other_domain"
    NO_ROW_FITS = "no_row_fits"
    EXCESS = "excess"


class SparedReason(StrEnum):
    """Why a machine without a holder is not reclaimed; the first that applies."""

    PREEMPTED = "preempted"
    CLUSTER_NOT_REPORTED = "cluster_not_reported"
    ROW_SHORT = "row_short"


class HeldReason(StrEnum):
    """Why an Idle machine is not released; the first that applies."""

    CLAIMED = "claimed"
    RESERVED = "reserved"
    FIXED_CAPACITY = "fixed_capacity"
    NO_IDLE_STAMP = "no_idle_stamp"
    HOLD_RUNNING = "hold_running"


Detail = Mapping[str, object]


def difference(second: float, first: float) -> float:
    """Return second − first of two order keys; equal values differ by 0, infinite ones too."""
    return 0.0 if second == first else second - first


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFolded:
    """Gangs became one row, because one machine can host each of them whole."""

    row: RowRef
    members: tuple[RowRef, ...]
    #: The smallest id that proves the fold.
    proof_machine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RowNotFolded:
    """A Same row stays as it is: no machine can host it whole."""

    row: RowRef
    #: Machines that match the folded profile but do not cover the aggregate, counted up to 256.
    matching_machines: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStarted:
    """A row's turn in the credit pass."""

    row: RowRef
    #: Place in processing order, from 0.
    rank: int
    priority: int
    interruption: int
    reclamation: int
    aggregate: Vector
    min_unit: Vector
    mode: Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateConsidered:
    """A machine that fits the row, is free for it and lies where the row looks, on its turn."""

    row: RowRef
    stage: Stage
    machine: str
    #: Place among the candidates considered in this scan, from 0.
    position: int
    #: Idle: (price). Speculative: (cost). Bound: (price, reclamation dollars). Victims: (score). By id alone: ().
    order_key: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateRejected:
    """A machine that a scan passed over, with the first reason that applies."""

    row: RowRef
    stage: Stage
    machine: str
    reason: Rejection
    #: What the reason compared, by name; empty for reasons that say everything.
    detail: Detail = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedDomain:
    """One domain among which a Same row chose."""

    value: str
    satisfiable: bool
    members: int
    total: Vector
    creditable: Vector
    own: Vector
    #: In the order compared. Satisfiable: creditable, own (capped), total. Otherwise: total, creditable, own (capped).
    coverages: tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainsRanked:
    """The domains of a Same row, best first; empty when there is none."""

    row: RowRef
    key: str
    domains: tuple[RankedDomain, ...]
    #: Rule of docs/spec/aggregates.md §5.3 that put the first before the second; None with fewer than two domains.
    decided_by: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Credited:
    """A machine that is bound to the row's cluster, or made for the row, counts for it."""

    row: RowRef
    machine: str
    state: MachineState
    #: Whether the machine carries the row's fingerprint and group.
    own: bool
    supply: Vector
    remaining: Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class Earmarked:
    """A machine of the chosen domain that the row counts on acquiring."""

    row: RowRef
    machine: str
    remaining: Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class Acquired:
    """A machine newly taken."""

    row: RowRef
    machine: str
    kind: ActionKind
    price: float
    probability: float
    penalty_dollars: float
    cost: float
    remaining: Vector
    #: The machine of the same scan that would have replaced this one, "" for none, and its order key.
    runner_up: str = ""
    runner_up_cost: float | None = None
    cost_difference: float | None = None
    #: Strict spread only: why the machine's domain was open.
    domain: str | None = None
    count: int | None = None
    minimum: int | None = None
    skew: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchingCounts:
    """Machines that fit a short row whatever their claims, each counted up to 256."""

    idle: int
    speculative: int
    configured: int
    #: Whether one of the counts stopped at 256.
    is_capped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BestDomain:
    """A domain and how much of the aggregate it could cover at most."""

    value: str
    coverage_per_mille: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFinished:
    """What Phase 1 gave a row."""

    row: RowRef
    satisfied: bool
    deficit: Vector
    #: In claim order.
    claimed: tuple[str, ...]
    bootstraps: tuple[str, ...]
    provisions: tuple[str, ...]
    domain: str
    satisfiable: bool
    #: Short rows only.
    matching: MatchingCounts | None = None
    #: Short Same rows only: at most 6, by coverage descending, then value.
    best_domains: tuple[BestDomain, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VictimComing:
    """A machine drains for the row already."""

    row: RowRef
    machine: str
    supply: Vector
    remaining: Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedVictim:
    """One possible victim and what its score is made of."""

    machine: str
    cluster: str
    claimed_by: RowRef | None
    score: float
    gap: int
    priority_term: float
    drain_term: float
    interruption_term: float
    reclamation_term: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VictimsRanked:
    """The machines that a row may take, best first."""

    row: RowRef
    victims: tuple[RankedVictim, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VictimPicked:
    """A machine is preempted for the row."""

    row: RowRef
    machine: str
    cluster: str
    claimed_by: RowRef | None
    score: float
    grace_seconds: int
    remaining: Vector
    #: The machine that would have been drained instead, "" for none.
    runner_up: str = ""
    score_difference: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowUnresolved:
    """What neither free machines nor victims cover: the row's shortfall."""

    row: RowRef
    deficit: Vector
    #: Machines picked in this cycle, and the supply that they free.
    victims: int
    freed: Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineKept:
    """A Configured machine stays: a row holds it."""

    machine: str
    cluster: str
    row: RowRef


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReclaimed:
    """A Configured machine is given back."""

    machine: str
    cluster: str
    reason: ReclaimReason
    #: Place in the cluster's keep-priority order, from 0.
    position: int
    #: (price, reclamation dollars).
    keep_key: tuple[float, float]
    #: The last machine retained before it in that order, "" for none, and the reclaimed one's price less that one's.
    last_kept: str = ""
    price_difference: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpared:
    """A Configured machine without a holder is not reclaimed in this cycle."""

    machine: str
    cluster: str
    reason: SparedReason
    #: `row_short` only: the short row that the machine is stamped for, and what Phase 1 left it short of.
    bound_for: RowRef | None = None
    deficit: Vector = field(default_factory=lambda: vector.ZERO)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReleased:
    """An Idle machine is given up."""

    machine: str
    capacity_type: CapacityType
    idle_seconds: float
    hold_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineHeld:
    """An Idle machine is not given up."""

    machine: str
    reason: HeldReason
    #: `hold_running` only.
    seconds_left: float | None = None


RowRecord = (
    RowFolded
    | RowNotFolded
    | RowStarted
    | CandidateConsidered
    | CandidateRejected
    | DomainsRanked
    | Credited
    | Earmarked
    | Acquired
    | RowFinished
    | VictimComing
    | VictimsRanked
    | VictimPicked
    | RowUnresolved
)
MachineRecord = MachineKept | MachineReclaimed | MachineSpared | MachineReleased | MachineHeld
Record = RowRecord | MachineRecord


class Reporter(Protocol):
    """Listens to a decision. A record about a row and a machine is built only when both are wanted."""

    def wants_row(self, row: RowRef) -> bool:
        """Return whether records about the row are wanted."""
        ...

    def wants_machine(self, machine_id: str) -> bool:
        """Return whether records about the machine are wanted."""
        ...

    def report(self, record: Record) -> None:
        """Take one record, in decision order."""
        ...


class RecordLog:
    """A reporter that stores the records it receives, up to a bound; the rest is counted."""

    def __init__(
        self,
        *,
        rows: frozenset[tuple[str, str, str]] | None = None,
        machines: frozenset[str] | None = None,
        records_max: int = LOG_RECORDS_MAX,
    ) -> None:
        """Keep records about `rows` (cluster, fingerprint, group) and `machines`; None is all of them."""
        self.records: list[Record] = []
        #: Records that came after the bound was reached.
        self.dropped = 0
        self._rows = rows
        self._machines = machines
        self._records_max = records_max

    def wants_row(self, row: RowRef) -> bool:
        """Return whether records about the row are wanted."""
        return self._rows is None or row[:3] in self._rows

    def wants_machine(self, machine_id: str) -> bool:
        """Return whether records about the machine are wanted."""
        return self._machines is None or machine_id in self._machines

    def report(self, record: Record) -> None:
        """Keep the record, or count it when the log is full."""
        if len(self.records) < self._records_max:
            self.records.append(record)
        else:
            self.dropped += 1
