"""One number for which machines each row holds, in compiled code: half a million of them in a millisecond.

docs/adr/0134-a-recording-is-what-the-engine-saw.md. Importing this module loads or compiles the loop, which is why it
is imported when the first cycle is recorded and not before. The number is for finding accidents: nothing here may be
taken for a proof against somebody who wants two decisions to look alike.
"""

import numpy as np

from bigfleet.engine.columnar.arrays import Int32s, Int64s
from bigfleet.engine.columnar.kernels import I4_T, I8_T, INT, kernel


@kernel(INT(I4_T, I8_T, I8_T, I4_T, I8_T, I8_T, I8_T))
def mixed(
    credited: Int32s,
    credit_from: Int64s,
    credit_to: Int64s,
    acquired: Int32s,
    acquire_from: Int64s,
    acquire_to: Int64s,
    rows: Int64s,
) -> np.int64:
    """Return a number that depends on the machines of each row, in their order, and on the order of the rows."""
    factor = np.uint64(0x9E3779B97F4A7C15)
    number = np.uint64(len(rows))
    for row in rows:
        # How many there are keeps a machine from passing for one of the next row.
        held = credit_to[row] - credit_from[row] + acquire_to[row] - acquire_from[row]
        number = (number ^ np.uint64(held)) * factor
        number ^= number >> np.uint64(29)
        for place in range(credit_from[row], credit_to[row]):
            number = (number ^ np.uint64(credited[place])) * factor
            number ^= number >> np.uint64(29)
        for place in range(acquire_from[row], acquire_to[row]):
            number = (number ^ np.uint64(acquired[place])) * factor
            number ^= number >> np.uint64(29)
    return np.int64(number)
