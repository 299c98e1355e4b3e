"""Shares what all compiled loops need: their settings, their types, and the arithmetic of one claim.

Every kernel does what the reference engine's function of the like name does, over integers. Sums cannot wrap: the
caller ensures that the scaled supply of the whole fleet stays below `QUANTITY_MAX`, and a coverage that would not fit
stops the loop so that exact arithmetic can choose the domain. Prices are compared as they were written. Nothing here
may use fast-math, run in parallel, or allocate per row.
"""

from collections.abc import Callable
from typing import Any, Final

import numba
import numpy as np

from bigfleet.engine.columnar.arrays import (
    BoundMachines,
    FleetArrays,
    Gangs,
    Listings,
    Memo,
    Replay,
    Rows,
    Scratch,
    Work,
)

_CONFIG: Final[Any] = numba.config
#: Compiled code leaves the interpreter to others while it runs. It is cached between processes only where the process
#: named a directory (`bigfleet.cli.runtime.kernel_cache`): beside its source it would outlive a change of what it takes
#: in.
SETTINGS: Final[dict[str, Any]] = {"cache": bool(_CONFIG.CACHE_DIR), "nogil": True}
#: What makes no arrays need not count who holds those that it is given: 110 arrays of one call, counted up and down,
#: took three quarters of the time of a credit pass.
_BORROWING: Final[dict[str, Any]] = {**SETTINGS, "_nrt": False}
#: Sums of weighted shares of coverage stay below this.
COVERAGE_MAX: Final = 2**62

Kernel = Callable[..., Any]


def _array(dtype: type, dimensions: int = 1) -> np.ndarray[Any, Any]:
    return np.zeros((1,) * dimensions, dtype)


_TYPES: Final[dict[str, np.ndarray[Any, Any]]] = {
    "Int32s": _array(np.int32),
    "Int64s": _array(np.int64),
    "Bytes": _array(np.uint8),
    "Floats": _array(np.float64),
}
#: Fields with two dimensions; all others have one.
_TABLES: Final = frozenset(
    {
        *("supply", "speculative", "fits", "domain_of", "aggregate", "weight", "total", "credit", "own"),
        *("remaining", "cursor_speculative"),
        *("totals", "requests", "is_allowed", "rooms", "least"),
    }
)


def typeof(group: type) -> Any:
    """Return the compiler's type of a group of arrays, of the very kinds that its fields declare."""
    import bigfleet.engine.columnar.arrays as declared

    kinds = {getattr(declared, name): array for name, array in _TYPES.items()}
    fields = {}
    for name, kind in group.__annotations__.items():
        array = kinds[kind]
        fields[name] = array.reshape(1, 1) if name in _TABLES else array
    return numba.typeof(group(**fields))  # type: ignore[no-untyped-call]


FLEET_T, BOUND_T, ROWS_T, LISTINGS_T = (typeof(group) for group in (FleetArrays, BoundMachines, Rows, Listings))
GANGS_T, MEMO_T, WORK_T, SCRATCH_T, REPLAY_T = (typeof(group) for group in (Gangs, Memo, Work, Scratch, Replay))
I4_T, I8_T, U1_T, F8_T = (numba.typeof(array) for array in _TYPES.values())  # type: ignore[no-untyped-call]
I8X_T, I4X_T, U1X_T, F8X_T = (
    numba.typeof(_array(dtype, 2))  # type: ignore[no-untyped-call]
    for dtype in (np.int64, np.int32, np.uint8, np.float64)
)
INT: Final = numba.int64
BOOL: Final = numba.boolean


def kernel(signature: Any) -> Callable[[Kernel], Kernel]:
    """Compile a function that makes no arrays, for one signature, or for each of a list."""
    compiled: Callable[[Kernel], Kernel] = numba.njit(signature, **_BORROWING)
    return compiled


def allocating(signature: Any) -> Callable[[Kernel], Kernel]:
    """Compile a function that makes arrays of its own."""
    compiled: Callable[[Kernel], Kernel] = numba.njit(signature, **SETTINGS)
    return compiled


def inlined(function: Kernel) -> Kernel:
    """Inline a function into the kernels that call it; without a signature Numba compiles no copy of its own.

    A call would pass every array of its groups by value, which costs too much in a loop over machines.
    """
    dispatcher: Kernel = numba.njit(inline="always", **_BORROWING)(function)
    return dispatcher


@inlined
def subtract(fleet, work, row, supply):
    """Take a supply off what the row still wants."""
    want = work.want[row]
    for d in range(fleet.supply.shape[1]):
        left = work.remaining[row, d]
        if left > 0 and fleet.supply[supply, d] > 0:
            left = max(0, left - fleet.supply[supply, d])
            work.remaining[row, d] = left
            if left == 0:
                want &= ~(np.int64(1) << d)
    work.want[row] = want


@kernel(INT(FLEET_T, WORK_T, INT, INT))
def harmless_claims(fleet, work, row, supply):
    """Return how many machines of a supply the row can take before a dimension is met: until then nothing else changes.

    Machines come in long runs of one supply, and a count is cheaper than a vector.
    """
    most = np.int64(-1)
    for d in range(fleet.supply.shape[1]):
        left, step = work.remaining[row, d], fleet.supply[supply, d]
        if left > 0 and step > 0:
            times = (left - 1) // step
            if most < 0 or times < most:
                most = times
    return max(most, 0)


@kernel(numba.void(FLEET_T, WORK_T, INT, INT, INT))
def subtract_times(fleet, work, row, supply, times):
    """Take a number of harmless claims off what the row still wants."""
    for d in range(fleet.supply.shape[1]):
        if work.remaining[row, d] > 0:
            work.remaining[row, d] -= fleet.supply[supply, d] * times


@kernel([INT(ordered, INT, INT, INT) for ordered in (I4_T, I8_T)])
def first_at_least(ordered, start, stop, wanted):
    """Return the first place in an ascending stretch whose value is not below the wanted one."""
    while start < stop:
        middle = (start + stop) // 2
        if ordered[middle] < wanted:
            start = middle + 1
        else:
            stop = middle
    return start
