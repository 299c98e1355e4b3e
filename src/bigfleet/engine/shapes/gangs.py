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
from bigfleet.engine.shapes.hosting import clear_row, place_first_fit, unplace
from bigfleet.engine.shapes.state import ClusterState, DomainVerdict, HostIndex, HostState, OfferState, RowState


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


def credit_gang(row: RowState, fleet: DecisionState) -> None:
    """Choose the row's domain, claim room there on the gang's own machines first, and earmark what it will acquire."""
    index = _index_of(row.cluster, fleet.options.leaving)
    home = _home(row, index)
    if home is not None:
        row.domain, row.matching = home, _in_domain(row, fleet, home)
        row.is_satisfiable = not row.impossible
        place_first_fit(row, _own(row, index))
        return
    best = _best_domain(row, fleet, index)
    if best is None:
        row.is_satisfiable = row.is_held = False
        row.matching = frozenset()
        return
    row.domain = best.value
    row.is_satisfiable = not best.rank.is_unsatisfiable and not row.impossible
    row.is_held = best.rank.held == -1 and row.has_left
    row.matching = _in_domain(row, fleet, best.value)
    place_first_fit(row, _own_first(row, index, frozenset(_own(row, index))))
    for offer, count in best.wanted:
        offer.earmarked += count


def _home(row: RowState, index: HostIndex) -> str | None:
    """Return the only domain in which the gang's own machines host all of it, None without one.

    No other domain can be better (docs/spec/engine.md §4): it hosts the whole gang, on what the cluster holds, and on
    its own machines. Looking at offers and other machines would find the same.
    """
    key = row.same_key
    assert key is not None, "only a gang has domains"
    if not row.has_left:
        return None
    by_domain: dict[str, list[HostState]] = {}
    for host in _own(row, index):
        value = host.machine.attribute(key)
        if value is not None and row.may_use(host.machine, host.shape):
            by_domain.setdefault(value, []).append(host)
    found = []
    for value, hosts in by_domain.items():
        place_first_fit(row, hosts)
        if not any(_wanted(row)):
            found.append(value)
        _clear(row, hosts)
    return found[0] if len(found) == 1 else None


def _index_of(cluster: ClusterState, leaving: Set[str]) -> HostIndex:
    """Return the cluster's machines by shape and by stamp; build the index again after machines were added.

    Machines that leave are no gang's own: it would stay with them.
    """
    index = cluster.index
    if index is None or index.size != len(cluster.hosts):
        index = cluster.index = HostIndex(len(cluster.hosts))
        for place, host in enumerate(cluster.hosts):
            machine = host.machine
            index.by_shape.setdefault(host.shape, []).append((place, host))
            if machine.id not in leaving:
                stamp = (machine.assigned_need_fingerprint, machine.assigned_group)
                index.by_stamp.setdefault(stamp, []).append(host)
    return index


def _own(row: RowState, index: HostIndex) -> Sequence[HostState]:
    """Return the machines that carry the row's fingerprint and group, in hosting order."""
    return index.by_stamp.get((row.need.fingerprint, row.need.group), ())


def _own_first(row: RowState, index: HostIndex, own: Set[HostState]) -> Sequence[HostState]:
    """Return the hosts of the row's shapes with the row's own machines before the others, each in hosting order."""
    hosts = _hosts_of_shapes(row.matching, index)
    return sorted(hosts, key=lambda host: host not in own) if own else hosts


def _hosts_of_shapes(shapes: frozenset[int], index: HostIndex) -> Sequence[HostState]:
    """Return the hosts of some shapes in hosting order."""
    found = index.by_shapes.get(shapes)
    if found is None:
        entries = [entry for shape in shapes & index.by_shape.keys() for entry in index.by_shape[shape]]
        entries.sort(key=lambda entry: entry[0])
        found = index.by_shapes[shapes] = [host for _, host in entries]
    return found


def _in_domain(row: RowState, fleet: DecisionState, value: str) -> frozenset[int]:
    key = row.same_key
    assert key is not None, "only a gang has a domain"
    return fleet.in_domains(row, key).get(value, frozenset())


def _best_domain(row: RowState, fleet: DecisionState, index: HostIndex) -> GangDomain | None:
    """Return the domain of least rank among those in which something could host a part of the gang."""
    key = row.same_key
    assert key is not None, "only a gang has domains"
    held = _held_values(row, key, index)
    is_stuck = row.need.parked or bool(row.impossible)
    offers = {} if is_stuck else fleet.usable_in_domains(row, key)
    gang = _gang(row, fleet, index)
    planned = _planned_domains(row, fleet)
    best: GangDomain | None = None
    for domain in _judged(gang, held, offers, planned, fleet, index):
        best = domain if best is None or domain.rank < best.rank else best
    if best is not None and row.has_left and best.rank.held == -1:
        # What hosts the whole gang on what the cluster holds ranks before every domain of which it holds nothing.
        return best
    free = [value for value, found in offers.items() if value not in held and any(_unclaimed(o) > 0 for o in found)]
    for domain in _judged(gang, free, offers, planned, fleet, index):
        best = domain if best is None or domain.rank < best.rank else best
    return best


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


