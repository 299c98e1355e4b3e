"""Places whole parts by first-fit on the machines of many fleets at once.

Pods of a part are equal, so first-fit of a part is one pass over the machines: each takes what fits until no pod is
left. Amounts are integers below 2^20 and counts below 2^23, so single precision is exact here on every processor: the
quotient of two such integers is never rounded up to the next integer.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bigfleet.planner.simulate import Int

Single = NDArray[np.float32]

#: Above every count, small enough for single precision.
ANY: Final = 1 << 23
_NOTHING: Final = 2.0**-30


class FirstFitTables:
    """Scaled amounts of one core in single precision; P parts, C columns."""

    def __init__(self, request: Int, supply: Int, fits: Int, count: Int) -> None:
        """Take requests (P, D) and supplies (C, D) below 2^20, pods of a part that a machine hosts (P, C), pods (P)."""
        used = [d for d in range(request.shape[1]) if request[:, d].any()]
        self.supply: list[Single] = [np.append(supply[:, d], 0).astype(np.float32) for d in used]
        self.request: list[Single] = [request[:, d].astype(np.float32) for d in used]
        # What a part does not want limits nothing: more than nothing, divided by so little, exceeds any count of pods.
        self.divisor: list[Single] = [np.where(wants > 0, wants, np.float32(_NOTHING)) for wants in self.request]
        self.extra: list[Single | None] = [
            None if wants.all() else np.where(wants > 0, 0, 1).astype(np.float32) for wants in self.request
        ]
        self.count: Single = np.minimum(count, ANY).astype(np.float32)
        most = np.minimum(np.minimum(fits, count[:, None]), ANY)
        self.most: Single = np.concatenate([most, np.zeros((len(count), 1), np.int64)], axis=1).astype(np.float32)

    def place(self, columns: Int, orders: Sequence[Sequence[int]], keep: bool) -> tuple[Int, Int]:
        """Return the pods left (R, P), and the pods placed (R, P, M) if asked.

        A row is a fleet in an order: `columns` (R, M) are its machines by column, one past the last column for none;
        `orders` the parts one after the other.
        """
        parts, width = self.most.shape
        rows, size = columns.shape
        free = [supply[columns] for supply in self.supply]
        left = np.zeros((rows, parts), np.int64)
        on = np.zeros((rows, parts, size) if keep else (0,), np.int64)
        room, times, before = (np.empty((rows, size), np.float32) for _ in range(3))
        index = np.empty((rows, size), np.int64)
        most, row = self.most.ravel(), np.arange(rows)
        for part in np.array(orders, np.int64).reshape(rows, parts).T.copy():
            np.add(columns, (part * width)[:, None], out=index)
            most.take(index, out=room, mode="clip")
            for has, divisor, extra in zip(free, self.divisor, self.extra, strict=True):
                if extra is None:
                    np.divide(has, divisor[part][:, None], out=times)
                else:
                    np.add(has, extra[part][:, None], out=times)
                    np.divide(times, divisor[part][:, None], out=times)
                np.floor(times, out=times)
                np.minimum(room, times, out=room)
            count = self.count[part]
            np.cumsum(room, axis=1, out=before)
            left[row, part] = np.maximum(count - before[:, -1], 0)
            np.subtract(before, room, out=before)
            np.subtract(count[:, None], before, out=times)
            np.maximum(times, 0, out=times)
            np.minimum(room, times, out=room)
            for has, request in zip(free, self.request, strict=True):
                np.multiply(room, request[part][:, None], out=times)
                np.subtract(has, times, out=has)
            if keep:
                on[row, part] = room
        return left, on
