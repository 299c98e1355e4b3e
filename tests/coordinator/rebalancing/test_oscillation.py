"""Machines do not move to and fro between shards (docs/spec/coordinator.md §7.5): what comes to rest, and why.

Real passes, reports and handovers over a model of shards that act on what moves. Each of the four defences is taken
away by itself: then a course of demand makes the same machines return again and again, which with all four moves none,
or none before its cooldown is over.
"""

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest

from bigfleet.coordinator import donors
from bigfleet.coordinator import rebalance_plan as planner
from bigfleet.coordinator.leader_term import CoordinatorSettings
from bigfleet.coordinator.transfers import Knobs
from bigfleet.model.ids import ClusterId
from bigfleet.model.states import MachineState
from bigfleet.model.vector import Vector
from bigfleet.shard.ownership import donor_selection, handover
from bigfleet.sim.kernel.virtual_time import run_virtual
from tests.coordinator.fleet_world import (
    CLOCK,
    COOLDOWN_SECONDS,
    PASS_SECONDS,
    Fleet,
    Want,
    machines_of,
    steady,
)
from tests.engine.proof import RecordProperty

TYPES = ("m6i", "c6i", "r6i")
HOUR_SECONDS = 3_600.0
#: Longer than any cooldown, reservation, retry or expiry: what stands still for so long stands still for ever.
REST_SECONDS = 2_400.0
REST_HOURS_MAX = 8
#: Random fleets of `make test-long` with constant demand; half as many have swinging demand.
FLEETS = int(os.environ.get("BIGFLEET_OSCILLATION_FLEETS", "100"))


def square_wave(rng: random.Random, low: int, high: int) -> Callable[[float], int]:
    """Return demand that jumps between two numbers, sooner and later than any pass or cooldown."""
    period_seconds, phase_seconds = rng.choice((120.0, 200.0, 300.0, 480.0, 700.0, 1_500.0)), rng.uniform(0, 1_500)
    return lambda at: high if (at + phase_seconds) % period_seconds < period_seconds / 2 else low


def random_fleet(seed: int, *, swings: bool) -> Fleet:
    """Return 2 to 20 shards with machines and slots of a few types; some lack what others have too much of."""
    rng = random.Random(seed)
    fleet = Fleet(CoordinatorSettings())
    types = TYPES[: rng.randint(1, 3)]
    # Where there is little, only work that is cheaper to interrupt can make room.
    amounts = rng.choice(((0, 0, 2, 5, 12), (0, 3, 6)))
    states = rng.choice(((MachineState.IDLE,), (MachineState.IDLE, MachineState.SPECULATIVE)))
    for number in range(rng.randint(2, 20)):
        zone = f"s{number:02}"
        machines = [
            machine
            for kind in types
            for state in states
            for machine in machines_of(zone, kind, rng.choice(amounts), state)
        ]
        wants = []
        for index in range(rng.randint(0, 4)):
            number_wanted = rng.choice((1, 2, 4, 9, 20))
            wants.append(
                Want(
                    cluster=ClusterId(f"{zone}-{index}"),
                    instance_types=tuple(rng.sample(types, rng.randint(1, len(types)))),
                    count=square_wave(rng, rng.randint(0, 3), number_wanted) if swings else steady(number_wanted),
                    priority=rng.choice((0, 100, 1_000, 10_000)),
                    bucket=rng.choice((1, 3, 8, 13)),
                    is_same=rng.random() < 0.1,
                )
            )
        fleet.add(zone, machines, *wants)
    return fleet


async def until_at_rest(fleet: Fleet) -> float:
    """Return when the last machine moved. Raises AssertionError when they never stop."""
    async with fleet.running():
        for _ in range(REST_HOURS_MAX):
            await CLOCK.sleep(HOUR_SECONDS)
            if not fleet.moved(since=CLOCK.monotonic_seconds() - REST_SECONDS):
                break
        moved = fleet.moved()
        last = moved[-1].at if moved else 0.0
        assert CLOCK.monotonic_seconds() - last >= REST_SECONDS, f"still moving: {moved[-10:]}"
    return last


def check_rest(seed: int) -> tuple[int, float]:
    fleet = random_fleet(seed, swings=False)
    last = run_virtual(lambda: until_at_rest(fleet))
    assert fleet.too_soon() == [], seed
    for machine_id in fleet.records:
        assert len(fleet.owners(machine_id)) == 1, (seed, machine_id)
    return len(fleet.moved()), last


