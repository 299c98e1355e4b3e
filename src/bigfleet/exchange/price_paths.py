"""Remembers the prices of three days, and judges by them for how long an exchange would stay the cheaper choice.

docs/spec/exchange.md §5.1. Of two machines now one and now the other may be cheaper. They are exchanged four hours
after a turn of their prices at the earliest. If prices turn again soon, the cluster pays the dearer one most of the
time. What prices did after earlier turns says whether that is to be expected. This module must not read a
clock or act.
"""

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

from bigfleet.engine.decision import CapacityPool
from bigfleet.engine.shapes.choice import RELEASABLE
from bigfleet.exchange.plausibility import MEMORY_SECONDS, WINDOW_SECONDS, PriceBook
from bigfleet.exchange.values import ClusterExchanges, ExchangeProposal, MachineKind, WaitReason, total_usd

#: For so long prices are remembered: more than two turns of prices that follow the day.
PATH_SECONDS: Final = 3 * 24 * 3600.0
#: After an exchange: the hours for which what came is expected to stay the cheaper one, and those until a turn counts.
OUTCOME_SECONDS: Final = 2 * MEMORY_SECONDS
#: The same in stretches of a window: a turn is a sign that lasted from one end of the memory to the other.
_TURN: Final = int(MEMORY_SECONDS / WINDOW_SECONDS) + 1
_OUTCOME: Final = int(OUTCOME_SECONDS / WINDOW_SECONDS)
_PATH: Final = int(PATH_SECONDS / WINDOW_SECONDS)
#: What a proposal may wait for that is judged: nothing, the gate, and what is asked after the gate.
_JUDGED: Final = (None, WaitReason.DOES_NOT_PAY, WaitReason.NO_STOCK, WaitReason.FORECAST, WaitReason.WOULD_NOT_FIT)

#: Machines that are rented, by pool.
Rented = Mapping[CapacityPool, int]


@dataclass(slots=True)
class _Path:
    """The prices of one pool: the stretches in which it had another price than before, ascending."""

    seen: int = 0
    stretches: "array[int]" = field(default_factory=lambda: array("q"))
    prices: "array[float]" = field(default_factory=lambda: array("d"))

    def add(self, stretch: int, price: float) -> None:
        self.seen = stretch
        if not self.prices or self.prices[-1] != price:
            self.stretches.append(stretch)
            self.prices.append(price)
        # One price from before the first stretch that is remembered stays: it held until the next one.
        old = bisect_right(self.stretches, stretch - _PATH) - 1
        if old > 0:
            del self.stretches[:old], self.prices[:old]

    def at(self, stretch: int) -> float:
        """Return the price of a stretch that is not before the first one."""
        return self.prices[bisect_right(self.stretches, stretch) - 1]


