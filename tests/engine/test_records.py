"""What a reporter hears of a decision, record by record (docs/spec/aggregates.md §8)."""

from collections.abc import Sequence
from typing import Any, TypeVar

from hypothesis import given, settings

from bigfleet.engine.decision import ActionKind
from bigfleet.engine.explain.records import (
    Acquired,
    BestDomain,
    CandidateConsidered,
    CandidateRejected,
    Credited,
    DomainsRanked,
    Earmarked,
    HeldReason,
    MachineHeld,
    MachineKept,
    MachineReclaimed,
    MachineReleased,
    MachineSpared,
    MatchingCounts,
    Mode,
    ReclaimReason,
    Record,
    RecordLog,
    Rejection,
    RowFinished,
    RowFolded,
    RowNotFolded,
    RowStarted,
    RowUnresolved,
    SparedReason,
    Stage,
    VictimComing,
    VictimPicked,
    VictimsRanked,
)
from bigfleet.engine.reference.decide import decide
from bigfleet.model.states import CapacityType, MachineState
from tests.engine.proof import in_proportion
from tests.engine_cases import CaseFleet, Entry, fingerprints_of, need_of
from tests.strategies import FleetInput, fleets

R = TypeVar("R")
GPU_8 = {"gpu": 8000}


def heard(machines: Sequence[Entry], needs: Sequence[Entry], **options: Any) -> list[Record]:
    """Decide one cycle of a fleet written as in tests/cases/engine and return every record."""
    fleet = CaseFleet()
    fleet.add(machines, fingerprints_of(needs))
    rows = [need_of(entry) for entry in needs]
    log = RecordLog()
    decide(fleet.snapshot(), rows, fleet.options(rows, options), log)
    return log.records


def of_kind(records: Sequence[Record], kind: type[R]) -> list[R]:
    return [record for record in records if isinstance(record, kind)]


def rejections(records: Sequence[Record], stage: Stage) -> dict[str, tuple[Rejection, object]]:
    return {
        record.machine: (record.reason, dict(record.detail))
        for record in of_kind(records, CandidateRejected)
        if record.stage is stage
    }


PLAIN = {"id": "n", "t": "P4", "cluster": "c1", "agg": {"cpu": "8"}}
GANG = {"id": "g", "t": "SZ", "cluster": "k", "group": "g", "agg": {"gpu": "16"}}


def test_a_row_starts_with_its_rank_and_mode() -> None:
    records = heard(
        [],
        [
            PLAIN,
            {**GANG, "prio": 900, "parked": True},
            {**GANG, "id": "h", "prio": 800},
            {"id": "s", "spread": [["Z", 1, "DoNotSchedule"]], "agg": {"cpu": "1"}, "prio": 700, "ipb": 3, "rpb": 4},
        ],
    )

    started = of_kind(records, RowStarted)
    assert [record.mode for record in started] == [Mode.PARKED, Mode.SAME, Mode.SPREAD, Mode.PLAIN]
    assert [(record.rank, record.row.position) for record in started] == [(0, 1), (1, 2), (2, 3), (3, 0)]
    assert (started[2].priority, started[2].interruption, started[2].reclamation) == (700, 3, 4)


def test_folding_names_members_and_the_smallest_proof() -> None:
    gang = {"cluster": "c1", "reqs": [["R", "Same"]], "agg": {"cpu": "4"}}
    big = {**gang, "id": "big", "group": "c", "agg": {"cpu": "40"}}

    records = heard(
        [{"ids": ["m2", "m1"], "t": "T4", "st": "Idle", "labels": {"R": "r0"}}],
        [PLAIN, {**gang, "id": "a", "group": "a"}, big, {**gang, "id": "b", "group": "b"}],
    )

    (folded,) = of_kind(records, RowFolded)
    assert folded.proof_machine == "m1"
    assert [(member.group, member.position) for member in folded.members] == [("a", 1), ("b", 3)]
    assert folded.row.position == 1
    (kept,) = of_kind(records, RowNotFolded)
    assert (kept.row.position, kept.matching_machines) == (2, 2)


