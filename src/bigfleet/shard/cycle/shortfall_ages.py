"""Measures the age of shortfalls: of stalled gangs, of short rows, and of the fleet.

docs/spec/shard.md §3, §7, §11.1. Pure arithmetic over a decision, so it may run off the loop. Only short rows are read.
This module does not decide what is done about them.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from bigfleet.engine import parking, shortfalls
from bigfleet.engine.columns.store import ColumnSnapshot
from bigfleet.engine.decision import ParkingKey, RowResult
from bigfleet.model import vector
from bigfleet.model.need import RowKey
from bigfleet.shard.status.views import NO_FAILURES, Failing, beyond, lacks_all, short_of, split_residual


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortfallAges:
    """What one cycle hands to the next; each part is replaced, never changed."""

    parking: Mapping[ParkingKey, int] = field(default_factory=dict)
    #: Timer cycles for which a reported row has been short, by row.
    rows: Mapping[RowKey, int] = field(default_factory=dict)
    #: What the fleet lacks, by fingerprint.
    ledger: shortfalls.Ledger = field(default_factory=dict)


@runtime_checkable
class KnowsShort(Protocol):
    """Rows of which those that are short can be had without making the others."""

    def short(self, also: Set[RowKey] = frozenset()) -> Iterable[RowResult]:
        """Return all and only the rows that Phase 1 left short, and those with the keys `also`, in order."""
        ...


def next_ages(
    ages: ShortfallAges,
    short_rows: Sequence[RowResult],
    *,
    snapshot: ColumnSnapshot,
    refused: Set[RowKey],
    failing: Failing = NO_FAILURES,
    advance: bool,
) -> ShortfallAges:
    """Return the ages after a cycle; they rise when `advance` is True (a timer cycle) and are only reset otherwise.

    `short_rows` are those of `short_of_cycle`. `refused` names the rows whose operator cannot bootstrap them: what such
    a row was given again does not count, and it is no shortfall of the fleet, because a machine from elsewhere would
    meet the same operator. `failing` names the rows for which machines could not be created or bootstrapped, by pool:
    what is on its way there does not count either, and the row is a shortfall of the fleet.
    """
    row_ages: dict[RowKey, int] = {}
    lacking = []
    known, older = ages.rows, int(advance)
    for result in short_rows:
        need, short = result.need, result.unresolved
        key = need.key
        is_refused = key in refused
        if is_refused or key in failing:
            short = short_of(result, short, is_refused=is_refused, snapshot=snapshot, failing=failing.get(key))
        if not is_refused:
            lacking.append(result if short is result.unresolved else replace(result, unresolved=short))
        if not short:
            continue
        if lacks_all(result, short):
            row_ages[key] = known[key] + older if key in known else 1
            continue
        covered = vector.subtract(need.aggregate, short)
        for member, residual in split_residual(result.members, covered, beyond(need, short)):
            if residual:
                key = member.key
                row_ages[key] = known[key] + older if key in known else 1
    return ShortfallAges(
        parking=parking.next_ages(ages.parking, short_rows, advance=advance),
        rows=row_ages,
        ledger=shortfalls.record(ages.ledger, lacking, advance=advance),
    )


def short_of_cycle(rows: Sequence[RowResult], refused: Set[RowKey], failing: Failing = NO_FAILURES) -> list[RowResult]:
    """Return the rows that Phase 1 left short, and those that cannot be bootstrapped or created, in list order."""
    also = refused | failing.keys()
    if isinstance(rows, KnowsShort):
        return list(rows.short(also) if also else rows.short())
    return [result for result in rows if not result.satisfied or result.need.key in also]
