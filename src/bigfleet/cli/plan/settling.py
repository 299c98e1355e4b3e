"""Decides and applies until nothing more is decided: what a fleet looks like at rest (docs/planning.md).

Every action is carried out at once and succeeds. A machine that is acquired is bound to its cluster with the stamps
of its row; one that is drained is idle; one that is released can be made again. Holds of idle machines count as over
when nothing else is left to do. Demand is constant, so target compositions are planned once, and again when a row
stays short.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from bigfleet.cli.engine.cases import HOST
from bigfleet.cli.plan.inputs import MachineGiven
from bigfleet.cli.plan.planning import Plan, PlanInput, make_plan
from bigfleet.engine.decision import Action, ActionKind
from bigfleet.engine.targets import Target
from bigfleet.model.ids import ClusterId
from bigfleet.model.machine import NO_HOST, Machine
from bigfleet.model.penalty import bucket_upper_dollars
from bigfleet.model.shapes import DemandShape
from bigfleet.model.states import MachineState

#: Cycles after which a fleet that does not come to rest is given up.
CYCLES_MAX: Final = 200
#: Longer than any hold of idle machines.
REST_SECONDS: Final = 7200.0
#: States of machines that a cluster holds.
_HELD: Final = frozenset({MachineState.CONFIGURED, MachineState.CONFIGURING, MachineState.CREATING})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A fleet at rest."""

    #: The last plan: it decides nothing, unless the fleet did not come to rest.
    last: Plan
    #: Cycles that decided something, and what they decided in all.
    cycles: int
    actions: int
    is_at_rest: bool
    #: Machines that each cluster holds, clusters and machines by id.
    clusters: Mapping[str, tuple[Machine, ...]]

    @property
    def cost_usd_per_hour(self) -> float:
        """Price of everything that clusters hold or that stands idle."""
        return self.last.before.total_usd_per_hour

    def claims(self) -> Mapping[str, list[tuple[str, DemandShape | None, Mapping[str, int]]]]:
        """Return what each machine hosts: (row, shape with the pods' count, amounts), rows in the demand's order.

        A row without shapes has no pods: its shape is None and the amounts are its share.
        """
        found: dict[str, list[tuple[str, DemandShape | None, Mapping[str, int]]]] = {}
        for name, row in zip(self.last.names, self.last.decision.rows, strict=True):
            shapes = (*row.need.shapes, *row.need.waiting)
            for placement in row.placements:
                shape = replace(shapes[placement.shape], count=placement.count)
                found.setdefault(placement.machine_id, []).append((name, shape, shape.resources))
            for machine_id, amounts in row.shares:
                found.setdefault(machine_id, []).append((name, None, amounts))
        return found


def settle(given: PlanInput) -> Settled:
    """Return the fleet at rest, or as it is after `CYCLES_MAX` cycles that decided something."""
    targets: Mapping[str, Target] | None = None
    cycles = actions = 0
    has_waited = has_replanned = False
    while True:
        plan = make_plan(given, targets)
        targets = plan.options.targets
        if plan.decision.actions and cycles < CYCLES_MAX:
            cycles += 1
            actions += len(plan.decision.actions)
            given = _applied(given, plan)
            has_waited = False
            continue
        is_short = any(not row.satisfied for row in plan.decision.rows)
        if not plan.decision.actions and not has_waited:
            given = replace(given, now_seconds=given.now_seconds + REST_SECONDS)
            has_waited = True
            continue
        if not plan.decision.actions and is_short and not has_replanned:
            targets, has_replanned = None, True
            continue
        return _settled(plan, cycles, actions)


def _settled(plan: Plan, cycles: int, actions: int) -> Settled:
    held: dict[str, list[Machine]] = {}
    for machine in plan.snapshot.machines.values():
        owner = machine.intended_cluster if machine.state is MachineState.CREATING else machine.cluster
        if machine.state in _HELD and owner:
            held.setdefault(owner, []).append(machine)
    return Settled(
        last=plan,
        cycles=cycles,
        actions=actions,
        is_at_rest=not plan.decision.actions,
        clusters={cluster: tuple(held[cluster]) for cluster in sorted(held)},
    )


def _applied(given: PlanInput, plan: Plan) -> PlanInput:
    machines = dict(given.machines)
    for action in plan.decision.actions:
        machines[action.machine_id] = _carried_out(machines[action.machine_id], action, given.now_seconds)
    for machine_id, one in machines.items():
        if one.machine.state in (MachineState.CREATING, MachineState.CONFIGURING, MachineState.DRAINING):
            machines[machine_id] = _arrived(one, given.now_seconds)
    return replace(given, machines=machines)


def _arrived(given: MachineGiven, now_seconds: float) -> MachineGiven:
    """Return a machine on its way where it was going."""
    machine = given.machine
    if machine.state is MachineState.CONFIGURING and machine.cluster:
        return replace(given, machine=replace(machine, state=MachineState.CONFIGURED))
    if machine.state is MachineState.DRAINING or machine.state is MachineState.CREATING:
        return _idle(given, now_seconds)
    return given


def _idle(given: MachineGiven, now_seconds: float) -> MachineGiven:
    machine = given.machine.without_binding()
    host = machine.host if machine.host.is_present else HOST
    return replace(given, machine=replace(machine, state=MachineState.IDLE, host=host), idle_since_seconds=now_seconds)


def _carried_out(given: MachineGiven, action: Action, now_seconds: float) -> MachineGiven:
    machine = given.machine
    if action.kind in (ActionKind.RECLAIM, ActionKind.PREEMPT):
        return replace(_idle(given, now_seconds), unjoined=False)
    if action.kind is ActionKind.DELETE:
        freed = replace(machine.without_binding(), state=MachineState.SPECULATIVE, host=NO_HOST)
        return replace(given, machine=freed, idle_since_seconds=None)
    profile = action.profile
    assert profile is not None, "an acquisition names the row's profile"
    bound = replace(
        machine,
        state=MachineState.CONFIGURED,
        host=machine.host if machine.host.is_present else HOST,
        cluster=action.cluster,
        intended_cluster=ClusterId(""),
        assigned_need_fingerprint=profile.fingerprint,
        assigned_group=action.group,
        assigned_priority=profile.priority,
        assigned_interruption_penalty_dollars=bucket_upper_dollars(profile.interruption_bucket),
        assigned_reclamation_penalty_dollars=bucket_upper_dollars(profile.reclamation_bucket),
    )
    return replace(given, machine=bound, idle_since_seconds=None)
