"""Properties of explanations over random fleets: made of the records, and every change that they name flips."""

from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from bigfleet.engine.decision import Decision, Options, RowResult
from bigfleet.engine.explain.explanation import (
    MachineExplanation,
    explain,
    explain_machine,
    explain_need,
    explain_needs,
)
from bigfleet.engine.explain.flips import Flip, FlipKind
from bigfleet.engine.explain.records import HeldReason, MachineHeld, RecordLog, RowRef
from bigfleet.engine.explain.sentences import sentences
from bigfleet.engine.reference.decide import decide
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model import labels as keys
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need
from bigfleet.model.profile import Operator, Requirement
from bigfleet.model.states import MachineState
from bigfleet.model.vector import ZERO, parse_vector
from tests.engine.proof import examples
from tests.engine.test_explain import PLAIN, World, flips_of
from tests.engine_cases import Entry
from tests.strategies import CLUSTERS, NOW_SECONDS, FleetInput, fleets, machines, needs

EXAMPLES = examples(70)


@EXAMPLES
@given(fleets())
def test_an_explanation_is_made_of_the_records_alone(fleet: FleetInput) -> None:
    """What `explain` tells is what the whole log of the decision tells, and every explanation can be said."""
    log = RecordLog()
    decision = decide(fleet.snapshot, fleet.demand, fleet.options, log)
    told = explain_needs(fleet.snapshot, fleet.demand, fleet.options, fleet.demand)
    for need, explanation in zip(fleet.demand, told, strict=True):
        position, row = row_of(decision, need)
        from_log = explain_need(log.records, RowRef.of(row.need, position))
        assert from_log is not None
        assert (from_log.rejections, from_log.domain) == (explanation.rejections, explanation.domain)
        assert explanation.credited + row.acquired == len(row.claimed)
        assert explanation.preempted == len(row.victims)
        assert all(sentence.endswith(".") for sentence in sentences(explanation))
    for machine_id in list(fleet.snapshot.machines)[:3]:
        machine = explain(fleet.snapshot, fleet.demand, fleet.options, machine=machine_id)
        assert isinstance(machine, MachineExplanation)
        assert replace(explain_machine(log.records, machine_id), acquired=None) == replace(machine, acquired=None)
        assert all(sentence.endswith(".") for sentence in sentences(machine))
        claimed = any(machine_id in row.claimed for row in decision.rows)
        if isinstance(machine.outcome, MachineHeld):
            assert claimed == (machine.outcome.reason is HeldReason.CLAIMED)


def row_of(decision: Decision, need: Need) -> tuple[int, RowResult]:
    return next((n, row) for n, row in enumerate(decision.rows) if any(member is need for member in row.members))


def decided_with(fleet: FleetInput, machine: Machine) -> Decision:
    """Decide the fleet with one machine replaced."""
    machines = [machine if machine.id == other.id else other for other in fleet.snapshot.machines.values()]
    snapshot = Snapshot.of(machines, fleet.snapshot.idle_since_seconds)
    return decide(snapshot, fleet.demand, fleet.options)


EPSILON = 1e-6


@st.composite
def crowds(draw: st.DrawFn, state: MachineState, *, priority: int) -> FleetInput:
    """Draw a fleet whose machines are mostly of one state and fit its few rows, so that there is a choice.

    The rows' cluster has no machines: whatever they hold they take.
    """
    rows = [
        replace(
            need,
            cluster=ClusterId("new"),
            min_unit=ZERO,
            aggregate=parse_vector(draw(st.sampled_from([{"cpu": "4"}, {"cpu": "16"}, {"cpu": "12", "gpu": "2"}]))),
            profile=replace(
                need.profile,
                priority=priority,
                requirements=draw(few_requirements),
                interruption_bucket=draw(st.sampled_from([1, 5, 7, 27])),
            ),
            parked=False,
        )
        for need in draw(st.lists(needs(spread=False), min_size=1, max_size=3))
    ]
    in_states = st.sampled_from([state] * 11 + [MachineState.IDLE, MachineState.CONFIGURED])
    fleet = [draw(machines(f"m{n:02}", rows=rows, in_states=in_states)) for n in range(draw(st.integers(6, 16)))]
    options = Options(now_seconds=NOW_SECONDS, reported=frozenset(CLUSTERS))
    return FleetInput(Snapshot.of(fleet), tuple(rows), options)


few_requirements = st.sampled_from(
    [(), (), (Requirement(keys.INSTANCE_TYPE, Operator.IN, ("x",)),), (Requirement(keys.ZONE, Operator.SAME),)]
)


