"""It settles (docs/spec/aggregates.md §9.9): with constant demand and supply the actions stop, and do not come back.

Random fleets first, then one scene for each way in which gangs were ever seen to churn: what a gang holds is told apart
by domain, by gang and by machine (§5.3), through dwell, maturing machines and rows that change places.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.engine.decision import ActionKind
from bigfleet.model.ids import MachineId
from bigfleet.model.states import MachineState
from tests.engine.closed_loop import Course, Pace, rotated, run, trades_domains, trading_gangs
from tests.engine.crowds import crowds
from tests.engine.proof import Proof, RecordProperty, examples
from tests.engine_cases import CaseFleet, Entry, fingerprints_of, need_of
from tests.strategies import FleetInput, fleets

#: Cycles within which a small fleet must come to rest: gangs look again at 32, 64 and 96, and may move others then.
SETTLE_CYCLES_MAX = 160
#: Quiet cycles that show that it has: every parked gang looks again twice in them.
QUIET_CYCLES = 70

BINDING = (ActionKind.BOOTSTRAP, ActionKind.PROVISION)
REMOVING = (ActionKind.RECLAIM, ActionKind.PREEMPT, ActionKind.DELETE)


@st.composite
def worlds(draw: st.DrawFn, *, of: st.SearchStrategy[FleetInput]) -> tuple[FleetInput, Pace]:
    """Draw a fleet and how slowly things happen in it; some slots turn up in another rack."""
    fleet = draw(of)
    slots = [
        machine.id
        for machine in fleet.snapshot.machines.values()
        if machine.state in (MachineState.SPECULATIVE, MachineState.CREATING)
    ]
    landings = draw(st.dictionaries(st.sampled_from(slots), st.sampled_from(["r0", "r1", "r2"]))) if slots else {}
    delays = draw(st.lists(st.integers(0, 5), min_size=1, max_size=5))
    seconds = draw(st.sampled_from([150.0, 700.0]))
    return fleet, Pace(delays=tuple(delays), cycle_seconds=seconds, landings=landings)


def test_any_fleet_settles(record_property: RecordProperty) -> None:
    """Actions stop within 160 cycles and stay away for 70, however slowly machines are created, configured, drained and
    deleted, wherever they turn up, and though equal rows change places. Fleets of the excepted kind are shown to be."""
    settled, excepted = Proof(), Proof()

    @examples(250)
    @given(worlds(of=crowds() | fleets(flags=False)))
    def check(world: tuple[FleetInput, Pace]) -> None:
        course = run(*world, cycles_max=SETTLE_CYCLES_MAX, quiet_cycles=QUIET_CYCLES)
        if course.settled_after is not None:
            with settled.example():
                assert course.settled_after <= SETTLE_CYCLES_MAX
        else:
            with excepted.example():
                assert_excepted(course, *world)

    with (
        settled.told(record_property, "closed loops"),
        excepted.told(record_property, "closed loops of the excepted kind"),
    ):
        check()


def assert_excepted(course: Course, fleet: FleetInput, pace: Pace) -> None:
    """Show that gangs of one cluster trade, and that without trading domains it is the list's changing order alone."""
    assert trading_gangs(course, last=QUIET_CYCLES), "it never came to rest, and no gangs trade"
    if not trades_domains(course, last=QUIET_CYCLES):
        steady = replace(pace, rotates=False)
        again = run(fleet, steady, cycles_max=SETTLE_CYCLES_MAX, quiet_cycles=QUIET_CYCLES)
        assert again.settled_after is not None, "gangs trade machines within a domain though nothing changes"


def test_rows_that_change_places_are_equal() -> None:
    """Rotation never changes what one cluster wants before what: that would be another demand."""
    needs = [need_of({"cluster": c, "agg": {"cpu": a}, "group": g}) for c, a, g in ROTATING]

    turned = rotated(needs, 1)

    assert sorted(map(repr, needs)) == sorted(map(repr, turned))
    assert needs != turned
    for cluster in ("c1", "c2"):
        assert [n.aggregate for n in needs if n.cluster == cluster] == [
            n.aggregate for n in turned if n.cluster == cluster
        ]


ROTATING = [("c1", "4", "a"), ("c1", "8", "x"), ("c1", "4", "b"), ("c2", "8", "y"), ("c2", "8", "z")]