def check_swing(seed: int) -> int:
    """Let demand swing for two hours; in every other fleet leaders die meanwhile, and the next one knows nothing."""
    fleet, rng = random_fleet(seed, swings=True), random.Random(seed)

    async def course() -> None:
        until = 2 * HOUR_SECONDS
        async with fleet.running():
            while seed % 2 and CLOCK.monotonic_seconds() < until - HOUR_SECONDS / 2:
                await CLOCK.sleep(rng.uniform(300, 1_200))
                fleet.crash()
                await CLOCK.sleep(10)
                fleet.lead()
            await CLOCK.sleep(until - CLOCK.monotonic_seconds())
            assert fleet.crowded() == [], seed

    run_virtual(course)
    assert fleet.too_soon() == [], seed
    for machine_id in fleet.records:
        # One that is on its way at the end is nobody's for the moment.
        assert len(fleet.owners(machine_id)) <= 1, (seed, machine_id)
    return len(fleet.moved())


@pytest.mark.rule("coordinator 7.5/1")
@pytest.mark.parametrize("seeds", [(1, 6), pytest.param((0, 2, 4), marks=pytest.mark.slow)], ids=["two", "more"])
def test_random_fleets_with_constant_demand_come_to_rest(
    record_property: RecordProperty, seeds: tuple[int, ...]
) -> None:
    record_property("fleets at rest", told([check_rest(seed) for seed in seeds]))


