"""Chooses the next machine to acquire: the one with the lowest marginal cost for the pods that it hosts.

The value of a machine is the sum of the reference prices of the pods that it would host: the cheapest price at which
any offer hosts one such pod. Equal ratios are decided by what the machine leaves unused (opportunity), then by id.
"""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from bigfleet.engine.shapes.hosting import fitting
from bigfleet.engine.shapes.state import OfferState, PodGroup, Request, Room, RowState, dominant_share
from bigfleet.model.states import CapacityType, MachineState

#: Idle machines of these types would be released otherwise, so they cost what they cost; all others are paid for
#: anyway.
RELEASABLE: Final = frozenset({CapacityType.ON_DEMAND, CapacityType.SPOT})


class Share(NamedTuple):
    """What a row without shapes would take of a machine."""

    row: RowState
    amounts: Mapping[int, int]


@dataclass(slots=True)
class Fill:
    """What an empty machine would host."""

    pods: list[tuple[PodGroup, int]] = field(default_factory=list)
    shares: list[Share] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Return whether the machine would host nothing."""
        return not (self.pods or self.shares)


def is_paid_for(offer: OfferState) -> bool:
    """Return whether the offer's machines cost the same whether they are used or not."""
    return offer.state is MachineState.IDLE and offer.example.capacity_type not in RELEASABLE


@dataclass(frozen=True, slots=True)
class WantedPods:
    """What a row would place on a machine."""

    row: RowState
    #: Groups with the most pods of each that one machine may take; those of which there are none are left out.
    groups: Sequence[tuple[PodGroup, int]]


def wanted_of(rows: Iterable[RowState], left: Mapping[PodGroup, int]) -> list[WantedPods]:
    """Return what the rows would place, in their order; `left` overrides how many pods of a group have no place."""
    found = []
    for row in rows:
        groups = []
        for group in row.groups:
            most = left.get(group, group.left)
            if group.limit:
                most = min(most, group.limit)
            if most > 0:
                groups.append((group, most))
        if groups or row.divisible:
            found.append(WantedPods(row, groups))
    return found


def fill_of(offer: OfferState, total: Room, wanted: Iterable[WantedPods]) -> Fill:
    """Return what one machine of the offer would host of what is wanted, in this order."""
    room, fill = list(total), Fill()
    for each in wanted:
        row = each.row
        if not row.may_use(offer.example, offer.shape):
            continue
        if row.divisible:
            if fitting(room, row.unit, 1):
                taken = {d: min(room[d], milli) for d, milli in row.divisible.items() if room[d] > 0}
                if taken:
                    fill.shares.append(Share(row, taken))
                    for d, milli in taken.items():
                        room[d] -= milli
            continue
        for group, most in each.groups:
            d, milli = group.request[0]
            # A machine that is nearly full has room for none of the hundreds of groups that follow.
            count = fitting(room, group.request, most) if room[d] >= milli else 0
            if count:
                fill.pods.append((group, count))
                for d, milli in group.request:
                    room[d] -= milli * count
    return fill


def largest_fraction(request: Request, count: int, total: Room, pods: int) -> float:
    """Return the largest share of the machine's supply that the pods take, over the dimensions but `pods`."""
    return max((float(milli * count) / float(total[d]) for d, milli in request if d != pods and total[d]), default=0.0)


def running_cost(offer: OfferState, total: Room, fill: Fill, pods: int) -> float:
    """Return price + probability × Σ share × penalty over what the machine would host, dollars an hour."""
    machine = offer.example
    cost = 0.0 if is_paid_for(offer) else machine.price_usd_per_hour
    if machine.interruption_probability == 0:
        return cost
    weighted = 0.0
    for group, count in fill.pods:
        weighted += largest_fraction(group.request, count, total, pods) * group.row.penalty_dollars
    for share in fill.shares:
        amounts = tuple(share.amounts.items())
        weighted += largest_fraction(amounts, 1, total, pods) * share.row.penalty_dollars
    return cost + machine.interruption_probability * weighted


class PodPrices:
    """The cheapest price at which any of some offers hosts one pod, dollars an hour; each is computed once."""

    def __init__(self, offers: Sequence[OfferState], totals: Mapping[int, Room], pods: int) -> None:
        """Compute nothing yet; where an offer is free of charge, the dearest price stands for its own."""
        self.offers = offers
        self._totals, self._pods = totals, pods
        self.dearest = max((offer.example.price_usd_per_hour for offer in offers), default=0.0) or 1.0
        self._known: dict[tuple[Request, frozenset[int], bool], float] = {}

    def of_group(self, group: PodGroup) -> float:
        """Return the price of one pod of the group; 0 where no offer hosts one."""
        row = group.row
        key = (group.request, row.matching, row.is_pinned)
        price = self._known.get(key)
        if price is None:
            prices = (
                self._price(offer) * dominant_share(group.request, self._totals[offer.shape], self._pods)
                for offer in self.offers
                if row.may_use(offer.example, offer.shape) and fitting(self._totals[offer.shape], group.request, 1)
            )
            price = self._known[key] = min(prices, default=0.0)
        return price

    def of_divisible(self, row: RowState) -> float:
        """Return the price of everything that a row without shapes has left; 1.0 where no offer has all of it."""
        wanted = tuple((row.divisible or {}).items())
        prices = (
            self._price(offer) * dominant_share(wanted, self._totals[offer.shape], self._pods)
            for offer in self.offers
            if row.may_use(offer.example, offer.shape)
        )
        return min((price for price in prices if math.isfinite(price)), default=1.0)

    def _price(self, offer: OfferState) -> float:
        return offer.example.price_usd_per_hour or self.dearest


