"""Preempts machines of lower priority in other clusters for rows that are still short: Phase 2.

Among the sets of machines that make the room, the one that destroys least is taken (`bigfleet.engine.shapes.units`).
Gangs are preempted whole. Room in the row's own cluster was used before: Phase 1 serves rows by precedence.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from bigfleet.engine.shapes.fleet import DecisionState
from bigfleet.engine.shapes.hosting import clear_row, place_row
from bigfleet.engine.shapes.state import ClaimLoss, HostState, RowState, Unit
from bigfleet.engine.shapes.units import units_for
from bigfleet.model.machine import Machine

#: Most units that are tried alone.
SINGLES_MAX: Final = 256


def preempt(fleet: DecisionState) -> None:
    """Let each short row, in processing order, count what drains for it and preempt for the rest."""
    short = [row for row in fleet.rows if row.has_left and row.may_acquire]
    if not short:
        return
    coming = _coming(fleet)
    for row in short:
        if _is_spread(row):
            # What its spread leaves out of the cluster's machines has room there, for which no machine is preempted.
            place_row(row, row.cluster.hosts)
        _count_coming(row, coming.get(row.need.key, []), fleet)
        if row.has_left:
            _pick(row, fleet)
        if _is_spread(row):
            # It may have taken other places on what its cluster holds, which others look at for victims.
            row.cluster.units = None


def _coming(fleet: DecisionState) -> dict[tuple[str, str, str], list[Machine]]:
    coming: defaultdict[tuple[str, str, str], list[Machine]] = defaultdict(list)
    for machine in fleet.machines.draining():
        if machine.preempted_for is not None:
            coming[machine.preempted_for].append(machine)
    return coming


def _count_coming(row: RowState, machines: Iterable[Machine], fleet: DecisionState) -> None:
    """Count on the machines that drain for the row, by id, while they help."""
    for machine in machines:
        if not row.has_left:
            return
        host = fleet.host(row.cluster, machine)
        if row.may_use(machine, host.shape) and _helps(row, host):
            fleet.taken[machine.id] = row
            row.coming.append(machine)


def _helps(row: RowState, host: HostState) -> bool:
    """Place the row's pods on the host as if it were free; returns whether it takes any."""
    row.cluster.hosts.append(host)
    place_row(row, row.cluster.hosts if _is_spread(row) else [host])
    if not host.is_claimed:
        row.cluster.hosts.remove(host)
        return False
    return True


# ---- victims -----------------------------------------------------------------------------------------------------


def _pick(row: RowState, fleet: DecisionState) -> None:
    """Preempt the units that destroy least: one that makes all the room, or several in the order of their loss."""
    units = units_for(row, fleet)
    held = len(row.cluster.hosts)
    best = _single(row, units, held, fleet)
    several = _several(row, units, held, fleet)
    if best is None or (several and _sum(several) < best.loss and not row.has_left):
        chosen = several
    else:
        for unit in several:
            _remove(row, unit, fleet)
        _add(row, best, held, fleet)
        chosen = [best]
    row.victims = [host.machine for unit in chosen for host in unit.hosts]


def _sum(units: Sequence[Unit]) -> ClaimLoss:
    losses = [unit.loss for unit in units]
    return ClaimLoss(
        max(loss.priority_class for loss in losses),
        sum(loss.penalty_dollars for loss in losses),
        max(loss.priority for loss in losses),
        sum(loss.supply for loss in losses),
        losses[0].id,
    )


def _single(row: RowState, units: Sequence[Unit], held: int, fleet: DecisionState) -> Unit | None:
    """Return the unit of least loss that alone makes the room for the whole row; nothing is changed."""
    for unit in units[:SINGLES_MAX]:
        _add(row, unit, held, fleet)
        makes_room = not row.has_left
        _remove(row, unit, fleet)
        if makes_room:
            return unit
    return None


def _several(row: RowState, units: Sequence[Unit], held: int, fleet: DecisionState) -> list[Unit]:
    """Take units in the order of their loss until the row has a place, then give back what is not needed."""
    taken = []
    for unit in units:
        if not row.has_left:
            break
        if _add(row, unit, held, fleet):
            taken.append(unit)
        else:
            _remove(row, unit, fleet)
    for unit in reversed(list(taken)) if len(taken) > 1 else ():
        before = _left(row)
        _remove(row, unit, fleet)
        place_row(row, _open_hosts(row, held))
        if _left(row) == before:
            taken.remove(unit)
        else:
            _add(row, unit, held, fleet)
    return taken


def _left(row: RowState) -> tuple[list[int], dict[int, int]]:
    return [group.left for group in row.groups], dict(row.divisible or {})


def _add(row: RowState, unit: Unit, held: int, fleet: DecisionState) -> bool:
    """Place the row on the unit's machines as if they were free; returns whether it takes any."""
    before = _left(row)
    for host in unit.hosts:
        fleet.taken[host.machine.id] = row
        if row.may_use(host.machine, host.shape):
            row.cluster.hosts.append(fleet.host(row.cluster, host.machine))
    place_row(row, _open_hosts(row, held))
    return _left(row) != before


def _open_hosts(row: RowState, held: int) -> Sequence[HostState]:
    """Return the machines on which the row may find a place; the first `held` ones have none, but a spread may move."""
    return row.cluster.hosts if _is_spread(row) else row.cluster.hosts[held:]


def _is_spread(row: RowState) -> bool:
    return row.spread is not None and row.divisible is None


def _remove(row: RowState, unit: Unit, fleet: DecisionState) -> None:
    """Undo `_add`."""
    ids = {host.machine.id for host in unit.hosts}
    added = [host for host in row.cluster.hosts if host.machine.id in ids]
    clear_row(row, added)
    row.cluster.hosts[:] = [host for host in row.cluster.hosts if host.machine.id not in ids]
    for machine_id in ids:
        fleet.taken.pop(machine_id, None)
