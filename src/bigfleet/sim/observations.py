"""Defines the input of the invariants: events as they happen, and what is known of the run so far.

An invariant (`bigfleet.sim.checkers.invariants`) is a function of one event and of these observations, and yields a
sentence for each violation. Observations come from disks and wires, never from the memory of the code under test,
unless an event says so. They must never change the world.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, TypeVar

import msgspec

from bigfleet.coordinator.ephemeral_state import ReportAnswer
from bigfleet.engine.targets import Target
from bigfleet.model import vector
from bigfleet.model.ids import MachineId, ShardId
from bigfleet.model.instructions import CrossShardDrain
from bigfleet.model.need import Need, RowKey
from bigfleet.model.ownership import OwnershipVersion
from bigfleet.model.shapes import DemandShape, total_of
from bigfleet.model.vector import Vector
from bigfleet.operator.drains import DrainRecord
from bigfleet.provider.backends.simulated.book import SimulatedHost
from bigfleet.provider.records.fence import Mark
from bigfleet.provider.records.record import Record
from bigfleet.shard.cycle.cycle_report import CycleReport
from bigfleet.shard.outcomes import ActionRecord
from bigfleet.shard.sessions.demand import RollUpOutcome
from bigfleet.sim.kernel.journal import Journal
from bigfleet.sim.observed_shard import ObservedShard
from bigfleet.sim.pods.evictions import Eviction
from bigfleet.sim.sites.ownership import OwnershipRecord

VIOLATIONS_MAX = 20

_Kind = TypeVar("_Kind")
#: Request and limit per machine.
_PodKind: TypeAlias = tuple[tuple[tuple[str, int], ...], int]


class RowContent(NamedTuple):
    """What one row wants at least and at most.

    A shard counts pods that wait among those of the row for a while, and leaves some of them out after machines did not
    help them (docs/spec/shard.md §9.9). Both are equal for a row without such pods.
    """

    least: Vector
    most: Vector
    #: By request and limit per machine.
    pods_least: Mapping[_PodKind, int]
    pods_most: Mapping[_PodKind, int]


class Violation(NamedTuple):
    """One breach of one invariant."""

    invariant: str
    at_nanos: int
    text: str


class ObservedCall(NamedTuple):
    """One mutating call as it left its shard."""

    shard: ObservedShard
    method: str
    machine_id: str
    epoch: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Committed:
    """The provider's disk took a change of one machine."""

    before: Record | None
    after: Record | None


@dataclass(frozen=True, slots=True)
class Marked:
    """The provider's disk took a fence mark; `before` is the newest one that it ever took for that pair."""

    mark: Mark
    before: Mark | None


@dataclass(frozen=True, slots=True)
class Hosted:
    """The cloud changed a host."""

    machine_id: str
    before: SimulatedHost | None
    after: SimulatedHost | None
    is_fixed: bool
    at_unix_nanos: int


@dataclass(frozen=True, slots=True)
class Called:
    """A shard sent a mutating call."""

    call: ObservedCall


class AuditRecord(msgspec.Struct):
    """The fields of an audit record that are looked at."""

    kind: str
    machine: str
    cluster: str
    epoch: int
    decided_cycle: int
    token_sequence: int
    outcome: str


@dataclass(frozen=True, slots=True)
class Audited:
    """A shard's audit log took a record."""

    shard: ObservedShard
    record: AuditRecord


@dataclass(frozen=True, slots=True)
class RolledUp:
    """A shard judged a roll-up; `rows` is None when it could not be read."""

    shard: ObservedShard
    cluster: str
    rows: tuple[Need, ...] | None
    outcome: RollUpOutcome
    #: Rows of the last one in force, and how many in a row were suspicious before this one.
    baseline: tuple[Need, ...] | None
    suspicious_before: int


@dataclass(frozen=True, slots=True)
class Cycled:
    """A shard finished a cycle; this shows its memory."""

    shard: ObservedShard
    report: CycleReport
    #: Noted since the last cycle, oldest first.
    actions: "tuple[ActionRecord, ...]"


@dataclass(frozen=True, slots=True)
class OwnershipChanged:
    """A shard's disk took a change of what the shard owns or keeps for others."""

    shard_id: ShardId
    before: OwnershipRecord
    after: OwnershipRecord


@dataclass(frozen=True, slots=True)
class Died:
    """A shard process was killed while actions of these machines were under way."""

    shard: ObservedShard
    in_flight: frozenset[str]


@dataclass(frozen=True, slots=True)
class Evicted:
    """Pods of a cluster lost their node."""

    eviction: Eviction


@dataclass(frozen=True, slots=True)
class Stranded:
    """An operator answered WOULD_NOT_FIT: so many pods of the node have no other place."""

    cluster: str
    drain: DrainRecord
    pods: int


