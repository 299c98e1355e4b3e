"""Reclaims what a cluster no longer needs and releases idle machines: Phase 3 (docs/spec/aggregates.md §7).

It works on the machines that Phases 1 and 2 left. A machine that is claimed or was preempted is never reclaimed, nor is
one that was bound for a row which is short. Missing reports cause no reclaim. The safety limits of the shard, not this
module, decide how many reclaims are executed.
"""

from collections.abc import Iterable, Iterator, Mapping

from bigfleet.engine.decision import RECLAIM_GRACE_SECONDS, Action, ActionKind, Options
from bigfleet.engine.folding import folded_need
from bigfleet.engine.reference.rows import Allocations, DemandRow
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model.ids import ClusterId
from bigfleet.model.machine import Machine
from bigfleet.model.need import RowKey
from bigfleet.model.states import CapacityType, MachineState

#: Only these are ever released, whatever the hold policy says: the rest is fixed capacity.
RELEASABLE = frozenset({CapacityType.ON_DEMAND, CapacityType.SPOT})


def clusters_with_machines(snapshot: Snapshot) -> list[str]:
    """Return the clusters that have a Configured machine, by id."""
    return sorted(cluster for cluster, state in snapshot.by_cluster if state is MachineState.CONFIGURED)


def rows_by_stamp_when_short(rows: Iterable[DemandRow]) -> dict[RowKey, DemandRow]:
    """Return the rows that Phase 1 left with a deficit, by every key that a machine bound for them may be stamped with.

    The keys are the row's own, of a folded row those of its members, and of a gang that is not folded the one that it
    would have: a gang may fold in one cycle and not in another. If several rows have one key, the first in list order
    is returned.
    """
    short: dict[RowKey, DemandRow] = {}
    for row in sorted((row for row in rows if row.deficit), key=lambda row: row.position):
        for need in (row.need, *row.members):
            short.setdefault(need.key, row)
        if not row.folded and row.is_same:
            short.setdefault(folded_need(row.need).key, row)
    return short


def short_row_of(machine: Machine, options: Options, short: Mapping[RowKey, DemandRow]) -> DemandRow | None:
    """Return the short row of its cluster that a machine is stamped for, None without one.

    `short` is the result of `rows_by_stamp_when_short`. A machine that never joined its cluster protects no pod, so it
    has none. No row has an empty fingerprint, so a machine without a stamp has none either.
    """
    if machine.id in options.unjoined:
        return None
    return short.get((machine.cluster, machine.assigned_need_fingerprint, machine.assigned_group))


def reclaims(
    snapshot: Snapshot, options: Options, allocations: Allocations, short: Mapping[RowKey, DemandRow]
) -> Iterator[Action]:
    """Yield a Reclaim for each Configured machine that no row holds, in clusters that have reported.

    A machine that is stamped for a short row stays (`short` is the result of `rows_by_stamp_when_short`): the row may
    be short because of one pod, and the others run there (docs/adr/0136).

    Order: cluster, then keep-priority, so that a cluster sheds its expensive machines and keeps the cheap ones.
    """
    for cluster in clusters_with_machines(snapshot):
        if cluster not in options.reported:
            continue
        for machine in snapshot.of_cluster(cluster, MachineState.CONFIGURED):
            if machine.id in allocations.claims or machine.id in allocations.taken:
                continue
            if short_row_of(machine, options, short) is not None:
                continue
            yield Action(
                kind=ActionKind.RECLAIM,
                machine_id=machine.id,
                cluster=ClusterId(cluster),
                reason="phase3.unjoined" if machine.id in options.unjoined else "phase3.excess",
                grace_seconds=RECLAIM_GRACE_SECONDS,
            )


def releases(snapshot: Snapshot, options: Options, allocations: Allocations) -> Iterator[Action]:
    """Yield a Delete for each Idle machine that no row claims and whose hold is over, by id."""
    for machine in snapshot.of_state(MachineState.IDLE):
        if machine.id in allocations.claims or machine.id in options.reserved:
            continue
        seconds_left = hold_seconds_left(machine, snapshot, options)
        if seconds_left is not None and seconds_left <= 0:
            yield Action(kind=ActionKind.DELETE, machine_id=machine.id, cluster=ClusterId(""), reason="phase3.release")


def hold_seconds(machine: Machine, options: Options) -> float | None:
    """Return how long the machine is held while Idle, None for ever."""
    seconds = options.hold_seconds.get(machine.capacity_type, 0.0)
    return seconds if machine.capacity_type in RELEASABLE and seconds > 0 else None


def hold_seconds_left(machine: Machine, snapshot: Snapshot, options: Options) -> float | None:
    """Return what is left of the hold, zero or less when it is over; None when it never ends or has no beginning."""
    hold = hold_seconds(machine, options)
    idle_since = snapshot.idle_since_seconds.get(machine.id)
    if hold is None or idle_since is None:
        return None
    return hold - (options.now_seconds - idle_since)
