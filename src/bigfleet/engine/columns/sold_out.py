"""Finds the machines of a view whose capacity pool has no stock.

It stands apart from the kernels, because a shard asks it before they are loaded.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from bigfleet.engine.columns.store import ColumnSnapshot
from bigfleet.engine.decision import Options
from bigfleet.model.ids import MachineId
from bigfleet.model.states import CapacityType, MachineState

Int64s = npt.NDArray[np.int64]


def sold_out_rows(view: ColumnSnapshot, options: Options) -> Int64s:
    """Return the rows of the Speculative machines whose pool has no stock and that are no probes, ascending."""
    if not options.sold_out:
        return np.zeros(0, np.int64)
    columns, vocabulary = view.columns, view.vocabulary
    speculative = np.flatnonzero(columns.state == MachineState.SPECULATIVE)
    if not len(speculative):
        return np.zeros(0, np.int64)
    shape, offer = columns.shape[speculative], columns.offer[speculative]
    # A place is an instance type in a zone: numbered from 1, in few pools; 0 is every other.
    places: dict[tuple[str, str], int] = {}
    for pool in options.sold_out:
        places.setdefault((pool.instance_type, pool.zone), len(places) + 1)
    is_sold_out = np.zeros((len(places) + 1, len(CapacityType)), np.bool_)
    for pool in options.sold_out:
        is_sold_out[places[pool.instance_type, pool.zone], pool.capacity_type] = True

    def place_of(number: int) -> int:
        known = vocabulary.shapes[number]
        return places.get((known.instance_type, known.zone), 0)

    place = _looked_up(shape, place_of)
    found = speculative[is_sold_out[place, _looked_up(offer, lambda number: vocabulary.offers[number].capacity_type)]]
    probes = [row for row in (view.rows.get(MachineId(each)) for each in options.probes) if row is not None]
    rows: Int64s = found[~np.isin(found, probes)] if probes else found
    return rows.astype(np.int64)


def _looked_up(numbers: npt.NDArray[np.int32], value_of: Callable[[int], int]) -> Int64s:
    """Return a value for each number: only those that occur are looked up, because a vocabulary holds many more."""
    used = np.flatnonzero(np.bincount(numbers))
    values = np.zeros(int(used[-1]) + 1, np.int64)
    values[used] = [value_of(number) for number in used.tolist()]
    found: Int64s = values[numbers]
    return found
