"""Decides a plan: runs one cycle of the engine on the files, and computes its cost and its shortfalls.

No safety limit delays the decision, and no action is executed (docs/planning.md). A cluster without a row in the demand
is silent and keeps its machines; a cluster that a patch removed reports an empty demand.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from bigfleet.cli.plan.inputs import MachineGiven, NeedGiven, in_list_order
from bigfleet.cli.runtime.kernel_cache import keep_kernels
from bigfleet.compositions.targets import targets_of
from bigfleet.engine.decision import Action, ActionKind, Decision, Options, RowResult
from bigfleet.engine.explain.explanation import Explanation, NeedExplanation, explain_decision, explain_needs
from bigfleet.engine.explain.records import RowRef
from bigfleet.engine.explain.sentences import shortfall_sentences
from bigfleet.engine.reference.decide import decide
from bigfleet.engine.shapes.decide import decide_with_fleet, says_pods
from bigfleet.engine.shapes.explain import Explained
from bigfleet.engine.shapes.explain import shortfall_sentences as reasons_of_shapes
from bigfleet.engine.shapes.fleet import DecisionState
from bigfleet.engine.snapshot import Snapshot
from bigfleet.engine.targets import Target
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need
from bigfleet.model.shapes import Overhead
from bigfleet.model.states import MachineState
from bigfleet.model.vector import Vector
from bigfleet.planner.problem import PlanSettings

#: Short rows whose reasons a plan works out, the most urgent first.
SHORTFALLS_EXPLAINED_MAX = 20
#: Members that the name of a folded row spells out.
_NAMED_MEMBERS_MAX = 3

#: States of a machine that is there and serves, or will serve, a cluster.
SERVING_STATES = frozenset(
    {MachineState.CREATING, MachineState.CONFIGURING, MachineState.CONFIGURED, MachineState.DRAINING}
)

#: Where the machine of an action ends.
STATE_AFTER: Mapping[ActionKind, MachineState] = {
    ActionKind.BOOTSTRAP: MachineState.CONFIGURED,
    ActionKind.PROVISION: MachineState.CONFIGURED,
    ActionKind.RECLAIM: MachineState.IDLE,
    ActionKind.PREEMPT: MachineState.IDLE,
    ActionKind.DELETE: MachineState.SPECULATIVE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInput:
    """What a plan is made of."""

    machines: Mapping[MachineId, MachineGiven]
    #: In the order of the file.
    needs: tuple[NeedGiven, ...]
    now_seconds: float
    #: Clusters that want nothing and say so.
    removed_clusters: frozenset[str] = frozenset()
    #: What DaemonSets take of each machine, by cluster.
    overheads: Mapping[str, tuple[Overhead, ...]] = field(default_factory=dict)
    #: How all clusters are planned.
    settings: PlanSettings = field(default_factory=PlanSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The hourly cost of machines, by state."""

    serving_usd_per_hour: float
    idle_usd_per_hour: float
    serving_machines: int
    idle_machines: int

    @property
    def total_usd_per_hour(self) -> float:
        """The sum of both."""
        return self.serving_usd_per_hour + self.idle_usd_per_hour


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedAction:
    """One action with the machine and the row that it is about."""

    action: Action
    machine: Machine
    #: The row that gains the machine, or for which it is preempted; "" for Reclaim and Delete.
    need_id: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What makes two actions of two plans the same."""
        return (self.action.kind.label, self.machine.id, self.action.cluster, self.need_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedShortfall:
    """What one row lacks."""

    need_id: str
    row: RowResult
    #: Machines that are preempted for it in this plan.
    waits_for: tuple[MachineId, ...]
    #: Why, for the most urgent rows; None where nothing stays uncovered or too many rows are short.
    explanation: NeedExplanation | None

    @property
    def lacks(self) -> Vector:
        """What neither machines nor victims cover."""
        return self.row.unresolved


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """One decision with its costs."""

    given: PlanInput
    snapshot: Snapshot
    demand: tuple[Need, ...]
    options: Options
    decision: Decision
    #: Name of each row of the decision.
    names: tuple[str, ...]
    actions: tuple[PlannedAction, ...]
    before: Cost
    after: Cost
    #: By precedence.
    shortfalls: tuple[PlannedShortfall, ...]
    #: Rows of the demand by their ids.
    needs_by_id: Mapping[str, Need] = field(repr=False)
    #: Explains a decision over demand shapes; None for a decision over aggregates.
    explained: Explained | None = field(default=None, repr=False)

    def row_name(self, row: RowRef) -> str:
        """Return the name of a row of the folded list."""
        return self.names[row.position]

    def explain_need(self, need_id: str) -> Explanation | list[str]:
        """Return why a row got what it got, sentences for a decision over shapes. The row must be in the demand."""
        need = self.needs_by_id[need_id]
        if self.explained is None:
            return explain_decision(self.decision, need)
        return self.explained.row(next(place for place, each in enumerate(self.demand) if each is need))

    def explain_machine(self, machine_id: str) -> Explanation | list[str]:
        """Return why a machine serves its cluster. The machine must be in the inventory."""
        if self.explained is not None:
            return self.explained.machine(machine_id)
        return explain_decision(self.decision, MachineId(machine_id))

    def shortfall_reasons(self, short: PlannedShortfall) -> list[str]:
        """Return why a row is short, in sentences."""
        if self.explained is not None:
            return reasons_of_shapes(short.row)
        return [] if short.explanation is None else shortfall_sentences(short.explanation, row_name=self.row_name)


def plan_input(
    machines: Sequence[MachineGiven],
    needs: Sequence[NeedGiven],
    *,
    overheads: Mapping[str, tuple[Overhead, ...]] | None = None,
    now_seconds: float | None = None,
    settings: PlanSettings | None = None,
) -> PlanInput:
    """Return the input of a plan; without a time it is that of the latest idle-since stamp."""
    stamps = [given.idle_since_seconds for given in machines if given.idle_since_seconds is not None]
    return PlanInput(
        machines={given.machine.id: given for given in machines},
        needs=tuple(needs),
        overheads=overheads or {},
        now_seconds=max(stamps, default=0.0) if now_seconds is None else now_seconds,
        settings=settings or PlanSettings(),
    )


def make_plan(given: PlanInput, targets: Mapping[str, Target] | None = None) -> FleetPlan:
    """Decide one cycle and return everything that a person asks of it; `targets` as in `answer_to`."""
    asked = question_of(given)
    answer = answer_to(asked, given.settings, targets)
    explained = None
    if answer.fleet is not None:
        names = [need.id for need in in_list_order(given.needs)]
        explained = Explained(answer.decision, answer.fleet, names)
    return decided_plan(given, asked.snapshot, asked.demand, answer.options, answer.decision, explained=explained)


class PlannedDecision(NamedTuple):
    """A decision and the options with which it was made."""

    decision: Decision
    options: Options
    #: The working state that a decision over shapes left; None for a decision over aggregates.
    fleet: DecisionState | None


def answer_to(
    asked: "Question", settings: PlanSettings, targets: Mapping[str, Target] | None = None
) -> PlannedDecision:
    """Decide one cycle.

    A demand with shapes is decided pod by pod, towards target compositions; without `targets` they are planned first.
    A demand without any is decided by its aggregates.
    """
    if not says_pods(asked.demand):
        return PlannedDecision(decide(*asked), asked.options, None)
    if targets is None:
        keep_kernels()
        clusters = dict.fromkeys((str(need.cluster) for need in asked.demand), settings)
        targets = targets_of(*asked, settings=clusters)
    options = replace(asked.options, targets=targets)
    decision, fleet = decide_with_fleet(asked.snapshot, asked.demand, options)
    return PlannedDecision(decision, options, fleet)


class Question(NamedTuple):
    """What an engine is asked."""

    snapshot: Snapshot
    #: In list order.
    demand: tuple[Need, ...]
    options: Options


def question_of(given: PlanInput) -> Question:
    """Return the engine's input of one cycle."""
    demand = tuple(need.need for need in in_list_order(given.needs))
    snapshot = Snapshot.of(
        [one.machine for one in given.machines.values()],
        {
            machine_id: one.idle_since_seconds
            for machine_id, one in given.machines.items()
            if one.idle_since_seconds is not None
        },
    )
    options = Options(
        now_seconds=given.now_seconds,
        reported=frozenset(need.cluster for need in demand) | given.removed_clusters,
        unjoined=frozenset(machine_id for machine_id, one in given.machines.items() if one.unjoined),
        reserved=frozenset(machine_id for machine_id, one in given.machines.items() if one.reserved),
        overheads=given.overheads,
    )
    return Question(snapshot, demand, options)