def test_an_acquisition_names_its_price_and_what_would_have_replaced_it() -> None:
    records = heard(
        [
            {"id": "a", "t": "T4", "st": "Speculative", "price": 1, "iprob": 0.5},
            {"id": "b", "t": "T4", "st": "Speculative", "price": 2},
            {"id": "c", "t": "T4", "st": "Speculative", "price": 9},
        ],
        [{**PLAIN, "ipb": 3}],
    )

    first, second = of_kind(records, Acquired)
    assert (
        first.machine,
        first.kind,
        first.price,
        first.probability,
        first.penalty_dollars,
        first.cost,
    ) == ("a", ActionKind.PROVISION, 1.0, 0.5, 1.0, 1.5)
    # b is taken anyway: what would have replaced a is c.
    assert (first.runner_up, first.runner_up_cost, first.cost_difference) == ("c", 9.0, 7.5)
    assert (second.runner_up, second.runner_up_cost, second.cost_difference) == ("c", 9.0, 7.0)
    assert [first.remaining, second.remaining] == [{"cpu": 4000}, {}]
    assert rejections(records, Stage.SPECULATIVE) == {"c": (Rejection.COVERED, {})}


def test_the_last_machine_of_its_kind_has_no_runner_up() -> None:
    (acquired,) = of_kind(heard([{"id": "a", "t": "T4", "st": "Idle"}], [PLAIN]), Acquired)

    assert (acquired.runner_up, acquired.runner_up_cost, acquired.cost_difference) == ("", None, None)


def test_a_spread_acquisition_says_why_its_domain_was_open() -> None:
    records = heard(
        [
            {"ids": ["a0", "a1", "a2"], "t": "T4", "st": "Idle", "zone": "za", "price": 1},
            {"id": "b0", "t": "T4", "st": "Idle", "zone": "zb", "price": 5},
            {"id": "nowhere", "t": "T4", "st": "Idle", "price": 0},
        ],
        [{**PLAIN, "agg": {"cpu": "16"}, "spread": [["Z", 1, "DoNotSchedule"]]}],
    )

    acquired = of_kind(records, Acquired)
    assert [(record.machine, record.domain, record.count, record.minimum, record.skew) for record in acquired] == [
        ("a0", "za", 0, 0, 1),
        ("b0", "zb", 0, 0, 1),
        ("a1", "za", 1, 1, 1),
    ]
    # Without b0 nothing would count for zb any more, and za could have taken everything.
    assert [record.runner_up for record in acquired] == ["a2", "a2", "a2"]
    assert rejections(records, Stage.IDLE) == {
        "nowhere": (Rejection.NO_TOPOLOGY_VALUE, {"key": "topology.kubernetes.io/zone"}),
        "a2": (Rejection.SKEW, {"domain": "za", "count": 2, "minimum": 1, "skew": 1}),
    }


def test_a_rejection_names_the_first_reason_and_what_it_compared() -> None:
    machines: list[Entry] = [
        {"id": "unjoined", "t": "T4", "st": "Idle", "unjoined": True},
        {"id": "reserved", "t": "T4", "st": "Idle", "reserved": True},
        {"id": "claimed", "t": "T4", "st": "Idle", "price": 0},
        {"id": "profile", "t": "G8", "st": "Idle"},
        {"id": "small", "t": "T4", "st": "Idle", "alloc": {"cpu": "2"}},
        {"id": "useless", "t": "T4", "st": "Idle", "alloc": {"cpu": "4", "gpu": "1"}, "price": 9},
    ]
    high = {**PLAIN, "id": "high", "cluster": "c2", "prio": 900, "agg": {"cpu": "4"}}
    low = {**PLAIN, "min": {"cpu": "3"}, "agg": {"memory": "1"}}

    records = heard(machines, [high, low])

    lower = [r for r in of_kind(records, CandidateRejected) if r.row.cluster == "c1" and r.stage is Stage.IDLE]
    found = {record.machine: (record.reason, dict(record.detail)) for record in lower}
    assert found["unjoined"] == (Rejection.UNJOINED, {})
    assert found["reserved"] == (Rejection.RESERVED, {})
    assert Rejection.CLAIMED is found["claimed"][0]
    assert found["claimed"][1]["row"].cluster == "c2"  # type: ignore[attr-defined]
    assert found["small"] == (Rejection.MIN_UNIT, {"dimension": "cpu", "have": 2000, "want": 3000})
    assert found["useless"] == (Rejection.NOT_USEFUL, {"remaining": {"memory": 1000}})
    assert found["profile"][1] == {
        "key": "node.kubernetes.io/instance-type",
        "operator": 1,
        "values": ("t4",),
        "value": "g8",
    }