# ---- scenes ------------------------------------------------------------------------------------------------------


def gang(name: str, *, machines: int = 2, **fields: Any) -> Entry:
    """A gang on one rack, written as in tests/cases/engine."""
    return {"id": name, "t": "SR", "cluster": "k", "group": name.upper(), "agg": {"gpu": str(8 * machines)}, **fields}


def bound(rack: str, ids: Sequence[str], of: str = "", **fields: Any) -> Entry:
    """Configured machines of the gang's cluster in one rack, stamped for a gang or for nobody."""
    stamps = {"afp": f"@{of}", "agroup": of.upper()} if of else {}
    common = {"t": "G8", "st": "Configured", "cluster": "k", "aprio": 100, "labels": {"R": rack}}
    return {"ids": list(ids), **common, **stamps, **fields}


def free(rack: str, ids: Sequence[str], **fields: Any) -> Entry:
    """Idle machines in one rack."""
    return {"ids": list(ids), "t": "G8", "st": "Idle", "labels": {"R": rack}, **fields}


def scene(machines: Sequence[Entry], needs: Sequence[Entry]) -> FleetInput:
    """Return the fleet of entries that are written as in tests/cases/engine."""
    fleet = CaseFleet()
    fleet.add(machines, fingerprints_of(needs))
    demand = [need_of(entry) for entry in needs]
    return FleetInput(fleet.snapshot(), tuple(demand), fleet.options(demand, {}))


def course_of(machines: Sequence[Entry], needs: Sequence[Entry], pace: Pace, *, cycles_max: int = 60) -> Course:
    """Run a scene until it rests."""
    return run(scene(machines, needs), pace, cycles_max=cycles_max, quiet_cycles=QUIET_CYCLES)


def held(course: Course) -> dict[str, list[frozenset[MachineId]]]:
    """Return the machines of each gang, cycle by cycle."""
    claims: dict[str, list[frozenset[MachineId]]] = {}
    for turn in course.turns:
        for row in turn.decision.rows:
            claims.setdefault(row.need.group, []).append(frozenset(row.claimed))
    return claims


def acted(course: Course, *kinds: ActionKind) -> list[str]:
    """Return the machines acted upon, in order."""
    return [action.machine_id for _, action in course.actions(*kinds)]


DWELLS = pytest.mark.parametrize("dwell", [0, 1, 3, 6])


@DWELLS
def test_a_gang_does_not_leave_its_rack_for_one_with_as_many_of_its_clusters_machines(dwell: int) -> None:
    """The gang's own three stand in rx; ra holds as many of the cluster's, and more that is free."""
    machines = [
        bound("rx", ["x1", "x2", "x3"], "a"),
        bound("ra", ["a1", "a2", "a3"]),
        free("ra", ["a4", "a5", "a6"], price=0),
    ]

    course = course_of(machines, [gang("a", machines=3)], Pace(delays=(dwell,)))

    assert {frozenset({"x1", "x2", "x3"})} == set(held(course)["A"])
    assert acted(course, *REMOVING) == ["a1", "a2", "a3"]
    assert acted(course, *BINDING) == []


@DWELLS
def test_a_gang_stays_where_its_machines_are_being_configured(dwell: int) -> None:
    """What it bootstraps is its own from the moment of Configure, while the free supply around it moves."""
    machines = [
        *(free("ra", [f"a{n}"]) for n in range(3)),
        *(free("rb", [f"b{n}"]) for n in range(3)),
        {"ids": ["s0", "s1"], "t": "G8", "st": "Draining", "cluster": "other", "labels": {"R": "rb"}},
        {"ids": ["t0", "t1"], "t": "G8", "st": "Creating", "labels": {"R": "ra"}},
    ]

    course = course_of(machines, [gang("a")], Pace(delays=(dwell, 0, dwell, 1)))

    assert {frozenset({"a0", "a1"})} == set(held(course)["A"])
    assert acted(course, *BINDING) == ["a0", "a1"]
    assert acted(course, *REMOVING) == []