def decided_plan(
    given: PlanInput,
    snapshot: Snapshot,
    demand: tuple[Need, ...],
    options: Options,
    decision: Decision,
    *,
    explained: Explained | None = None,
) -> FleetPlan:
    """Return everything that a person asks of a decision on some input; its rows are the very objects of the input."""
    ids = {id(need.need): need.id for need in given.needs}
    names = tuple(_name([ids[id(member)] for member in row.members]) for row in decision.rows)
    return FleetPlan(
        given=given,
        snapshot=snapshot,
        demand=demand,
        options=options,
        decision=decision,
        names=names,
        actions=_planned(decision, snapshot, names),
        before=cost_of(snapshot.machines.values()),
        after=cost_of(snapshot.machines.values(), {a.machine_id: STATE_AFTER[a.kind] for a in decision.actions}),
        shortfalls=_shortfalls(decision, names, snapshot, demand, options, has_records=explained is None),
        needs_by_id={need.id: need.need for need in given.needs},
        explained=explained,
    )


def cost_of(machines: Iterable[Machine], moved: Mapping[MachineId, MachineState] | None = None) -> Cost:
    """Return what the machines cost that are there, `moved` in another state than their own.

    Speculative, Deleting and Failed machines cost nothing.
    """
    serving: list[float] = []
    idle: list[float] = []
    for machine in machines:
        state = machine.state if moved is None else moved.get(machine.id, machine.state)
        if state in SERVING_STATES:
            serving.append(machine.price_usd_per_hour)
        elif state is MachineState.IDLE:
            idle.append(machine.price_usd_per_hour)
    return Cost(
        serving_usd_per_hour=math.fsum(serving),
        idle_usd_per_hour=math.fsum(idle),
        serving_machines=len(serving),
        idle_machines=len(idle),
    )


