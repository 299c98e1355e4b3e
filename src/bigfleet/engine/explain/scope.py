"""Finds the machines that can change the explanation of one row of a finished decision.

docs/adr/0121-explain-one-row.md. Of machines of one kind (equal supply, and equal place where places count) a scan
takes the first ones and no more than the row can use, so those and one more represent their kind. An answer names only
the first machines that a scan rejects. Everything else is only ever counted, here in columns. This module does not take
a machine for a row: the reference does, in `bigfleet.engine.explain.replay`.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Final

import numpy as np

from bigfleet.engine.decision import RowResult
from bigfleet.engine.explain.decided_fleet import DecidedFleet, Ints, Mask, first_of_each
from bigfleet.engine.explain.earmarks import EarmarkReplay
from bigfleet.engine.explain.records import MATCHING_COUNT_MAX, Stage
from bigfleet.engine.folding import folded_need
from bigfleet.model import vector
from bigfleet.model.need import Need
from bigfleet.model.penalty import bucket_upper_dollars
from bigfleet.model.states import MachineState
from bigfleet.model.vector import Vector

#: More of one machine than any row can use.
_USE_MAX: Final = 2**31
_NO_DOMAIN: Final = -2


def may_preempt(result: RowResult) -> bool:
    """Return whether a short row looked for victims: it is not parked and knows where it wants machines."""
    return not result.need.parked and (result.need.profile.same_key is None or result.has_domain)


class RowScope:
    """One row of a decision and the machines around it."""

    def __init__(self, fleet: DecidedFleet, place: int, earmarks: EarmarkReplay) -> None:
        self.fleet = fleet
        self.place = place
        self.result = fleet.results[place]
        self.need = self.result.need
        self.rank = int(fleet.rank[place])
        self._earmarks = earmarks
        #: Draining machines that earlier rows with the same key counted; the replay of the row reads them.
        self.coming_taken: Ints = np.zeros(0, np.int64)
        #: By machine: whether some phase may see it and it fits.
        self._open: Mask = ~fleet.hidden & fleet.fits(self.need.profile, self.need.min_unit)[fleet.shape]
        self._free_order = (
            fleet.by_price(),
            fleet.by_cost(bucket_upper_dollars(self.need.profile.interruption_bucket)),
        )

    # ---- what the row wanted, and who had what before it ---------------------------------------------------------

    @cached_property
    def after_credit(self) -> Vector:
        """What the row wanted when it had its credits."""
        claimed = self.fleet.rows_of(self.result.claimed)
        return vector.subtract(self.need.aggregate, self.fleet.supply(claimed[~self.fleet.is_free[claimed]]))

    @property
    def is_gang(self) -> bool:
        """Return whether the row wants one domain."""
        return self.need.profile.same_key is not None

    @property
    def looks_for_victims(self) -> bool:
        """Return whether Phase 2 did anything for the row."""
        return bool(self.result.deficit) and may_preempt(self.result)

    @property
    def _looks_at_free(self) -> bool:
        """Return whether the row chose its domain with free machines in sight."""
        return self.is_gang and not self.need.parked

    @cached_property
    def earmarked_by(self) -> Ints:
        """By machine: the place of the earlier row that counts on it, -1 for none; of gangs that look at free ones."""
        if not self._looks_at_free:
            return np.full(len(self.fleet.state), -1, np.int64)
        return self._earmarks.before(self.rank)

    @cached_property
    def _uncredited(self) -> Mask:
        """By machine: whether no earlier row was credited with it."""
        return (self.fleet.holder_rank >= self.rank) | self.fleet.is_free

    @cached_property
    def _unclaimed(self) -> Mask:
        return self.fleet.holder_rank >= self.rank

    # ---- places --------------------------------------------------------------------------------------------------

    @cached_property
    def _domains(self) -> tuple[Ints, list[str]]:
        key = self.need.profile.same_key
        assert key is not None, "only a gang has domains"
        return self.fleet.values(key)

    @cached_property
    def _domain(self) -> int:
        """The number of the domain that the row chose."""
        return self._domains[1].index(self.result.domain) if self.result.has_domain else _NO_DOMAIN

    @cached_property
    def _may_choose(self) -> Mask:
        """By shape: whether its machines are candidates for a gang's choice."""
        fits = self.fleet.fits(self.need.profile, self.need.min_unit)
        return fits & self.fleet.useful(self.need.aggregate) & (self._domains[0] >= 0)

    @cached_property
    def _kinds(self) -> Ints:
        """By shape: machines of one kind differ for the row in their order alone."""
        kinds = self.fleet.supply_of_shape.copy()
        spread = self.need.profile.strict_spread
        if spread is not None:
            values, names = self.fleet.values(spread.topology_key)
            kinds = kinds * (len(names) + 1) + values + 1
        if self.is_gang:
            kinds = kinds * 2 + (self._domains[0] == self._domain)
        return kinds

    def _misplaced(self, stage: Stage) -> Mask:
        """By shape: whether its machines lie where the scan takes none."""
        misplaced = np.zeros(len(self.fleet.supply_of_shape), np.bool_)
        if stage is Stage.DOMAIN:
            return misplaced
        spread = self.need.profile.strict_spread
        if spread is not None and stage is not Stage.CREDIT:
            misplaced |= self.fleet.values(spread.topology_key)[0] < 0
        if self.is_gang:
            misplaced |= self._domains[0] != self._domain
        return misplaced

    # ---- scans ---------------------------------------------------------------------------------------------------

    @cached_property
    def _own(self) -> Mask:
        """By machine: whether it carries the row's fingerprint and group."""
        fingerprint, group = self.need.fingerprint, self.need.group
        return self.fleet.stamped(
            lambda stamp: stamp.assigned_need_fingerprint == fingerprint and stamp.assigned_group == group
        )

    def _own_creating(self, need: Need) -> Ints:
        """Return the row's own machines in creation, in the order of the pool."""
        creating = self.fleet.of_state(MachineState.CREATING)
        creating = creating[~self.fleet.hidden[creating]]
        of_row = self.fleet.stamped(
            lambda stamp: (stamp.assigned_need_fingerprint, stamp.assigned_group) == (need.fingerprint, need.group)
        )
        recorded = self.fleet.stamped(lambda stamp: stamp.intended_cluster == need.cluster != "")
        unrecorded = self.fleet.stamped(lambda stamp: not stamp.intended_cluster)
        creating = creating[of_row[creating]]
        return np.concatenate([creating[recorded[creating]], creating[unrecorded[creating]]])

    @cached_property
    def _credit_parts(self) -> tuple[Ints, Ints, Ints, Ints]:
        """What the credit scan looks at: Configured, Configuring, own in creation, other ones in creation."""
        own = self._own_creating(self.need)
        creating = self.fleet.of_state(MachineState.CREATING)
        cluster = self.need.cluster
        return (
            self.fleet.by_keep_priority(cluster, MachineState.CONFIGURED),
            self.fleet.by_keep_priority(cluster, MachineState.CONFIGURING),
            own,
            creating[~np.isin(creating, own)],
        )

    @cached_property
    def creditable(self) -> Ints:
        """The machines that could be credited on the row's turn; of a gang those among which it chose."""
        rows = np.concatenate(self._credit_parts[:3])
        rows = rows[(self._open & self._uncredited)[rows]]
        return rows[self._may_choose[self.fleet.shape[rows]]] if self.is_gang else rows

    @cached_property
    def acquirable(self) -> Ints:
        """The free machines among which a gang chose."""
        if not self._looks_at_free:
            return np.zeros(0, np.int64)
        rows = np.concatenate(self._free_order)
        rows = rows[self._open[rows] & (self.earmarked_by[rows] < 0)]
        return rows[self._may_choose[self.fleet.shape[rows]]]

    @cached_property
    def _incumbents_first(self) -> Ints:
        """A gang's creditable machines in the order of its credit scan: own of the domain, others of it, the rest."""
        rows = self.creditable
        is_member = (self._domains[0] == self._domain)[self.fleet.shape[rows]]
        own = self._own[rows]
        return np.concatenate([rows[is_member & own], rows[is_member & ~own], rows[~is_member]])

    @cached_property
    def _draining(self) -> Ints:
        rows = self.fleet.of_state(MachineState.DRAINING)
        return rows[self.fleet.stamped(lambda stamp: stamp.preempted_for is not None)[rows]]

    @cached_property
    def _coming(self) -> Mask:
        """By machine: whether it drains for a row with this row's key."""
        key = self.need.key
        return self.fleet.stamped(lambda stamp: stamp.preempted_for == key)

    @cached_property
    def _ranked(self) -> Ints:
        return self.fleet.by_score(self.need.profile.priority)

    @cached_property
    def _preemptible(self) -> Mask:
        """By machine: whether it could be a victim, wherever it lies and whatever it offers."""
        fleet = self.fleet
        is_lower = fleet.assigned_priority < self.need.profile.priority
        is_left = fleet.taker_rank >= self.rank
        preemptible: Mask = self._open & is_lower & is_left & (fleet.level[fleet.holder] > fleet.level[self.place])
        return preemptible

    def possible_victims(self, start: Vector) -> int:
        """Return how many machines could have been preempted for what was wanted then."""
        allowed = self.fleet.useful(start) & ~self._misplaced(Stage.VICTIM)
        rows = self._ranked
        return int(np.count_nonzero(self._preemptible[rows] & allowed[self.fleet.shape[rows]]))

    def domain_counts(self) -> tuple[Counter[int], Counter[int], Counter[int]]:
        """Return the machines among which a gang chose, by shape: creditable, acquirable, creditable and its own."""
        return (
            self._by_shape(self.creditable),
            self._by_shape(self.acquirable),
            self._by_shape(self.creditable[self._own[self.creditable]]),
        )

    def _by_shape(self, rows: Ints) -> Counter[int]:
        counts = np.bincount(self.fleet.shape[rows])
        return Counter({number: int(counts[number]) for number in np.flatnonzero(counts).tolist()})

    # ---- the machines that matter --------------------------------------------------------------------------------

    def machines(self, *, heads: int, listed: int) -> Ints:
        """Return the machines that matter: with the first `heads` of every scan and `listed` possible victims."""
        parts = [
            self.fleet.rows_of((*self.result.claimed, *self.result.victims)),
            *self._of_credit(heads),
            *self._of_acquisition(heads),
            self._draining[:heads],
            self._draining[self._coming[self._draining]],
            *self._of_preemption(heads, listed),
            *self._of_folding(),
        ]
        return np.unique(np.concatenate(parts))

    def _of_credit(self, heads: int) -> Iterator[Ints]:
        configured, configuring, own, others = self._credit_parts
        yield from (configured[:heads], configuring[:heads], own, others[:heads])
        rows, kinds = self.creditable, self._kinds[self.fleet.shape[self.creditable]]
        if self.is_gang:
            is_member = (self._domains[0] == self._domain)[self.fleet.shape[rows]]
            is_own = self._own[rows]
            for group in (is_member & is_own, is_member & ~is_own, ~is_member):
                yield rows[group][:heads]
            # The sums of all domains are reported, so every shape needs somebody to stand for it.
            for among in (rows, self.acquirable):
                yield first_of_each(among, self.fleet.shape[among].astype(np.int64), np.ones(len(among), np.int64))
            kinds = kinds * 2 + is_own
        yield first_of_each(rows, kinds, self._use(self.need.aggregate)[self.fleet.shape[rows]])

    def _of_acquisition(self, heads: int) -> Iterator[Ints]:
        use = self._use(self.after_credit)
        for order in self._free_order:
            yield order[:heads]
            fitting = order[self._open[order]]
            if self.result.deficit:
                yield fitting[: MATCHING_COUNT_MAX + 1]
            unclaimed = fitting[self._unclaimed[fitting]]
            yield first_of_each(unclaimed, self._kinds[self.fleet.shape[unclaimed]], use[self.fleet.shape[unclaimed]])
        rows = self.acquirable
        yield first_of_each(rows, self._kinds[self.fleet.shape[rows]], use[self.fleet.shape[rows]])

    def _of_preemption(self, heads: int, listed: int) -> Iterator[Ints]:
        configured = self.fleet.of_state(MachineState.CONFIGURED)
        if self.result.deficit:
            yield configured[self._open[configured]][: MATCHING_COUNT_MAX + 1]
        if not self.looks_for_victims:
            return
        order = self._ranked
        yield order[:heads]
        rows = order[self._preemptible[order] & ~self._misplaced(Stage.VICTIM)[self.fleet.shape[order]]]
        yield first_of_each(
            rows, self._kinds[self.fleet.shape[rows]], self._use(self.result.deficit)[self.fleet.shape[rows]]
        )
        # What helps shows in the dimensions of a supply: the first of each set hold the first of those that help.
        yield first_of_each(rows, self.fleet.dimensions_of_shape[self.fleet.shape[rows]], np.full(len(rows), listed))

    def _of_folding(self) -> Iterator[Ints]:
        """What proves a fold, or is too small to prove it."""
        if not self.result.folded and not self.is_gang:
            return
        folded = self.need if self.result.folded else folded_need(self.need)
        if self.result.folded:
            meant = self.fleet.fits(folded.profile, folded.min_unit)
            if folded.profile.strict_spread is not None:
                meant &= self.fleet.values(folded.profile.strict_spread.topology_key)[0] >= 0
        else:
            meant = self.fleet.matches(folded.profile) & ~self.fleet.covering(folded.aggregate)
        bound = (MachineState.CONFIGURED, MachineState.CONFIGURING)
        for order in (
            *(self.fleet.by_keep_priority(folded.cluster, state) for state in bound),
            self._own_creating(folded),
            *(self.fleet.of_state(state) for state in (MachineState.IDLE, MachineState.SPECULATIVE)),
        ):
            rows = np.sort(order[meant[self.fleet.shape[order]] & ~self.fleet.hidden[order]])
            yield rows[:1] if self.result.folded else rows[:MATCHING_COUNT_MAX]

    def _use(self, start: Vector) -> Ints:
        """By shape: how many machines can help at most when so much is wanted, and one to come in place of one."""
        counts = [
            1 + max((-(-milli // supply[name]) for name, milli in start.items() if name in supply), default=0)
            for supply in self.fleet.view.vocabulary.supplies
        ]
        use: Ints = np.array([min(count, _USE_MAX) for count in counts], np.int64)[self.fleet.supply_of_shape]
        return use

    # ---- places in a scan ----------------------------------------------------------------------------------------

    def position(self, stage: Stage, machine: int, *, start: Vector, taken: Sequence[int]) -> int:
        """Return how many candidates a scan considered before a machine that it considered.

        `start` is what the row wanted when the scan began, `taken` what it took, in the order taken.
        """
        order, is_open = self._scan(stage)
        spread = self.need.profile.strict_spread
        if spread is not None and stage in (Stage.IDLE, Stage.SPECULATIVE, Stage.VICTIM):
            # Picks come first, in their order, then the others as the last pick left them.
            if machine in taken:
                return taken.index(machine)
            rest = order[~np.isin(order, taken)]
            left = vector.subtract(start, self.fleet.supply(np.array(taken, np.int64)))
            before = rest[: int(np.flatnonzero(rest == machine)[0])]
            return len(taken) + self._considered(before, is_open, stage, left)
        before = order[: int(np.flatnonzero(order == machine)[0])]
        if not self._misplaced(stage).any():
            return int(np.count_nonzero(is_open[before]))
        count, remaining, begin = 0, start, 0
        for place in np.flatnonzero(np.isin(before, taken)).tolist():
            count += self._considered(before[begin : place + 1], is_open, stage, remaining)
            remaining = vector.subtract(remaining, self.fleet.supply(before[place : place + 1]))
            begin = place + 1
        return count + self._considered(before[begin:], is_open, stage, remaining)

    def _considered(self, rows: Ints, is_open: Mask, stage: Stage, remaining: Vector) -> int:
        """Count those that the scan considers while so much remains: open ones, but for useful ones that lie wrong."""
        passed = self._misplaced(stage)
        if remaining:
            passed = passed & self.fleet.useful(remaining)
        return int(np.count_nonzero(is_open[rows] & ~passed[self.fleet.shape[rows]]))

    def _scan(self, stage: Stage) -> tuple[Ints, Mask]:
        """Return a scan's machines in order, and by machine whether it was open to the row."""
        match stage:
            case Stage.CREDIT if self.is_gang:
                return self._incumbents_first, self._open
            case Stage.CREDIT:
                return np.concatenate(self._credit_parts), self._mask(self.creditable)
            case Stage.DOMAIN:
                free = self._free_order if self._looks_at_free else ()
                rows = np.concatenate([*self._credit_parts, *free])
                creditable = np.concatenate(self._credit_parts[:3])
                is_open = self._mask(creditable[(self._open & self._uncredited)[creditable]])
                return rows, is_open | (self._open & self.fleet.is_free & (self.earmarked_by < 0))
            case Stage.IDLE | Stage.SPECULATIVE:
                return self._free_order[stage is Stage.SPECULATIVE], self._open & self._unclaimed
            case Stage.COMING:
                return self._draining, self._open & self._coming & ~self._mask(self.coming_taken)
            case Stage.VICTIM:
                return self._ranked, self._preemptible

    def _mask(self, rows: Ints) -> Mask:
        mask = np.zeros(len(self.fleet.state), np.bool_)
        mask[rows] = True
        return mask
