"""Finds stable orders of columns of small integers."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]

_DIGIT_BITS: Final = 16


def stable_order(*keys: npt.NDArray[np.signedinteger[Any]]) -> Rows:
    """Return the order by some keys, the last key first; equal places stay in their order.

    Keys are not negative. NumPy counts integers of 16 bits, which takes a fifth of the time of comparing longer ones.
    """
    order: Rows | None = None
    for key in keys:
        for shift in range(0, max(1, int(key.max(initial=0)).bit_length()), _DIGIT_BITS):
            digit = (key >> shift).astype(np.uint16)
            if order is None:
                order = np.argsort(digit, kind="stable")
            else:
                order = order[np.argsort(digit[order], kind="stable")]
    assert order is not None, "there is a key"
    return order