def test_a_machine_in_creation_for_somebody_else_says_what_differs() -> None:
    records = heard(
        [
            {"id": "group", "t": "T4", "st": "Creating", "afp": "@n", "agroup": "x"},
            {"id": "cluster", "t": "T4", "st": "Creating", "afp": "@n", "icl": "c2"},
            {"id": "mine", "t": "T4", "st": "Creating", "afp": "@n", "icl": "c1"},
        ],
        [PLAIN],
    )

    assert rejections(records, Stage.CREDIT) == {
        "group": (Rejection.NOT_OWN, {"differs": ("group",)}),
        "cluster": (Rejection.NOT_OWN, {"differs": ("cluster",)}),
    }
    (credited,) = of_kind(records, Credited)
    assert (credited.machine, credited.state, credited.own) == ("mine", MachineState.CREATING, True)


def test_domains_are_ranked_with_the_coverages_and_the_rule_that_decided() -> None:
    records = heard(
        [
            {"id": "own", "t": "G8", "st": "Configured", "cluster": "k", "zone": "zb", "afp": "@g", "agroup": "g"},
            {"id": "other", "t": "G8", "st": "Configured", "cluster": "k", "zone": "za"},
            {"ids": ["ia", "ib"], "t": "G8", "st": "Idle", "zone": "za"},
            {"id": "ic", "t": "G8", "st": "Idle", "zone": "zb"},
            {"id": "id", "t": "G8", "st": "Idle", "zone": "zc"},
        ],
        [GANG],
    )

    (ranked,) = of_kind(records, DomainsRanked)
    assert [domain.value for domain in ranked.domains] == ["zb", "za", "zc"]
    assert [domain.satisfiable for domain in ranked.domains] == [True, True, False]
    assert ranked.domains[0].coverages == ("1/2", "1/2", "1/1")
    assert ranked.domains[1].coverages == ("1/2", "0/1", "3/2")
    assert ranked.domains[2].coverages == ("1/2", "0/1", "0/1")
    assert (ranked.decided_by, ranked.key) == (2, "topology.kubernetes.io/zone")
    (earmarked,) = of_kind(records, Earmarked)
    assert (earmarked.machine, earmarked.remaining) == ("ic", {})
    assert rejections(records, Stage.CREDIT)["other"] == (Rejection.OTHER_DOMAIN, {"value": "za", "chosen": "zb"})
    reclaimed = of_kind(records, MachineReclaimed)
    assert [(record.machine, record.reason) for record in reclaimed] == [("other", ReclaimReason.OTHER_DOMAIN)]


def test_an_earmarked_machine_is_rejected_for_the_next_gang_only_as_a_member() -> None:
    records = heard(
        [{"ids": ["b0", "b1", "b2"], "t": "G8", "st": "Idle", "zone": "zb"}],
        [{**GANG, "prio": 900}, {**GANG, "id": "h", "group": "h"}],
    )

    second = [r for r in of_kind(records, CandidateRejected) if r.row.group == "h" and r.stage is Stage.DOMAIN]
    assert [(r.machine, r.reason) for r in second] == [("b0", Rejection.EARMARKED), ("b1", Rejection.EARMARKED)]