class PricePaths:
    """The prices of pools in the last days, one of each quarter of an hour."""

    def __init__(self) -> None:
        self._paths: dict[CapacityPool, _Path] = {}
        self._stretch = 0

    def observe(self, now_seconds: float, prices: PriceBook) -> None:
        """Add the prices of now; times rise. A pool on offer counts with its offer, another one with what is held."""
        self._stretch = int(now_seconds // WINDOW_SECONDS)
        for pool, price in {**prices.held, **prices.offered}.items():
            path = self._paths.setdefault(pool, _Path())
            if path.seen < self._stretch or not path.prices:
                path.add(self._stretch, price)
        if any(path.seen < self._stretch - _PATH for path in self._paths.values()):
            self._paths = {pool: path for pool, path in self._paths.items() if path.seen >= self._stretch - _PATH}

    def lasting_share(self, goes: Rented, comes: Rented, *, fraction_min: float, extra_usd_per_hour: float) -> float:
        """Return the share of the expected hold for which what comes may be expected to stay the cheaper choice.

        One is cheaper than the other where it saves at least a fraction of the dearer one, with `extra_usd_per_hour`
        for what comes. 1 where the past says nothing.
        """
        signs = []
        for goes_usd, comes_usd in self._sums(goes, comes, self._stretch - _PATH):
            saving = goes_usd - comes_usd + extra_usd_per_hour
            is_clear = abs(saving) >= fraction_min * max(goes_usd, comes_usd)
            signs.append((saving > 0) - (saving < 0) if is_clear else 0)
        return share_of(signs)

    def mean_change_usd_per_hour(self, goes: Rented, comes: Rented, since_seconds: float) -> float | None:
        """Return by how much the saving of an exchange differed from that at a time since then; None if not known."""
        since = int(since_seconds // WINDOW_SECONDS)
        sums = self._sums(goes, comes, since)
        if len(sums) != self._stretch - since + 1:
            return None
        savings = [goes_usd - comes_usd for goes_usd, comes_usd in sums]
        return total_usd(savings) / len(savings) - savings[0]

    def _sums(self, goes: Rented, comes: Rented, first: int) -> list[tuple[float, float]]:
        """Return what goes and what comes cost in each stretch from the first one to now in which all are known."""
        paths = {pool: self._paths.get(pool) for pool in (*goes, *comes)}
        known = {pool: path for pool, path in paths.items() if path is not None}
        if len(known) < len(paths):
            return []
        first = max(first, *(path.stretches[0] for path in known.values())) if known else first
        return [
            (
                sum(known[pool].at(stretch) * count for pool, count in goes.items()),
                sum(known[pool].at(stretch) * count for pool, count in comes.items()),
            )
            for stretch in range(first, self._stretch + 1)
        ]


def share_of(signs: Sequence[int]) -> float:
    """Return the mean outcome after earlier turns, as a share of the hours that follow an exchange.

    `signs` has one of each stretch: 1 where what comes is cheaper, -1 where what goes is, 0 where neither is. At a
    turn one of them has been cheaper for so long that its price counts; before, the other one was.

    The outcome of a turn is the share of hours in which that one was cheaper, less those in which the other one was.
    The hours begin as long after each turn as the last turn is ago. A turn after which the other one was cheaper by
    then says nothing; if none is left, the present one must have been cheaper for four hours longer than each before.
    """
    turns: list[tuple[int, int]] = []
    run = before = 0
    for place, sign in enumerate(signs):
        run = run + 1 if sign == before else 1
        before = sign
        if sign and run >= _TURN and (not turns or turns[-1][1] != sign):
            turns.append((place, sign))
    if turns and turns[-1][1] < 0:
        turns.append((len(signs) - 1, 1))  # a moment before it counts as one
    if len(turns) < 2:
        return 1.0
    age = len(signs) - 1 - turns[-1][0]
    earlier = [(place, until - place, sign) for (place, sign), (until, _) in pairwise(turns)]
    longest = max(lasted for _, lasted, _ in earlier)
    outcomes = [
        sign * each
        for place, lasted, sign in earlier
        if lasted > age and signs[place + age] != -sign
        for each in signs[place + age + 1 : place + age + 1 + _OUTCOME]
    ]
    if not outcomes:
        return 1.0 if age >= longest else 0.0
    return max(0.0, sum(outcomes) / len(outcomes))


def rented_by_pool(kinds: Iterable[tuple[MachineKind, int]]) -> Counter[CapacityPool]:
    """Return how many rented machines of each pool these are."""
    found: Counter[CapacityPool] = Counter()
    for kind, count in kinds:
        if kind.key.capacity_type in RELEASABLE:
            found[CapacityPool(kind.key.instance_type, kind.key.zone, kind.key.capacity_type)] += count
    return found


def judged(proposal: ExchangeProposal, paths: PricePaths) -> ExchangeProposal:
    """Return a proposal with the hold that earlier prices let expect, and with what it waits for then.

    Only proposals that would pay otherwise are judged. Of a move what goes is what the taker rents.
    """
    if proposal.waits_for not in _JUDGED:
        return proposal
    settings, part = proposal.gate.settings, proposal.taker_part
    share = paths.lasting_share(
        rented_by_pool(proposal.goes if part is None else part.goes),
        rented_by_pool(proposal.comes),
        fraction_min=settings.saving_fraction_min,
        extra_usd_per_hour=proposal.gate.interruptions_saved_usd_per_hour,
    )
    gate = replace(proposal.gate, lasting_share=share)
    waits_for = None if proposal.waits_for is WaitReason.DOES_NOT_PAY else proposal.waits_for
    return replace(proposal, gate=gate, waits_for=gate.wait_reason or waits_for)


def all_judged(exchanges: ClusterExchanges, paths: PricePaths) -> ClusterExchanges:
    """Return the exchanges of a cluster, judged; the same object if nothing differs."""
    proposals = tuple(judged(each, paths) for each in exchanges.proposals)
    return exchanges if proposals == exchanges.proposals else replace(exchanges, proposals=proposals)
