"""Preempts machines of lower priority in other clusters for rows that are still short: Phase 2.

Among the sets of machines that make the room, the one that destroys least is taken: the lowest priority class, then the
smallest sum of penalties in dollars, then the lowest priority, then the least surplus, then ids. Gangs are preempted
whole. Room in the row's own cluster was used before: Phase 1 serves rows by precedence.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from bigfleet.engine.shapes.fleet import Fleet
from bigfleet.engine.shapes.hosting import clear_row, place_row
from bigfleet.engine.shapes.state import UNLIMITED, Host, Row, largest
from bigfleet.model.machine import Machine
from bigfleet.model.penalty import bucket_upper_dollars

#: Lowest priority of each class (docs/spec/engine.md §10): other, batch, service, critical.
CLASS_FLOORS: Final = (100, 1_000, 1_000_000)
#: Most units that one row compares.
UNITS_MAX: Final = 4_096
#: Most units that are tried alone.
SINGLES_MAX: Final = 256


class Loss(NamedTuple):
    """Sort key of what preempting a unit, or a set of units, destroys; the least is chosen."""

    priority_class: int
    penalty_dollars: float
    priority: int
    #: Supply that becomes free, as the sum over the dimensions of its share of the largest Configured machine.
    supply: float
    id: str


@dataclass(frozen=True, slots=True)
class Unit:
    """Machines that are preempted together: one machine, and all machines of every gang on it."""

    hosts: tuple[Host, ...]
    loss: Loss


def preempt(fleet: Fleet) -> None:
    """Let each short row, in processing order, count what drains for it and preempt for the rest."""
    short = [row for row in fleet.rows if row.has_left and row.may_acquire]
    if not short:
        return
    serving, coming = _serving(fleet), _coming(fleet)
    for row in short:
        _count_coming(row, coming.get(row.need.key, []), fleet)
        if row.has_left:
            _pick(row, serving, fleet)


def priority_class(priority: int) -> int:
    """Return the class of a priority, 0 lowest."""
    return sum(priority >= floor for floor in CLASS_FLOORS)


def _serving(fleet: Fleet) -> list[Host]:
    """Return every Configured machine with its claims, by id; of clusters without demand as well."""
    clusters = (*fleet.clusters.values(), *fleet.kept.values())
    held = {host.machine.id: host for c in clusters for host in c.hosts if host.is_configured}
    found = []
    for machine in fleet.machines.configured():
        host = held.get(machine.id)
        if host is None:
            shape = fleet.machines.shape_of(machine)
            total = fleet.total(machine.cluster, shape)
            host = Host(machine=machine, shape=shape, total=total, room=list(total))
        found.append(host)
    return found


def _coming(fleet: Fleet) -> dict[tuple[str, str, str], list[Machine]]:
    coming: defaultdict[tuple[str, str, str], list[Machine]] = defaultdict(list)
    for machine in fleet.machines.draining():
        if machine.preempted_for is not None:
            coming[machine.preempted_for].append(machine)
    return coming


def _count_coming(row: Row, machines: Iterable[Machine], fleet: Fleet) -> None:
    """Count on the machines that drain for the row, by id, while they help."""
    for machine in machines:
        if not row.has_left:
            return
        host = fleet.host(row.cluster, machine)
        if row.may_use(machine, host.shape) and _helps(row, host):
            fleet.taken[machine.id] = row
            row.coming.append(machine)


def _helps(row: Row, host: Host) -> bool:
    """Place the row's pods on the host as if it were free; returns whether it takes any."""
    row.cluster.hosts.append(host)
    place_row(row, [host] if row.need.profile.strict_spread is None else row.cluster.hosts)
    if not host.is_claimed:
        row.cluster.hosts.remove(host)
        return False
    return True


# ---- victims -----------------------------------------------------------------------------------------------------


def protecting_priority(host: Host, fleet: Fleet) -> int | None:
    """Return the priority that protects a machine; None for excess, which nothing protects.

    The highest priority among its claims when its cluster has reported, else its stamp's. A machine that a target keeps
    without a claim is protected by its stamp.
    """
    if host.machine.cluster not in fleet.options.reported:
        return host.machine.assigned_priority
    rows = host.rows()
    if rows:
        return max(row.need.profile.priority for row in rows)
    return host.machine.assigned_priority if host.is_target else None


def _pick(row: Row, serving: Sequence[Host], fleet: Fleet) -> None:
    """Preempt the units that destroy least: one that makes all the room, or several in the order of their loss."""
    units = _units(row, serving, fleet)
    best = _single(row, units, fleet)
    several = _several(row, units, fleet)
    if best is None or (several and _sum(several) < best.loss and not row.has_left):
        chosen = several
    else:
        for unit in several:
            _remove(row, unit, fleet)
        _add(row, best, fleet)
        chosen = [best]
    row.victims = [host.machine for unit in chosen for host in unit.hosts]


def _sum(units: Sequence[Unit]) -> Loss:
    losses = [unit.loss for unit in units]
    return Loss(
        max(loss.priority_class for loss in losses),
        sum(loss.penalty_dollars for loss in losses),
        max(loss.priority for loss in losses),
        sum(loss.supply for loss in losses),
        losses[0].id,
    )


