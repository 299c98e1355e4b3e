"""Converts one recorded cycle to the input of a plan, so that it is printed, patched and explained like a plan.

docs/replay.md. A row is named by its cluster and the id that `bigfleet get needs` shows. Options that the files of a
plan cannot express keep their recorded values. This module does not change the recording.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

from bigfleet.cli.get.records import need_id
from bigfleet.cli.plan.inputs import MachineGiven, NeedGiven, in_list_order
from bigfleet.cli.plan.patches import apply_patches
from bigfleet.cli.plan.planning import Difference, FleetPlan, PlanInput, decided_plan, difference_of
from bigfleet.cli.replay.changes import ReplaySettings
from bigfleet.cli.replay.replaying import new_engine
from bigfleet.cli.runtime.failures import UsageFault
from bigfleet.engine.columns.store import column_snapshot
from bigfleet.engine.decision import Decision, Options
from bigfleet.engine.explain.explanation import Explanation
from bigfleet.engine.shapes.decide import decide_with_fleet, says_pods
from bigfleet.engine.shapes.explain import Explained
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model.ids import MachineId
from bigfleet.recording.reader import RecordedCycle

#: Names that the message for an ambiguous beginning lists.
_NAMED_MAX = 5


def plan_of(recorded: RecordedCycle, decision: Decision) -> FleetPlan:
    """Return a cycle `with_machines`, and what was decided on it now, as a plan."""
    snapshot, options = recorded.view.source, recorded.options
    assert snapshot is not None, "the caller has had the machines made"
    given = PlanInput(
        machines={
            machine_id: MachineGiven(
                machine=machine,
                idle_since_seconds=snapshot.idle_since_seconds.get(machine_id),
                unjoined=machine_id in options.unjoined,
                reserved=machine_id in options.reserved,
            )
            for machine_id, machine in snapshot.machines.items()
        },
        needs=tuple(_named(recorded)),
        now_seconds=options.now_seconds,
        overheads=options.overheads,
    )
    explained = None
    if says_pods(recorded.demand):
        again, fleet = decide_with_fleet(snapshot, recorded.demand, options)
        explained = Explained(again, fleet, [need.id for need in given.needs])
    return decided_plan(given, snapshot, recorded.demand, options, decision, explained=explained)


def difference_to(base: FleetPlan, patches: Path | None, settings: ReplaySettings, engine: str) -> Difference:
    """Return what patches and settings change. Raises UsageFault for patches that do not fit the cycle."""
    given = base.given if patches is None else apply_patches(base.given, patches)
    demand = tuple(need.need for need in in_list_order(given.needs))
    snapshot = base.snapshot if given.machines is base.given.machines else _snapshot_of(given)
    options = settings.applied(_options_of(given, base.options))
    decision = new_engine(engine)(column_snapshot(snapshot), demand, options)
    return difference_of(base, decided_plan(given, snapshot, demand, options, decision))


def explained(plan: FleetPlan, asked: str, *, base: FleetPlan) -> tuple[Explanation | list[str], str]:
    """Return why a row or a machine is decided as it is, and its name.

    `asked` is a machine's id, or a row's name or how its id begins, with or without its cluster; need: or machine:
    before it says which. Raises UsageFault.
    """
    kind, colon, name = asked.partition(":")
    if not colon or kind not in ("need", "machine"):
        kind, name = "", asked
    if kind != "need" and name in plan.snapshot.machines:
        return plan.explain_machine(name), name
    rows = [] if kind == "machine" else _rows_meant(plan, name)
    if len(rows) > 1:
        rest = f" and {len(rows) - _NAMED_MAX:,} more" if len(rows) > _NAMED_MAX else ""
        named = ", ".join(rows[:_NAMED_MAX])
        raise UsageFault(f"--explain: {name!r} matches {len(rows):,} rows: {named}{rest}; give more of the id")
    if rows:
        return plan.explain_need(rows[0]), rows[0]
    if plan is not base and (_rows_meant(base, name) or name in base.snapshot.machines):
        raise UsageFault(f"--explain: {name!r} does not exist after the change; explain it without --what-if")
    raise UsageFault(
        f"--explain: the cycle has no {kind or 'row and no machine'} {name!r}; "
        "rows are named CLUSTER/ID as --cycle shows them, machines by their id"
    )


def _rows_meant(plan: FleetPlan, asked: str) -> list[str]:
    if asked in plan.needs_by_id:
        return [asked]
    if not asked:
        return []
    return [name for name in plan.needs_by_id if name.startswith(asked) or name.rpartition("/")[2].startswith(asked)]


def _named(recorded: RecordedCycle) -> list[NeedGiven]:
    found: Counter[str] = Counter()
    named = []
    for need in recorded.demand:
        name = f"{need.cluster}/{need_id(need.fingerprint, need.group)}"
        found[name] += 1
        # Equal rows of one cluster are distinguished by their order.
        named.append(NeedGiven(id=name if found[name] == 1 else f"{name}#{found[name]}", need=need))
    return named


def _snapshot_of(given: PlanInput) -> Snapshot:
    since = {one: each.idle_since_seconds for one, each in given.machines.items()}
    return Snapshot.of(
        (each.machine for each in given.machines.values()),
        {one: seconds for one, seconds in since.items() if seconds is not None and not np.isnan(seconds)},
    )


def _options_of(given: PlanInput, options: Options) -> Options:
    def flagged(name: str) -> frozenset[MachineId]:
        return frozenset(one for one, each in given.machines.items() if getattr(each, name))

    return replace(
        options,
        reported=options.reported | given.removed_clusters,
        unjoined=flagged("unjoined"),
        reserved=flagged("reserved"),
        overheads=given.overheads,
    )
