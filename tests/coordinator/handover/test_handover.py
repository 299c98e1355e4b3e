"""Handover between shards: never two owners, and one in the end, whatever is lost (docs/spec/coordinator.md §9, §13).

The leader, the inbox and the rows are the real ones; chance, and three chosen courses of events, do the rest.
"""

import os
import random
from typing import Any

import pytest

from bigfleet.model.ids import MachineId, ShardId
from tests.coordinator.handover.handover_mutants import (
    ANSWER_A_NEW_FILE,
    ANY_VIEW_IS_CURRENT,
    DROP_ON_AN_OLD_VIEW,
    FORGET_WHAT_WAS_ONLY_SENT,
    MUTANTS,
    NO_ORDER_OF_REPORTS,
    Mutant,
)
from tests.coordinator.handover.handover_states import Budget, Move, explore, first_state
from tests.coordinator.handover.handover_world import UNQUIET, USUAL, World
from tests.engine.proof import RecordProperty

M0, M1, M2 = MachineId("m0"), MachineId("m1"), MachineId("m2")
S0, S1 = ShardId("s0"), ShardId("s1")
STEPS = 300
SEEDS_OF_A_MUTANT_MAX = 400
#: Those of `make test-long` (docs/spec/coordinator.md §13); `make test-slow` runs the first part, which is small.
SEEDS = int(os.environ.get("BIGFLEET_HANDOVER_SEEDS", "10000"))
SLOW_SEEDS = range(min(100, SEEDS))
SEEDS_OF_A_PART = 1_000
PARTS = [
    pytest.param(SLOW_SEEDS, marks=pytest.mark.slow),
    *(
        pytest.param(range(first, min(first + SEEDS_OF_A_PART, SEEDS)), marks=pytest.mark.long)
        for first in range(SLOW_SEEDS.stop, SEEDS, SEEDS_OF_A_PART)
    ),
]


def live(seed: int) -> None:
    """Let chance do what it likes for a while, then heal. Raises AssertionError."""
    world = World(random.Random(seed), (USUAL, UNQUIET)[seed % 2])
    for _ in range(STEPS):
        world.step()
        world.check()
    world.heal()


@pytest.mark.rule("coordinator 9.3/1", "coordinator 9.4/1", "coordinator 12/2")
def test_no_machine_ever_has_two_owners_and_each_has_one_in_the_end(record_property: RecordProperty) -> None:
    seeds = 40
    for seed in range(seeds):
        live(seed)
    record_property("handovers", (seeds, seeds))


@pytest.mark.rule("coordinator 9.4/1", "coordinator 13/2")
@pytest.mark.parametrize("seeds", PARTS, ids=lambda seeds: f"{seeds.start}-{seeds.stop}")
def test_ten_thousand_seeds(seeds: range, record_property: RecordProperty) -> None:
    """In parts, so that workers share them."""
    for seed in seeds:
        live(seed)
    record_property("handovers", (len(seeds), len(seeds)))


def mutant_params() -> list[Any]:
    """Return the rules, those marked that take hundreds of seeds to miss."""
    return [
        pytest.param(mutant, id=mutant.rule.replace(" ", "-"), marks=pytest.mark.slow if mutant.is_slow else [])
        for mutant in MUTANTS
    ]


@pytest.mark.rule("coordinator 9.1/4", "coordinator 13/1")
@pytest.mark.parametrize("mutant", mutant_params())
def test_each_rule_is_needed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    with pytest.raises(AssertionError):  # noqa: PT012 - which seed it is does not matter
        for seed in range(SEEDS_OF_A_MUTANT_MAX):
            live(seed)
        pytest.fail(f"{SEEDS_OF_A_MUTANT_MAX} seeds, and nobody misses the rule", pytrace=False)


def settled(shards: int = 2, machines: int = 2) -> World:
    world = World(random.Random(0), shards=shards, machines=machines, zones=2)
    for _ in range(4):
        for name in world.shards:
            world.exchange(name, world.leader)
    assert world.owners(M0) == [S0]
    assert world.owners(M1) == [S1]
    return world


