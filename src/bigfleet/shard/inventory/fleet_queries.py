"""Counts and finds machines in a snapshot's columns, with NumPy.

The queries about half a million machines are here: the reclaim cap, the shown rows, the metrics, the pages of
ListMachines. A snapshot never changes, so every function may run in any thread. This module must not create an object
per machine.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from bigfleet.engine.columns.objects import example_of, machines_at, resources_of
from bigfleet.engine.columns.sold_out import sold_out_rows
from bigfleet.engine.columns.store import REMOVED, ColumnSnapshot
from bigfleet.engine.decision import CapacityPool, Options
from bigfleet.engine.matching import Fit, Shapes
from bigfleet.model import vector
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need, RowKey
from bigfleet.model.penalty import bucket_for_dollars
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.model.vector import Vector
from bigfleet.shard.inventory.machine_record import InventoryRecord
from bigfleet.shard.inventory.machine_shapes import Ask, Attributes

_STATES = len(MachineState)

Mask = npt.NDArray[np.bool_]


def row_of(view: ColumnSnapshot, machine_id: str) -> int | None:
    """Return the machine's row, None when the snapshot does not hold it."""
    row = view.rows.get(MachineId(machine_id))
    # A machine that was removed keeps its row until rows are next numbered.
    return None if row is None or view.columns.state[row] == REMOVED else row


def supply_of(view: ColumnSnapshot, machine_id: str) -> Vector:
    """Return the machine's supply, milli-units. Raises KeyError when the snapshot does not hold it."""
    row = row_of(view, machine_id)
    if row is None:
        raise KeyError(machine_id)
    vocabulary = view.vocabulary
    shape = int(view.columns.shape[row])
    return vocabulary.supplies[vocabulary.supply_of_shape[shape]]


def largest_supply(view: ColumnSnapshot, cluster: str) -> Vector:
    """Return, per dimension, the largest supply among the machines that carry the cluster; zero without one."""
    columns, vocabulary = view.columns, view.vocabulary
    number = vocabulary.cluster_numbers().get(cluster, -1)
    shapes = np.unique(columns.shape[(columns.cluster == number) & (columns.state != REMOVED)]) if number > 0 else ()
    largest: Vector = vector.ZERO
    for shape in shapes:
        largest = vector.maximum(largest, vocabulary.supplies[vocabulary.supply_of_shape[int(shape)]])
    return largest


@dataclass(frozen=True, slots=True)
class FailingPools:
    """Pools in which machines could not be created for a row, and those in which they could not be bootstrapped."""

    created: frozenset[CapacityPool] = frozenset()
    bootstrapped: frozenset[CapacityPool] = frozenset()

    def are_of(self, view: ColumnSnapshot, machine_id: str) -> bool:
        """Return whether the machine must still be created or bootstrapped, and that failed in its pool."""
        row = row_of(view, machine_id)
        if row is None or view.columns.state[row] == MachineState.CONFIGURED:
            return False
        pool = pool_of_row(view, row)
        is_uncreated = view.columns.state[row] in (MachineState.SPECULATIVE, MachineState.CREATING)
        return pool in self.bootstrapped or (is_uncreated and pool in self.created)


class OtherCandidates:
    """Idle machines other than some, and Speculative ones with stock. Cost: one look at the columns, then one a row."""

    def __init__(
        self,
        view: ColumnSnapshot,
        attributes: Attributes,
        *,
        sold_out: frozenset[CapacityPool],
        besides: Iterable[str],
    ) -> None:
        columns = view.columns
        is_free: Mask = (columns.state == MachineState.IDLE) | (columns.state == MachineState.SPECULATIVE)
        is_free[sold_out_rows(view, Options(now_seconds=0.0, reported=frozenset(), sold_out=sold_out))] = False
        is_free[[row for row in (view.rows.get(MachineId(each)) for each in besides) if row is not None]] = False
        self._fits = attributes.fits(view, np.flatnonzero(np.bincount(columns.shape[is_free])))

    def can_host(self, need: Need) -> bool:
        """Return whether one of them matches the row and holds its min unit."""
        return bool(self._fits.fitting(Ask.of(need)).any())