def test_a_short_row_says_what_there_would_be_to_match() -> None:
    records = heard(
        [
            {"ids": [f"i{n:03}" for n in range(300)], "t": "G8", "st": "Idle", "zone": "za"},
            {"id": "s", "t": "G8", "st": "Speculative", "zone": "zb"},
            {"id": "c", "t": "G8", "st": "Configured", "cluster": "o", "zone": "zb"},
        ],
        [{**GANG, "agg": {"gpu": "4000"}}],
    )

    (finished,) = of_kind(records, RowFinished)
    assert MatchingCounts(idle=256, speculative=1, configured=1, is_capped=True) == finished.matching
    assert (
        BestDomain(value="za", coverage_per_mille=600),
        BestDomain(value="zb", coverage_per_mille=2),
    ) == finished.best_domains
    assert (
        finished.satisfied,
        finished.satisfiable,
        finished.domain,
        len(finished.bootstraps),
    ) == (False, False, "za", 300)


def test_a_satisfied_row_says_nothing_of_what_it_did_not_need() -> None:
    (finished,) = of_kind(heard([{"ids": ["a", "b"], "t": "T4", "st": "Idle"}], [PLAIN]), RowFinished)

    assert (finished.satisfied, finished.matching, finished.best_domains) == (True, None, ())
    assert ("a", "b") == finished.claimed == finished.bootstraps


def test_victims_are_ranked_with_the_terms_of_their_scores() -> None:
    victim = {"t": "G8", "st": "Configured", "cluster": "o", "aint": 4, "arec": "+Inf"}
    records = heard(
        [
            {**victim, "id": "v1", "aprio": 10},
            {**victim, "id": "v2", "aprio": 50},
            {**victim, "id": "high", "aprio": 1000},
            {"id": "d", "t": "G8", "st": "Draining", "cluster": "o", "pfor": ["k", "@t", ""]},
        ],
        [
            {"id": "t", "t": "PG", "cluster": "k", "prio": 1000, "agg": {"gpu": "16"}},
            {"id": "o", "t": "PG", "cluster": "o", "prio": 50, "agg": {"gpu": "16"}},
        ],
    )

    (coming,) = of_kind(records, VictimComing)
    assert (coming.machine, coming.supply, coming.remaining) == ("d", GPU_8, GPU_8)
    ranked = of_kind(records, VictimsRanked)[0]
    assert [v.machine for v in ranked.victims] == ["v1", "v2"]
    first = ranked.victims[0]
    assert (first.gap, first.priority_term, first.interruption_term, first.reclamation_term) == (990, 990.0, 0.025, 0.0)
    assert (first.claimed_by.cluster if first.claimed_by else "") == "o"
    (picked,) = of_kind(records, VictimPicked)
    assert (
        picked.machine,
        picked.runner_up,
        round(picked.score_difference or 0.0, 9),
        picked.grace_seconds,
    ) == ("v1", "v2", -40.0, 600)
    assert rejections([r for r in records if getattr(r, "row", ("",))[0] == "k"], Stage.VICTIM) == {
        "v2": (Rejection.COVERED, {}),
        "high": (Rejection.ASSIGNED_PRIORITY, {"assigned": 1000, "row": 1000}),
    }
    assert of_kind(records, RowUnresolved) == []


def test_an_unresolved_row_says_what_was_freed_for_it() -> None:
    records = heard(
        [{"id": "v", "t": "G8", "st": "Configured", "cluster": "o", "aprio": 10}],
        [{"id": "t", "t": "PG", "cluster": "k", "prio": 1000, "agg": {"gpu": "24"}}],
    )

    (unresolved,) = of_kind(records, RowUnresolved)
    assert (unresolved.deficit, unresolved.victims, unresolved.freed) == ({"gpu": 16000}, 1, GPU_8)
    spared = of_kind(records, MachineSpared)
    assert [(record.machine, record.reason) for record in spared] == [("v", SparedReason.PREEMPTED)]


