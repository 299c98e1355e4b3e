"""Defines what a decision takes and returns: options, actions, one result per row (docs/spec/engine.md §1, §11).

Plain frozen values, shared by all engines, the safety limits, the shard and the tests. A decision stores its input, so
that it can be explained (`bigfleet.engine.explain.explanation`). This module does not decide.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum, IntEnum
from types import MappingProxyType
from typing import Final, NamedTuple

from bigfleet.engine.snapshot import Snapshot
from bigfleet.engine.targets import Target
from bigfleet.model import vector
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need
from bigfleet.model.profile import Profile
from bigfleet.model.shapes import Overhead
from bigfleet.model.states import CapacityType
from bigfleet.model.vector import Vector

RECLAIM_GRACE_SECONDS: Final = 600
DEFAULT_HOLD_SECONDS: Final[Mapping[CapacityType, float]] = MappingProxyType(
    {CapacityType.ON_DEMAND: 600.0, CapacityType.SPOT: 60.0}
)


class Phase(Enum):
    """The parts of one decision, in their order (docs/spec/engine.md §2)."""

    #: The rows are folded, and what changed since the last decision is known.
    FOLD = "fold"
    #: Phase 1: rows are credited with what serves them and acquire what they miss.
    ASSIGN = "assign"
    #: Phase 2.
    PREEMPT = "preempt"
    #: Phase 3, and the answer is put together.
    RECLAIM = "reclaim"


#: Hears of each phase of a decision that has ended, each once and in order, in the thread that decides. An engine that
#: decides a second time, or hands over to another one, begins again with the first.
PhaseListener = Callable[[Phase], None]


def unheard(_phase: Phase) -> None:
    """Listen to nothing."""


class ActionKind(IntEnum):
    """What is done with a machine."""

    BOOTSTRAP = 1
    PROVISION = 2
    RECLAIM = 3
    PREEMPT = 4
    DELETE = 5

    @property
    def label(self) -> str:
        """The name that metrics, the audit log and people read, such as `Bootstrap`."""
        return self.name.capitalize()


class Preemptor(NamedTuple):
    """The row that a machine is taken for."""

    cluster: str
    fingerprint: str
    group: str


class ParkingKey(NamedTuple):
    """The class of gangs that shares one parking age (§9)."""

    cluster: str
    group: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One decided action on one machine; a machine has at most one per cycle."""

    kind: ActionKind
    machine_id: MachineId
    #: Bootstrap, Provision: the cluster that gains the machine. Reclaim, Preempt: the one that loses it. Delete: "".
    cluster: ClusterId
    #: Engine tag: phase1.idle, phase1.speculative, phase2.inversion, phase3.excess, phase3.unjoined, phase3.release.
    reason: str
    #: Bootstrap and Provision only: the row's profile and group.
    profile: Profile | None = None
    group: str = ""
    #: Reclaim and Preempt only.
    grace_seconds: int = 0
    #: Preempt only; 0 is voluntary.
    preemptor_priority: int = 0
    preemptor: Preemptor | None = None


class CapacityPool(NamedTuple):
    """Machines of one provider that run out of stock together."""

    instance_type: str
    zone: str
    capacity_type: CapacityType

    @classmethod
    def of(cls, machine: Machine) -> "CapacityPool":
        """Return the pool of a machine."""
        return cls(machine.instance_type, machine.zone, machine.capacity_type)


@dataclass(frozen=True, slots=True, kw_only=True)
class WithheldPools:
    """Pools of which a cluster acquires nothing for now, because their machines could not be bootstrapped for it."""

    pools: frozenset[CapacityPool]
    #: Machines of these pools that the cluster may acquire all the same.
    probes: frozenset[str] = frozenset()

    def hides(self, machine: Machine) -> bool:
        """Return whether the cluster may not acquire the machine."""
        return machine.id not in self.probes and CapacityPool.of(machine) in self.pools


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights of the victim score (docs/spec/aggregates.md §6.4)."""

    priority: float = 1.0
    drain: float = 0.1
    interruption: float = 0.1
    reclamation: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Everything that a decision depends on beside the snapshot and the demand."""

    #: Same clock as the snapshot's idle-since stamps, seconds.
    now_seconds: float
    #: Clusters that have reported a roll-up, accepted or held, since the process started.
    reported: frozenset[str]
    #: Machines that missed the join gate, or are stuck on their way: no supply, no victim (docs/spec/engine.md §1.1).
    unjoined: frozenset[str] = frozenset()
    #: Machines reserved for another shard (docs/spec/model.md §1), or held for a former cluster (shard.md §5.4).
    reserved: frozenset[str] = frozenset()
    #: Pools without stock: their Speculative machines are no candidates (docs/spec/model.md §1).
    sold_out: frozenset[CapacityPool] = frozenset()
    #: Speculative machines of pools without stock that are candidates all the same (docs/spec/model.md §1).
    probes: frozenset[str] = frozenset()
    #: Idle and Speculative machines that are no candidates for now: they failed to bootstrap, or their newest record
    #: was rejected (docs/spec/engine.md §1.1).
    set_aside: frozenset[str] = frozenset()
    #: Pools that are withheld from a cluster, by cluster (docs/spec/engine.md §1.1); absent is none.
    withheld: Mapping[str, WithheldPools] = field(default_factory=dict)
    #: Seconds that an Idle machine is held before it is released; a type that is absent or ≤ 0 is never released.
    hold_seconds: Mapping[CapacityType, float] = field(default_factory=lambda: DEFAULT_HOLD_SECONDS)
    weights: Weights = field(default_factory=Weights)
    drain_seconds: float = 30.0
    #: Stalled cycles of each class of gangs (§9); absent is 0.
    parking_ages: Mapping[ParkingKey, int] = field(default_factory=dict)
    #: What DaemonSets take of every matching machine of a cluster; canonical, without clusters where it is nothing.
    overheads: Mapping[str, tuple[Overhead, ...]] = field(default_factory=dict)
    #: Target composition of each cluster; absent is none.
    targets: Mapping[str, Target] = field(default_factory=dict)
    #: Clusters that take no new machines in this decision, because their target composition is being planned.
    awaiting_plan: frozenset[str] = frozenset()
    #: How full the nodes of clusters with excess machines are, by machine; larger is fuller, absent is 0.
    fullness: Mapping[str, int] = field(default_factory=dict)
    #: Machines that an exchange replaces: they host what has no other place (§3.4).
    leaving: frozenset[str] = frozenset()
    #: An Idle machine that would be released otherwise wins while it costs at most this factor times the best offer.
    idle_head_start: float = 1.25