Event = (
    Committed | Marked | Hosted | Called | Audited | RolledUp | Cycled | OwnershipChanged | Died | Evicted | Stranded
)


@dataclass(slots=True)
class ClusterMemory:
    """What one cluster reported to one shard process."""

    #: (row key, aggregate) of the last roll-up that came into force.
    in_force: Mapping[RowKey, RowContent] = field(default_factory=dict)
    baseline: tuple[Need, ...] | None = None
    suspicious_in_a_row: int = 0
    last_outcome: RollUpOutcome | None = None


@dataclass(slots=True)
class ShardMemory:
    """What is known of one shard process, from its wires and disks."""

    clusters: dict[str, ClusterMemory] = field(default_factory=dict)
    calls: dict[int, ObservedCall] = field(default_factory=dict)
    #: Of those, the ones that were not answered yet.
    open_calls: set[int] = field(default_factory=set)
    audited: Counter[int] = field(default_factory=Counter)
    #: Reclaims enqueued since the last timer cycle, and the largest cap since then, by cluster.
    reclaims: Counter[str] = field(default_factory=Counter)
    caps: dict[str, int] = field(default_factory=dict)
    #: When the last cycles without a break first found each machine excess, in seconds of their decisions.
    excess_since_seconds: dict[str, float] = field(default_factory=dict)
    #: Target compositions of the last decision, by cluster.
    targets: Mapping[str, Target] = field(default_factory=dict)
    #: The newest action that was looked at.
    last_action_id: str = ""

    @property
    def called(self) -> set[str]:
        """The machines about which a call was not answered yet."""
        return {self.calls[sequence].machine_id for sequence in self.open_calls}


class Handed(NamedTuple):
    """The answer that a shard was given last."""

    term: int
    #: What the shard had accepted when it was given.
    accepted_term: int


@dataclass(slots=True)
class ObservedTransfers:
    """What was seen of machines that change shards: on disks, and on the wire between shards and coordinator."""

    #: What each shard's disk says; empty in a world of one shard.
    ownerships: dict[ShardId, OwnershipRecord] = field(default_factory=dict)
    #: How long an adopted machine must stay.
    cooldown_nanos: int = 0
    handed: dict[ShardId, Handed] = field(default_factory=dict)
    #: How often, and to how many processes of a shard, an instruction was delivered.
    delivered: Counter[tuple[ShardId, str]] = field(default_factory=Counter)
    delivered_to: dict[tuple[ShardId, str], int] = field(default_factory=dict)
    #: Of instructions to drain: how many machines.
    drain_counts: dict[tuple[ShardId, str], int] = field(default_factory=dict)
    #: Machines that were ever reserved under an instruction.
    drained: dict[tuple[ShardId, str], set[MachineId]] = field(default_factory=dict)
    #: Versions under which a shard has released machines, and machines that it has adopted under a version.
    releases: set[tuple[ShardId, OwnershipVersion]] = field(default_factory=set)
    adoptions: set[tuple[ShardId, MachineId, OwnershipVersion]] = field(default_factory=set)
    #: When a machine came to a shard from another one, and from which.
    arrivals: dict[tuple[ShardId, MachineId], tuple[int, ShardId]] = field(default_factory=dict)
    #: Shards that carry an instruction out at this moment.
    busy: set[ShardId] = field(default_factory=set)
    terms: list[int] = field(default_factory=list)
    #: Machines that are being taken from a gang for somebody more important.
    taken_from_gangs: set[MachineId] = field(default_factory=set)
    #: How often a machine changed shards, or who owns what changed otherwise.
    changes: int = 0

    @property
    def under_way(self) -> bool:
        """Whether a machine is between two shards, or is drained for another one."""
        return any(ownership.released or ownership.reservations for ownership in self.ownerships.values())

    def forget(self, shard_id: ShardId) -> None:
        """A shard has lost its disk: it may do again what only the disk said."""
        self.releases = {each for each in self.releases if each[0] != shard_id}
        self.adoptions = {each for each in self.adoptions if each[0] != shard_id}
        self.arrivals = {key: each for key, each in self.arrivals.items() if key[0] != shard_id}