def _leave_zone(world: World) -> None:
    """Zone z0 is taken from its shard, which has nothing there that keeps it."""
    world.take_domain(world.leader, world.zones[0])
    for _ in range(2):
        world.exchange(S0, world.leader)
        world.shards[S0].empty_leaving()
    world.exchange(S0, world.leader)


def _repeat_after_the_zone_came_back(world: World, reports_since: int) -> None:
    """An old report does not show the zone that its shard has by now, and that is taken again."""
    zone = world.zones[0]
    _leave_zone(world)
    world.give_domain(world.leader, zone, S0)
    world.exchange(S0, world.leader)
    assert world.owners(M0) == [S0]
    leader, report = world.late[-1]
    for _ in range(reports_since):
        world.exchange(S0, world.leader)
    world.take_domain(world.leader, zone)
    world.ask(leader, report)
    world.give_domain(world.leader, zone, S1)
    for _ in range(2):
        world.exchange(S1, world.leader)
        world.check()


def a_report_arrives_again_after_its_answer(world: World) -> None:
    _repeat_after_the_zone_came_back(world, reports_since=0)


def a_report_arrives_after_the_next_one(world: World) -> None:
    _repeat_after_the_zone_came_back(world, reports_since=1)


def a_shard_with_a_new_file_meets_a_former_leader(world: World) -> None:
    """The former one still wants it to adopt what the next one has taken back, as the shard had been removed."""
    former = world.leader
    world.move(former, M1, S1, S0)
    for _ in range(2):
        world.exchange(S1, former)
    world.shards[S0].lose_disk()
    world.exchange(S0, former, is_lost=True)
    world.elect()
    world.remove(S0)
    for _ in range(3):
        world.exchange(S1, world.leader)
    assert world.owners(M1) == [S1]
    world.exchange(S0, former)
    world.check()


def a_former_leader_answers_a_shard_that_has_not_accepted_the_next(world: World) -> None:
    """The next one takes the shard's word that it has left a zone, which the former one then gives it."""
    zone, former = world.zones[0], world.leader
    _leave_zone(world)
    world.exchange(S1, former)
    world.give_domain(former, zone, S0)
    world.elect()
    world.take_domain(world.leader, zone)
    world.exchange(S1, world.leader, is_lost=True)
    world.exchange(S0, world.leader, is_lost=True)
    world.give_domain(world.leader, zone, S1)
    for _ in range(3):
        world.exchange(S1, world.leader)
    world.exchange(S0, former)
    world.check()


def a_donor_without_its_file_asks_before_the_recipient_reports(world: World) -> None:
    """The machine is at its recipient; only what the donor was told about it says so."""
    world.move(world.leader, M0, S0, S1)
    for name in (S0, S0, S1):
        world.exchange(name, world.leader)
    assert world.owners(M0) == [S1]
    world.shards[S0].lose_disk()
    for _ in range(4):
        world.exchange(S0, world.leader)
        world.check()


COURSES = [
    (NO_ORDER_OF_REPORTS, a_report_arrives_after_the_next_one),
    (FORGET_WHAT_WAS_ONLY_SENT, a_donor_without_its_file_asks_before_the_recipient_reports),
    (DROP_ON_AN_OLD_VIEW, a_report_arrives_again_after_its_answer),
    (ANSWER_A_NEW_FILE, a_shard_with_a_new_file_meets_a_former_leader),
    (ANY_VIEW_IS_CURRENT, a_former_leader_answers_a_shard_that_has_not_accepted_the_next),
]


