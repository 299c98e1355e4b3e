"""Replays the scans of a decision machine by machine: considered, taken, rejected.

Each scan is reported after it ended, from what the row wanted before it and what it took, so that the phases contain no
reporting code. A replay reads the allocations and never changes them.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from bigfleet.engine.decision import Options
from bigfleet.engine.explain.records import (
    CandidateConsidered,
    CandidateRejected,
    Detail,
    Rejection,
    Reporter,
    RowRecord,
    Stage,
)
from bigfleet.engine.explain.rejections import LATE_REASONS, Rejections, ref
from bigfleet.engine.reference.rows import Allocations, DemandRow
from bigfleet.engine.reference.spread import Preference, SpreadPick, spread_picks
from bigfleet.model import vector
from bigfleet.model.machine import Machine
from bigfleet.model.vector import Vector

OrderKey = Callable[[Machine], tuple[float, ...]]
#: Makes the record of a machine taken; the vector is what still remained before it.
TakenRecord = Callable[[Machine, Vector], RowRecord]


class CandidateScan:
    """One stage of one row: the machines in scan order, what the row wanted before, and what it took."""

    def __init__(
        self, row: DemandRow, stage: Stage, machines: Sequence[Machine], *, start: Vector, taken: Collection[Machine]
    ) -> None:
        self.row = row
        self.stage = stage
        self.machines = machines
        self.start = start
        #: In the order taken.
        self.taken = taken
        self.taken_ids = frozenset(machine.id for machine in taken)


class TraceEmitter:
    """Turns scans into records for one reporter."""

    def __init__(self, reporter: Reporter, options: Options, allocations: Allocations) -> None:
        self._reporter = reporter
        self._rejections = Rejections(options, allocations)

    def wants(self, row: DemandRow) -> bool:
        """Return whether the reporter wants records about the row."""
        return self._reporter.wants_row(ref(row))

    def emit(self, scan: CandidateScan, *, order_key: OrderKey, taken_record: TakenRecord) -> None:
        """Report every machine of a scan that takes whatever helps, in scan order."""
        remaining, position = scan.start, 0
        for machine in scan.machines:
            if machine.id in scan.taken_ids:
                self._taken(scan, machine, position, order_key, remaining, taken_record)
                remaining = vector.subtract(remaining, machine.supply)
                position += 1
                continue
            why = self._rejections.reason(scan.row, scan.stage, machine, remaining)
            if why is None or why[0] in LATE_REASONS:
                self._considered(scan, machine, position, order_key)
                position += 1
            if why is not None:
                self._rejected(scan, machine, *why)

    def emit_spread(
        self, scan: CandidateScan, picks: Sequence[SpreadPick], *, order_key: OrderKey, taken_record: TakenRecord
    ) -> None:
        """Report the picks of a strict spread in pick order, then the others in scan order.

        `scan.row` holds the picks already; the counts of a `skew` rejection are those after the last pick.
        """
        remaining, position = scan.start, 0
        for pick in picks:
            self._taken(scan, pick.machine, position, order_key, remaining, taken_record)
            remaining = vector.subtract(remaining, pick.machine.supply)
            position += 1
        counts = self._counts(scan)
        for machine in scan.machines:
            if machine.id in scan.taken_ids:
                continue
            why = self._rejections.reason(scan.row, scan.stage, machine, remaining)
            why = why or (Rejection.SKEW, _skew_detail(scan.row, machine, counts))
            if why[0] in LATE_REASONS:
                self._considered(scan, machine, position, order_key)
                position += 1
            self._rejected(scan, machine, *why)

    def candidates(self, scan: CandidateScan) -> list[Machine]:
        """Return the machines that could have been taken when the scan began, in scan order."""
        return [
            machine
            for machine in scan.machines
            if machine.id in scan.taken_ids
            or (scan.start and self._rejections.reason(scan.row, scan.stage, machine, scan.start) is None)
        ]

    def _counts(self, scan: CandidateScan) -> Counter[str]:
        row = scan.row
        spread = row.need.profile.strict_spread
        assert spread is not None, "only a strict spread counts"
        held = [*row.claimed, *row.coming, *row.victims]
        counts: Counter[str] = Counter()
        for machine in held:
            value = machine.attribute(spread.topology_key)
            if value is not None:
                counts[value] += 1
        domains = (machine.attribute(spread.topology_key) for machine in self.candidates(scan))
        counts.update({value: 0 for value in domains if value is not None})
        return counts

    def _taken(
        self,
        scan: CandidateScan,
        machine: Machine,
        position: int,
        order_key: OrderKey,
        remaining: Vector,
        taken_record: TakenRecord,
    ) -> None:
        # Asked before the record is made: finding the runner-up of each of thousands costs more than the scan.
        if self._reporter.wants_machine(machine.id):
            self._considered(scan, machine, position, order_key)
            self._report(machine, taken_record(machine, remaining))

    def _considered(self, scan: CandidateScan, machine: Machine, position: int, order_key: OrderKey) -> None:
        record = CandidateConsidered(
            row=ref(scan.row),
            stage=scan.stage,
            machine=machine.id,
            position=position,
            order_key=order_key(machine),
        )
        self._report(machine, record)

    def _rejected(self, scan: CandidateScan, machine: Machine, reason: Rejection, detail: Detail) -> None:
        record = CandidateRejected(
            row=ref(scan.row), stage=scan.stage, machine=machine.id, reason=reason, detail=detail
        )
        self._report(machine, record)

    def _report(self, machine: Machine, record: RowRecord) -> None:
        if self._reporter.wants_machine(machine.id):
            self._reporter.report(record)


def _skew_detail(row: DemandRow, machine: Machine, counts: Counter[str]) -> Detail:
    spread = row.need.profile.strict_spread
    assert spread is not None, "only a strict spread has a skew"
    domain = machine.attribute(spread.topology_key)
    assert domain is not None, "a machine without the key was rejected before"
    return {"domain": domain, "count": counts[domain], "minimum": min(counts.values()), "skew": spread.skew_max}


class RunnersUp:
    """Finds what a scan that takes whatever helps would have taken in a machine's place."""

    def __init__(self, scan: CandidateScan, candidates: Sequence[Machine]) -> None:
        """Add up once what the scan took; `candidates` are in scan order."""
        #: Candidates that were not taken, each with how many were taken before it.
        self._others: list[Machine] = []
        self._before: list[int] = []
        #: What the first so many taken candidates offer together, and how many were taken before each.
        self._offered: list[Vector] = [vector.ZERO]
        self._place: dict[str, int] = {}
        for machine in candidates:
            if machine.id in scan.taken_ids:
                self._place[machine.id] = len(self._offered) - 1
                self._offered.append(vector.add(self._offered[-1], machine.supply))
            else:
                self._others.append(machine)
                self._before.append(len(self._offered) - 1)

    def of(self, machine: Machine, remaining: Vector) -> Machine | None:
        """Return the first machine that the scan did not take as it was; `remaining` was wanted on the turn.

        What the scan took behind the machine it would have taken then, too, and in whatever order it comes, it leaves
        of each dimension what the sum leaves: so each of the others is looked at against that.
        """
        place = self._place[machine.id]
        up_to_it = self._offered[place + 1]
        for number in range(bisect_left(self._before, place + 1), len(self._others)):
            behind = vector.subtract(self._offered[self._before[number]], up_to_it)
            left = vector.subtract(remaining, behind)
            if not left:
                return None
            if vector.is_useful(self._others[number].supply, left):
                return self._others[number]
        return None


def spread_runner_up(
    scan: CandidateScan,
    candidates: Sequence[Machine],
    machine: Machine,
    *,
    held: Sequence[Machine],
    preference: Callable[[Machine, str], Preference],
) -> Machine | None:
    """Return what a spread would have picked in the machine's place; `held` is what the row held before the scan."""
    spread = scan.row.need.profile.strict_spread
    assert spread is not None, "the row has no strict spread"
    picks = spread_picks(
        (candidate for candidate in candidates if candidate is not machine),
        spread=spread,
        held=held,
        remaining=scan.start,
        preference=preference,
    )
    return next((pick.machine for pick in picks if pick.machine.id not in scan.taken_ids), None)