def configured_by_cluster(view: ColumnSnapshot) -> dict[str, int]:
    """Return how many Configured machines each cluster has; clusters without one are absent."""
    counts = np.bincount(view.columns.cluster[view.columns.state == MachineState.CONFIGURED])
    names = view.vocabulary.clusters
    return {names[number]: int(counts[number]) for number in np.flatnonzero(counts).tolist()}


def machines_by_kind(view: ColumnSnapshot) -> Mapping[tuple[MachineState, CapacityType, int], int]:
    """Return the machines by state, capacity type and interruption bucket; the bucket of an unbound one is 0."""
    columns, vocabulary = view.columns, view.vocabulary
    live = columns.state != REMOVED
    offers, stamps = len(vocabulary.offers), len(vocabulary.stamps)
    key = columns.state[live].astype(np.int64) * offers + columns.offer[live]
    key = (key * stamps + columns.stamp[live]) * 2 + (columns.cluster[live] != 0)
    kinds, sizes = np.unique(key, return_counts=True)
    counts: dict[tuple[MachineState, CapacityType, int], int] = {}
    for kind, size in zip(kinds.tolist(), sizes.tolist(), strict=True):
        rest, is_bound = divmod(kind, 2)
        rest, stamp = divmod(rest, stamps)
        state, offer = divmod(rest, offers)
        bucket = bucket_for_dollars(vocabulary.stamps[stamp].assigned_interruption_penalty_dollars) if is_bound else 0
        group = (MachineState(state), CapacityType(vocabulary.offers[offer].capacity_type), bucket)
        counts[group] = counts.get(group, 0) + size
    return counts


def pool_of_row(view: ColumnSnapshot, row: int) -> CapacityPool:
    """Return the pool of the machine in a row of a view."""
    shape = view.vocabulary.shapes[int(view.columns.shape[row])]
    offer = view.vocabulary.offers[int(view.columns.offer[row])]
    return CapacityPool(shape.instance_type, shape.zone, CapacityType(offer.capacity_type))


def owner_of_row(view: ColumnSnapshot, row: int) -> RowKey | None:
    """Return the row of demand that a machine is created or bound for; None for a machine that is free."""
    stamp = view.vocabulary.stamps[int(view.columns.stamp[row])]
    is_creating = int(view.columns.state[row]) == MachineState.CREATING
    cluster = stamp.intended_cluster if is_creating else view.vocabulary.clusters[int(view.columns.cluster[row])]
    return (cluster, stamp.assigned_need_fingerprint, stamp.assigned_group) if cluster else None


def machines_on_their_way(view: ColumnSnapshot, cluster: str) -> list[Machine]:
    """Return the machines that are created or configured for a cluster, by row."""
    columns = view.columns
    rows = np.flatnonzero((columns.state == MachineState.CREATING) | (columns.state == MachineState.CONFIGURING))
    owned = [row for row in rows.tolist() if (owner := owner_of_row(view, row)) is not None and owner[0] == cluster]
    return machines_at(view, owned, resources_of(view.vocabulary))


def rows_of_pool(view: ColumnSnapshot, pool: CapacityPool, state: MachineState) -> npt.NDArray[np.int64]:
    """Return the rows of a pool's machines of one state, ids ascending."""
    shapes, offers = view.vocabulary.shapes, view.vocabulary.offers
    is_place = np.fromiter(((s.instance_type, s.zone) == (pool.instance_type, pool.zone) for s in shapes), np.bool_)
    is_type = np.fromiter((each.capacity_type == pool.capacity_type for each in offers), np.bool_)
    rows = np.flatnonzero(view.columns.state == state)
    found: npt.NDArray[np.int64] = rows[is_place[view.columns.shape[rows]] & is_type[view.columns.offer[rows]]]
    return found


# ---- supply that could host a row --------------------------------------------------------------------------------


