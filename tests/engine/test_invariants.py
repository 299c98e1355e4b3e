"""The invariants of docs/spec/aggregates.md §9 on generated fleets: one test each, the sentence as its docstring."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.engine.decision import ActionKind, Decision, Options, RowResult
from bigfleet.engine.explain.records import RecordLog
from bigfleet.engine.folding import forms_of
from bigfleet.engine.matching import fits
from bigfleet.engine.reference.decide import decide
from bigfleet.engine.reference.pool import is_set_aside, is_sold_out
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model import vector
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import NO_HOST, Machine
from bigfleet.model.need import Need
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.model.vector import parse_vector
from tests.engine.closed_loop import Pace, run
from tests.engine.proof import examples, in_proportion
from tests.strategies import CLUSTERS, HOST, NOW_SECONDS, FleetInput, fleets, machines, needs

EXAMPLES = examples(150)
#: Cycles within which a small fleet must come to rest, and the quiet ones that show that it has.
SETTLE_CYCLES_MAX = 120
QUIET_CYCLES = 12

FREE_STATES = (MachineState.IDLE, MachineState.SPECULATIVE)


def decision_of(fleet: FleetInput) -> Decision:
    return decide(fleet.snapshot, fleet.demand, fleet.options)


def held_machines(fleet: FleetInput, row: RowResult) -> list[Machine]:
    return [fleet.snapshot.machines[machine_id] for machine_id in row.claimed]


def supply_of(machines_held: Sequence[Machine]) -> vector.Vector:
    total: vector.Vector = vector.ZERO
    for machine in machines_held:
        total = vector.add(total, machine.supply)
    return total


@EXAMPLES
@given(fleets())
def test_one_claim_and_one_action(fleet: FleetInput) -> None:
    """A machine has at most one claim and at most one action."""
    decision = decision_of(fleet)

    claims = [machine_id for row in decision.rows for machine_id in row.claimed]
    actions = [action.machine_id for action in decision.actions]
    assert len(set(claims)) == len(claims)
    assert len(set(actions)) == len(actions)


@EXAMPLES
@given(fleets())
def test_actions_start_from_their_state(fleet: FleetInput) -> None:
    """Bootstrap and Delete start from Idle, Provision from Speculative, Reclaim and Preempt from Configured; Delete
    only for OnDemand and Spot."""
    start = {
        ActionKind.BOOTSTRAP: MachineState.IDLE,
        ActionKind.PROVISION: MachineState.SPECULATIVE,
        ActionKind.RECLAIM: MachineState.CONFIGURED,
        ActionKind.PREEMPT: MachineState.CONFIGURED,
        ActionKind.DELETE: MachineState.IDLE,
    }
    for action in decision_of(fleet).actions:
        machine = fleet.snapshot.machines[action.machine_id]
        assert start[action.kind] is machine.state
        if action.kind is ActionKind.DELETE:
            assert machine.capacity_type in (CapacityType.ON_DEMAND, CapacityType.SPOT)


@EXAMPLES
@given(fleets())
def test_claims_fit_and_lie_in_the_domain(fleet: FleetInput) -> None:
    """A claimed machine fits its row and is useful for its aggregate; everything that a Same row holds lies in its
    recorded domain."""
    for row in decision_of(fleet).rows:
        key = row.need.profile.same_key
        for machine in held_machines(fleet, row):
            assert fits(row.need.profile, row.need.min_unit, machine)
            assert vector.is_useful(machine.supply, row.need.aggregate)
            assert key is None or machine.attribute(key) == row.domain


@EXAMPLES
@given(fleets())
def test_deficit_is_what_the_held_supply_leaves(fleet: FleetInput) -> None:
    """Deficit = aggregate less supply held; satisfied ⇔ the supply held covers the aggregate."""
    for row in decision_of(fleet).rows:
        held = supply_of(held_machines(fleet, row))
        assert held == row.held
        assert vector.subtract(row.need.aggregate, held) == row.deficit
        assert vector.covers(held, row.need.aggregate) == row.satisfied


@EXAMPLES
@given(fleets())
def test_no_row_is_short_beside_a_machine_that_would_help(fleet: FleetInput) -> None:
    """No unparked row without a strict spread is short while an unclaimed, unreserved Idle or Speculative machine fits
    it and would be useful (in its domain, for a Same row). A Same row without a domain never leaves such a machine
    behind."""
    decision = decision_of(fleet)
    claimed = {machine_id for row in decision.rows for machine_id in row.claimed}
    hidden = fleet.options.reserved | fleet.options.unjoined
    hidden |= {
        machine.id
        for machine in fleet.snapshot.machines.values()
        if is_sold_out(machine, fleet.options) or is_set_aside(machine, fleet.options)
    }
    left = [m for state in FREE_STATES for m in fleet.snapshot.of_state(state) if m.id not in claimed | hidden]
    for row in decision.rows:
        profile = row.need.profile
        if row.satisfied or row.need.parked or profile.strict_spread is not None:
            continue
        for machine in left:
            helps = fits(profile, row.need.min_unit, machine) and vector.is_useful(machine.supply, row.deficit)
            in_domain = not row.has_domain or machine.attribute(profile.same_key or "") == row.domain
            assert not (helps and in_domain), f"{machine.id} would have helped {row.need.key}"


@EXAMPLES
@given(fleets())
def test_victims_are_below_and_unprotected(fleet: FleetInput) -> None:
    """A victim's assigned priority is below its preemptor's priority, and nobody of equal or higher precedence claims
    it."""
    decision = decision_of(fleet)
    holders = {machine_id: row for row in decision.rows for machine_id in row.claimed}
    for row in decision.rows:
        for machine_id in row.victims:
            assert fleet.snapshot.machines[machine_id].assigned_priority < row.need.profile.priority
            holder = holders.get(machine_id)
            assert holder is None or holder.need.profile.precedence < row.need.profile.precedence


@EXAMPLES
@given(fleets())
def test_claimed_machines_stay_and_parked_rows_do_nothing(fleet: FleetInput) -> None:
    """A claimed machine is neither reclaimed nor released. A parked row causes no action."""
    decision = decision_of(fleet)
    claimed = {machine_id for row in decision.rows for machine_id in row.claimed}
    for action in decision.actions:
        if action.kind in (ActionKind.RECLAIM, ActionKind.DELETE):
            assert action.machine_id not in claimed
    for row in decision.rows:
        if row.need.parked:
            assert (row.bootstraps, row.provisions, row.victims) == ((), (), ())


@EXAMPLES
@given(fleets())
def test_no_reclaim_of_a_machine_stamped_for_a_short_row(fleet: FleetInput) -> None:
    """A machine that joined is not reclaimed while the row of its cluster that it is stamped for, or a gang folded into
    that row, is short; every other machine that nobody holds or takes is."""
    decision = decision_of(fleet)
    short = {need.key for row in decision.rows if not row.satisfied for need in forms_of(row)}
    used = {machine_id for row in decision.rows for machine_id in (*row.claimed, *row.victims)}
    reclaimed = {action.machine_id for action in decision.actions if action.kind is ActionKind.RECLAIM}
    for machine in fleet.snapshot.of_state(MachineState.CONFIGURED):
        stamp = (machine.cluster, machine.assigned_need_fingerprint, machine.assigned_group)
        stays = stamp in short and machine.id not in fleet.options.unjoined
        is_excess = machine.id not in used and machine.cluster in fleet.options.reported
        assert (machine.id in reclaimed) == (is_excess and not stays)


@EXAMPLES
@given(fleets(), st.randoms(use_true_random=False))
def test_order_matters_only_among_equals(fleet: FleetInput, random: st.DataObject) -> None:
    """Permuting the list changes nothing as long as rows of equal precedence keep their order (and nothing folds
    together differently)."""
    turns = [need.profile.precedence for need in fleet.demand]
    random.shuffle(turns)  # type: ignore[attr-defined]
    queues = {p: [n for n in fleet.demand if n.profile.precedence == p] for p in turns}
    permuted = [queues[precedence].pop(0) for precedence in turns]

    first, second = decision_of(fleet), decide(fleet.snapshot, permuted, fleet.options)

    assert first.actions == second.actions
    assert _rows_by_members(first) == _rows_by_members(second)


def _rows_by_members(decision: Decision) -> dict[tuple[int, ...], RowResult]:
    return {tuple(id(member) for member in row.members): row for row in decision.rows}


@EXAMPLES
@given(fleets())
def test_a_reporter_changes_nothing(fleet: FleetInput) -> None:
    """No decision depends on the records, and equal input gives equal records."""
    first, second = RecordLog(), RecordLog()

    decision = decide(fleet.snapshot, fleet.demand, fleet.options, first)

    assert decision_of(fleet) == decision
    assert decision == decide(fleet.snapshot, fleet.demand, fleet.options, second)
    assert first.records == second.records


# ---- settling ----------------------------------------------------------------------------------------------------


@settings(max_examples=in_proportion(320), deadline=None)
@given(fleets(same=False, flags=False), st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_it_settles(fleet: FleetInput, delays: Sequence[int]) -> None:
    """It settles: with constant demand and supply and every action carried out, nothing more is decided after finitely
    many cycles, however slowly machines are created, configured and drained. (Fleets without gangs; tests of gangs are
    in test_settling.)"""
    pace = Pace(delays=tuple(delays), cycle_seconds=700.0)

    course = run(fleet, pace, cycles_max=SETTLE_CYCLES_MAX, quiet_cycles=QUIET_CYCLES)

    assert course.settled_after is not None


# ---- cheapest first ----------------------------------------------------------------------------------------------


@EXAMPLES
@given(
    st.lists(machines(in_states=st.sampled_from(FREE_STATES)), max_size=7),
    needs(same=False, spread=False),
    st.sampled_from(FREE_STATES),
)
def test_a_plain_row_acquires_the_cheapest_machines(drawn: Sequence[Machine], need: Need, state: MachineState) -> None:
    """Of machines of one size and one state, a plain row takes as few as it needs, and no cheaper choice exists."""
    need = replace(need, aggregate=parse_vector({"cpu": "10"}), min_unit=vector.ZERO)
    fleet = [
        replace(
            machine,
            id=MachineId(f"m{n}"),
            state=state,
            host=HOST if state is MachineState.IDLE else NO_HOST,
            allocatable={"cpu": "4"},
        )
        for n, machine in enumerate(drawn)
    ]
    options = Options(now_seconds=NOW_SECONDS, reported=frozenset(CLUSTERS))

    (row,) = decide(Snapshot.of(fleet), [need], options).rows

    def cost(machine: Machine) -> float:
        if state is MachineState.IDLE:
            return machine.price_usd_per_hour
        return machine.cost_for_bucket_usd_per_hour(need.profile.interruption_bucket)

    eligible = [machine for machine in fleet if fits(need.profile, need.min_unit, machine)]
    wanted = min(3, len(eligible))
    assert wanted == len(row.claimed)
    cheapest = min(sum(sorted(cost(m) for m in choice)) for choice in combinations(eligible, wanted))
    taken = [machine for machine in fleet if machine.id in row.claimed]
    assert cheapest == sum(sorted(cost(machine) for machine in taken))
