"""An explanation says what the records say, in values and in sentences, and its flips are true."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from bigfleet.cli.engine.columns import decide_from_columns
from bigfleet.engine.columnar.engine import columnar_decide
from bigfleet.engine.decision import Basis, Decision, Options, ParkingKey
from bigfleet.engine.explain.explanation import (
    ROWS_ASKED_MAX,
    AcquiredMachine,
    MachineExplanation,
    NeedExplanation,
    Victim,
    explain,
    explain_decision,
    explain_needs,
)
from bigfleet.engine.explain.flips import Flip, FlipKind
from bigfleet.engine.explain.records import Rejection, Stage
from bigfleet.engine.explain.sentences import dollars_text, sentences, shortfall_sentences
from bigfleet.engine.reference.decide import decide
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model.ids import MachineId
from bigfleet.model.need import Need
from tests.engine_cases import CaseFleet, Entry, fingerprints_of, need_of

PLAIN = {"id": "n", "t": "P4", "cluster": "c1", "agg": {"cpu": "8"}}
GANG = {"id": "g", "t": "SZ", "cluster": "k", "group": "g", "agg": {"gpu": "16"}}


class World:
    """A fleet written as in tests/cases/engine, and its explanations."""

    def __init__(self, machines: Sequence[Entry], needs: Sequence[Entry], **options: Any) -> None:
        fleet = CaseFleet()
        fleet.add(machines, fingerprints_of(needs))
        self.snapshot = fleet.snapshot()
        self.demand = [need_of(entry) for entry in needs]
        self.options = fleet.options(self.demand, options)

    def need(self, position: int = 0) -> NeedExplanation:
        told = explain(self.snapshot, self.demand, self.options, need=self.demand[position])
        assert isinstance(told, NeedExplanation)
        return told

    def machine(self, machine_id: str) -> MachineExplanation:
        told = explain(self.snapshot, self.demand, self.options, machine=machine_id)
        assert isinstance(told, MachineExplanation)
        return told


def flips_of(taken: AcquiredMachine | Victim) -> dict[FlipKind, Flip]:
    return {flip.kind: flip for flip in taken.flips}


SLOTS: list[Entry] = [
    {"id": "a", "t": "T4", "st": "Speculative", "price": 1, "iprob": 0.5},
    {"id": "b", "t": "T4", "st": "Speculative", "price": 3},
    {"id": "g", "t": "G8", "st": "Speculative"},
]


def test_a_machine_made_names_its_runner_up_and_what_would_have_turned_it() -> None:
    told = World(SLOTS, [{**PLAIN, "agg": {"cpu": "4"}, "ipb": 3}]).need()

    (taken,) = told.acquired
    assert (taken.record.machine, taken.record.runner_up, taken.record.cost_difference) == ("a", "b", 1.5)
    flips = flips_of(taken)
    assert (flips[FlipKind.PRICE].change, flips[FlipKind.PRICE].to) == (1.5, 2.5)
    assert FlipKind.INTERRUPTION_PROBABILITY not in flips, "no probability is above 1"
    # 1 + 0.5 P exceeds 3 beyond P = $4.
    assert (flips[FlipKind.ROW_PENALTY].to, flips[FlipKind.ROW_PENALTY].change) == (4.0, 3.0)
    assert [(c.stage, c.reason, c.count) for c in told.rejections] == [
        (Stage.SPECULATIVE, Rejection.PROFILE, 1),
        (Stage.SPECULATIVE, Rejection.COVERED, 1),
    ]
    assert sentences(told, row_name=lambda row: "web") == [
        "web wants cpu 4, at least cpu 1 on each machine, at priority 100; 0 rows were served before it.",
        "It has a made at an effective $1.50/h: $1.00/h and a 50% chance an hour of an interruption that costs $1.00.",
        "The runner-up b costs $1.50/h more.",
        "b would go first if the price of a exceeded $2.50/h, $1.50/h more than now.",
        "b would go first if the row's interruption penalty exceeded $4.00.",
        "With these it has everything it wants.",
        "Among the machines that could be made, 1 does not match "
        "(g: node.kubernetes.io/instance-type is g8, wanted is In t4): g.",
        "Among the machines that could be made, 1 came after everything was covered: b.",
    ]


def test_rejections_are_counted_by_reason_with_a_sample_of_ids() -> None:
    told = World([{"ids": [f"m{n}" for n in range(9)], "t": "G8", "st": "Idle"}], [PLAIN]).need()

    (count,) = told.rejections
    assert (count.stage, count.reason, count.count) == (Stage.IDLE, Rejection.PROFILE, 9)
    assert [over.machine for over in count.sample] == ["m0", "m1", "m2", "m3", "m4"]
    assert sentences(told)[-1].endswith(": m0, m1, m2, m3, m4 and 4 more.")


def test_a_gang_says_which_rule_and_which_coverages_chose_its_domain() -> None:
    told = World(
        [
            {"id": "own", "t": "G8", "st": "Configured", "cluster": "k", "zone": "zb", "afp": "@g", "agroup": "g"},
            {"id": "other", "t": "G8", "st": "Configured", "cluster": "k", "zone": "za"},
            {"ids": ["ia", "ib"], "t": "G8", "st": "Idle", "zone": "za"},
            {"id": "ic", "t": "G8", "st": "Idle", "zone": "zb"},
        ],
        [GANG],
    ).need()

    assert told.domain is not None
    assert (told.domain.decided_by, told.domain.decided_by_coverage, told.domain.domains) == (2, 1, 2)
    said = sentences(told)
    assert "Of 2 domains of topology.kubernetes.io/zone it chose zb; next came za." in said
    assert (
        "Rule 2 decided: both could cover it whole, and zb is better: 50% of the demand is covered by its own machines "
        "there, 0% in za (summed over its resources)."
    ) in said


def test_a_folded_gang_is_found_under_its_folded_row() -> None:
    gang = {"cluster": "c1", "reqs": [["R", "Same"]], "agg": {"cpu": "4"}}
    world = World(
        [{"ids": ["m2", "m1"], "t": "T4", "st": "Idle", "labels": {"R": "r0"}}],
        [{**gang, "id": "a", "group": "a"}, {**PLAIN, "prio": 1}, {**gang, "id": "b", "group": "b"}],
    )

    for position in (0, 2):
        told = world.need(position)
        assert told.folded is not None
        assert told.started.row.position == 0
        assert told.bootstraps == 2
    assert world.need(1).bootstraps == 0


def test_rows_of_one_key_are_told_apart_by_their_place() -> None:
    machines = [{"ids": ["m1", "m2"], "t": "T4", "st": "Idle"}]
    world = World(machines, [{**PLAIN, "id": "x", "agg": {"cpu": "4"}}, {**PLAIN, "id": "y", "agg": {"cpu": "8"}}])

    first, second = explain_needs(world.snapshot, world.demand, world.options, world.demand)

    assert [taken.record.machine for taken in first.acquired] == ["m1"]
    assert [taken.record.machine for taken in second.acquired] == ["m2"]
    assert second.finished.deficit == {"cpu": 4000}


VICTIMS: list[Entry] = [
    {"id": "v1", "t": "G8", "st": "Configured", "cluster": "o", "aprio": 10},
    {"id": "v2", "t": "G8", "st": "Configured", "cluster": "o", "aprio": 50},
    {"id": "high", "t": "G8", "st": "Configured", "cluster": "o", "aprio": 2000},
]
STARVED = {"id": "t", "t": "PG", "cluster": "k", "prio": 1000, "agg": {"gpu": "8"}}


def test_a_victim_says_its_score_and_what_would_have_spared_it() -> None:
    world = World(VICTIMS, [STARVED])

    (victim,) = world.need().victims
    assert (victim.record.machine, victim.record.runner_up, victim.record.score_difference) == ("v1", "v2", -40.0)
    # At equal scores the id decides, so 41 points.
    assert flips_of(victim)[FlipKind.ASSIGNED_PRIORITY].change == 41
    assert flips_of(victim)[FlipKind.ASSIGNED_PRIORITY].to == 51
    said = sentences(world.machine("v1"), row_name=lambda row: "train")
    assert said[:2] == [
        "v1 is not reclaimed from o, because it is preempted.",
        "train preempts v1 of o with 600 s of notice: score 1010.0033, of which 990.0000 for a priority 990 lower, "
        "0.0033 for the drain, 10.0000 and 10.0000 for its interruption and reclamation penalties, more the smaller "
        "they are.",
    ]
    assert "v2 would be drained first if v1 served a priority of 51 or more, 41 above its own." in said


def test_a_starved_row_says_at_which_priority_it_could_ask_for_one_more() -> None:
    told = World(VICTIMS[2:], [STARVED]).need()

    assert told.victim_priority == (2001, "high")
    assert "What nothing covers is its shortfall: gpu 8." in sentences(told)
    assert "At a priority of 2,001 or more it could ask for high too." in sentences(told)


def test_what_becomes_of_a_machine_is_said_with_its_figures() -> None:
    world = World(
        [
            {"id": "cheap", "t": "T4", "st": "Configured", "cluster": "c1", "price": 2},
            {"id": "dear", "t": "T4", "st": "Configured", "cluster": "c1", "price": 5, "arec": 3},
            {"id": "odd", "t": "G8", "st": "Configured", "cluster": "c1", "price": 6},
            {"id": "bad", "t": "T4", "st": "Configured", "cluster": "c1", "price": 7, "unjoined": True},
            {"id": "silent", "t": "T4", "st": "Configured", "cluster": "c9"},
            {"id": "stays", "t": "T4", "st": "Configured", "cluster": "c2", "afp": "@short"},
            {"id": "fixed", "t": "G8", "st": "Idle", "ct": "BareMetal", "idle_for_s": 900},
            {"id": "waiting", "t": "G8", "st": "Idle", "ct": "OnDemand", "idle_for_s": 590},
            {"id": "over", "t": "G8", "st": "Idle", "ct": "Spot", "idle_for_s": 60},
        ],
        [
            {**PLAIN, "agg": {"cpu": "4"}},
            {**PLAIN, "id": "short", "cluster": "c2", "agg": {"cpu": "64"}, "min": {"cpu": "64"}},
        ],
        not_reported=["c9"],
    )

    def first(machine_id: str) -> str:
        return sentences(world.machine(machine_id), row_name=lambda row: "web")[0]

    assert first("cheap") == "cheap stays with c1: web holds it."
    assert first("dear") == (
        "dear is reclaimed from c1: the rows that it fits were covered by machines that are kept before it. It costs "
        "$5.00/h and is number 2 in the order of keeping, cheap ones first; cheap, the last one kept before it, costs "
        "$3.00/h less."
    )
    assert "it fits no row of the cluster" in first("odd")
    assert "its node never joined the cluster" in first("bad")
    assert "silence gives nothing back" in first("silent")
    assert first("stays") == (
        "stays is not reclaimed from c2: it was bound for web, which lacks cpu 64, and a row that is short keeps the "
        "machines that were bound for it."
    )
    assert first("fixed") == "fixed is not released: its kind of capacity is never released."
    assert first("waiting") == "waiting is not released: its hold is not over; 10 s are left."
    assert first("over") == "over (Spot) is released: it has been idle for 60 s and is held for 60 s."


def test_a_machine_that_nobody_looked_at_says_so() -> None:
    world = World([{"id": "broken", "t": "T4", "st": "Failed"}], [PLAIN])

    assert sentences(world.machine("broken")) == ["Nothing was decided about broken, and no row looked at it."]


def test_explaining_asks_for_exactly_one_thing_that_exists() -> None:
    world = World(SLOTS, [PLAIN])
    stranger = need_of({**PLAIN, "cluster": "elsewhere"})

    with pytest.raises(ValueError, match="either a need or a machine"):
        explain(world.snapshot, world.demand, world.options)
    with pytest.raises(ValueError, match="no machine has the id 'zz'"):
        explain(world.snapshot, world.demand, world.options, machine="zz")
    with pytest.raises(ValueError, match="the demand has no row"):
        explain(world.snapshot, world.demand, world.options, need=stranger)


def test_machines_of_which_the_same_is_to_be_said_share_a_sentence() -> None:
    told = World([{"ids": ["a", "b", "c", "d"], "t": "T4", "st": "Idle"}], [{**PLAIN, "agg": {"cpu": "12"}}]).need()

    said = sentences(told)

    assert "It takes a, b and c, which are idle, each at $1.00/h." in said
    assert "The runner-up d costs the same and lost by the order of ids." in said
    assert not any("would go first" in sentence for sentence in said)


def test_of_idle_machines_the_price_alone_is_told_whatever_their_interruptions() -> None:
    machines: list[Entry] = [
        {"id": "a", "t": "T4", "st": "Idle", "iprob": 0.5},
        {"id": "b", "t": "T4", "st": "Idle"},
        {"id": "c", "t": "T4", "st": "Idle"},
    ]

    said = sentences(World(machines, [{**PLAIN, "ipb": 5}]).need())

    assert "It takes a and b, which are idle, each at $1.00/h." in said


@pytest.mark.rule("shard 12/7")
def test_of_many_rows_those_are_asked_about_a_machine_that_take_it_or_that_it_fits() -> None:
    misfits = [{"id": f"x{n}", "t": "PG", "prio": 900, "agg": {"gpu": "8"}} for n in range(ROWS_ASKED_MAX + 5)]
    world = World([{"id": "m", "t": "T4", "st": "Idle"}], [*misfits, {**PLAIN, "prio": 1}])

    told = world.machine("m")

    assert told.acquired is not None
    assert told.rows_left_out == 6
    assert sum(count.count for count in told.rejections if count.stage is Stage.IDLE) == ROWS_ASKED_MAX - 1
    assert sentences(told)[-1] == "6 more rows were not asked about it: less urgent, or no match for it."


def test_a_machine_that_the_others_make_good_for_is_said_to_be_spare() -> None:
    small: list[Entry] = [{"ids": ["s1", "s2"], "t": "T4", "st": "Idle"}]
    big: list[Entry] = [{"id": "z", "t": "T4", "st": "Idle", "alloc": {"cpu": "64"}}]
    wants = {**PLAIN, "agg": {"cpu": "12"}}

    told = World([*small, *big, {"id": "zz", "t": "T4", "st": "Idle"}], [wants]).need()

    assert [(taken.record.machine, taken.is_spare) for taken in told.acquired] == [
        ("s1", True),
        ("s2", True),
        ("z", False),
    ]
    said = sentences(told)
    assert (
        "It takes s1 and s2, which are idle, each at $1.00/h; the row's other machines would cover everything without "
        "any one of them."
    ) in said
    assert "It takes z, which is idle at $1.00/h." in said
    assert "The runner-up zz costs the same and lost by the order of ids." in said


def test_the_machine_too_is_said_to_be_spare() -> None:
    world = World(
        [{"id": "s", "t": "T4", "st": "Idle"}, {"id": "z", "t": "T4", "st": "Idle", "alloc": {"cpu": "64"}}],
        [{**PLAIN, "agg": {"cpu": "12"}}],
    )

    assert sentences(world.machine("s"), row_name=lambda row: "web") == [
        "web takes s, which is idle at $1.00/h; the row's other machines would cover everything without it.",
    ]
    assert sentences(world.machine("z"), row_name=lambda row: "web") == [
        "web takes z, which is idle at $1.00/h; no other candidate would have replaced it.",
    ]


def test_a_shortfall_tells_first_what_nearly_fits_and_not_who_holds_what_would_not_do() -> None:
    machines: list[Entry] = [
        {"id": "held", "t": "T4", "st": "Idle"},
        {"id": "other", "t": "T4", "st": "Idle"},
        {"id": "small", "t": "G8", "st": "Idle", "alloc": {"gpu": "4"}},
    ]
    rows: list[Entry] = [{**PLAIN, "agg": {"cpu": "4"}}, {"id": "t", "t": "PG", "cluster": "k", "agg": {"gpu": "8"}}]

    told = World(machines, rows).need(1)

    assert shortfall_sentences(told) == [
        "Machines that fit it, held or free: 0 idle, 0 that could be made, 0 in service.",
        "Among the idle machines, 1 is too small (small: it has gpu 4, one machine must have gpu 8): small.",
        "Among the idle machines, 1 does not match "
        "(other: node.kubernetes.io/instance-type is t4, wanted is In g8): other.",
    ]
    assert "It gets no machine and lacks everything that it wants: gpu 8." in sentences(told)


def test_a_shortfall_tells_who_holds_what_would_do() -> None:
    rows: list[Entry] = [{**PLAIN, "agg": {"cpu": "4"}}, {**PLAIN, "cluster": "k", "agg": {"cpu": "4"}}]

    told = World([{"id": "held", "t": "T4", "st": "Idle"}], rows).need(1)

    assert "Among the idle machines, 1 is held by another row (held: by row 1 of c1): held." in shortfall_sentences(
        told
    )


def test_figures_of_one_row_are_not_read_as_those_of_all() -> None:
    world = World(
        [{"id": "m", "t": "T4", "st": "Idle"}],
        [{**PLAIN, "t": "PG", "cluster": "a"}, {**PLAIN, "t": "", "reqs": [["Z", "In", ["x"]]], "cluster": "b"}],
    )

    assert (
        "Not taken as an idle machine for row 1 of a, row 2 of b: it does not match "
        "(for row 1 of a: node.kubernetes.io/instance-type is t4, wanted is In g8)."
    ) in sentences(world.machine("m"))


def test_a_count_of_machines_that_stopped_at_its_bound_says_at_least() -> None:
    crowd: list[Entry] = [{"ids": [f"m{n:03}" for n in range(300)], "t": "G8", "st": "Idle", "zone": "za"}]

    said = sentences(World(crowd, [GANG]).need())

    assert said[1] == (
        "No single machine could host it whole, so all its machines must share one domain; at least 256 machines match "
        "but are too small."
    )


# ---- asking the decision -----------------------------------------------------------------------------------------

BOTH = pytest.mark.parametrize(
    "decide_with", [decide, columnar_decide, decide_from_columns], ids=["reference", "columnar", "columns alone"]
)
Decide = Callable[[Snapshot, Sequence[Need], Options], Decision]


def decision_of(world: World, decide_with: Decide) -> Decision:
    return decide_with(world.snapshot, world.demand, world.options)


@BOTH
def test_a_decision_explains_its_rows_and_machines_as_explain_does(decide_with: Decide) -> None:
    world = World([*VICTIMS, {"id": "i", "t": "T4", "st": "Idle"}], [STARVED, PLAIN])

    decision = decision_of(world, decide_with)

    for position, need in enumerate(world.demand):
        assert explain_decision(decision, need) == world.need(position)
        assert explain_decision(decision, need.key) == world.need(position)
    for machine_id in world.snapshot.machines:
        assert explain_decision(decision, machine_id) == world.machine(machine_id)


@BOTH
def test_a_decision_explains_its_own_rows_folded_and_parked_ones_too(decide_with: Decide) -> None:
    gang = {"cluster": "c1", "reqs": [["R", "Same"]], "agg": {"cpu": "4"}}
    rows: list[Entry] = [
        {**gang, "id": "a", "group": "a"},
        {**gang, "id": "b", "group": "b"},
        {**GANG, "agg": {"gpu": "64"}},
    ]
    world = World([{"ids": ["m1", "m2"], "t": "T4", "st": "Idle", "labels": {"R": "r0"}}], rows)
    stuck = world.demand[2]
    world.options = replace(world.options, parking_ages={ParkingKey(stuck.cluster, stuck.group, stuck.fingerprint): 8})

    decision = decision_of(world, decide_with)

    folded, parked = decision.rows
    assert (folded.folded, parked.need.parked, parked.need == stuck) == (True, True, False)
    assert explain_decision(decision, folded.need) == explain_decision(decision, folded.need.key) == world.need(0)
    assert explain_decision(decision, world.demand[1]) == world.need(1)
    assert explain_decision(decision, parked.need) == explain_decision(decision, stuck) == world.need(2)


@BOTH
def test_of_rows_of_one_key_a_decision_explains_the_one_that_is_given(decide_with: Decide) -> None:
    machines = [{"ids": ["m1", "m2"], "t": "T4", "st": "Idle"}]
    world = World(machines, [{**PLAIN, "agg": {"cpu": "4"}}, {**PLAIN, "agg": {"cpu": "4"}}])

    decision = decision_of(world, decide_with)

    first, second = (explain_decision(decision, need) for need in world.demand)
    assert (first, second) == (world.need(0), world.need(1))
    assert first != second


@BOTH
def test_what_took_no_part_in_a_decision_is_refused(decide_with: Decide) -> None:
    world = World(SLOTS, [PLAIN])
    decision = decision_of(world, decide_with)

    with pytest.raises(ValueError, match=r"the demand has no row \('elsewhere', "):
        explain_decision(decision, need_of({**PLAIN, "cluster": "elsewhere"}))
    with pytest.raises(ValueError, match=r"the demand has no row \('c1', 'p=1', ''\)"):
        explain_decision(decision, ("c1", "p=1", ""))
    with pytest.raises(ValueError, match="no machine has the id 'zz'"):
        explain_decision(decision, MachineId("zz"))


def test_a_decision_without_a_basis_says_so() -> None:
    world = World(SLOTS, [PLAIN])
    bare = replace(decision_of(world, decide), basis=None)

    with pytest.raises(ValueError, match="does not hold what it was made of"):
        explain_decision(bare, world.demand[0])


def test_the_basis_is_no_part_of_the_answer() -> None:
    world = World(SLOTS, [PLAIN])
    decision = decision_of(world, decide)

    other = replace(decision, basis=Basis(demand=(), options=world.options, snapshot=lambda: Snapshot.of(())))

    assert decision == other
    assert repr(decision) == repr(other)


@pytest.mark.parametrize(
    ("dollars", "text"),
    [
        (0.0, "$0.00"),
        (1.5, "$1.50"),
        (-2.0, "-$2.00"),
        (0.0125, "$0.0125"),
        (4.375, "$4.375"),
        (0.12001, "$0.12"),
        (28.125, "$28.12"),
        (1e-7, "$1e-07"),
        (12345.6, "$12,345.60"),
        (math.inf, "unbounded dollars"),
    ],
)
def test_dollars_show_cents_and_what_is_finer(dollars: float, text: str) -> None:
    assert dollars_text(dollars) == text
