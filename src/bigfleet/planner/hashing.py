"""Supplies permutations and tie-breaks from a hash, so that equal problems are simulated alike in every process."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

_GOLDEN: Final = 0x9E3779B97F4A7C15
_FIRST: Final = 0xBF58476D1CE4E5B9
_SECOND: Final = 0x94D049BB133111EB
_MASK: Final = (1 << 64) - 1
_ORDER_STRIDE: Final = 1 << 32


def mix(value: int) -> int:
    """Return the splitmix64 hash of a non-negative integer."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def mix_all(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return `mix` of each value."""
    mixed = values + np.uint64(_GOLDEN)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_FIRST)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SECOND)
    return mixed ^ (mixed >> np.uint64(31))


@lru_cache(maxsize=256)
def queue_ranks(pods: int, order: int) -> NDArray[np.uint64]:
    """Return a sort key for each pod, read-only: a permutation that differs from order to order."""
    values: NDArray[np.uint64] = ranks_of_orders(pods, (order,))[0]
    values.setflags(write=False)
    return values


def ranks_of_orders(pods: int, orders: Sequence[int]) -> NDArray[np.uint64]:
    """Return `queue_ranks` of each order, (O, pods)."""
    # One call for all orders: with few pods numpy's calls take longer than the hashes.
    offsets = (np.array(orders, np.uint64) + np.uint64(1)) * np.uint64(_ORDER_STRIDE)
    return mix_all(np.arange(pods, dtype=np.uint64)[None, :] + offsets[:, None])


@lru_cache(maxsize=64)
def noise(length: int, below: int) -> NDArray[np.int64]:
    """Return so many hashes below a power of two, read-only."""
    values = (mix_all(np.arange(length, dtype=np.uint64)) & np.uint64(below - 1)).astype(np.int64)
    values.setflags(write=False)
    return values


class Picks:
    """A sequence of hash values: the planner's choices where a sample of many is taken."""

    __slots__ = ("_state",)

    def __init__(self, seed: int) -> None:
        """Start the sequence of a seed."""
        self._state = seed

    def below(self, bound: int) -> int:
        """Return the next value from 0 to bound - 1."""
        self._state += 1
        return (mix(self._state) >> 11) % bound