@pytest.mark.rule("coordinator 9.6/3", "coordinator 12/6", "coordinator 13/1")
@pytest.mark.parametrize(("mutant", "course"), COURSES, ids=lambda value: getattr(value, "__name__", ""))
def test_chosen_courses_end_well_and_only_because_of_their_rule(
    mutant: Mutant, course: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(course)
    world = settled()
    course(world)
    world.heal()

    mutant.apply(monkeypatch)
    with pytest.raises(AssertionError, match="belongs to"):
        course(settled())


@pytest.mark.rule("coordinator 9.3/5")
def test_each_machine_of_a_transfer_is_forgotten_when_it_is_gone() -> None:
    """Its instructions have one id; the donor executes each, and then has nothing more to report."""
    world = settled(machines=3)
    world.move(world.leader, M0, S0, S1, M2)
    for name in (S0, S0, S1, S1, S0, S0):
        world.exchange(name, world.leader)
    assert world.owners(M0) == world.owners(M2) == [S1]

    recipient, donor = world.shards[S1], world.shards[S0]
    for gone, left in ((M0, [M2]), (M2, [])):
        recipient.disk.owned = recipient.disk.owned.without([gone])
        for name in (S1, S0, S0):
            world.exchange(name, world.leader)
        assert list(donor.disk.owned.rows) == left
        assert not any(world.leader.ephemeral.ledger.live())


@pytest.mark.rule("coordinator 9.3/1", "coordinator 9.4/1")
def test_a_machine_whose_adopter_lost_its_row_before_the_leader_saw_it_is_adopted_again() -> None:
    """An adopter that was cut off has pruned a machine that the provider did not list for a while."""
    world = settled()
    world.move(world.leader, M0, S0, S1)
    for name in (S0, S0, S1):
        world.exchange(name, world.leader)
    recipient = world.shards[S1]
    recipient.disk.owned = recipient.disk.owned.without([M0])
    for name in (S1, S0, S1, S1, S0):
        world.exchange(name, world.leader)

    assert world.owners(M0) == [S1]
    world.heal()


@pytest.mark.rule("coordinator 9.6/2")
def test_a_shard_that_was_removed_and_comes_back_gives_up_what_was_taken_back() -> None:
    """It had adopted the machine and was cut off before it could report that."""
    world = settled()
    world.move(world.leader, M0, S0, S1)
    for name in (S0, S0, S1):
        world.exchange(name, world.leader)
    world.remove(S1)
    for _ in range(3):
        world.exchange(S0, world.leader)
    assert world.owners(M0) == [S0, S1]

    world.exchange(S1, world.leader)
    assert world.owners(M0) == [S0]
    world.heal()
    assert world.owners(M0) == [S0]


@pytest.mark.rule("coordinator 9.4/1", "coordinator 12/16")
@pytest.mark.slow
def test_every_state_that_a_move_can_reach(record_property: RecordProperty) -> None:
    budget = Budget(moves=[Move(M0, S0, S1), Move(M0, S1, S0)], lost_answers=1, crashes=1)
    states, _ = explore(first_state(budget), states_max=20_000)
    record_property("handover states", (states, states))


#: What may go wrong on one path; every state within each is visited, and each must heal.
BUDGETS = {
    "a move, an election, lost and late messages": Budget(
        moves=[Move(M0, S0, S1)], elections=1, lost_answers=1, delayed_reports=1
    ),
    "two machines cross, a crash and a lost message": Budget(
        moves=[Move(M0, S0, S1), Move(M1, S1, S0)], lost_answers=1, crashes=1
    ),
    "a move, a lost disk and a crash": Budget(moves=[Move(M0, S0, S1)], lost_disks=1, crashes=1, lost_answers=1),
}


@pytest.mark.rule("coordinator 9.4/1", "coordinator 12/16", "coordinator 13/2")
@pytest.mark.long
@pytest.mark.parametrize("budget", BUDGETS.values(), ids=[name.replace(" ", "-") for name in BUDGETS])
def test_every_state_within_a_budget(budget: Budget, record_property: RecordProperty) -> None:
    states, _ = explore(first_state(budget), states_max=200_000)
    record_property("handover states", (states, states))
