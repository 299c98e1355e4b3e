"""Summarises a shard for the coordinator: counts of machines, and shortfalls.

docs/spec/shard.md §11.1 and §11.3. Pure functions over one snapshot and the ledger. Only machines that could be given
away are offered.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from bigfleet.engine import shortfalls
from bigfleet.engine.columns.store import REMOVED, ColumnSnapshot
from bigfleet.engine.decision import CapacityPool
from bigfleet.engine.shortfalls import Ledger
from bigfleet.model.shard_report import CapacityCount, ShardSummary, Shortfall
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.model.vector import Vector
from bigfleet.shard.inventory.machine_shapes import MachineRows, giveable_rows

#: Keys of a count by name.
NAMES_MAX = 256
#: Rows of each list of capacity.
CAPACITY_ROWS_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a shard reports after a cycle."""

    cycle: int
    summary: ShardSummary
    #: Priority descending, age descending, fingerprint; at most 100.
    shortfalls: tuple[Shortfall, ...]
    #: Pools in which creations of this shard failed for want of stock, with the rest of the back-off, seconds.
    sold_out: Mapping[CapacityPool, float]


def report_of(
    view: ColumnSnapshot, taken: MachineRows, ledger: Ledger, *, cycle: int, sold_out: Mapping[CapacityPool, float]
) -> Report:
    """Return the report of one cycle. `taken` are the machines that are pending, reserved or claimed in it."""
    return Report(
        cycle=cycle,
        summary=summary_of(view, taken),
        shortfalls=tuple(shortfalls.report(ledger)),
        sold_out=sold_out,
    )


def summary_of(view: ColumnSnapshot, taken: MachineRows) -> ShardSummary:
    """Return a snapshot's machines in figures; those in `taken` are counted and not offered."""
    columns, vocabulary = view.columns, view.vocabulary
    states = np.bincount(columns.state, minlength=len(MachineState))
    by_shape = np.bincount(columns.shape[columns.state != REMOVED], minlength=len(vocabulary.shapes))
    types: Counter[str] = Counter()
    zones: Counter[str] = Counter()
    for number in np.flatnonzero(by_shape).tolist():
        shape = vocabulary.shapes[number]
        types[shape.instance_type] += int(by_shape[number])
        zones[shape.zone] += int(by_shape[number])
    return ShardSummary(
        total_machines=int(states.sum() - states[REMOVED]),
        free_machines=int(states[MachineState.IDLE] + states[MachineState.SPECULATIVE]),
        type_counts=_largest(types),
        zone_counts=_largest(zones),
        idle=_capacity(view, giveable_rows(view, MachineState.IDLE, taken)),
        speculative=_capacity(view, giveable_rows(view, MachineState.SPECULATIVE, taken)),
    )


def _largest(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:NAMES_MAX])


def _capacity(view: ColumnSnapshot, rows: MachineRows) -> tuple[CapacityCount, ...]:
    columns, vocabulary = view.columns, view.vocabulary
    offers = max(1, len(vocabulary.offers))
    kinds = columns.shape[rows].astype(np.int64) * offers + columns.offer[rows]
    counts: Counter[tuple[str, str, int]] = Counter()
    smallest: dict[tuple[str, str, int], Vector] = {}
    for kind, count in _counted(kinds):
        shape = vocabulary.shapes[kind // offers]
        key = (shape.instance_type, shape.zone, vocabulary.offers[kind % offers].capacity_type)
        supply = vocabulary.supplies[vocabulary.supply_of_shape[kind // offers]]
        counts[key] += count
        known = smallest.get(key)
        smallest[key] = supply if known is None or known == supply else _minimum(known, supply)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return tuple(
        CapacityCount(
            instance_type=key[0],
            zone=key[1],
            capacity_type=CapacityType(key[2]),
            count=count,
            allocatable=smallest[key],
        )
        for key, count in ordered[:CAPACITY_ROWS_MAX]
    )


def _counted(kinds: MachineRows) -> Iterable[tuple[int, int]]:
    values, sizes = np.unique(kinds, return_counts=True)
    return zip(values.tolist(), sizes.tolist(), strict=True)


def _minimum(left: Vector, right: Vector) -> Vector:
    return {name: min(milli, right[name]) for name, milli in left.items() if name in right}
