"""Reclaims what a cluster no longer needs and releases idle machines: Phase 3.

A machine is excess when no row claims any of it and its target composition does not keep it. Silence reclaims
nothing: a cluster that has not reported since the process started keeps everything.
"""

from collections.abc import Iterator, Mapping, Sequence, Set

from bigfleet.engine.decision import RECLAIM_GRACE_SECONDS, Action, ActionKind
from bigfleet.engine.shapes.fleet import DecisionState
from bigfleet.engine.shapes.machines import Machines
from bigfleet.model.ids import ClusterId, MachineId


def reclaims(fleet: DecisionState, excess: Mapping[str, Sequence[MachineId]]) -> Iterator[Action]:
    """Yield a Reclaim for each excess machine of the clusters that have reported: by cluster, price, then id.

    `excess` has the machines that nothing keeps, by cluster, each list in keep-priority order.
    """
    for cluster in sorted(excess):
        if cluster not in fleet.options.reported:
            continue
        for machine_id in excess[cluster]:
            if machine_id not in fleet.taken:
                is_unjoined = machine_id in fleet.options.unjoined
                yield Action(
                    kind=ActionKind.RECLAIM,
                    machine_id=machine_id,
                    cluster=ClusterId(cluster),
                    reason="phase3.unjoined" if is_unjoined else "phase3.excess",
                    grace_seconds=RECLAIM_GRACE_SECONDS,
                )


def releases(machines: Machines, claimed: Set[str]) -> Iterator[Action]:
    """Yield a Delete for each Idle machine that was not acquired and whose hold is over, by id."""
    for machine in machines.releasable():
        if machine.id not in claimed:
            yield Action(kind=ActionKind.DELETE, machine_id=machine.id, cluster=ClusterId(""), reason="phase3.release")