@dataclass(frozen=True, slots=True)
class Placement:
    """Pods of one shape that a row claims room for on a machine."""

    machine_id: MachineId
    #: Place in the row's shapes; waiting shapes are numbered after the others.
    shape: int
    count: int


class Impossibility(NamedTuple):
    """Why no machine that the shard knows can host a pod of a row."""

    #: Place in the row's shapes; None for the min unit of a row without shapes.
    shape: int | None
    #: The first dimension, in name order, in which no machine that matches the profile has enough; "" when none
    #: matches.
    dimension: str
    #: Milli-units.
    wanted: int
    largest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """What one row, folded where it folds, got out of the cycle."""

    need: Need
    #: The rows that were folded into this one, in list order; the row itself when it is not folded.
    members: tuple[Need, ...]
    #: Whether `need` is a folded gang row.
    folded: bool = False
    #: Machines that the row holds after Phase 1, in claim order.
    claimed: Sequence[MachineId] = ()
    bootstraps: tuple[MachineId, ...] = ()
    provisions: tuple[MachineId, ...] = ()
    #: Supply of the machines held, milli-units.
    held: Vector = field(default_factory=lambda: vector.ZERO)
    #: Aggregate less held, after Phase 1; pods without a place that request nothing count as `pods`.
    deficit: Vector = field(default_factory=lambda: vector.ZERO)
    #: Same rows: the chosen domain, "" for none; other rows "".
    domain: str = ""
    #: Whether a domain was chosen: a label may be empty, so `domain` alone cannot show it.
    has_domain: bool = False
    #: Whether the domain's machines could cover a Same row; False without a domain; True for other rows.
    satisfiable: bool = True
    #: Deficit less what drains for the row and what was picked for it in Phase 2; empty when nothing is short.
    unresolved: Vector = field(default_factory=lambda: vector.ZERO)
    #: Machines picked for the row in Phase 2, and the supply that they free.
    victims: tuple[MachineId, ...] = ()
    freed: Vector = field(default_factory=lambda: vector.ZERO)
    #: Claims of a row with shapes, by machine in hosting order.
    placements: Sequence[Placement] = ()
    #: Claims of a row without shapes, by machine in hosting order: (machine, milli-units).
    shares: tuple[tuple[MachineId, Vector], ...] = ()
    #: (shape, pods) without a place after Phase 1, those that are impossible apart.
    unplaced: tuple[tuple[int, int], ...] = ()
    #: Demand that was set aside because no known machine can host one pod of it.
    impossible: tuple[Impossibility, ...] = ()

    @property
    def satisfied(self) -> bool:
        """Return whether Phase 1 left nothing short."""
        return not self.deficit

    @property
    def acquired(self) -> int:
        """Number of machines newly taken in this cycle."""
        return len(self.bootstraps) + len(self.provisions)


#: The setter of each slot of a result, and what it holds of a row that holds nothing; the others differ by row.
_SETTERS: Mapping[str, Callable[[RowResult, object], None]] = {
    slot.name: getattr(RowResult, slot.name).__set__ for slot in fields(RowResult)
}
_SET_NEED, _SET_MEMBERS, _SET_SATISFIABLE = (_SETTERS[name] for name in ("need", "members", "satisfiable"))
_SET_DEFICIT, _SET_UNRESOLVED = _SETTERS["deficit"], _SETTERS["unresolved"]
_OF_NOTHING: tuple[tuple[Callable[[RowResult, object], None], object], ...] = tuple(
    (_SETTERS[slot.name], vector.ZERO if slot.default is MISSING else slot.default)
    for slot in fields(RowResult)
    if slot.name not in ("need", "members", "satisfiable", "deficit", "unresolved")
)


def result_of_nothing(need: Need, *, satisfiable: bool) -> RowResult:
    """Return the result of a row that lacks all of its aggregate and for which nothing drains.

    Equal to `RowResult` of the same fields in a third of its time: a cycle may make tens of thousands.
    """
    result = RowResult.__new__(RowResult)
    _SET_NEED(result, need)
    _SET_MEMBERS(result, (need,))
    _SET_SATISFIABLE(result, satisfiable)
    _SET_DEFICIT(result, need.aggregate)
    _SET_UNRESOLVED(result, need.aggregate)
    for set_slot, value in _OF_NOTHING:
        set_slot(result, value)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """What a decision was made of; the machines are turned into objects when somebody asks why, not before."""

    #: In list order, as it was given.
    demand: Sequence[Need]
    options: Options
    #: Returns the machines that were decided on, the same each time.
    snapshot: Callable[[], Snapshot]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The whole answer of one cycle."""

    #: Phase 1, then 2, then 3; within a phase in emission order.
    actions: Sequence[Action]
    #: One per row after folding, in list order.
    rows: Sequence[RowResult]
    #: What it was made of; no part of the answer. None when it was not stored.
    basis: Basis | None = field(default=None, compare=False, repr=False)
