"""Repeats decide and apply until no action is left, and reports what every cluster holds then.

Between two cycles every action is applied with its final state (docs/spec/engine.md §11): Provision and Bootstrap reach
Configured with all stamps, Reclaim and Preempt reach Idle, Delete reaches Speculative. If no action is left, the clock
moves past every hold of an idle machine, so that unneeded machines are released. This module does not decide.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from bigfleet.cli.engine.case_fleet import CaseFleet
from bigfleet.cli.plan.inputs import MachineGiven
from bigfleet.cli.plan.planning import FleetPlan, PlanInput, answer_to, make_plan, question_of
from bigfleet.cli.runtime.failures import RunFault
from bigfleet.engine.decision import Action, ActionKind
from bigfleet.engine.targets import Target
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.quantity import Family
from bigfleet.model.states import MachineState
from bigfleet.model.vector import Vector

CYCLES_MAX: Final = 200

#: Where a transition ends that is under way in the input.
_END_OF: Final[Mapping[MachineState, MachineState]] = {
    MachineState.CREATING: MachineState.IDLE,
    MachineState.CONFIGURING: MachineState.CONFIGURED,
    MachineState.DRAINING: MachineState.IDLE,
    MachineState.DELETING: MachineState.SPECULATIVE,
}
_DRAINS: Final = frozenset({ActionKind.RECLAIM, ActionKind.PREEMPT})


@dataclass(frozen=True, slots=True)
class Claim:
    """What one row has on one machine."""

    row: str
    #: Of one pod; the whole share of a row without shapes.
    resources: Vector
    #: Pods; None for a row without shapes.
    pods: int | None
    families: Mapping[str, Family]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A fleet at rest."""

    #: Cycles that had actions.
    cycles: int
    #: How many of each kind were carried out.
    actions: Mapping[ActionKind, int]
    #: One more cycle on the fleet at rest; it has no action.
    plan: FleetPlan

    @property
    def clusters(self) -> dict[str, list[Machine]]:
        """Every cluster with demand or machines, ids ascending, and the machines that it holds, ids ascending."""
        found: dict[str, list[Machine]] = {need.cluster: [] for need in self.plan.demand}
        for _id, machine in sorted(self.plan.snapshot.machines.items()):
            if machine.cluster and machine.state is MachineState.CONFIGURED:
                found.setdefault(machine.cluster, []).append(machine)
        return dict(sorted(found.items()))

    @property
    def rows_of(self) -> dict[MachineId, list[str]]:
        """The names of the rows that each held machine counts for, in list order; other machines have none."""
        found: dict[MachineId, list[str]] = {}
        for name, row in zip(self.plan.names, self.plan.decision.rows, strict=True):
            for machine_id in row.claimed:
                found.setdefault(machine_id, []).append(name)
        return found

    @property
    def claims_of(self) -> dict[MachineId, list[Claim]]:
        """What each machine hosts, rows in list order; only where the demand has shapes."""
        found: dict[MachineId, list[Claim]] = {}
        for name, row in zip(self.plan.names, self.plan.decision.rows, strict=True):
            shapes, families = (*row.need.shapes, *row.need.waiting), row.need.families
            for placement in row.placements:
                claim = Claim(name, shapes[placement.shape].resources, placement.count, families)
                found.setdefault(placement.machine_id, []).append(claim)
            for machine_id, amounts in row.shares:
                found.setdefault(machine_id, []).append(Claim(name, amounts, None, families))
        return found


def settle(given: PlanInput, *, targets: Mapping[str, Target] | None = None, cycles_max: int = CYCLES_MAX) -> Settled:
    """Return the fleet at rest. Raises RunFault when it still acts after so many cycles.

    Transitions that are under way in the input end first. Without `targets` all clusters are planned.
    """
    fleet = _fleet_of(given)
    given = replace(given, machines=_machines_of(fleet, given))
    counts: Counter[ActionKind] = Counter()
    cycles, holds_are_over, is_replanned = 0, False, False
    while True:
        answer = answer_to(question_of(given), given.settings, targets)
        # Demand is constant, so what was planned for it holds; a row that stays short is worth another attempt.
        targets, actions = answer.options.targets, answer.decision.actions
        if not actions and not is_replanned and targets and not all(row.satisfied for row in answer.decision.rows):
            targets, is_replanned = None, True
            continue
        if not actions and holds_are_over:
            return Settled(cycles=cycles, actions=dict(counts), plan=make_plan(given, targets))
        if actions and cycles == cycles_max:
            raise RunFault(_unsettled(actions, cycles))
        if actions:
            cycles += 1
            counts.update(action.kind for action in actions)
            fleet.apply(actions)
            # A machine that missed the join gate starts afresh once it was drained.
            fleet.unjoined -= {action.machine_id for action in actions if action.kind in _DRAINS}
        # Whatever became idle since then is held from now on.
        holds_are_over = not actions
        if holds_are_over:
            fleet.now_seconds += max((*answer.options.hold_seconds.values(), 0.0))
        given = replace(given, machines=_machines_of(fleet, given), now_seconds=fleet.now_seconds)


def _fleet_of(given: PlanInput) -> CaseFleet:
    fleet = CaseFleet(now_seconds=given.now_seconds)
    for machine_id, one in given.machines.items():
        machine = one.machine
        fleet.machines[machine_id] = machine
        if machine.state is MachineState.IDLE:
            # One whose time is not known is held from the beginning on.
            since = given.now_seconds if one.idle_since_seconds is None else one.idle_since_seconds
            fleet.idle_since_seconds[machine_id] = since
        if machine.state in _END_OF:
            fleet.move(machine, _END_OF[machine.state])
        if one.unjoined:
            fleet.unjoined.add(machine_id)
    return fleet


def _machines_of(fleet: CaseFleet, given: PlanInput) -> dict[MachineId, MachineGiven]:
    return {
        machine_id: MachineGiven(
            machine=machine,
            idle_since_seconds=fleet.idle_since_seconds.get(machine_id),
            unjoined=machine_id in fleet.unjoined,
            reserved=given.machines[machine_id].reserved,
        )
        for machine_id, machine in fleet.machines.items()
    }


def _unsettled(actions: Sequence[Action], cycles: int) -> str:
    kinds = Counter(action.kind.label for action in actions)
    next_actions = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    return f"--until-settled: no rest after {cycles} cycles, the next would have {next_actions}; report both files"
