"""Chooses the next machine to acquire: the least marginal cost for what it hosts.

The value of a machine is the sum of the reference prices of the pods that it would host: the cheapest price at which
any offer hosts one such pod. Equal ratios are decided by what the machine leaves unused (opportunity), then by id.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from bigfleet.engine.shapes.hosting import fitting
from bigfleet.engine.shapes.state import Offer, PodGroup, Request, Room, Row, dominant_share
from bigfleet.model.states import CapacityType, MachineState

#: Idle machines of these types would be released otherwise, so they cost what they cost; all others are paid for
#: anyway.
RELEASABLE: Final = frozenset({CapacityType.ON_DEMAND, CapacityType.SPOT})


class Share(NamedTuple):
    """What a row without shapes would take of a machine."""

    row: Row
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


def is_paid_for(offer: Offer) -> bool:
    """Return whether the offer's machines cost the same whether they are used or not."""
    return offer.state is MachineState.IDLE and offer.example.capacity_type not in RELEASABLE


def fill_of(offer: Offer, total: Room, rows: Sequence[Row], left: Mapping[PodGroup, int]) -> Fill:
    """Return what one machine of the offer would host of the rows, in their order; `left` overrides groups' counts."""
    room, fill = list(total), Fill()
    for row in rows:
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
        for group in row.groups:
            most = left.get(group, group.left)
            if group.limit:
                most = min(most, group.limit)
            count = fitting(room, group.request, most) if most > 0 else 0
            if count:
                fill.pods.append((group, count))
                for d, milli in group.request:
                    room[d] -= milli * count
    return fill


def largest_fraction(request: Request, count: int, total: Room, pods: int) -> float:
    """Return the largest share of the machine's supply that the pods take, over the dimensions but `pods`."""
    return max((float(milli * count) / float(total[d]) for d, milli in request if d != pods and total[d]), default=0.0)


def running_cost(offer: Offer, total: Room, fill: Fill, pods: int) -> float:
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


@dataclass(slots=True, kw_only=True)
class Prices:
    """Reference prices of one cluster's unplaced demand."""

    pods: int
    of_group: dict[PodGroup, float]
    of_row: dict[Row, float]
    #: What is free of each dimension in all offers; weighs what a machine leaves unused.
    free: Sequence[int]

    def value(self, fill: Fill) -> float:
        """Return the value of what a machine would host, in the order of the fill."""
        value = 0.0
        for group, count in fill.pods:
            value += count * self.of_group[group]
        for share in fill.shares:
            wanted = share.row.divisible or {}
            covered = sum(float(share.amounts.get(d, 0)) / float(milli) for d, milli in wanted.items())
            value += self.of_row[share.row] * covered / len(wanted)
        return value


def reference_prices(
    rows: Sequence[Row], offers: Sequence[Offer], totals: Mapping[int, Room], free: Sequence[int], pods: int
) -> Prices:
    """Return the reference prices of what the rows have left; 1.0 × share where every offer is free of charge."""
    costs = {id(o): o.example.price_usd_per_hour for o in offers}
    dearest = max(costs.values(), default=0.0) or 1.0
    of_group: dict[PodGroup, float] = {}
    of_row: dict[Row, float] = {}
    for row in rows:
        usable = [o for o in offers if row.may_use(o.example, o.shape)]
        for group in row.groups:
            of_group[group] = min(
                (
                    (costs[id(o)] or dearest) * dominant_share(group.request, totals[o.shape], pods)
                    for o in usable
                    if fitting(totals[o.shape], group.request, 1)
                ),
                default=0.0,
            )
        if row.divisible:
            wanted = tuple(row.divisible.items())
            prices = ((costs[id(o)] or dearest) * dominant_share(wanted, totals[o.shape], pods) for o in usable)
            of_row[row] = min((price for price in prices if math.isfinite(price)), default=1.0)
    return Prices(pods=pods, of_group=of_group, of_row=of_row, free=free)


class Choice(NamedTuple):
    """The offer that was chosen, what its machine would host, and how it compares."""

    offer: Offer
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


RankKey = tuple[float, float, float, float, float, bool, str]


def rank(offer: Offer, total: Room, fill: Fill, prices: Prices, head_start: float) -> RankKey:
    """Return the sort key of an offer; the least is chosen.

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
    machine = offer.peek()
    is_speculative = offer.state is MachineState.SPECULATIVE
    return (ratio, unwanted, -value, spare, machine.price_usd_per_hour, is_speculative, machine.id)


def choose(
    row: Row,
    others: Sequence[Row],
    offers: Sequence[Offer],
    totals: Mapping[int, Room],
    prices: Prices,
    *,
    left: Mapping[PodGroup, int],
    head_start: float,
) -> Choice | None:
    """Return the best offer that hosts something of the row; `others` may fill what the row leaves of the machine."""
    best: tuple[RankKey, Offer, Fill] | None = None
    second: tuple[RankKey, Offer] | None = None
    for offer in offers:
        if not offer.available or not row.may_use(offer.example, offer.shape):
            continue
        total = totals[offer.shape]
        fill = fill_of(offer, total, (row, *others), left)
        if not (any(g.row is row for g, _ in fill.pods) or any(s.row is row for s in fill.shares)):
            continue
        key = rank(offer, total, fill, prices, head_start)
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
        return Choice(best[1], best[2], best[0][0], value, "", math.inf)
    other = second[1]
    return Choice(best[1], best[2], best[0][0], value, other.peek().id, second[0][0])
