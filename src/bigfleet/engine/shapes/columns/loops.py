"""Declares the compiled loops that a decision over pods may use.

`bigfleet.engine.columnar.kernels.pod_credit` has them.
"""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from bigfleet.engine.columnar.arrays import PodGroups, PodHosts, PodPlaces

_Int64s = npt.NDArray[np.int64]
_Int32s = npt.NDArray[np.int32]


class PodLoops(Protocol):
    """Loops over machines and pods; arrays are contiguous, and of the very types that the loops were compiled for."""

    def number_kinds(self, *columns: npt.NDArray[Any]) -> _Int64s:
        """Number what machines have in common but for their ids; return the first place of each number."""
        ...

    def in_rank_order(self, *columns: npt.NDArray[Any]) -> tuple[_Int64s, _Int32s]:
        """Return rows in the order of their ranks, and the kind of each."""
        ...

    def place_pods(self, hosts: PodHosts, groups: PodGroups, places: PodPlaces, /) -> tuple[_Int32s, _Int64s]:
        """Place groups of pods by first fit; return host and pods of each claim, by group."""
        ...

    def arrange_groups(self, *columns: npt.NDArray[Any]) -> int:
        """Write the groups of rows in the order in which they are placed; return how many there are."""
        ...
