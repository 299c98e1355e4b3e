"""Reclaims what a cluster no longer needs and releases idle machines: Phase 3.

A machine is excess when no row claims any of it and its target composition does not keep it. Silence reclaims
nothing: a cluster that has not reported since the process started keeps everything.
"""

from collections.abc import Iterator

from bigfleet.engine.decision import RECLAIM_GRACE_SECONDS, Action, ActionKind
from bigfleet.engine.reclaim import hold_seconds_left
from bigfleet.engine.shapes.fleet import Fleet
from bigfleet.model.ids import ClusterId
from bigfleet.model.machine import Machine
from bigfleet.model.states import MachineState


def reclaims(fleet: Fleet, claimed: frozenset[str]) -> Iterator[Action]:
    """Yield a Reclaim for each excess machine of the clusters that have reported: by cluster, price, then id.

    `claimed` are the machines that Phase 1 gave to a row or that a target keeps.
    """
    short = _stamps_of_short_rows(fleet)
    for cluster, state in sorted(fleet.snapshot.by_cluster, key=lambda key: key[0]):
        if state is not MachineState.CONFIGURED or cluster not in fleet.options.reported:
            continue
        for machine in fleet.snapshot.of_cluster(cluster, state):
            if machine.id in claimed or machine.id in fleet.taken:
                continue
            is_unjoined = machine.id in fleet.options.unjoined
            if not is_unjoined and _stamp(machine) in short:
                continue
            yield Action(
                kind=ActionKind.RECLAIM,
                machine_id=machine.id,
                cluster=ClusterId(cluster),
                reason="phase3.unjoined" if is_unjoined else "phase3.excess",
                grace_seconds=RECLAIM_GRACE_SECONDS,
            )


def releases(fleet: Fleet, claimed: frozenset[str]) -> Iterator[Action]:
    """Yield a Delete for each Idle machine that was not acquired and whose hold is over, by id."""
    for machine in fleet.snapshot.of_state(MachineState.IDLE):
        if machine.id in claimed or machine.id in fleet.options.reserved:
            continue
        seconds_left = hold_seconds_left(machine, fleet.snapshot, fleet.options)
        if seconds_left is not None and seconds_left <= 0:
            yield Action(kind=ActionKind.DELETE, machine_id=machine.id, cluster=ClusterId(""), reason="phase3.release")


def _stamp(machine: Machine) -> tuple[str, str, str]:
    return (machine.cluster, machine.assigned_need_fingerprint, machine.assigned_group)


def _stamps_of_short_rows(fleet: Fleet) -> frozenset[tuple[str, str, str]]:
    """Return the stamps of rows that are short: their machines are never excess."""
    return frozenset(row.need.key for row in fleet.rows if row.is_short)
