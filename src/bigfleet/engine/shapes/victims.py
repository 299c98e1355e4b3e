"""Preempts machines of lower priority in other clusters for rows that are still short: Phase 2.

Among the sets of machines that make the room, the one that destroys least is taken (`bigfleet.engine.shapes.units`).
Gangs are preempted whole. Room in the row's own cluster was used before: Phase 1 serves rows by precedence.
"""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from bigfleet.engine.shapes.fleet import DecisionState
from bigfleet.engine.shapes.hosting import Places, clear_row, place_more, place_row, places_of, put_back
from bigfleet.engine.shapes.spread_domains import unplaced
from bigfleet.engine.shapes.state import ClaimLoss, HostState, OfferState, RowState, Unit
from bigfleet.engine.shapes.units import units_for
from bigfleet.model.machine import Machine

#: Most units that are tried alone.
SINGLES_MAX: Final = 256
#: Most gangs of one decision that look for victims in other domains, and most domains that each of them tries.
GANGS_MAX: Final = 16
DOMAINS_MAX: Final = 16


class _Own(NamedTuple):
    """What the row's cluster had before victims were looked for."""

    #: Machines; those of victims follow them.
    hosts: int
    #: Where the row's pods stood, if it is spread.
    places: Places


def preempt(fleet: DecisionState) -> None:
    """Let each short row, in processing order, count what drains for it and preempt for the rest."""
    tried = 0
    for row in [row for row in fleet.rows if row.has_left and row.may_preempt]:
        picked: list[Unit] = []
        if _is_spread(row):
            # What its spread leaves out of the cluster's machines has room there, for which no machine is preempted.
            place_row(row, row.cluster.hosts)
        if row.may_acquire:
            _count_coming(row, fleet)
        own = _own_of(row)
        if row.may_acquire and row.has_left:
            picked = _pick(row, own, fleet)
        if row.has_left and row.same_key is not None and row.divisible is None and tried < GANGS_MAX:
            tried += 1
            picked = _picked_in_other_domain(row, row.same_key, picked, own, fleet)
        row.victims = _machines(picked)
        if _is_spread(row):
            # It may have taken other places on what its cluster holds, which others look at for victims.
            row.cluster.units = None


def _count_coming(row: RowState, fleet: DecisionState) -> None:
    """Count on the machines that drain for the row, by id, while they help."""
    for machine in fleet.coming(row):
        if not row.has_left:
            return
        host = fleet.host(row.cluster, machine)
        if row.may_use(machine, host.shape) and _helps(row, host):
            fleet.taken[machine.id] = row
            row.coming.append(machine)


def _helps(row: RowState, host: HostState) -> bool:
    """Place the row's pods on the host as if it were free; returns whether fewer of them lack a place."""
    hosts = row.cluster.hosts
    hosts.append(host)
    if _place(row, len(hosts) - 1):
        return True
    hosts.remove(host)
    return False


def _place(row: RowState, held: int) -> bool:
    """Place what the row has left on its cluster's machines from number `held` on; returns whether it takes any.

    A spread row is placed on all of them from the beginning, as it is when it acquires: a machine in a new domain holds
    the others down, and a machine on which the row would not be placed then would be preempted in vain.
    """
    hosts, before = row.cluster.hosts, _left(row)
    if not _is_spread(row):
        place_row(row, hosts[held:])
        return _left(row) != before
    fewest, places = unplaced(row), places_of(row)
    clear_row(row, hosts)
    place_row(row, hosts)
    if unplaced(row) >= fewest:
        put_back(row, places)
        place_more(row, hosts)
    return unplaced(row) < fewest


# ---- victims -----------------------------------------------------------------------------------------------------


def _own_of(row: RowState) -> _Own:
    return _Own(len(row.cluster.hosts), places_of(row) if _is_spread(row) else ())


def _pick(row: RowState, own: _Own, fleet: DecisionState) -> list[Unit]:
    """Preempt the units that destroy least: one that makes all the room, or several in the order of their loss."""
    units = units_for(row, fleet)
    best = _single(row, units, own, fleet)
    several = _several(row, units, own, fleet)
    if best is None or (several and _sum(several) < best.loss and not row.has_left):
        chosen = several
    else:
        for unit in several:
            _remove(row, unit, own, fleet)
        _add(row, best, own, fleet)
        chosen = [best]
    return chosen


def _machines(units: Iterable[Unit]) -> list[Machine]:
    return [host.machine for unit in units for host in unit.hosts]


def _sum(units: Sequence[Unit]) -> ClaimLoss:
    losses = [unit.loss for unit in units]
    return ClaimLoss(
        max(loss.priority_class for loss in losses),
        sum(loss.penalty_dollars for loss in losses),
        max(loss.priority for loss in losses),
        sum(loss.supply for loss in losses),
        losses[0].id,
    )


def _single(row: RowState, units: Sequence[Unit], own: _Own, fleet: DecisionState) -> Unit | None:
    """Return the unit of least loss that alone makes the room for the whole row; nothing is changed."""
    tried: set[tuple[int, ...]] = set()
    for unit in units[:SINGLES_MAX]:
        usable = _usable(row, unit)
        if usable in tried:
            continue
        tried.add(usable)
        _add(row, unit, own, fleet)
        makes_room = not row.has_left
        _remove(row, unit, own, fleet)
        if makes_room:
            return unit
    return None


