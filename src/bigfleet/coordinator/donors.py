"""Finds the machines that donors can release for one shortfall, best first (docs/spec/coordinator.md §7.1, §7.2).

Rows of equal machines of one type and zone are sorted by available count, so the first row that is allowed is the best.
This module does not store state between two passes.
"""

from bisect import insort
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from bigfleet.coordinator.reports import ShardFigures, ShortfallClass, ZoneCapacity, accepts
from bigfleet.coordinator.transfers import FlowKey, Knobs, Skip
from bigfleet.model import labels
from bigfleet.model.ids import ShardId
from bigfleet.model.profile import Operator
from bigfleet.model.vector import Vector, vector_key

_COUNT = itemgetter(0)
_NO_SHARDS: frozenset[ShardId] = frozenset()
#: Type, zone and machine size.
_Kind = tuple[str, str, tuple[tuple[str, int], ...]]


class Benefit(NamedTuple):
    """What some machines of one kind do for a deficit, in exact parts of it."""

    is_all_closed: bool
    #: One dimension is closed by enough.
    is_enough: bool
    #: The least closed dimension: how much of it, of how much; never more than all.
    least_closed: tuple[int, int]

    @classmethod
    def of(cls, count: int, allocatable: Vector, deficit: Vector, knobs: Knobs) -> "Benefit":
        """Return the benefit of `count` machines; the deficit is not empty."""
        enough, of_enough = knobs.benefit_min.numerator, knobs.benefit_min.denominator
        least_part, least_whole, is_enough = 1, 1, False
        for name, milli in deficit.items():
            part = min(count * allocatable.get(name, 0), milli)
            if part * least_whole < least_part * milli:
                least_part, least_whole = part, milli
            is_enough = is_enough or part * of_enough >= enough * milli
        return cls(least_part == least_whole, is_enough, (least_part, least_whole))

    @property
    def is_worth_it(self) -> bool:
        """Return whether it closes everything, or one dimension by enough."""
        return self.is_all_closed or self.is_enough