def _name(members: Sequence[str]) -> str:
    rest = len(members) - _NAMED_MEMBERS_MAX
    return "+".join(members[:_NAMED_MEMBERS_MAX]) + (f" and {rest} more" if rest > 0 else "")


def _planned(decision: Decision, snapshot: Snapshot, names: Sequence[str]) -> tuple[PlannedAction, ...]:
    row_of = {
        machine_id: name
        for name, row in zip(names, decision.rows, strict=True)
        for machine_id in (*row.bootstraps, *row.provisions, *row.victims)
    }
    return tuple(
        PlannedAction(
            action=action,
            machine=snapshot.machines[action.machine_id],
            need_id=row_of.get(action.machine_id, ""),
        )
        for action in decision.actions
    )


def _shortfalls(
    decision: Decision,
    names: Sequence[str],
    snapshot: Snapshot,
    demand: Sequence[Need],
    options: Options,
    *,
    has_records: bool,
) -> tuple[PlannedShortfall, ...]:
    short = [(name, row) for name, row in zip(names, decision.rows, strict=True) if row.deficit]
    short.sort(key=lambda entry: entry[1].need.profile.precedence, reverse=True)
    unresolved = [row for _name, row in short if row.unresolved]
    asked = unresolved[:SHORTFALLS_EXPLAINED_MAX] if has_records else []
    explanations = explain_needs(snapshot, demand, options, [row.members[0] for row in asked]) if asked else []
    explained = {id(row): explanation for row, explanation in zip(asked, explanations, strict=True)}
    return tuple(
        PlannedShortfall(need_id=name, row=row, waits_for=row.victims, explanation=explained.get(id(row)))
        for name, row in short
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What a changed plan does that the other does not, and the other way round."""

    added: tuple[PlannedAction, ...]
    dropped: tuple[PlannedAction, ...]
    #: Rows whose uncovered rest differs: what they lack without the change, and with it.
    shortfalls: tuple[tuple[str, Vector, Vector], ...]
    base: FleetPlan
    changed: FleetPlan

    @property
    def is_empty(self) -> bool:
        """Return whether the two plans do, lack and cost the same."""
        same_costs = (self.base.before, self.base.after) == (self.changed.before, self.changed.after)
        return not (self.added or self.dropped or self.shortfalls) and same_costs


def difference_of(base: FleetPlan, changed: FleetPlan) -> Difference:
    """Return how a changed plan differs from another, in the order in which things are decided."""
    base_keys = {planned.key for planned in base.actions}
    changed_keys = {planned.key for planned in changed.actions}
    lacks = [{short.need_id: short.lacks for short in plan.shortfalls if short.lacks} for plan in (base, changed)]
    names = dict.fromkeys([*lacks[0], *lacks[1]])
    return Difference(
        added=tuple(planned for planned in changed.actions if planned.key not in base_keys),
        dropped=tuple(planned for planned in base.actions if planned.key not in changed_keys),
        shortfalls=tuple(
            (name, lacks[0].get(name, {}), lacks[1].get(name, {}))
            for name in names
            if lacks[0].get(name, {}) != lacks[1].get(name, {})
        ),
        base=base,
        changed=changed,
    )
