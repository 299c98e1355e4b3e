"""Decides which prices an exchange may rely on.

docs/spec/exchange.md §5. Wrong price data costs nothing as long as machines are only bought when pods need them. An
exchange acts because of a price, so a price that is missing, out of proportion or new is not relied on.
"""

import math
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from bigfleet.engine.decision import CapacityPool
from bigfleet.engine.shapes.choice import RELEASABLE
from bigfleet.model.machine import Machine
from bigfleet.model.states import MachineState

#: For so long a price must have been seen.
WINDOW_SECONDS: Final = 900.0
#: Of an offer the highest price of this time counts, of held machines the lowest, as far as prices were seen. For so
#: long the gate expects what comes to stay the cheaper one, so a price that moved within it is not expected to stay.
MEMORY_SECONDS: Final = 14_400.0
#: A price below this share of the dearest one of its instance type is wrong: no discount is so large.
TYPE_SHARE_MIN: Final = 1 / 20
#: The same against the median of all other types per unit of supply, for types of which one price alone is known.
MEDIAN_SHARE_MIN: Final = 1 / 50
#: With fewer other types there is no median worth the name.
OTHERS_MIN: Final = 3
_PRICE_MAX: Final = 1_000_000.0
_UNITS: Final = ("cpu", "memory")


class PriceBook(NamedTuple):
    """Prices by pool of machines, dollars an hour."""

    #: The highest price on offer.
    offered: Mapping[CapacityPool, float]
    #: The lowest price of machines that clusters hold.
    held: Mapping[CapacityPool, float]


def current_prices(machines: Iterable[Machine]) -> PriceBook:
    """Return the prices of machines as they are, those that are not a price at all left out.

    A pool of which one machine has such a price is left out: it is not known which of its prices is right.
    """
    offered: dict[CapacityPool, float] = {}
    held: dict[CapacityPool, float] = {}
    faulty: set[CapacityPool] = set()
    for machine in machines:
        pool, price = CapacityPool.of(machine), machine.price_usd_per_hour
        if not is_price(machine):
            faulty.add(pool)
        elif machine.state in (MachineState.IDLE, MachineState.SPECULATIVE):
            offered[pool] = max(price, offered.get(pool, 0.0))
        else:
            held[pool] = min(price, held.get(pool, math.inf))
    return PriceBook(
        {pool: price for pool, price in offered.items() if pool not in faulty},
        {pool: price for pool, price in held.items() if pool not in faulty},
    )


def is_price(machine: Machine) -> bool:
    """Return whether the number can be a price: finite, and above 0 for a machine that is rented by the hour."""
    price = machine.price_usd_per_hour
    if not math.isfinite(price) or not 0 <= price <= _PRICE_MAX:
        return False
    return price > 0 or machine.capacity_type not in RELEASABLE


@dataclass(frozen=True, slots=True)
class _Sample:
    at_seconds: float
    prices: PriceBook


@dataclass(slots=True)
class _Extremes:
    """The highest offered and the lowest held price of each pool, in a stretch of one window."""

    since_seconds: float
    last_seconds: float
    offered: dict[CapacityPool, float]
    held: dict[CapacityPool, float]

    def add(self, now_seconds: float, prices: PriceBook) -> None:
        self.last_seconds = now_seconds
        for pool, price in prices.offered.items():
            self.offered[pool] = max(price, self.offered.get(pool, price))
        for pool, price in prices.held.items():
            self.held[pool] = min(price, self.held.get(pool, price))