def test_kept_and_reclaimed_machines_name_their_place_in_keep_priority() -> None:
    records = heard(
        [
            {"id": "cheap", "t": "T4", "st": "Configured", "cluster": "c1", "price": 1, "arec": 7},
            {"id": "next", "t": "T4", "st": "Configured", "cluster": "c1", "price": 2},
            {"id": "dear", "t": "T4", "st": "Configured", "cluster": "c1", "price": 5, "arec": 3},
            {"id": "odd", "t": "G8", "st": "Configured", "cluster": "c1", "price": 6},
            {"id": "bad", "t": "T4", "st": "Configured", "cluster": "c1", "price": 7, "unjoined": True},
            {"id": "silent", "t": "T4", "st": "Configured", "cluster": "c9"},
        ],
        [PLAIN],
        not_reported=["c9"],
    )

    assert [record.machine for record in of_kind(records, MachineKept)] == ["cheap", "next"]
    reclaimed = of_kind(records, MachineReclaimed)
    assert [(r.machine, r.reason, r.position, r.keep_key, r.last_kept, r.price_difference) for r in reclaimed] == [
        ("dear", ReclaimReason.EXCESS, 2, (5.0, 3.0), "next", 3.0),
        ("odd", ReclaimReason.NO_ROW_FITS, 3, (6.0, 0.0), "next", 4.0),
        ("bad", ReclaimReason.UNJOINED, 4, (7.0, 0.0), "next", 5.0),
    ]
    spared = of_kind(records, MachineSpared)
    assert [(record.machine, record.reason) for record in spared] == [("silent", SparedReason.CLUSTER_NOT_REPORTED)]


def test_a_machine_that_stays_for_a_short_row_names_the_row_and_what_it_lacks() -> None:
    """The reasons come in the order of docs/spec/aggregates.md §8: the first that applies is reported."""
    bound = {"t": "T4", "st": "Configured", "cluster": "c1", "aprio": 100, "afp": "@n"}
    records = heard(
        [
            {**bound, "id": "held", "price": 0},
            {**bound, "id": "small", "alloc": {"cpu": "2"}},
            {**bound, "id": "unjoined", "alloc": {"cpu": "2"}, "unjoined": True},
            {**bound, "id": "taken", "type": "t9", "alloc": {"cpu": "2", "gpu": "8"}},
            {**bound, "id": "silent", "cluster": "c9", "alloc": {"cpu": "2"}},
            {**bound, "id": "other", "alloc": {"cpu": "2"}, "agroup": "x"},
        ],
        [
            {"id": "high", "cluster": "c2", "prio": 900, "min": {"gpu": "8"}, "agg": {"gpu": "8"}},
            {"id": "n", "t": "P4", "cluster": "c1", "min": {"cpu": "4"}, "agg": {"cpu": "12"}},
            {"id": "s", "t": "P4", "cluster": "c9", "min": {"cpu": "4"}, "agg": {"cpu": "12"}},
        ],
        not_reported=["c9"],
    )

    short = next(record.row for record in of_kind(records, RowStarted) if record.row.cluster == "c1")
    spared = {r.machine: (r.reason, r.bound_for, r.deficit) for r in of_kind(records, MachineSpared)}
    assert spared == {
        "small": (SparedReason.ROW_SHORT, short, {"cpu": 8000}),
        "taken": (SparedReason.PREEMPTED, None, {}),
        "silent": (SparedReason.CLUSTER_NOT_REPORTED, None, {}),
    }
    assert [record.machine for record in of_kind(records, MachineKept)] == ["held"]
    assert {record.machine for record in of_kind(records, MachineReclaimed)} == {"other", "unjoined"}


def test_idle_machines_say_why_they_are_held_or_released() -> None:
    records = heard(
        [
            {"ids": ["claimed", "kept"], "t": "T4", "st": "Idle", "price": 0},
            {"id": "reserved", "t": "G8", "st": "Idle", "ct": "Spot", "reserved": True, "idle_for_s": 900},
            {"id": "fixed", "t": "G8", "st": "Idle", "ct": "BareMetal", "idle_for_s": 900},
            {"id": "unknown", "t": "G8", "st": "Idle", "ct": "Spot", "no_stamp": True},
            {"id": "waiting", "t": "G8", "st": "Idle", "ct": "OnDemand", "idle_for_s": 590},
            {"id": "over", "t": "G8", "st": "Idle", "ct": "Spot", "idle_for_s": 60},
        ],
        [PLAIN],
    )

    assert {record.machine: (record.reason, record.seconds_left) for record in of_kind(records, MachineHeld)} == {
        "claimed": (HeldReason.CLAIMED, None),
        "kept": (HeldReason.CLAIMED, None),
        "reserved": (HeldReason.RESERVED, None),
        "fixed": (HeldReason.FIXED_CAPACITY, None),
        "unknown": (HeldReason.NO_IDLE_STAMP, None),
        "waiting": (HeldReason.HOLD_RUNNING, 10.0),
    }
    (released,) = of_kind(records, MachineReleased)
    assert (
        released.machine,
        released.capacity_type,
        released.idle_seconds,
        released.hold_seconds,
    ) == ("over", CapacityType.SPOT, 60.0, 60.0)