@EXAMPLES
@given(crowds(MachineState.IDLE, priority=100) | crowds(MachineState.SPECULATIVE, priority=100), st.data())
def test_the_change_that_flips_an_acquisition_is_true(fleet: FleetInput, data: st.DataObject) -> None:
    """Beyond the stated price or probability the runner-up is taken, short of it the row takes the same machines."""
    told = explain_needs(fleet.snapshot, fleet.demand, fleet.options, fleet.demand)
    flips = [(place, flip) for place, one in enumerate(told) for taken in one.acquired for flip in taken.flips]
    flips = [(place, flip) for place, flip in flips if flip.kind is not FlipKind.ROW_PENALTY]
    assume(flips)
    for kind in sorted({flip.kind for _place, flip in flips}):
        place, flip = data.draw(st.sampled_from([entry for entry in flips if entry[1].kind is kind]))
        check_acquisition_flip(fleet, fleet.demand[place], flip)


def check_acquisition_flip(fleet: FleetInput, need: Need, flip: Flip) -> None:
    before = row_of(decide(fleet.snapshot, fleet.demand, fleet.options), need)[1]
    machine = fleet.snapshot.machines[MachineId(flip.machine)]
    by_price = flip.kind is FlipKind.PRICE
    assert flip.to is not None

    def claimed_at(value: float) -> set[str]:
        if by_price:
            changed = replace(machine, price_usd_per_hour=value)
        else:
            changed = replace(machine, interruption_probability=value)
        return set(row_of(decided_with(fleet, changed), need)[1].claimed)

    now = machine.price_usd_per_hour if by_price else machine.interruption_probability
    assert flip.instead not in before.claimed
    assert flip.instead in claimed_at(flip.to + EPSILON)
    if now <= flip.to - EPSILON:
        assert claimed_at(flip.to - EPSILON) == set(before.claimed)


@EXAMPLES
@given(crowds(MachineState.SPECULATIVE, priority=100))
def test_the_penalty_that_flips_an_acquisition_is_true(fleet: FleetInput) -> None:
    """Beyond the stated penalty the runner-up costs less than the machine that was taken, short of it more."""
    for told in explain_needs(fleet.snapshot, fleet.demand, fleet.options, fleet.demand):
        for taken in told.acquired:
            machine = fleet.snapshot.machines[MachineId(taken.record.machine)]
            for flip in (flip for flip in taken.flips if flip.kind is FlipKind.ROW_PENALTY):
                second = fleet.snapshot.machines[MachineId(flip.instead)]
                assert flip.to is not None
                outward = 1.0 if flip.change >= 0 else -1.0
                costs = [
                    (machine.effective_cost_usd_per_hour(at), second.effective_cost_usd_per_hour(at))
                    for at in (flip.to + outward * 1e-3, flip.to - outward * 1e-3)
                ]
                # There is no penalty below zero.
                assert costs[0][1] < costs[0][0] or flip.to + outward * 1e-3 < 0
                assert costs[1][1] > costs[1][0] or flip.to - outward * 1e-3 < 0


def test_a_chance_of_interruption_that_is_too_high_lets_the_runner_up_go_first() -> None:
    machines: list[Entry] = [
        {"id": "a", "t": "T4", "st": "Speculative", "price": 1, "iprob": 0.25},
        {"id": "b", "t": "T4", "st": "Speculative", "price": 3},
    ]

    (taken,) = World(machines, [{**PLAIN, "agg": {"cpu": "4"}, "ipb": 5}]).need().acquired

    # 1 + p × $4 exceeds 3 beyond p = 0.5.
    flip = flips_of(taken)[FlipKind.INTERRUPTION_PROBABILITY]
    assert (flip.to, flip.change, flip.instead, flip.at_equality) == (0.5, 0.25, "b", False)


@EXAMPLES
@given(crowds(MachineState.CONFIGURED, priority=1000), st.data())
def test_the_change_that_spares_a_victim_is_true(fleet: FleetInput, data: st.DataObject) -> None:
    """Beyond the stated priority or penalty the runner-up is drained, short of it the row drains the same machines."""
    told = explain_needs(fleet.snapshot, fleet.demand, fleet.options, fleet.demand)
    flips = [(place, flip) for place, one in enumerate(told) for victim in one.victims for flip in victim.flips]
    assume(flips)
    place, flip = data.draw(st.sampled_from(flips))
    before = row_of(decide(fleet.snapshot, fleet.demand, fleet.options), fleet.demand[place])[1]
    machine = fleet.snapshot.machines[MachineId(flip.machine)]
    assert flip.to is not None

    def changed(value: float) -> Machine:
        if flip.kind is FlipKind.ASSIGNED_PRIORITY:
            return replace(machine, assigned_priority=int(value))
        return replace(machine, assigned_interruption_penalty_dollars=value)

    def victims_at(value: float) -> set[str]:
        return set(row_of(decided_with(fleet, changed(value)), fleet.demand[place])[1].victims)

    by_points = flip.kind is FlipKind.ASSIGNED_PRIORITY
    beyond, short = (flip.to, flip.to - 1) if by_points else (flip.to * (1 + EPSILON), flip.to * (1 - EPSILON))
    now = machine.assigned_priority if by_points else machine.assigned_interruption_penalty_dollars
    # At equality ids decide: below the present value other victims may change, too.
    short = max(short, now)
    assert flip.instead not in before.victims
    assert flip.instead in victims_at(beyond)
    assert victims_at(short) == set(before.victims)