@DWELLS
def test_gangs_of_one_class_do_not_steal_each_others_racks(dwell: int) -> None:
    """Four gangs that differ in nothing but the group, each on a rack of its own; each cycle lists them otherwise."""
    racks = {name: [f"{name}0", f"{name}1"] for name in ("a", "b", "c", "d")}
    machines: list[Entry] = [
        *(bound(f"r{name}", ids, name) for name, ids in racks.items()),
        *(free(f"r{name}", [f"{name}-spare"]) for name in racks),
    ]

    course = course_of(machines, [gang(name) for name in racks], Pace(delays=(dwell,)))

    for name, ids in racks.items():
        assert {frozenset(ids)} == set(held(course)[name.upper()])
    assert acted(course, *ActionKind) == []


@DWELLS
def test_a_machine_that_matures_does_not_push_out_one_that_serves(dwell: int) -> None:
    """A cheaper machine of nobody's, first by id too, finishes configuring in the gang's rack."""
    machines = [
        bound("rx", ["g-mmm", "g-nnn"], "a"),
        bound("rx", ["g-aaa"], st="Configuring", price=0.5),
    ]

    course = course_of(machines, [gang("a")], Pace(delays=(dwell,)))

    assert {frozenset({"g-mmm", "g-nnn"})} == set(held(course)["A"])
    assert acted(course, *REMOVING) == ["g-aaa"]
    assert acted(course, *BINDING) == []


@DWELLS
def test_a_gang_with_too_many_of_its_own_sheds_once(dwell: int) -> None:
    """Nothing tells its own machines apart, so which one goes may change while one matures; that one goes, and no
    other."""
    machines = [
        bound("rx", ["o1", "o2"], "a", price=2),
        bound("rx", ["o0"], "a", st="Configuring"),
    ]

    course = course_of(machines, [gang("a")], Pace(delays=(dwell,)))

    assert len(acted(course, ActionKind.RECLAIM)) == 1
    assert acted(course, *BINDING) == []


@DWELLS
def test_racks_of_mixed_stamps_with_too_much_in_them_come_to_rest(dwell: int) -> None:
    """Over-coverage, machines of two gangs and of nobody in every rack, some configuring: excess goes once."""
    machines = [
        bound("r0", ["a0", "b0", "n0"], "a"),
        bound("r0", ["b1"], "b"),
        bound("r0", ["n1"], st="Configuring"),
        bound("r1", ["a1"], "a", st="Configuring"),
        bound("r1", ["b2", "b3"], "b"),
        bound("r1", ["n2"]),
        free("r0", ["f0"]),
        free("r1", ["f1"]),
    ]

    course = course_of(machines, [gang("a"), gang("b")], Pace(delays=(dwell, 2)))

    assert course.settled_after is not None
    removed = acted(course, *REMOVING)
    assert len(removed) == len(set(removed)) == 5
    assert acted(course, *BINDING) == []


def test_sixteen_gangs_come_to_rest_while_a_quarter_of_their_machines_is_configuring() -> None:
    """Five machines each on eight racks: most domains are pinned by nothing but stamps."""
    names = [f"g{n:02}" for n in range(16)]
    machines = [
        entry
        for n, name in enumerate(names)
        for entry in (
            bound(f"r{n % 8}", [f"{name}-{i}" for i in range(3)], name),
            bound(f"r{n % 8}", [f"{name}-3"], name, st="Configuring"),
            free(f"r{n % 8}", [f"{name}-spare", f"{name}-other"]),
        )
    ]

    course = course_of(machines, [gang(name, machines=5) for name in names], Pace(delays=(3, 1, 4, 2, 3)))

    assert course.settled_after is not None
    assert acted(course, *REMOVING) == []
    assert len(acted(course, *BINDING)) == 16
    home = {name.upper(): f"r{n % 8}" for n, name in enumerate(names)}
    for turn in course.turns:
        assert home == {row.need.group: row.domain for row in turn.decision.rows}


@DWELLS
def test_slots_of_equal_price_that_turn_up_in_another_rack_are_bought_once(dwell: int) -> None:
    """The gang takes what it was offered where it was offered; a slot that lands elsewhere is given back for good."""
    machines = [
        {"ids": ["s0", "s1"], "t": "G8", "st": "Speculative", "labels": {"R": "r0"}},
        {"ids": ["s2", "s3"], "t": "G8", "st": "Speculative", "labels": {"R": "r1"}},
    ]

    course = course_of(machines, [gang("a")], Pace(delays=(dwell,), landings={MachineId("s0"): "r2"}))

    assert course.settled_after is not None
    assert sorted(set(acted(course, ActionKind.PROVISION))) == ["s0", "s1", "s2", "s3"]
    assert frozenset({"s2", "s3"}) == held(course)["A"][-1]