def _single(row: Row, units: Sequence[Unit], fleet: Fleet) -> Unit | None:
    """Return the unit of least loss that alone makes the room for the whole row; nothing is changed."""
    for unit in units[:SINGLES_MAX]:
        _add(row, unit, fleet)
        makes_room = not row.has_left
        _remove(row, unit, fleet)
        if makes_room:
            return unit
    return None


def _several(row: Row, units: Sequence[Unit], fleet: Fleet) -> list[Unit]:
    """Take units in the order of their loss until the row has a place, then give back what is not needed."""
    taken = []
    for unit in units:
        if not row.has_left:
            break
        if _add(row, unit, fleet):
            taken.append(unit)
        else:
            _remove(row, unit, fleet)
    for unit in reversed(list(taken)) if len(taken) > 1 else ():
        before = _left(row)
        _remove(row, unit, fleet)
        place_row(row, row.cluster.hosts)
        if _left(row) == before:
            taken.remove(unit)
        else:
            _add(row, unit, fleet)
    return taken


def _left(row: Row) -> tuple[list[int], dict[int, int]]:
    return [group.left for group in row.groups], dict(row.divisible or {})


def _add(row: Row, unit: Unit, fleet: Fleet) -> bool:
    """Place the row on the unit's machines as if they were free; returns whether it takes any."""
    before = _left(row)
    for host in unit.hosts:
        fleet.taken[host.machine.id] = row
        if row.may_use(host.machine, host.shape):
            row.cluster.hosts.append(fleet.host(row.cluster, host.machine))
    place_row(row, row.cluster.hosts)
    return _left(row) != before


def _remove(row: Row, unit: Unit, fleet: Fleet) -> None:
    """Undo `_add`."""
    ids = {host.machine.id for host in unit.hosts}
    added = [host for host in row.cluster.hosts if host.machine.id in ids]
    clear_row(row, added)
    row.cluster.hosts[:] = [host for host in row.cluster.hosts if host.machine.id not in ids]
    for machine_id in ids:
        fleet.taken.pop(machine_id, None)


def _units(row: Row, serving: Sequence[Host], fleet: Fleet) -> list[Unit]:
    """Return the units that the row may preempt, the least loss first.

    Units of higher priority classes are tried only where those of lower ones do not make the room, which the order by
    loss brings about.
    """
    of_gang: defaultdict[tuple[str, str, str], list[Host]] = defaultdict(list)
    for host in serving:
        for key in _gangs(host, fleet):
            of_gang[key].append(host)
    units: dict[frozenset[str], Unit] = {}
    most = largest((host.total for host in serving), len(fleet.dimensions.names))
    for host in serving:
        if host.machine.cluster == row.cluster.id or not row.may_use(host.machine, host.shape):
            continue
        hosts = _closure(host, of_gang, fleet)
        if any(not _may_preempt(row, other, fleet) for other in hosts):
            continue
        unit = Unit(hosts, _loss(hosts, most, fleet))
        units.setdefault(frozenset(h.machine.id for h in hosts), unit)
        if len(units) == UNITS_MAX:
            break
    return sorted(units.values(), key=lambda unit: unit.loss)


def _gangs(host: Host, fleet: Fleet) -> list[tuple[str, str, str]]:
    """Return the gangs that have pods on the machine; by its stamp where the cluster has not reported."""
    if host.machine.cluster in fleet.options.reported:
        return sorted(row.need.key for row in host.rows() if row.same_key is not None)
    machine = host.machine
    return (
        [(machine.cluster, machine.assigned_need_fingerprint, machine.assigned_group)] if machine.assigned_group else []
    )


def _closure(host: Host, of_gang: dict[tuple[str, str, str], list[Host]], fleet: Fleet) -> tuple[Host, ...]:
    found, waiting = {host.machine.id: host}, [host]
    while waiting:
        for key in _gangs(waiting.pop(), fleet):
            for other in of_gang.get(key, ()):
                if other.machine.id not in found:
                    found[other.machine.id] = other
                    waiting.append(other)
    return tuple(found[machine_id] for machine_id in sorted(found))


def _may_preempt(row: Row, host: Host, fleet: Fleet) -> bool:
    protected_by = protecting_priority(host, fleet)
    is_lower = protected_by is None or protected_by < row.need.profile.priority
    return is_lower and host.machine.cluster != row.cluster.id and host.machine.id not in fleet.taken


def _loss(hosts: Sequence[Host], most: Sequence[int], fleet: Fleet) -> Loss:
    priorities = [p for host in hosts if (p := protecting_priority(host, fleet)) is not None]
    highest = max(priorities, default=-(1 << 31))
    dollars = sum(_penalties(host, fleet) for host in hosts)
    supply = sum(
        float(milli) / float(most[d])
        for host in hosts
        for d, milli in enumerate(host.total)
        if most[d] and milli < UNLIMITED
    )
    return Loss(priority_class(highest) if priorities else -1, dollars, highest, supply, hosts[0].machine.id)


def _penalties(host: Host, fleet: Fleet) -> float:
    """Return the reclamation and interruption penalties of what runs on the machine, dollars."""
    rows = host.rows()
    if host.machine.cluster in fleet.options.reported and rows:
        profiles = [row.need.profile for row in sorted(rows, key=lambda r: r.rank)]
        return sum(
            bucket_upper_dollars(p.interruption_bucket) + bucket_upper_dollars(p.reclamation_bucket) for p in profiles
        )
    machine = host.machine
    return machine.assigned_interruption_penalty_dollars + machine.assigned_reclamation_penalty_dollars
