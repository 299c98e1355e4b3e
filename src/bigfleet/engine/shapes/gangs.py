"""Chooses the one domain of a gang (a row with a Same requirement) and claims what the gang holds there.

A domain is judged by how many of the gang's pods fit: on what the cluster holds, on the gang's own machines, and on
what could be acquired. A gang never takes a machine outside its domain.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from bigfleet.engine.shapes.choice import Prices, choose, reference_prices, repetitions
from bigfleet.engine.shapes.fleet import DecisionState
from bigfleet.engine.shapes.hosting import capacity, clear_row, may_host, place_first_fit, with_room
from bigfleet.engine.shapes.state import ClusterState, HostIndex, HostState, OfferState, RowState


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
    index = _index_of(row.cluster)
    home = _home(row, index)
    if home is not None:
        row.domain, row.matching = home, _in_domain(row, fleet, home)
        row.is_satisfiable = not row.impossible
        place_first_fit(row, _own(row, index))
        return
    domains = sorted(_domains(row, fleet, index), key=lambda domain: domain.rank)
    if not domains:
        row.is_satisfiable = row.is_held = False
        row.matching = frozenset()
        return
    best = domains[0]
    row.domain = best.value
    row.is_satisfiable = not best.rank.is_unsatisfiable and not row.impossible
    row.is_held = best.rank.held == -1 and row.has_left
    row.matching = _in_domain(row, fleet, best.value)
    place_first_fit(row, own_first(row, index))
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
        clear_row(row, hosts)
    return found[0] if len(found) == 1 else None


def _index_of(cluster: ClusterState) -> HostIndex:
    """Return the cluster's machines by shape and by stamp; build the index again after machines were added."""
    index = cluster.index
    if index is None or index.size != len(cluster.hosts):
        index = cluster.index = HostIndex(len(cluster.hosts))
        for place, host in enumerate(cluster.hosts):
            machine = host.machine
            index.by_shape.setdefault(host.shape, []).append((place, host))
            stamp = (machine.assigned_need_fingerprint, machine.assigned_group)
            index.by_stamp.setdefault(stamp, []).append(host)
    return index


def _own(row: RowState, index: HostIndex) -> Sequence[HostState]:
    """Return the machines that carry the row's fingerprint and group, in hosting order."""
    return index.by_stamp.get((row.need.fingerprint, row.need.group), ())


def own_first(row: RowState, index: HostIndex) -> list[HostState]:
    """Return the hosts of the row's shapes with the row's own machines before the others, each in hosting order."""
    found = [entry for shape in row.matching & index.by_shape.keys() for entry in index.by_shape[shape]]
    own = set(_own(row, index))
    return [host for _, host in sorted(found, key=lambda entry: (entry[1] not in own, entry[0]))]


def _in_domain(row: RowState, fleet: DecisionState, value: str) -> frozenset[int]:
    key = row.same_key
    assert key is not None, "only a gang has a domain"
    return fleet.in_domains(row, key).get(value, frozenset())


def _domains(row: RowState, fleet: DecisionState, index: HostIndex) -> list[GangDomain]:
    """Return every domain in which something could host a part of the gang."""
    key = row.same_key
    assert key is not None, "only a gang has domains"
    values: set[str] = set()
    for shape in row.matching & index.by_shape.keys():
        # A value of the key is the shape's; whether a machine can be interrupted is its own.
        hosts = index.by_shape[shape]
        value = hosts[0][1].machine.attribute(key)
        if value is not None and any(row.may_use(host.machine, shape) for _, host in hosts):
            values.add(value)
    is_stuck = row.need.parked or bool(row.impossible)
    offers = [] if is_stuck else fleet.usable(row)
    values.update(value for o in offers if (value := o.example.attribute(key)) is not None and _unclaimed(o) > 0)
    prices = reference_prices([row], fleet.pod_prices(row), fleet.free_at_first(), fleet.dimensions.pods)
    found = (_judge(row, fleet, value, offers, prices, index) for value in sorted(values))
    return [domain for domain in found if domain is not None]


def _unclaimed(offer: OfferState) -> int:
    return offer.available - offer.earmarked


def _judge(
    row: RowState, fleet: DecisionState, value: str, offers: Sequence[OfferState], prices: Prices, index: HostIndex
) -> GangDomain | None:
    """Try the domain: place, measure, and put everything back."""
    everywhere, key = row.matching, row.same_key
    assert key is not None, "only a gang has a domain"
    shapes = _in_domain(row, fleet, value)
    free = [o for o in offers if o.example.attribute(key) == value]
    if not any(_unclaimed(o) > 0 for o in free) and not _may_have_room(row, shapes, index):
        return None
    row.matching = shapes
    hosts = own_first(row, index)
    own_hosts = set(_own(row, index))
    owned = [host for host in hosts if host in own_hosts]
    before, dimensions = _wanted(row), list(row.divisible or {})
    place_first_fit(row, owned)
    own = _covered(row, dimensions, before)
    place_first_fit(row, hosts)
    held = _covered(row, dimensions, before)
    wanted, cost, added = _purchase(row, fleet, free, prices)
    total = _covered(row, dimensions, before)
    clear_row(row, (*hosts, *added))
    row.matching = everywhere
    if total == 0:
        return None
    is_whole = total == 1
    is_off_target = value not in _planned_domains(row, fleet)
    rank = DomainRank(not is_whole, Fraction(0) if is_whole else -total, -held, -own, is_off_target, cost, value)
    return GangDomain(value=value, rank=rank, wanted=wanted)


def _may_have_room(row: RowState, shapes: frozenset[int], index: HostIndex) -> bool:
    """Return whether a host of these shapes has room for a pod of the row; True where that is not checked."""
    if row.divisible is not None or not row.has_left:
        return True
    hosts = [host for shape in shapes & index.by_shape.keys() for _, host in index.by_shape[shape]]
    return any(
        may_host(group, host) and capacity(group, host) > 0
        for group in row.groups
        for host in with_room(group.request, hosts)
    )


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
) -> tuple[list[tuple[OfferState, int]], float, list[HostState]]:
    """Place what is left on machines of the offers, as acquisition would choose them; the offers stay as they are."""
    bought: dict[int, int] = {}
    hosts: list[HostState] = []
    cost = 0.0
    totals = fleet.totals(row.cluster.id)
    while row.has_left:
        open_offers = [o for o in offers if _unclaimed(o) > bought.get(id(o), 0)]
        choice = choose(row, (), open_offers, totals, prices, left={}, head_start=fleet.options.idle_head_start)
        if choice is None:
            break
        offer = choice.offer
        left = _unclaimed(offer) - bought.get(id(offer), 0)
        for _ in range(1 if choice.fill.shares else repetitions(choice, left)):
            machine = offer.peek(bought.get(id(offer), 0))
            host = fleet.host(row.cluster, machine)
            place_first_fit(row, [host])
            hosts.append(host)
            bought[id(offer)] = bought.get(id(offer), 0) + 1
            cost += machine.price_usd_per_hour
    return [(o, bought[id(o)]) for o in offers if id(o) in bought], cost, hosts
