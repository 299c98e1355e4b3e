"""Reclaims what a cluster no longer needs and releases idle machines: Phase 3.

A machine is excess when no row claims any of it and its target composition does not keep it. Silence reclaims
nothing: a cluster that has not reported since the process started keeps everything.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import MISSING, fields
from itertools import repeat
from typing import Final

from bigfleet.engine.bulk import made_at_once
from bigfleet.engine.decision import RECLAIM_GRACE_SECONDS, Action, ActionKind
from bigfleet.engine.shapes.fleet import DecisionState
from bigfleet.engine.shapes.machines import Machines
from bigfleet.model.ids import ClusterId, MachineId

#: Machines to reclaim of one cluster, in the order of their Reclaims.
Reclaimed = tuple[ClusterId, Sequence[MachineId]]

#: What all Reclaims have in common.
_EQUAL: Final[Mapping[str, object]] = {
    **{field.name: field.default for field in fields(Action) if field.default is not MISSING},
    "kind": ActionKind.RECLAIM,
    "grace_seconds": RECLAIM_GRACE_SECONDS,
}


def reclaimed(fleet: DecisionState, excess: Mapping[str, Sequence[MachineId]]) -> list[Reclaimed]:
    """Return the excess machines of the clusters that have reported: by cluster, price, then id.

    `excess` has the machines that nothing keeps, by cluster, each list in keep-priority order.
    """
    found = []
    for cluster in sorted(excess):
        if cluster not in fleet.options.reported:
            continue
        ids = excess[cluster]
        if fleet.taken:
            ids = [machine_id for machine_id in ids if machine_id not in fleet.taken]
        if len(ids):
            found.append((ClusterId(cluster), ids))
    return found


def reclaims(machines: Iterable[Reclaimed], unjoined: Set[str]) -> Iterator[Action]:
    """Yield a Reclaim for each machine; `unjoined` are those that have not joined."""
    for cluster, ids in machines:
        yield from _reclaims_of(cluster, ids, unjoined)


def reclaim(cluster: ClusterId, machine_id: MachineId, unjoined: Set[str]) -> Action:
    """Return the Reclaim of a machine."""
    return _reclaims_of(cluster, (machine_id,), unjoined)[0]


def _reclaims_of(cluster: ClusterId, ids: Sequence[MachineId], unjoined: Set[str]) -> list[Action]:
    reasons = ["phase3.unjoined" if each in unjoined else "phase3.excess" for each in ids] if unjoined else None
    slots: dict[str, Iterable[object]] = {name: repeat(value) for name, value in _EQUAL.items()}
    slots.update(machine_id=ids, cluster=repeat(cluster), reason=reasons or repeat("phase3.excess"))
    return made_at_once(Action, len(ids), slots)


def releases(machines: Machines, claimed: Set[str]) -> Iterator[Action]:
    """Yield a Delete for each Idle machine that was not acquired and whose hold is over, by id."""
    for machine in machines.releasable():
        if machine.id not in claimed:
            yield Action(kind=ActionKind.DELETE, machine_id=machine.id, cluster=ClusterId(""), reason="phase3.release")
