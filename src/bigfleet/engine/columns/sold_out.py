"""Finds the machines of a view whose capacity pool has no stock.

It stands apart from the kernels, because a shard asks it before they are loaded.
"""

import numpy as np
import numpy.typing as npt

from bigfleet.engine.columns.store import ColumnSnapshot
from bigfleet.engine.decision import Options
from bigfleet.model.ids import MachineId
from bigfleet.model.states import MachineState

Int64s = npt.NDArray[np.int64]


def sold_out_rows(view: ColumnSnapshot, options: Options) -> Int64s:
    """Return the rows of the Speculative machines whose pool has no stock and that are no probes, ascending."""
    if not options.sold_out:
        return np.zeros(0, np.int64)
    columns, vocabulary = view.columns, view.vocabulary
    shapes: dict[tuple[str, str], list[int]] = {}
    for number, shape in enumerate(vocabulary.shapes):
        shapes.setdefault((shape.instance_type, shape.zone), []).append(number)
    # Few pools are sold out at the same time: one mask of shapes and offers each, and one look at the machines.
    is_sold_out = np.zeros((len(vocabulary.shapes) + 1, len(vocabulary.offers) + 1), np.bool_)
    for pool in options.sold_out:
        offers = [n for n, offer in enumerate(vocabulary.offers) if offer.capacity_type == pool.capacity_type]
        for shape_number in shapes.get((pool.instance_type, pool.zone), ()):
            is_sold_out[shape_number, offers] = True
    speculative = np.flatnonzero(columns.state == MachineState.SPECULATIVE)
    found = speculative[is_sold_out[columns.shape[speculative], columns.offer[speculative]]]
    probes = [row for row in (view.rows.get(MachineId(each)) for each in options.probes) if row is not None]
    rows: Int64s = found[~np.isin(found, probes)] if probes else found
    return rows.astype(np.int64)
