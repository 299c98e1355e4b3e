"""Random fleets with demand shapes: what is called satisfied runs, and no rule of the claims is broken."""

import random
from dataclasses import replace

import pytest

from bigfleet.engine.columns.store import ColumnStore
from bigfleet.engine.decision import Decision, Placement
from bigfleet.engine.parking import stamp_parked
from bigfleet.engine.shapes.acquire import acquire
from bigfleet.engine.shapes.credit import credit
from bigfleet.engine.shapes.decide import decide
from bigfleet.engine.shapes.fleet import build
from bigfleet.engine.shapes.hosting import place_row
from bigfleet.engine.shapes.machines import SnapshotMachines
from bigfleet.engine.shapes.pod_engine import PodEngine
from bigfleet.model.shapes import DemandShape, canonical_shapes
from tests.engine.proof import EQUALITY_EXAMPLES, in_proportion
from tests.engine.shapes.claims_checker import violations
from tests.engine.shapes.shape_fleets import Drawn, fleet

#: Fleets of one test case; the number of cases follows the usual knob.
CHUNK = 100
CHUNKS = max(1, EQUALITY_EXAMPLES // 4 // CHUNK)
SHORT_FLEETS = in_proportion(2400, least=150)


def decided(drawn: Drawn) -> Decision:
    """Return the decision on a drawn fleet."""
    return decide(drawn.snapshot, drawn.demand, drawn.options)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_claim_is_sound_and_every_satisfied_row_is_hosted(chunk: int) -> None:
    """A checker that shares no code with the engine finds nothing to object to."""
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        drawn = fleet(seed)

        assert violations(drawn.machines, drawn.demand, drawn.options, decided(drawn)) == [], f"seed {seed}"


def test_no_row_is_short_beside_room_that_it_may_use() -> None:
    """Machines that lower rows acquired have room for higher gangs, and domains that spreads lacked."""
    short = 0
    for seed in range(SHORT_FLEETS):
        drawn = fleet(seed)
        demand = stamp_parked(drawn.demand, drawn.options.parking_ages)
        state = build(SnapshotMachines(drawn.snapshot, drawn.options), demand, drawn.options)
        credit(state)
        acquire(state)
        for row in state.rows:
            left = [group.left for group in row.groups], dict(row.divisible or {})
            place_row(row, row.cluster.hosts)

            assert ([group.left for group in row.groups], dict(row.divisible or {})) == left, f"seed {seed}"
            short += row.has_left
    assert short > SHORT_FLEETS // 2, "the fleets have rows that stay short"


def test_a_row_with_pods_that_request_nothing_is_satisfied_only_if_they_have_a_place() -> None:
    """Both engines; the number of such pods without a place is in what the row lacks."""
    lacking = 0
    for seed in range(in_proportion(600, least=60)):
        drawn = fleet(seed)
        nothing = DemandShape({}, 1 + seed % 40)
        demand = tuple(
            replace(row, shapes=canonical_shapes((*row.shapes, nothing))) if row.shapes else row for row in drawn.demand
        )
        drawn = replace(drawn, demand=demand)
        decision = decided(drawn)
        view = ColumnStore.from_snapshot(drawn.snapshot).snapshot()

        assert violations(drawn.machines, drawn.demand, drawn.options, decision) == [], f"seed {seed}"
        assert PodEngine(loops=None).decide(view, drawn.demand, drawn.options) == decision, f"seed {seed}"
        for result in decision.rows:
            shapes = (*result.need.shapes, *result.need.waiting)
            aside = [(each.shape, shapes[each.shape].count) for each in result.impossible if each.shape is not None]
            pods = sum(count for index, count in (*result.unplaced, *aside) if not shapes[index].resources)
            assert result.deficit.get("pods", 0) == 1000 * pods, f"seed {seed}"
            lacking += bool(pods)
    assert lacking, "some rows lack a place for them"


@pytest.mark.parametrize("seed", [4774, 5781, 6076, 9132])
def test_a_domain_that_a_machine_in_creation_adds_counts_in_a_spread(seed: int) -> None:
    """Of 10,000 fleets these had a row that stood on one domain before a machine in creation added another."""
    drawn = fleet(seed)

    assert violations(drawn.machines, drawn.demand, drawn.options, decided(drawn)) == []


def test_the_order_of_machines_and_equal_rows_changes_nothing() -> None:
    """The decision depends on the demand's list order among equals alone, not on the order of the machines."""
    for seed in range(in_proportion(600, least=40)):
        drawn = fleet(seed)
        machines = list(drawn.machines)
        random.Random(seed).shuffle(machines)
        demand = sorted(drawn.demand, key=lambda row: (row.profile.precedence, row.arrival_unix_nanos))

        again = decide(replace(drawn, machines=tuple(machines)).snapshot, drawn.demand, drawn.options)
        reordered = decide(drawn.snapshot, sorted(demand, key=lambda row: row.arrival_unix_nanos), drawn.options)

        first = decided(drawn)
        assert again == first
        assert {(a.kind, a.machine_id, a.cluster) for a in reordered.actions} == {
            (a.kind, a.machine_id, a.cluster) for a in first.actions
        }


def test_the_fleets_have_what_they_are_meant_to_have() -> None:
    """Among a few hundred fleets every feature of the demand occurs."""
    wanted = {"Bootstrap", "Provision", "Reclaim", "Preempt", "gang", "spread", "impossible", "unplaced"}
    wanted |= {"no shapes", "limit", "waiting", "shared machine"}
    found: set[str] = set()
    for seed in range(300):
        drawn = fleet(seed)
        decision = decided(drawn)
        rows = decision.rows
        found |= {action.kind.label for action in decision.actions}
        found |= {"gang" for row in rows if row.has_domain and row.placements}
        found |= {"spread" for row in rows if row.need.profile.strict_spread and row.placements}
        found |= {"impossible" for row in rows if row.impossible}
        found |= {"unplaced" for row in rows if row.unplaced}
        found |= {"no shapes" for row in rows if row.shares}
        found |= {"limit" for row in rows for p in row.placements if _limit(row.need.shapes, p)}
        found |= {"waiting" for row in rows for p in row.placements if p.shape >= len(row.need.shapes)}
        on = [p.machine_id for row in rows for p in row.placements]
        found |= {"shared machine"} if len(on) > len(set(on)) else set()
        if found >= wanted:
            break

    assert wanted - found == set()


def _limit(shapes: tuple[object, ...], placement: Placement) -> bool:
    return placement.shape < len(shapes) and bool(getattr(shapes[placement.shape], "max_per_machine", 0))


# ---- the checker has teeth ---------------------------------------------------------------------------------------


def _first_with_placements() -> tuple[Drawn, Decision, int]:
    for seed in range(200):
        drawn = fleet(seed)
        decision = decided(drawn)
        for number, row in enumerate(decision.rows):
            if row.placements and row.satisfied:
                return drawn, decision, number
    raise AssertionError("no fleet has a placement")


def _with_row(decision: Decision, number: int, **changes: object) -> Decision:
    rows = list(decision.rows)
    rows[number] = replace(rows[number], **changes)  # type: ignore[arg-type]
    return replace(decision, rows=tuple(rows))


def test_a_claim_beyond_the_room_of_a_machine_is_found() -> None:
    """A claim of a thousand times the pods is more than any machine has."""
    drawn, decision, number = _first_with_placements()
    claims = decision.rows[number].placements
    planted = tuple(Placement(p.machine_id, p.shape, p.count * 1000) for p in claims)

    assert violations(drawn.machines, drawn.demand, drawn.options, _with_row(decision, number, placements=planted))


def test_a_pod_without_a_claim_is_found() -> None:
    """A row that is called satisfied with one claim less is not."""
    drawn, decision, number = _first_with_placements()
    planted = decision.rows[number].placements[1:]

    assert violations(drawn.machines, drawn.demand, drawn.options, _with_row(decision, number, placements=planted))


def test_two_actions_on_one_machine_are_found() -> None:
    """Every action twice is one too many for each machine."""
    drawn, decision = next((f, d) for f in map(fleet, range(200)) if (d := decided(f)).actions)

    planted = replace(decision, actions=(*decision.actions, *decision.actions))

    assert violations(drawn.machines, drawn.demand, drawn.options, planted)
