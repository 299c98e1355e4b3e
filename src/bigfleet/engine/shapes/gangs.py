"""Chooses the one domain of a gang (a row with a Same requirement) and claims what the gang holds there.

A domain is judged by how many of the gang's pods fit: on what the cluster holds, on the gang's own machines, and on
what could be acquired. A gang never takes a machine outside its domain.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import NamedTuple

from bigfleet.engine.shapes.choice import Prices, choose, repetitions
from bigfleet.engine.shapes.fleet import DecisionState
from bigfleet.engine.shapes.held_gangs import (
    covered,
    held_domains,
    index_of,
    least_room,
    own_first,
    own_machines,
    place_whole,
    wanted,
)
from bigfleet.engine.shapes.hosting import clear_row, place_first_fit
from bigfleet.engine.shapes.state import DomainVerdict, HostIndex, HostState, LeastRoom, OfferState, RowState
from bigfleet.model.machine import Machine


class DomainRank(NamedTuple):
    """Sort key of a domain: the least is chosen."""

    is_unsatisfiable: bool
    #: Share of the gang that the domain could host, negative; 0 when it can host the whole gang.
    lacking: Fraction
    #: Shares of the gang on what the cluster holds and on the gang's own machines, negative.
    held: Fraction
    own: Fraction
    #: Whether the target composition has the gang elsewhere.
    is_off_target: bool
    #: What the machines to acquire cost, dollars an hour.
    cost: float
    value: str


@dataclass(slots=True, kw_only=True)
class GangDomain:
    """What one domain offers a gang."""

    value: str
    rank: DomainRank
    #: Machines that the gang would acquire, by offer.
    wanted: list[tuple[OfferState, int]] = field(default_factory=list)


def credit_gang(row: RowState, fleet: DecisionState, *, is_remembered: bool = True) -> None:
    """Choose the row's domain, claim room there on the gang's own machines first, and earmark what it will acquire.

    With `is_remembered`, what domains offer is looked up, and stored for others.
    """
    index = index_of(row.cluster, fleet.options.leaving)
    planned = _planned_domains(row, fleet)
    held = place_whole(row, index, planned)
    if held is not None:
        row.domain, row.matching = held, _in_domain(row, fleet, held)
        row.is_satisfiable = not row.impossible
        return
    best = _best_domain(row, fleet, index, planned, is_remembered=is_remembered)
    if best is None:
        row.is_satisfiable = row.is_held = False
        row.matching = frozenset()
        return
    row.domain = best.value
    row.is_satisfiable = not best.rank.is_unsatisfiable and not row.impossible
    row.is_held = best.rank.held == -1 and row.has_left
    row.matching = _in_domain(row, fleet, best.value)
    place_first_fit(row, own_first(row, index, frozenset(own_machines(row, index))))
    for offer, count in best.wanted:
        offer.earmarked += count


def choose_again(row: RowState, fleet: DecisionState) -> None:
    """Choose the domain of a gang that claims nothing by what is left now, and claim its room there.

    The answers of earlier choices are of no use: machines of the offers are gone.
    """
    cluster = row.cluster
    cluster.index, row.domain, row.is_satisfiable = None, None, True
    row.matching = fleet.machines.matching(row.need.profile)
    credit_gang(row, fleet, is_remembered=False)
    cluster.index = None
    for offer in fleet.offers:
        offer.earmarked = 0


def _in_domain(row: RowState, fleet: DecisionState, value: str) -> frozenset[int]:
    key = row.same_key
    assert key is not None, "only a gang has a domain"
    return fleet.in_domains(row, key).get(value, frozenset())


def _best_domain(
    row: RowState, fleet: DecisionState, index: HostIndex, planned: Set[str | None], *, is_remembered: bool
) -> GangDomain | None:
    """Return the domain of least rank among those in which something could host a part of the gang.

    No domain hosts the whole gang on what the cluster holds, or the gang has no pods.
    """
    key = row.same_key
    assert key is not None, "only a gang has domains"
    held = held_domains(row, index)
    is_stuck = row.need.parked or bool(row.impossible)
    offers = {} if is_stuck else fleet.usable_in_domains(row, key)
    free = [value for value, found in offers.items() if value not in held and any(_unclaimed(o) > 0 for o in found)]
    gang = _gang(row, fleet, index)
    coming = () if is_stuck else fleet.coming(row)
    if coming or not is_remembered:
        gang = gang._replace(kind=None, coming=coming)
    drained = [value for machine in coming if (value := machine.attribute(key)) is not None]
    judged = _judged(gang, dict.fromkeys((*held, *free, *drained)), offers, planned, fleet, index)
    return min(judged, key=lambda domain: domain.rank, default=None)


def _judged(
    gang: "_Gang",
    values: Iterable[str],
    offers: Mapping[str, Sequence[OfferState]],
    planned: Set[str | None],
    fleet: DecisionState,
    index: HostIndex,
) -> Iterator[GangDomain]:
    """Yield those of some domains in which something could host a part of the gang."""
    row, everywhere = gang.row, gang.row.matching
    key = row.same_key
    assert key is not None, "only a gang has domains"
    shapes = fleet.in_domains(row, key)
    for value in values:
        row.matching, found = shapes.get(value, frozenset()), offers.get(value, ())
        verdict = _verdict(gang, fleet, found, index)
        row.matching = everywhere
        if verdict is not None and verdict.hosts_something:
            yield _ranked(value, verdict, found, is_off_target=value not in planned)


def _unclaimed(offer: OfferState) -> int:
    return offer.available - offer.earmarked


def _ranked(value: str, verdict: DomainVerdict, offers: Sequence[OfferState], *, is_off_target: bool) -> GangDomain:
    rank = DomainRank(
        is_unsatisfiable=verdict.lacking != 0,
        lacking=verdict.lacking,
        held=verdict.held,
        own=verdict.own,
        is_off_target=is_off_target,
        cost=verdict.cost,
        value=value,
    )
    return GangDomain(value=value, rank=rank, wanted=[(offers[place], count) for place, count in verdict.wanted])


# ---- one domain --------------------------------------------------------------------------------------------------


class _Gang(NamedTuple):
    """A row with what its verdicts depend on in every domain."""

    row: RowState
    prices: Prices
    #: What the choice among offers depends on beside them.
    weights: tuple[float, ...]
    #: What the gang wants; None where nothing is remembered.
    kind: Hashable
    #: A room that every host of a pod of the gang has at least.
    least: LeastRoom
    #: The machines that carry its fingerprint and group.
    own: Set[HostState]
    #: Machines that drain for it.
    coming: Sequence[Machine] = ()


def _gang(row: RowState, fleet: DecisionState, index: HostIndex) -> _Gang:
    prices, weights = fleet.gang_prices(row)
    own = frozenset(own_machines(row, index))
    if row.divisible is not None or not row.has_left:
        return _Gang(row, prices, weights, None, least_room(()), own)
    cluster = row.cluster.id if row.cluster.id in fleet.options.overheads else ""
    pods = tuple([(g.request, g.left, g.limit, g.is_waiting) for g in row.groups])
    kind = (cluster, row.cluster.withheld, row.is_pinned, row.penalty_dollars, pods)
    return _Gang(row, prices, weights, kind, least_room(group.request for group in row.groups), own)


def _verdict(gang: _Gang, fleet: DecisionState, offers: Sequence[OfferState], index: HostIndex) -> DomainVerdict | None:
    """Judge the domain to which the row's shapes are limited, unless that is known; None when nothing has room."""
    if gang.kind is None:
        return _judge(gang, fleet, offers, index)
    rooms = _open_rooms(gang, index)
    free = tuple([(offer.number, _unclaimed(offer)) for offer in offers])
    if not rooms and all(count <= 0 for _, count in free):
        return None
    question = (gang.kind, gang.row.matching, free, rooms)
    verdict = fleet.verdicts.get(question)
    if verdict is None or verdict.weights not in (None, gang.weights):
        verdict = _judge(gang, fleet, offers, index)
        if sum([count > 0 for _, count in free]) > 1:
            verdict = replace(verdict, weights=gang.weights)
    fleet.verdicts[question] = verdict
    return verdict