@dataclass(slots=True)
class Observations:
    """Everything that was seen in one run."""

    journal: Journal
    now_nanos: Callable[[], int]
    marks: dict[tuple[str, str], Mark] = field(default_factory=dict)
    shards: dict[tuple[str, int], ShardMemory] = field(default_factory=dict)
    moves: ObservedTransfers = field(default_factory=ObservedTransfers)
    #: What the provider's disk holds.
    records: Mapping[str, Record] = field(default_factory=dict)
    #: Machines that the provider ever held.
    machines: set[str] = field(default_factory=set)
    fixed: set[str] = field(default_factory=set)
    #: Instructions that were answered WOULD_NOT_FIT, with the time of the answer.
    stranded: dict[str, int] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)
    #: Interesting states that were reached, with how often.
    reached: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    actions: Counter[str] = field(default_factory=Counter)
    cycles: int = 0
    #: Errors that code of ours logged with a traceback, and no check has read yet.
    unexpected: list[str] = field(default_factory=list)
    #: How often each invariant looked at an event.
    checks: Counter[str] = field(default_factory=Counter)

    def note(self, kind: str, subject: str, text: str = "") -> None:
        """Write into the journal at this moment."""
        self.journal.note(self.now_nanos(), kind, subject, text)

    def mark(self, name: str) -> None:
        """Note that an interesting state was reached."""
        self.reached[name] += 1

    def breach(self, invariant: str, text: str) -> None:
        """Note a violation; the first ones count."""
        if len(self.violations) < VIOLATIONS_MAX:
            self.violations.append(Violation(invariant, self.now_nanos(), text))
        self.note("VIOLATION", invariant, text)

    def memory(self, shard: ObservedShard) -> ShardMemory:
        """Return what is known of a shard process."""
        return self.shards.setdefault((shard.shard_id, shard.number), ShardMemory())

    def led(self, term: int) -> None:
        """Note that a replica has begun to lead."""
        if self.moves.terms:
            self.mark("another leader")
            if any(ownership.released for ownership in self.moves.ownerships.values()):
                self.mark("leader changed during a handover")
            if self.moves.taken_from_gangs:
                self.mark("gang preempted during a leader change")
        self.moves.terms.append(term)

    def answered(self, shard_id: ShardId, answer: ReportAnswer, *, is_old: bool) -> None:
        """Note what a shard is given as the answer to its report."""
        moves = self.moves
        ownership = moves.ownerships[shard_id]
        moves.handed[shard_id] = Handed(answer.term, ownership.accepted_term)
        if answer.term < ownership.accepted_term:
            self.mark("an answer of a former leader")
        if is_old:
            self.mark("an answer came again")
        for instruction in answer.instructions:
            key = (shard_id, instruction.instruction_id)
            moves.delivered[key] += 1
            if moves.delivered[key] > 1:
                self.mark("an instruction redelivered")
                if moves.delivered_to[key] != ownership.epoch:
                    self.mark("an instruction redelivered to a new process")
            moves.delivered_to[key] = ownership.epoch
            if isinstance(instruction.payload, CrossShardDrain):
                moves.drain_counts[key] = instruction.payload.selector.count


def content_of(rows: Iterable[Need]) -> dict[RowKey, RowContent]:
    """Return what rows want, by their key."""
    return {
        row.key: RowContent(
            row.aggregate,
            vector.add(row.aggregate, total_of(row.waiting)),
            _pods(row.shapes),
            _pods((*row.shapes, *row.waiting)),
        )
        for row in rows
    }


def is_content(rows: Iterable[Need], reported: Mapping[RowKey, RowContent]) -> bool:
    """Return whether rows in force want what was reported, except waiting pods that the shard leaves out."""
    found = content_of(rows)
    return found.keys() == reported.keys() and all(
        _lies_between(found[key].most, each.least, each.most)
        and _lies_between(found[key].pods_most, each.pods_least, each.pods_most)
        for key, each in reported.items()
    )


def _lies_between(found: Mapping[_Kind, int], least: Mapping[_Kind, int], most: Mapping[_Kind, int]) -> bool:
    return all(least.get(kind, 0) <= found.get(kind, 0) <= most.get(kind, 0) for kind in (*found, *most))


def _pods(shapes: Iterable[DemandShape]) -> Counter[_PodKind]:
    counts: Counter[_PodKind] = Counter()
    for shape in shapes:
        counts[vector.vector_key(shape.resources), shape.max_per_machine] += shape.count
    return counts


def has_collapsed(before: Iterable[Need], after: Iterable[Need]) -> bool:
    """Return whether less than a tenth is left in a dimension of which 10 rows, or 10 min units, were wanted."""
    before, after = list(before), list(after)
    for name in {name for row in before for name in row.aggregate}:
        wanted = [(row.aggregate[name], row.min_unit.get(name)) for row in before if name in row.aggregate]
        units = sum(max(1, amount // least) if least else 1 for amount, least in wanted)
        left = sum(row.aggregate.get(name, 0) for row in after)
        if max(len(wanted), units) >= 10 and left * 10 < sum(amount for amount, _least in wanted):
            return True
    return False


def new_actions(shard: ObservedShard, memory: ShardMemory) -> list[ActionRecord]:
    """Return the actions that the shard noted since the last look, oldest first."""
    fresh: list[ActionRecord] = []
    for record in reversed(shard.ledger.history):
        if record.action_id == memory.last_action_id:
            break
        fresh.append(record)
    if fresh:
        memory.last_action_id = fresh[0].action_id
    return fresh[::-1]