class PriceHistory:
    """Prices of the last hours: one sample for each observation within the window, one of each window before it.

    What is on offer is observed each time; held machines of some clusters only.
    """

    def __init__(self, window_seconds: float = WINDOW_SECONDS, memory_seconds: float = MEMORY_SECONDS) -> None:
        self._window_seconds, self._memory_seconds = window_seconds, memory_seconds
        self._samples: deque[_Sample] = deque()
        #: By pool: times of the observations that had held machines of it, from the last one before the window on.
        self._held_at: defaultdict[CapacityPool, deque[float]] = defaultdict(deque)
        self._extremes: deque[_Extremes] = deque()

    def observe(self, now_seconds: float, prices: PriceBook) -> None:
        """Add the prices of now; times rise."""
        self._samples.append(_Sample(now_seconds, prices))
        # One sample from before the window stays: its prices held until the next one.
        while len(self._samples) > 1 and self._samples[1].at_seconds <= now_seconds - self._window_seconds:
            self._samples.popleft()
        for pool in prices.held:
            seen = self._held_at[pool]
            seen.append(now_seconds)
            while len(seen) > 1 and seen[1] <= now_seconds - self._window_seconds:
                seen.popleft()
        if not self._extremes or now_seconds - self._extremes[-1].since_seconds >= self._window_seconds:
            self._extremes.append(_Extremes(now_seconds, now_seconds, {}, {}))
        self._extremes[-1].add(now_seconds, prices)
        while self._extremes[0].last_seconds < now_seconds - self._memory_seconds:
            self._extremes.popleft()

    def __len__(self) -> int:
        """Return the number of samples, of the window and of the memory."""
        return len(self._samples) + len(self._extremes)

    @property
    def settled(self) -> PriceBook:
        """The highest offered and the lowest held price of the memory, and of the observation before the window.

        Of offers, pools that each observation of the window has; of held machines, pools of the last observation. A
        pool that was first seen within the window does not count.
        """
        samples = self._samples
        if not samples or samples[-1].at_seconds - samples[0].at_seconds < self._window_seconds:
            return PriceBook({}, {})
        offered = {
            pool: max(found.offered[pool] for found in self._extremes if pool in found.offered)
            for pool in samples[-1].prices.offered
            if all(pool in sample.prices.offered for sample in samples)
        }
        earliest_seconds = samples[-1].at_seconds - self._window_seconds
        held = {
            pool: min(found.held[pool] for found in self._extremes if pool in found.held)
            for pool in samples[-1].prices.held
            if self._held_at[pool][0] <= earliest_seconds
        }
        return PriceBook(offered, held)


def proportionate(prices: PriceBook, machines: Iterable[Machine]) -> PriceBook:
    """Return the prices without offers that are out of proportion; `machines` has one or more of each pool."""
    supply: dict[str, Mapping[str, int]] = {}
    for machine in machines:
        supply.setdefault(machine.instance_type, machine.supply)
    by_type: defaultdict[str, list[float]] = defaultdict(list)
    for book in prices:
        for pool, price in book.items():
            if pool.capacity_type in RELEASABLE:
                by_type[pool.instance_type].append(price)
    dearest = {name: max(found) for name, found in by_type.items()}
    units = {name: per_unit(price, supply.get(name, {})) for name, price in dearest.items()}
    known = sorted(unit for unit in units.values() if unit is not None)
    offered = {}
    for pool, price in prices.offered.items():
        if pool.capacity_type in RELEASABLE:
            if price < TYPE_SHARE_MIN * dearest[pool.instance_type]:
                continue
            own = per_unit(price, supply.get(pool.instance_type, {}))
            of_others = _median_without(known, units[pool.instance_type])
            if own is not None and of_others is not None and own < MEDIAN_SHARE_MIN * of_others:
                continue
        offered[pool] = price
    return PriceBook(offered, prices.held)


def _median_without(ascending: Sequence[float], one: float | None) -> float | None:
    """Return the median of the numbers but one of them; None for too few others."""
    left = len(ascending) - (one is not None)
    if left < OTHERS_MIN:
        return None
    gap = len(ascending) if one is None else bisect_left(ascending, one)
    low, high = (place + (place >= gap) for place in ((left - 1) // 2, left // 2))
    return (ascending[low] + ascending[high]) / 2


def per_unit(price: float, supply: Mapping[str, int]) -> float | None:
    """Return the price of one cpu and what usually comes with it; None for a machine without cpu and memory."""
    cores = [
        supply[name] / scale
        for name, scale in zip(_UNITS, (1000.0, 4.0 * 2**30 * 1000), strict=True)
        if supply.get(name)
    ]
    return price / max(cores) if cores else None