def _held_values(row: RowState, key: str, index: HostIndex) -> frozenset[str]:
    """Return the values of the key on hosts that the row may use."""
    question = (row.matching, row.is_pinned, key)
    found = index.values.get(question)
    if found is None:
        usable = (host for host in _hosts_of_shapes(row.matching, index) if row.may_use(host.machine, host.shape))
        values = (host.machine.attribute(key) for host in usable)
        found = index.values[question] = frozenset(value for value in values if value is not None)
    return found


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
    #: A room that every host of a pod of the gang has at least, in two dimensions.
    least: tuple[tuple[int, int], tuple[int, int]]
    #: The machines that carry its fingerprint and group.
    own: Set[HostState]


def _gang(row: RowState, fleet: DecisionState, index: HostIndex) -> _Gang:
    prices, weights = fleet.gang_prices(row)
    own = frozenset(_own(row, index))
    if row.divisible is not None or not row.has_left:
        return _Gang(row, prices, weights, None, ((0, 0), (0, 0)), own)
    cluster = row.cluster.id if row.cluster.id in fleet.options.overheads else ""
    pods = tuple([(g.request, g.left, g.limit, g.is_waiting) for g in row.groups])
    kind = (cluster, row.is_pinned, row.penalty_dollars, pods)
    return _Gang(row, prices, weights, kind, _least(row), own)


def _least(row: RowState) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the least that pods of the row request of two dimensions."""
    first = row.groups[0].request
    (d, least), (other, other_least) = first[0], first[min(1, len(first) - 1)]
    for group in row.groups:
        request = group.request
        if len(request) == len(first) and request[0][0] == d and request[min(1, len(request) - 1)][0] == other:
            milli, other_milli = request[0][1], request[min(1, len(request) - 1)][1]
        else:
            amounts = dict(request)
            milli, other_milli = amounts.get(d, 0), amounts.get(other, 0)
        least, other_least = min(least, milli), min(other_least, other_milli)
    return (d, least), (other, other_least)


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
    (d, milli), (other, other_milli) = gang.least
    hosts = [
        host
        for host in _own_first(row, index, own)
        if host.room[d] >= milli and host.room[other] >= other_milli and row.may_use(host.machine, host.shape)
    ]
    return tuple([(host in own, host.is_configured, tuple(host.room)) for host in hosts])


def _judge(gang: _Gang, fleet: DecisionState, offers: Sequence[OfferState], index: HostIndex) -> DomainVerdict:
    """Try the domain to which the row's shapes are limited: place, measure, and put everything back."""
    row = gang.row
    hosts = _own_first(row, index, gang.own)
    before, dimensions = _wanted(row), list(row.divisible or {})
    if gang.own:
        place_first_fit(row, [host for host in hosts if host in gang.own])
    own = _covered(row, dimensions, before)
    place_first_fit(row, hosts)
    held = _covered(row, dimensions, before)
    wanted, cost, added = _purchase(row, fleet, offers, gang.prices)
    total = _covered(row, dimensions, before)
    _clear(row, (*hosts, *added))
    lacking = Fraction(0) if total == 1 else -total
    return DomainVerdict(bool(total), lacking, -held, -own, cost, wanted)


def _clear(row: RowState, hosts: Iterable[HostState]) -> None:
    """Give back everything that the row takes of the hosts."""
    if row.divisible is not None:
        clear_row(row, hosts)
        return
    for host in hosts:
        for group in row.groups if host.claims else ():
            if group in host.claims:
                unplace(group, host)


def _planned_domains(row: RowState, fleet: DecisionState) -> set[str | None]:
    """Return the domains in which the target composition has the gang."""
    target = fleet.options.targets.get(row.cluster.id)
    key = row.same_key
    assert key is not None, "only a gang has a domain"
    claims = () if target is None else target.claims
    return {claim.machine_class.attribute(key) for claim in claims if claim.row == row.need.key}


def _wanted(row: RowState) -> Sequence[int]:
    """Return what the gang has left: by dimension of a divisible row, else its pods."""
    return [*row.divisible.values()] if row.divisible is not None else [sum(group.left for group in row.groups)]


def _covered(row: RowState, dimensions: Sequence[int], before: Sequence[int]) -> Fraction:
    """Return the share of the gang that has a place: of its pods, or the mean over a divisible row's dimensions."""
    if row.divisible is None:
        had, has = before[0], sum(group.left for group in row.groups)
        return Fraction(had - has, had) if had else Fraction(1)
    left = [row.divisible.get(d, 0) for d in dimensions]
    shares = [Fraction(had - has, had) for had, has in zip(before, left, strict=True) if had]
    return sum(shares, Fraction(0)) / len(shares) if shares else Fraction(1)


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