def machines_needed(allocatable: Vector, deficit: Vector) -> int:
    """Return how many machines close every dimension that they can close; 0 when they help in none."""
    most = 0
    for name, milli in deficit.items():
        each = allocatable.get(name)
        if each and -(-milli // each) > most:
            most = -(-milli // each)
    return most


def margin(count: int, knobs: Knobs) -> int:
    """Return how many of so many machines a donor keeps."""
    fraction = knobs.margin_fraction
    return max(knobs.margin_min, -(-count * fraction.numerator // fraction.denominator))


@dataclass(slots=True)
class Giveable:
    """One row of one donor during a pass."""

    donor: ShardId
    row: ZoneCapacity
    #: What may still be given in this pass; falls below 0 when the donor has less than its margin.
    available: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """The best row for a shortfall, and how much of it."""

    giveable: Giveable
    give: int
    benefit: Benefit

    def is_before(self, other: "Flow | None") -> bool:
        """Return whether this is the better one (§7.2).

        All closed first, then the larger least closed dimension, then the larger rest of the donor; ties go to donor,
        type, zone ascending.
        """
        if other is None:
            return True
        if self.benefit.is_all_closed != other.benefit.is_all_closed:
            return self.benefit.is_all_closed
        (part, whole), (other_part, other_whole) = self.benefit.least_closed, other.benefit.least_closed
        if part * other_whole != other_part * whole:
            return part * other_whole > other_part * whole
        if self.rest != other.rest:
            return self.rest > other.rest
        return self.names < other.names

    @property
    def rest(self) -> int:
        """What the donor could still give afterwards."""
        return self.giveable.available - self.give

    @property
    def names(self) -> tuple[str, str, str]:
        """Donor, type, zone."""
        row = self.giveable.row
        return (self.giveable.donor, row.instance_type, row.zone)


@dataclass(slots=True)
class Wish:
    """What a shortfall still lacks during a pass."""

    requester: ShardId
    asking: ShortfallClass
    deficit: Vector
    #: The last gate that some row reached.
    reached: Skip

    def note(self, reason: Skip) -> None:
        """Remember how far something came."""
        if reason > self.reached:
            self.reached = reason


@dataclass(slots=True)
class DonorBatch:
    """Rows of one kind with equal machines, of which something is left to give."""

    #: Most available first.
    rows: list[Giveable] = field(default_factory=list)
    #: Whose rows were left out, as a shortfall of their own could use them.
    wanted_by: set[ShardId] = field(default_factory=set)
    #: A row was left out, or has become empty, as its donor keeps a margin.
    is_margin_reached: bool = False

    def reached(self, requester: ShardId) -> Skip:
        """Return how far the rows came that are not here any more."""
        if self.is_margin_reached:
            return Skip.MARGIN
        return Skip.DONOR_IN_NEED if self.wanted_by - {requester} else Skip.REQUIREMENTS


@dataclass(slots=True)
class Most:
    """What the best rows could still bring to one asking, dimension by dimension, for any shard, without cooldowns."""

    has_rows: bool = False
    milli: dict[str, int] = field(default_factory=dict)
    #: How far the rows came that can give nothing.
    reached: Skip = Skip.REQUIREMENTS
    #: Who needs such rows for itself.
    wanted_by: set[ShardId] = field(default_factory=set)


@dataclass(slots=True)
class DonorOffers:
    """What the donors behind one provider address could give in one tier."""

    knobs: Knobs
    _batches: dict[_Kind, DonorBatch] = field(default_factory=dict)
    #: By type, each with the row that stands for its machines.
    _of_type: dict[str, list[tuple[ZoneCapacity, DonorBatch]]] = field(default_factory=dict)
    _serving: dict[ShortfallClass, list[tuple[Vector, DonorBatch]]] = field(default_factory=dict)

    @classmethod
    def of(cls, donors: Iterable[ShardFigures], knobs: Knobs, *, is_speculative: bool) -> "DonorOffers":
        """Return the offers of one tier."""
        offers = cls(knobs)
        for shard in donors:
            wanted = shard.speculative_wanted_here if is_speculative else shard.idle_wanted_here
            for row in shard.speculative if is_speculative else shard.idle:
                if not row.allocatable:
                    continue
                key = _batch_key(row)
                batch = offers._batches.get(key)
                if batch is None:
                    batch = offers._batches[key] = DonorBatch()
                    offers._of_type.setdefault(row.instance_type, []).append((row, batch))
                giveable = Giveable(shard.shard_id, row, row.count - margin(row.count, knobs))
                if (row.instance_type, row.zone) in wanted:
                    batch.wanted_by.add(shard.shard_id)
                elif giveable.available <= 0:
                    batch.is_margin_reached = True
                else:
                    batch.rows.append(giveable)
        for batch in offers._batches.values():
            batch.rows.sort(key=_order)
        return offers

    def serving(self, asking: ShortfallClass) -> list[tuple[Vector, DonorBatch]]:
        """Return the batches that serve an asking, each with the allocatable of its machines."""
        known = self._serving.get(asking)
        if known is None:
            known = self._serving[asking] = [
                (row.allocatable, batch)
                for name in _types_asked_for(asking, self._of_type)
                for row, batch in self._of_type.get(name, ())
                if asking.is_served_by(row)
            ]
        return known

    def most(self, asking: ShortfallClass, slots: "DonorSlots | None") -> "Most":
        """Return what any row could still bring to any shard."""
        most = Most()
        for allocatable, batch in self.serving(asking):
            if batch.is_margin_reached:
                most.reached = Skip.MARGIN
            most.wanted_by |= batch.wanted_by
            if not batch.rows:
                continue
            available = batch.rows[0].available
            if slots is not None:
                available = max(min(row.available, slots.left(row.donor)) for row in batch.rows)
            if available <= 0:
                most.reached = Skip.MARGIN
                continue
            most.has_rows = True
            count = min(available, self.knobs.machines_max)
            for name in asking.names:
                most.milli[name] = max(most.milli.get(name, 0), count * allocatable.get(name, 0))
        return most

    def best(self, wish: Wish, cooling: "Cooling", slots: "DonorSlots | None") -> Flow | None:
        """Return the best flow that may be used now, or None; the wish notes how far the others came."""
        found: Flow | None = None
        for allocatable, batch in self.serving(wish.asking):
            wish.note(batch.reached(wish.requester))
            if not batch.rows:
                continue
            needed = min(machines_needed(allocatable, wish.deficit), self.knobs.machines_max)
            if not needed:
                continue
            flow = self._best_of_equals(batch.rows, needed, wish, cooling, slots)
            if flow is not None and flow.is_before(found):
                found = flow
        return found

    def _best_of_equals(
        self, rows: list[Giveable], needed: int, wish: Wish, cooling: "Cooling", slots: "DonorSlots | None"
    ) -> Flow | None:
        found: Flow | None = None
        for giveable in rows:
            if giveable.donor == wish.requester:
                continue
            available = giveable.available if slots is None else min(giveable.available, slots.left(giveable.donor))
            if available <= 0:
                wish.note(Skip.MARGIN)
                continue
            give = min(available, needed)
            benefit = Benefit.of(give, giveable.row.allocatable, wish.deficit, self.knobs)
            if not benefit.is_worth_it:
                wish.note(Skip.WORTH)
                if slots is None:
                    # Those behind have less.
                    break
                continue
            if cooling.bars(giveable, wish.requester):
                wish.note(Skip.COOLDOWN)
                continue
            flow = Flow(giveable=giveable, give=give, benefit=benefit)
            if flow.is_before(found):
                found = flow
            if slots is None and (benefit.least_closed[0] or available > give):
                # Those behind close less, or leave less; equal ones come later by name.
                break
        return found

    def take(self, flow: Flow) -> None:
        """Note that the flow's machines are planned for."""
        giveable = flow.giveable
        batch = self._batches[_batch_key(giveable.row)]
        batch.rows.remove(giveable)
        giveable.available -= flow.give
        if giveable.available > 0:
            insort(batch.rows, giveable, key=_order)
        else:
            batch.is_margin_reached = True


class Drains:
    """The machines that donors behind one provider address could drain for others, by type (§7.4)."""

    def __init__(self, donors: Iterable[ShardFigures]) -> None:
        """Donors come by id, ascending."""
        of_type: defaultdict[str, list[tuple[int, ShardId]]] = defaultdict(list)
        self._wanted_by: defaultdict[str, set[ShardId]] = defaultdict(set)
        self._types_of: dict[ShortfallClass, list[str]] = {}
        for donor in donors:
            for instance_type, count in donor.drainable.items():
                of_type[instance_type].append((count, donor.shard_id))
            for instance_type in donor.types_wanted_here:
                self._wanted_by[instance_type].add(donor.shard_id)
        for counts in of_type.values():
            # The sort is stable: equal counts stay by donor.
            counts.sort(key=_COUNT, reverse=True)
        #: Most first, then by donor.
        self._of_type = of_type

    def types(self, asking: ShortfallClass) -> list[str]:
        """Return the types that an asking accepts, ascending."""
        known = self._types_of.get(asking)
        if known is None:
            every = self._of_type.keys() | self._wanted_by.keys()
            asked = every.intersection(_types_asked_for(asking, every))
            known = self._types_of[asking] = [name for name in sorted(asked) if accepts(asking.gate, name, None)]
        return known

    def is_open(self, asking: ShortfallClass, draining_donors: set[ShardId]) -> bool:
        """Return whether a drain could still do something for an asking, or must be asked why it cannot."""
        return any(
            name in self._wanted_by or any(donor not in draining_donors for _, donor in self._of_type.get(name, ()))
            for name in self.types(asking)
        )

    def of_type(self, instance_type: str) -> list[tuple[int, ShardId]]:
        """Return how many machines of a type are bound at whom, most first, then by donor."""
        return self._of_type.get(instance_type, [])

    def is_wanted_by_others(self, instance_type: str, requester: ShardId) -> bool:
        """Return whether another donor has a shortfall that the type could serve."""
        return bool(self._wanted_by.get(instance_type, _NO_SHARDS) - {requester})


@dataclass(slots=True)
class Cooling:
    """The flows that rest: those that did before the pass, and those that it began."""

    flows: set[FlowKey]

    def bars(self, giveable: Giveable, requester: ShardId) -> bool:
        """Return whether the flow from a row to a shard rests."""
        row = giveable.row
        return FlowKey.between(row.instance_type, row.zone, giveable.donor, requester) in self.flows

    def bars_drain(self, instance_type: str, donor: ShardId, requester: ShardId) -> bool:
        """Return whether a donor rests from draining a type for a shard."""
        return FlowKey.between(instance_type, "", donor, requester) in self.flows


@dataclass(slots=True)
class DonorSlots:
    """The provider's slots of each shard in one region, less what the pass plans to move."""

    slots_of: dict[ShardId, int]

    def left(self, shard_id: ShardId) -> int:
        """Return the slots that a shard has left."""
        return self.slots_of.get(shard_id, 0)

    def take(self, shard_id: ShardId, count: int) -> None:
        """Note slots that are planned to move away; the recipient has them once the quota is transferred."""
        self.slots_of[shard_id] = self.left(shard_id) - count


def _types_asked_for(asking: ShortfallClass, known: Iterable[str]) -> Iterable[str]:
    """Return the types that an asking may accept: those that it lists, if it does."""
    for requirement in asking.gate:
        if requirement.key == labels.INSTANCE_TYPE and requirement.operator is Operator.IN:
            return requirement.values
    return known


def _order(giveable: Giveable) -> tuple[int, ShardId]:
    return (-giveable.available, giveable.donor)


def _batch_key(row: ZoneCapacity) -> _Kind:
    return (row.instance_type, row.zone, vector_key(row.allocatable))