@dataclass(slots=True, kw_only=True)
class Prices:
    """Reference prices of one cluster's unplaced demand."""

    pods: int
    of_pods: PodPrices
    of_row: dict[RowState, float]
    #: What is free of each dimension in all offers; weighs what a machine leaves unused.
    free: Sequence[int]

    def value(self, fill: Fill) -> float:
        """Return the value of what a machine would host, in the order of the fill."""
        value = 0.0
        for group, count in fill.pods:
            value += count * self.of_pods.of_group(group)
        for share in fill.shares:
            wanted = share.row.divisible or {}
            covered = sum(float(share.amounts.get(d, 0)) / float(milli) for d, milli in wanted.items())
            value += self.of_row[share.row] * covered / len(wanted)
        return value


def reference_prices(rows: Sequence[RowState], of_pods: PodPrices, free: Sequence[int], pods: int) -> Prices:
    """Return the reference prices of what the rows have left."""
    of_row = {row: of_pods.of_divisible(row) for row in rows if row.divisible}
    return Prices(pods=pods, of_pods=of_pods, of_row=of_row, free=free)


class OfferChoice(NamedTuple):
    """The offer that was chosen, what its machine would host, and how it compares."""

    offer: OfferState
    fill: Fill
    #: Marginal cost ÷ value; the runner-up's as well, infinite when there is none.
    ratio: float
    value: float
    #: The lowest id of the runner-up, "" for none.
    runner_up: str
    runner_up_ratio: float

    @property
    def cost_usd_per_hour(self) -> float:
        """Return the marginal cost of the machine."""
        return self.ratio * self.value

    @property
    def runner_up_costs_more_usd_per_hour(self) -> float:
        """Return what the runner-up costs more for the same value; infinite without one."""
        return math.inf if self.runner_up_ratio == math.inf else (self.runner_up_ratio - self.ratio) * self.value


#: Sort key of offers that are alike; the lowest id decides between them.
RankKey = tuple[float, float, float, float, float, bool]


def rank(offer: OfferState, total: Room, fill: Fill, prices: Prices, head_start: float) -> RankKey:
    """Return the sort key of an offer but for its lowest id, which comes last; the least is chosen.

    Marginal cost ÷ value; unused supply in dimensions that nothing of the fill wants, weighted by scarcity; more value
    first; unused supply in the wanted dimensions; price; Idle before Speculative; the lowest id.
    """
    value = prices.value(fill)
    cost = running_cost(offer, total, fill, prices.pods)
    if offer.state is MachineState.IDLE and cost > 0:
        cost = cost / head_start
    ratio = cost / value if value > 0 else (0.0 if cost == 0 else math.inf)
    used: dict[int, int] = {}
    for group, count in fill.pods:
        for d, milli in group.request:
            used[d] = used.get(d, 0) + milli * count
    for share in fill.shares:
        for d, milli in share.amounts.items():
            used[d] = used.get(d, 0) + milli
    unwanted = spare = 0.0
    for d in range(len(total)):
        if d == prices.pods or not prices.free[d]:
            continue
        if d not in used:
            unwanted += float(total[d]) / float(prices.free[d])
        else:
            spare += float(total[d] - used[d]) / float(prices.free[d])
    is_speculative = offer.state is MachineState.SPECULATIVE
    return (ratio, unwanted, -value, spare, offer.example.price_usd_per_hour, is_speculative)


def choose(
    row: RowState,
    others: Sequence[RowState],
    offers: Sequence[OfferState],
    totals: Mapping[int, Room],
    prices: Prices,
    *,
    left: Mapping[PodGroup, int],
    head_start: float,
) -> OfferChoice | None:
    """Return the best offer that hosts something of the row; `others` may fill what the row leaves of the machine."""
    wanted = wanted_of((row, *others), left)
    matching = list(dict.fromkeys(each.row.matching for each in wanted))
    # Offers that differ in labels alone, such as racks, are ranked once.
    known: dict[Hashable, tuple[Fill, RankKey]] = {}
    best: tuple[tuple[RankKey, str], OfferState, Fill] | None = None
    second: tuple[tuple[RankKey, str], OfferState] | None = None
    for offer in offers:
        if not offer.available or not row.may_use(offer.example, offer.shape):
            continue
        total = totals[offer.shape]
        kind = (offer.terms, tuple(total), tuple([offer.shape in shapes for shapes in matching]))
        if kind not in known:
            made = fill_of(offer, total, wanted)
            known[kind] = made, rank(offer, total, made, prices, head_start)
        fill, of_kind = known[kind]
        if second is not None and of_kind > second[0][0]:
            continue
        if not (any(g.row is row for g, _ in fill.pods) or any(s.row is row for s in fill.shares)):
            continue
        key = (of_kind, offer.peek().id)
        if best is None or key < best[0]:
            if best is not None:
                second = (best[0], best[1])
            best = (key, offer, fill)
        elif second is None or key < second[0]:
            second = (key, offer)
    if best is None:
        return None
    value = prices.value(best[2])
    if second is None:
        return OfferChoice(best[1], best[2], best[0][0][0], value, "", math.inf)
    return OfferChoice(best[1], best[2], best[0][0][0], value, second[0][1], second[0][0][0])


def repetitions(choice: OfferChoice, machines: int) -> int:
    """Return how often the choice stays the best: until some group has fewer pods left than one machine hosts.

    At most `machines`, at least 1. The choice may have no shares.
    """
    return max(1, min(machines, *(group.left // count for group, count in choice.fill.pods)))