@pytest.mark.rule("shard 16/6", "coordinator 7.5/2")
@pytest.mark.parametrize("seed", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_with_swinging_demand_nothing_moves_before_its_cooldown_is_over(
    record_property: RecordProperty, seed: int
) -> None:
    record_property("swinging fleets", (1, check_swing(seed)))


@pytest.mark.rule("coordinator 7.5/1")
@pytest.mark.long
def test_many_random_fleets_with_constant_demand_come_to_rest(record_property: RecordProperty) -> None:
    record_property("fleets at rest", told([check_rest(seed) for seed in range(FLEETS)]))


@pytest.mark.rule("coordinator 7.5/2")
@pytest.mark.long
def test_with_much_swinging_demand_nothing_moves_before_its_cooldown_is_over(record_property: RecordProperty) -> None:
    moved = [check_swing(seed) for seed in range(FLEETS // 2)]
    record_property("swinging fleets", (len(moved), sum(moved)))


@pytest.mark.rule("coordinator 7.5/2")
def test_what_came_lately_is_not_drained_for_others() -> None:
    """Nor for whoever gave it away: the work that it came for would be interrupted for nothing."""
    fleet = Fleet(CoordinatorSettings())
    fleet.add("a", machines_of("a", "m6i", 0), want("a", steady(4)))
    # Once its machines are given away, more urgent work comes to where they were.
    urgent = Want(ClusterId("urgent"), ("m6i",), lambda at: 6 if at >= 340 else 0, priority=1_000, bucket=13)
    fleet.add("b", machines_of("b", "m6i", 6), urgent)

    async def course() -> None:
        async with fleet.running():
            await CLOCK.sleep(HOUR_SECONDS)

    run_virtual(course)
    taken = [event.at for event in fleet.events if event.what == "taken" and event.shard == "a"]
    drained = [event.at for event in fleet.moved() if event.what == "drained"]

    assert taken[0] < 340
    assert drained, "later it is"
    assert min(drained) - taken[0] >= COOLDOWN_SECONDS


def told(rests: list[tuple[int, float]]) -> tuple[int, int]:
    """Return fleets and moves; that nothing ever moved would prove nothing."""
    assert sum(moves for moves, _last in rests) > 20
    return len(rests), sum(moves for moves, _last in rests)


# ---- each defence by itself --------------------------------------------------------------------------------------


def by_turns(first: int, second: int, half_seconds: float = 600.0) -> Callable[[float], int]:
    """Return demand that is one number, then the other."""
    return lambda at: first if at % (2 * half_seconds) < half_seconds else second


def want(zone: str, count: Callable[[float], int]) -> Want:
    return Want(cluster=ClusterId(f"of-{zone}"), instance_types=("m6i",), count=count, priority=100)


def two_shards(settings: CoordinatorSettings, **given: tuple[int, Callable[[float], int]]) -> Fleet:
    fleet = Fleet(settings)
    for zone, (number, count) in given.items():
        fleet.add(zone, machines_of(zone, "m6i", number), want(zone, count))
    return fleet


def blips(settings: CoordinatorSettings) -> Fleet:
    """Both lack something in turn around a pass, for less than six cycles: their own work ends before help is there."""

    def blip(pass_number: int) -> Callable[[float], int]:
        # 45 s before every second pass, for 55 s.
        return lambda at: 9 if (at + 45 - pass_number * PASS_SECONDS) % (2 * PASS_SECONDS) < 55 else 0

    return two_shards(settings, a=(5, blip(0)), b=(5, blip(1)))


def haste(settings: CoordinatorSettings) -> Fleet:
    """Demand goes from one to the other a little after each pass."""

    def every_other_pass(first: int) -> Callable[[float], int]:
        return lambda at: 9 if (at - 20 - first * PASS_SECONDS) % (2 * PASS_SECONDS) < PASS_SECONDS else 0

    return two_shards(settings, a=(5, every_other_pass(0)), b=(5, every_other_pass(1)))


def last_machine(settings: CoordinatorSettings) -> Fleet:
    """Each has one to spare while the other lacks one; it will want its own again."""
    return two_shards(settings, a=(3, by_turns(2, 3)), b=(3, by_turns(4, 3)))


def little_help(settings: CoordinatorSettings) -> Fleet:
    """One lacks ten, and could get two that will be wanted where they are."""
    return two_shards(settings, a=(12, by_turns(9, 12)), b=(10, by_turns(20, 5)))


def too_much_help(settings: CoordinatorSettings) -> Fleet:
    """One lacks twenty; what it gets beyond that will be wanted where it came from."""
    return two_shards(settings, a=(40, by_turns(10, 20)), b=(10, by_turns(30, 1)))


KNOBS = Knobs()
FULL = CoordinatorSettings()


def keep_everything(patch: pytest.MonkeyPatch) -> None:
    del patch


def no_cooldown_of_machines(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(handover, "COOLDOWN_REPORT_CYCLES", 0)


def no_margin_of_donors(patch: pytest.MonkeyPatch) -> None:
    def chosen(selector: Any, matching: Any) -> Any:
        return [each.machine.id for each in sorted(matching, key=donor_selection._order)[: selector.count]]

    patch.setattr(handover, "chosen", chosen)


def no_demand_pull(patch: pytest.MonkeyPatch) -> None:
    def as_many_as_there_are(_allocatable: Vector, _deficit: Vector) -> int:
        return 100

    patch.setattr(donors, "machines_needed", as_many_as_there_are)
    patch.setattr(planner, "machines_needed", as_many_as_there_are)


def comes_back(fleet: Fleet) -> int:
    """Return how often a machine came back to a shard that had given it away."""
    return fleet.returns()


def moves_too_soon(fleet: Fleet) -> int:
    """Return how often a machine was given on before its cooldown was over."""
    return len(fleet.too_soon())


@dataclass(frozen=True)
class Defence:
    """One of the four of §7.5, or half of one: a course of demand that it stops, and how it is taken away."""

    name: str
    course: Callable[[CoordinatorSettings], Fleet]
    #: What must not happen at all while it stands.
    oscillates: Callable[[Fleet], int]
    settings: CoordinatorSettings
    patch: Callable[[pytest.MonkeyPatch], None] = keep_everything


DEFENCES = (
    Defence("age", blips, comes_back, replace(FULL, knobs=replace(KNOBS, age_cycles=0, preempt_age_cycles=0))),
    Defence("cooldown", haste, moves_too_soon, replace(FULL, cooldown_seconds=0.0), no_cooldown_of_machines),
    Defence(
        "margin",
        last_machine,
        comes_back,
        replace(FULL, knobs=replace(KNOBS, margin_min=0, margin_fraction=Fraction(0))),
        no_margin_of_donors,
    ),
    Defence("worth", little_help, comes_back, replace(FULL, knobs=replace(KNOBS, benefit_min=Fraction(0)))),
    Defence("demand-pull", too_much_help, comes_back, FULL, no_demand_pull),
)


def counted(fleet: Fleet, oscillates: Callable[[Fleet], int]) -> tuple[int, int]:
    """Run for four hours; return how often it oscillated, in all and in the last hour."""

    async def course() -> tuple[int, int]:
        counts = []
        async with fleet.running():
            for _ in range(4):
                await CLOCK.sleep(HOUR_SECONDS)
                counts.append(oscillates(fleet))
        return counts[-1], counts[-1] - counts[-2]

    return run_virtual(course)


@pytest.mark.rule("coordinator 7.5/3")
@pytest.mark.parametrize("defence", DEFENCES, ids=lambda defence: defence.name)
def test_each_defence_stops_an_oscillation_that_the_others_let_through(
    defence: Defence, monkeypatch: pytest.MonkeyPatch, record_property: RecordProperty
) -> None:
    assert counted(defence.course(FULL), defence.oscillates) == (0, 0)

    defence.patch(monkeypatch)
    without = defence.course(defence.settings)
    without.donors_keep_a_margin = defence.name != "margin"
    in_all, in_the_last_hour = counted(without, defence.oscillates)

    assert in_the_last_hour >= 2, "it goes on and on"
    record_property("oscillations", (in_all, 1))
