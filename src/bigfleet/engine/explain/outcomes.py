"""Reports to a listener what Phase 3 did with every Configured and Idle machine (docs/spec/aggregates.md §7).

It reports why a machine is retained, reclaimed, spared, released or held, from the allocations of Phases 1 and 2. It
must never be asked whether something happens: that is `bigfleet.engine.reference.reclaim`'s answer.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from bigfleet.engine.decision import Options
from bigfleet.engine.explain.records import (
    HeldReason,
    MachineHeld,
    MachineKept,
    MachineReclaimed,
    MachineRecord,
    MachineReleased,
    MachineSpared,
    ReclaimReason,
    Reporter,
    SparedReason,
    difference,
)
from bigfleet.engine.explain.rejections import ref
from bigfleet.engine.reference.reclaim import clusters_with_machines, hold_seconds, hold_seconds_left, short_row_of
from bigfleet.engine.reference.rows import Allocations, DemandRow
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model.machine import Machine
from bigfleet.model.need import RowKey
from bigfleet.model.states import MachineState


def report_outcomes(
    reporter: Reporter,
    *,
    snapshot: Snapshot,
    options: Options,
    allocations: Allocations,
    rows: Sequence[DemandRow],
    short: Mapping[RowKey, DemandRow],
) -> None:
    """Report Configured machines by cluster and keep-priority, then Idle ones by id.

    `short` is the result of `bigfleet.engine.reference.reclaim.rows_by_stamp_when_short`.
    """
    rows_of: defaultdict[str, list[DemandRow]] = defaultdict(list)
    for row in rows:
        rows_of[row.need.cluster].append(row)
    for cluster in clusters_with_machines(snapshot):
        _report_cluster(reporter, cluster, snapshot, options, allocations, rows_of[cluster], short)
    for machine in snapshot.of_state(MachineState.IDLE):
        if reporter.wants_machine(machine.id):
            reporter.report(idle_record(machine, snapshot, options, allocations))


def _report_cluster(
    reporter: Reporter,
    cluster: str,
    snapshot: Snapshot,
    options: Options,
    allocations: Allocations,
    rows: Sequence[DemandRow],
    short: Mapping[RowKey, DemandRow],
) -> None:
    last_kept: Machine | None = None
    for position, machine in enumerate(snapshot.of_cluster(cluster, MachineState.CONFIGURED)):
        record: MachineRecord
        holder = allocations.claims.get(machine.id)
        if machine.id in allocations.taken:
            record = MachineSpared(machine=machine.id, cluster=cluster, reason=SparedReason.PREEMPTED)
        elif holder is not None:
            last_kept = machine
            record = MachineKept(machine=machine.id, cluster=cluster, row=ref(holder))
            if not reporter.wants_row(record.row):
                continue
        elif cluster not in options.reported:
            record = MachineSpared(machine=machine.id, cluster=cluster, reason=SparedReason.CLUSTER_NOT_REPORTED)
        elif (short_row := short_row_of(machine, options, short)) is not None:
            record = spared_for(machine, short_row)
        else:
            reason = reclaim_reason(machine, options, allocations, rows)
            record = reclaimed_record(machine, position, reason, last_kept)
        if reporter.wants_machine(machine.id):
            reporter.report(record)


def spared_for(machine: Machine, row: DemandRow) -> MachineSpared:
    """Return the record of a machine that stays because the row that it is stamped for is short."""
    return MachineSpared(
        machine=machine.id,
        cluster=machine.cluster,
        reason=SparedReason.ROW_SHORT,
        bound_for=ref(row),
        deficit=row.deficit,
    )


def reclaim_reason(
    machine: Machine, options: Options, allocations: Allocations, rows: Sequence[DemandRow]
) -> ReclaimReason:
    """Return why a machine is given back; `rows` are those of its cluster."""
    if machine.id in options.unjoined:
        return ReclaimReason.UNJOINED
    shape = allocations.pool.shapes.of[machine.id]
    fitting = [row for row in rows if shape in row.fit.shapes]
    for row in fitting:
        key = row.need.profile.same_key
        if key is not None and row.domain is not None and machine.attribute(key) != row.domain:
            return ReclaimReason.OTHER_DOMAIN
    return ReclaimReason.EXCESS if fitting else ReclaimReason.NO_ROW_FITS


def reclaimed_record(
    machine: Machine, position: int, reason: ReclaimReason, last_kept: Machine | None
) -> MachineReclaimed:
    """Return the record of a machine given back; `position` is its place in its cluster's keep-priority order."""
    price = machine.price_usd_per_hour
    return MachineReclaimed(
        machine=machine.id,
        cluster=machine.cluster,
        reason=reason,
        position=position,
        keep_key=(price, machine.assigned_reclamation_penalty_dollars),
        last_kept="" if last_kept is None else last_kept.id,
        price_difference=None if last_kept is None else difference(price, last_kept.price_usd_per_hour),
    )


def idle_record(machine: Machine, snapshot: Snapshot, options: Options, allocations: Allocations) -> MachineRecord:
    """Return what becomes of an Idle machine: `snapshot` has since when it is Idle, `allocations` who claims it."""
    if machine.id in allocations.claims:
        return MachineHeld(machine=machine.id, reason=HeldReason.CLAIMED)
    if machine.id in options.reserved:
        return MachineHeld(machine=machine.id, reason=HeldReason.RESERVED)
    hold = hold_seconds(machine, options)
    if hold is None:
        return MachineHeld(machine=machine.id, reason=HeldReason.FIXED_CAPACITY)
    seconds_left = hold_seconds_left(machine, snapshot, options)
    if seconds_left is None:
        return MachineHeld(machine=machine.id, reason=HeldReason.NO_IDLE_STAMP)
    if seconds_left > 0:
        return MachineHeld(machine=machine.id, reason=HeldReason.HOLD_RUNNING, seconds_left=seconds_left)
    return MachineReleased(
        machine=machine.id,
        capacity_type=machine.capacity_type,
        idle_seconds=options.now_seconds - snapshot.idle_since_seconds[machine.id],
        hold_seconds=hold,
    )