def test_candidates_are_numbered_in_walking_order() -> None:
    records = heard([{"ids": ["b", "a"], "t": "T4", "st": "Idle"}, {"id": "g", "t": "G8", "st": "Idle"}], [PLAIN])

    considered = [record for record in of_kind(records, CandidateConsidered) if record.stage is Stage.IDLE]
    assert [(r.machine, r.position, r.order_key) for r in considered] == [("a", 0, (1.0,)), ("b", 1, (1.0,))]


# ---- reporters ---------------------------------------------------------------------------------------------------


def machine_named(record: Record) -> str | None:
    return getattr(record, "machine", None)


@settings(max_examples=in_proportion(240), deadline=None)
@given(fleets())
def test_asking_for_one_machine_gives_the_records_about_it_and_about_rows(fleet: FleetInput) -> None:
    """A reporter that wants one machine hears what a full one hears of it, in the same order."""
    full = RecordLog()
    decide(fleet.snapshot, fleet.demand, fleet.options, full)
    for machine_id in list(fleet.snapshot.machines)[:2]:
        one = RecordLog(machines=frozenset({machine_id}))
        decide(fleet.snapshot, fleet.demand, fleet.options, one)
        assert [r for r in full.records if machine_named(r) in (None, machine_id)] == one.records


@settings(max_examples=in_proportion(240), deadline=None)
@given(fleets())
def test_asking_for_one_row_gives_the_records_about_it_and_about_machines(fleet: FleetInput) -> None:
    """A reporter that wants one row hears what a full one hears of it, in the same order."""
    full = RecordLog()
    decide(fleet.snapshot, fleet.demand, fleet.options, full)
    for need in fleet.demand[:2]:
        one = RecordLog(rows=frozenset({need.key}))
        decide(fleet.snapshot, fleet.demand, fleet.options, one)
        wanted = [r for r in full.records if getattr(r, "row", need.key)[:3] == need.key]
        assert wanted == one.records


@settings(max_examples=in_proportion(400), deadline=None)
@given(fleets())
def test_records_tell_the_decision(fleet: FleetInput) -> None:
    """What was credited, acquired and picked is what the decision says, and remaining falls to what it leaves."""
    log = RecordLog()
    decision = decide(fleet.snapshot, fleet.demand, fleet.options, log)
    for position, row in enumerate(decision.rows):
        about = [record for record in log.records if getattr(getattr(record, "row", None), "position", -1) == position]
        taken = [r for r in about if isinstance(r, Credited | Acquired)]
        assert sorted(row.claimed) == sorted(record.machine for record in taken)
        assert (taken[-1].remaining if taken else row.need.aggregate) == row.deficit
        picked = of_kind(about, VictimPicked)
        assert list(row.victims) == [record.machine for record in picked]
        unresolved = of_kind(about, RowUnresolved)
        assert ([unresolved[0].deficit] if unresolved else []) == ([row.unresolved] if row.unresolved else [])
        for record in about:
            # A row is told that its own machine is no victim for it; in every other walk what it took was not rejected.
            if isinstance(record, CandidateRejected) and record.stage is not Stage.VICTIM:
                assert record.machine not in {r.machine for r in taken}


def test_a_full_log_counts_what_it_drops() -> None:
    fleet = CaseFleet()
    fleet.add([{"ids": ["a", "b"], "t": "T4", "st": "Idle"}], {})
    rows = [need_of(PLAIN)]
    log = RecordLog(records_max=3)

    decide(fleet.snapshot(), rows, fleet.options(rows, {}), log)

    assert len(log.records) == 3
    assert log.dropped > 0