def _several(row: RowState, units: Sequence[Unit], own: _Own, fleet: DecisionState) -> list[Unit]:
    """Take units in the order of their loss until the row has a place, then give back what is not needed."""
    taken = []
    vain: set[tuple[int, ...]] = set()
    for unit in units:
        usable = _usable(row, unit)
        if not row.has_left:
            break
        if usable in vain:
            continue
        if _add(row, unit, own, fleet):
            taken.append(unit)
            # What came before may help now: the row's spread allows more.
            vain.clear()
        else:
            _remove(row, unit, own, fleet)
            vain.add(usable)
    for unit in reversed(list(taken)) if len(taken) > 1 else ():
        before = _left(row)
        _remove(row, unit, own, fleet)
        _place(row, own.hosts)
        if _left(row) == before:
            taken.remove(unit)
        else:
            _add(row, unit, own, fleet)
    return taken


def _usable(row: RowState, unit: Unit) -> tuple[int, ...]:
    """Return the shapes of the machines of a unit that the row may use: units of equal ones make equal room."""
    return tuple(sorted(host.shape for host in unit.hosts if row.may_use(host.machine, host.shape)))


def _left(row: RowState) -> tuple[list[int], dict[int, int]]:
    return [group.left for group in row.groups], dict(row.divisible or {})


def _add(row: RowState, unit: Unit, own: _Own, fleet: DecisionState) -> bool:
    """Place the row on the unit's machines as if they were free; returns whether it takes any."""
    for host in unit.hosts:
        fleet.taken[host.machine.id] = row
        if row.may_use(host.machine, host.shape):
            row.cluster.hosts.append(fleet.host(row.cluster, host.machine))
    return _place(row, own.hosts)


def _is_spread(row: RowState) -> bool:
    return row.spread is not None and row.divisible is None


def _remove(row: RowState, unit: Unit, own: _Own, fleet: DecisionState) -> None:
    """Undo `_add`."""
    hosts, ids = row.cluster.hosts, {host.machine.id for host in unit.hosts}
    clear_row(row, hosts if _is_spread(row) else [host for host in hosts if host.machine.id in ids])
    hosts[:] = [host for host in hosts if host.machine.id not in ids]
    if _is_spread(row):
        put_back(row, own.places)
        _place(row, own.hosts)
    for machine_id in ids:
        fleet.taken.pop(machine_id, None)


# ---- gangs -------------------------------------------------------------------------------------------------------


def _picked_in_other_domain(
    row: RowState, key: str, picked: Sequence[Unit], own: _Own, fleet: DecisionState
) -> list[Unit]:
    """Return what to preempt for a gang that does not fit into its domain: units of a domain that then hosts all of it.

    The domain with the least loss is chosen. Without one, what is picked in the own domain is returned. The gang keeps
    its claims: in the next decision the draining machines make the other domain large enough, and the gang moves there.
    """
    cluster, matching, hosts, places = row.cluster, row.matching, list(row.cluster.hosts), places_of(row)
    row.matching = fleet.machines.matching(row.need.profile)
    # All units are formed here, before the claims of the gang are cleared.
    concerned = [*_machines(units_for(row, fleet)), *fleet.coming(row)]
    values = {value for machine in concerned if (value := machine.attribute(key)) is not None}
    shapes, offers = fleet.in_domains(row, key), fleet.usable_in_domains(row, key)
    held = [host for host in hosts if host.machine.cluster == cluster.id or host.offer is not None]
    clear_row(row, hosts)
    found: list[list[Unit]] = []
    for value in sorted(values - {row.domain})[:DOMAINS_MAX]:
        row.matching = shapes.get(value, frozenset())
        cluster.hosts[:] = held
        units = _units_for_whole(row, offers.get(value, ()), fleet)
        if units is not None:
            found.append(units)
    row.matching = matching
    cluster.hosts[:] = hosts
    put_back(row, places)
    if not found:
        return list(picked)
    for unit in picked:
        _remove(row, unit, own, fleet)
    # A domain without victims comes first: it waits for what drains for the gang.
    best = min(found, key=lambda units: (1, _sum(units)) if units else (0,))
    fleet.taken.update((machine.id, row) for machine in _machines(best))
    return best


def _units_for_whole(row: RowState, offers: Iterable[OfferState], fleet: DecisionState) -> list[Unit] | None:
    """Return what has to be preempted for the row's domain to host all of it; None if it could not.

    Machines on offer and machines that drain for the row count. The row has no place before and after.
    """
    hosts = row.cluster.hosts
    place_row(row, hosts)
    for offer in offers:
        for number in range(offer.available):
            if not _helps(row, fleet.host(row.cluster, offer.peek(number))):
                break
    for machine in fleet.coming(row):
        _helps(row, fleet.host(row.cluster, machine))
    own = _own_of(row)
    units = _pick(row, own, fleet) if row.has_left else []
    is_whole = not row.has_left
    for unit in units:
        _remove(row, unit, own, fleet)
    clear_row(row, hosts)
    return units if is_whole else None