class ShapeCounts:
    """How many machines of each state could host a row: matching is asked once per shape, counting is done once."""

    def __init__(self, view: ColumnSnapshot) -> None:
        columns, vocabulary = view.columns, view.vocabulary
        shapes = len(vocabulary.shapes)
        key = columns.state.astype(np.int64) * shapes + columns.shape
        counts = np.bincount(key, minlength=_STATES * shapes)[: _STATES * shapes].reshape(_STATES, shapes)
        counts[REMOVED] = 0
        used = np.flatnonzero(counts.any(axis=0))
        #: Machines by state and used shape.
        self._counts = counts[:, used]
        self._shapes = _shapes(view, used)
        self._places: dict[Fit, npt.NDArray[np.int64]] = {}

    def count(self, need: Need, state: MachineState) -> int:
        """Return how many machines of the state match the row and hold its min unit."""
        fit = self._shapes.fit(need.profile, need.min_unit)
        places = self._places.get(fit)
        if places is None:
            places = self._places[fit] = np.fromiter(fit.shapes, np.int64, len(fit.shapes))
        return int(self._counts[state, places].sum())


def _shapes(view: ColumnSnapshot, shape_numbers: npt.NDArray[np.int64]) -> Shapes:
    """Return some shapes of the view for matching."""
    return Shapes(example_of(view.vocabulary, number) for number in shape_numbers.tolist())


class SoldOutShapes:
    """Machines of pools without stock or withheld, as far as matching looks at them; asked about once per row."""

    def __init__(self, view: ColumnSnapshot, options: Options) -> None:
        self._shapes = _shapes_of(view, sold_out_rows(view, options))
        self._withheld = {
            cluster: _shapes_of(view, sold_out_rows(view, replace(options, sold_out=each.pools, probes=each.probes)))
            for cluster, each in options.withheld.items()
        }

    def could_host(self, need: Need) -> bool:
        """Return whether a machine of a pool without stock matches the row and holds its min unit."""
        return _can_host(self._shapes, need)

    def are_withheld_from(self, need: Need) -> bool:
        """Return whether a machine of a pool that is withheld from the row's cluster matches it in this way."""
        return _can_host(self._withheld.get(need.cluster), need)


def _shapes_of(view: ColumnSnapshot, rows: npt.NDArray[np.int64]) -> Shapes | None:
    return _shapes(view, np.unique(view.columns.shape[rows])) if len(rows) else None


def _can_host(shapes: Shapes | None, need: Need) -> bool:
    return shapes is not None and bool(shapes.fit(need.profile, need.min_unit).shapes)


# ---- finding -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineQuery:
    """Which machines are asked for; every part that is given must hold."""

    cluster: str = ""
    instance_type: str = ""
    zone: str = ""
    states: frozenset[int] = frozenset()
    capacity_types: frozenset[int] = frozenset()

    def holds(self, machine: Machine | InventoryRecord) -> bool:
        """Return whether one machine is asked for."""
        return (
            self.cluster in ("", machine.cluster)
            and self.instance_type in ("", machine.instance_type)
            and self.zone in ("", machine.zone)
            and (not self.states or machine.state.value in self.states)
            and (not self.capacity_types or machine.capacity_type.value in self.capacity_types)
        )


def find(view: ColumnSnapshot, wanted: MachineQuery, *, but_for: Iterable[MachineId] = ()) -> npt.NDArray[np.int64]:
    """Return the rows of the machines that are asked for, ids ascending, without those of `but_for`."""
    columns, vocabulary = view.columns, view.vocabulary
    found: Mask = columns.state != REMOVED
    if wanted.cluster:
        found &= columns.cluster == vocabulary.cluster_numbers().get(wanted.cluster, -1)
    if wanted.states:
        found &= np.isin(columns.state, sorted(wanted.states))
    if wanted.instance_type or wanted.zone:
        shapes = [
            wanted.instance_type in ("", shape.instance_type) and wanted.zone in ("", shape.zone)
            for shape in vocabulary.shapes
        ]
        found &= _picked(shapes, columns.shape)
    if wanted.capacity_types:
        found &= _picked([offer.capacity_type in wanted.capacity_types for offer in vocabulary.offers], columns.offer)
    left_out = [row for row in map(view.rows.get, but_for) if row is not None]
    found[left_out] = False
    return np.flatnonzero(found)


def _picked(is_wanted: list[bool], numbers: npt.NDArray[Any]) -> Mask:
    # An empty vocabulary has no machines; an entry more keeps the lookup legal.
    picked: Mask = np.array([*is_wanted, False], np.bool_)[numbers]
    return picked


def first_after(view: ColumnSnapshot, machine_id: str) -> int:
    """Return the row of the first machine whose id is greater, the number of rows when there is none."""
    return bisect_right(view.ids, machine_id)