def _open_rooms(gang: _Gang, index: HostIndex) -> tuple[tuple[bool, bool, tuple[int, ...]], ...]:
    """Return what a verdict depends on of the hosts that may have room for a pod, in hosting order, its own first."""
    row, own = gang.row, gang.own
    d, milli, other, other_milli = gang.least
    hosts = [
        host
        for host in own_first(row, index, own)
        if host.room[d] >= milli and host.room[other] >= other_milli and row.may_use(host.machine, host.shape)
    ]
    return tuple([(host in own, host.is_configured, tuple(host.room)) for host in hosts])


def _judge(gang: _Gang, fleet: DecisionState, offers: Sequence[OfferState], index: HostIndex) -> DomainVerdict:
    """Try the domain to which the row's shapes are limited: place, measure, and put everything back."""
    row = gang.row
    hosts = own_first(row, index, gang.own)
    before, dimensions = wanted(row), list(row.divisible or {})
    if gang.own:
        place_first_fit(row, [host for host in hosts if host in gang.own])
    own = covered(row, dimensions, before)
    place_first_fit(row, hosts)
    held = covered(row, dimensions, before)
    bought, cost, added = _purchase(row, fleet, offers, gang.prices)
    for host in [fleet.host(row.cluster, machine) for machine in gang.coming]:
        place_first_fit(row, [host])
        added.append(host)
    total = covered(row, dimensions, before)
    clear_row(row, (*hosts, *added))
    lacking = Fraction(0) if total == 1 else -total
    return DomainVerdict(bool(total), lacking, -held, -own, cost, bought)


def _planned_domains(row: RowState, fleet: DecisionState) -> set[str | None]:
    """Return the domains in which the target composition has the gang."""
    target = fleet.options.targets.get(row.cluster.id)
    key = row.same_key
    assert key is not None, "only a gang has a domain"
    claims = () if target is None else target.claims
    return {claim.machine_class.attribute(key) for claim in claims if claim.row == row.need.key}


def _purchase(
    row: RowState, fleet: DecisionState, offers: Sequence[OfferState], prices: Prices
) -> tuple[list[tuple[int, int]], float, list[HostState]]:
    """Place what is left on machines of the offers, as acquisition would choose them; the offers stay as they are.

    Return the machines that it takes by the place of the offer, what they cost, and the hosts.
    """
    bought = dict.fromkeys(range(len(offers)), 0)
    places = {id(offer): place for place, offer in enumerate(offers)}
    hosts: list[HostState] = []
    cost = 0.0
    totals = fleet.totals(row.cluster.id)
    while row.has_left:
        open_offers = [offer for place, offer in enumerate(offers) if _unclaimed(offer) > bought[place]]
        choice = choose(row, (), open_offers, totals, prices, left={}, head_start=fleet.options.idle_head_start)
        if choice is None:
            break
        offer, place = choice.offer, places[id(choice.offer)]
        for _ in range(1 if choice.fill.shares else repetitions(choice, _unclaimed(offer) - bought[place])):
            machine = offer.peek(bought[place])
            host = fleet.host(row.cluster, machine)
            place_first_fit(row, [host])
            hosts.append(host)
            bought[place] += 1
            cost += machine.price_usd_per_hour
    return [(place, count) for place, count in bought.items() if count], cost, hosts