@DWELLS
def test_machines_in_creation_that_nobody_recorded_serve_the_gang_that_bought_them(dwell: int) -> None:
    """After a restart no cluster is recorded with them; the class and the group are, and nothing is bought again."""
    creating = {"t": "G8", "st": "Creating", "labels": {"R": "r0"}, "afp": "@a", "agroup": "A"}
    machines: list[Entry] = [
        {"ids": ["s0", "s1"], **creating},
        {"ids": ["s2", "s3"], "t": "G8", "st": "Speculative", "price": 1.0, "labels": {"R": "r0"}},
    ]

    course = course_of(machines, [gang("a")], Pace(delays=(dwell,)))

    assert acted(course, ActionKind.PROVISION) == []
    assert sorted(acted(course, ActionKind.BOOTSTRAP)) == ["s0", "s1"]


@DWELLS
def test_a_preempted_machine_is_drained_once_and_waited_for(dwell: int) -> None:
    """The gang's rack is full of another cluster's batch work; equal gangs wait beside it."""
    machines = [
        bound("r0", ["v0", "v1"], cluster="batch", aprio=10),
        bound("r1", ["v2", "v3"], cluster="batch", aprio=10),
        free("r0", ["i0"]),
        free("r1", ["i1"]),
    ]
    needs = [
        gang("a", prio=900, machines=3),
        gang("b", prio=900, machines=3),
        {"id": "w", "t": "PG", "cluster": "batch", "prio": 10, "agg": {"gpu": "32"}},
    ]

    course = course_of(machines, needs, Pace(delays=(dwell,)))

    assert course.settled_after is not None
    assert sorted(acted(course, ActionKind.PREEMPT)) == ["v0", "v1", "v2", "v3"]
    assert acted(course, ActionKind.RECLAIM) == []


# ---- what does not settle ----------------------------------------------------------------------------------------


def rivals() -> FleetInput:
    """Two equal gangs on one rack of unequal machines: each can be whole, in one order of the list only."""
    machines = [
        bound("r0", ["a1"], "a", alloc={"gpu": "16"}),
        bound("r0", ["a2"], "a"),
        bound("r0", ["b1", "b2"], "b", alloc={"gpu": "16"}),
        free("r0", ["i1", "i2"]),
    ]
    return scene(machines, [gang("a", machines=4), gang("b", machines=4)])


def test_gangs_whose_order_keeps_changing_may_trade_machines_and_are_shown_to() -> None:
    """The first takes from the second what its own machines lack, a larger one than it needs, and the second buys."""
    pace = Pace(delays=(2,))

    course = run(rivals(), pace, cycles_max=60, quiet_cycles=QUIET_CYCLES)

    assert course.settled_after is None
    assert {"A", "B"} & {trade.gang[1] for trade in trading_gangs(course, last=QUIET_CYCLES)}
    assert_excepted(course, rivals(), pace)


def starved_gang() -> tuple[list[Entry], list[Entry]]:
    """A gang that its rack can never cover, and a machine of lower priority in the same rack."""
    machines = [bound("r0", ["own"], "a"), bound("r0", ["victim"], cluster="batch", aprio=10)]
    return machines, [
        gang("a", machines=4, prio=900),
        {"id": "w", "t": "PG", "cluster": "batch", "prio": 10, "agg": {"gpu": "8"}},
    ]


def test_a_starved_gang_gets_what_drains_for_it_while_it_tries() -> None:
    course = course_of(*starved_gang(), Pace(delays=(3,)))

    assert acted(course, *REMOVING) == ["victim"]
    assert frozenset({"own", "victim"}) == held(course)["A"][-1]


def test_a_starved_gang_does_not_drain_the_same_machine_at_every_look_again() -> None:
    """The drain takes longer than the gang tries: when the machine is free its owner takes it back."""
    course = course_of(*starved_gang(), Pace(delays=(10,)), cycles_max=SETTLE_CYCLES_MAX)

    assert course.settled_after is not None
