"""The phases of a cycle: each moment of it belongs to one of those that docs/spec/shard.md §14 names."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import pytest
from prometheus_client import CollectorRegistry

from bigfleet.engine.decision import Phase
from bigfleet.model.states import MachineState
from bigfleet.shard.cycle.phase_timer import SHOWN_AS, PhaseTimer
from bigfleet.shard.inventory.inventory import Inventory
from bigfleet.shard.metrics import PHASES, ShardMetrics
from tests.shard.world import ScriptedProvider, World, machine, need

T = TypeVar("T")


class Watch:
    """A clock that stands until it is told to go on."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def monotonic_seconds(self) -> float:
        """Return the time."""
        return self.seconds

    def unix_nanos(self) -> int:
        """Return the time."""
        return int(self.seconds * 1e9)

    async def sleep(self, seconds: float) -> None:
        """Nobody waits here."""
        raise AssertionError(seconds)


class Timed:
    """Laps over a clock in hand, and what they observed."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.watch = Watch()
        self.laps = PhaseTimer(self.watch, ShardMetrics(self.registry, Inventory()))

    def after(self, seconds: float) -> PhaseTimer:
        """Return the laps when so much time has passed."""
        self.watch.seconds += seconds
        return self.laps

    def seen(self) -> dict[str, tuple[int, float]]:
        """Return (samples, seconds) of every phase that has samples."""
        name = "bigfleet_shard_cycle_phase_duration_seconds"
        seen = {}
        for phase in PHASES:
            samples = self.registry.get_sample_value(f"{name}_count", {"phase": phase}) or 0
            seen[phase] = int(samples), self.registry.get_sample_value(f"{name}_sum", {"phase": phase}) or 0.0
        return {phase: figures for phase, figures in seen.items() if figures[0]}


@pytest.mark.rule("shard 14/4")
def test_every_moment_of_a_cycle_belongs_to_one_phase() -> None:
    timed = Timed()
    timed.after(1).end("reconcile")
    for seconds, phase in zip((2, 4, 8, 16), Phase, strict=True):
        timed.after(seconds).decided(phase)
    timed.after(32).end_decision()
    timed.after(64).end("emit")

    assert timed.seen() == {
        "reconcile": (1, 1),
        "snapread": (1, 2),
        "phase1": (1, 4),
        "phase2": (1, 8),
        # With the answer's way back.
        "phase3": (1, 48),
        "emit": (1, 64),
    }


def test_a_decision_that_is_made_twice_is_one_sample_of_both() -> None:
    timed = Timed()
    for phase in (*Phase, *Phase):
        timed.after(1).decided(phase)
    timed.laps.end_decision()

    assert timed.seen() == dict.fromkeys(("snapread", "phase1", "phase2", "phase3"), (1, 2))


def test_a_decision_that_came_to_no_end_is_no_sample() -> None:
    timed = Timed()
    timed.after(1).end("reconcile")
    timed.after(1).decided(Phase.FOLD)

    assert timed.seen() == {"reconcile": (1, 1)}


def test_every_phase_of_a_decision_has_a_name_of_its_own() -> None:
    assert (set(SHOWN_AS), len(set(SHOWN_AS.values()))) == (set(Phase), len(Phase))
    assert set(SHOWN_AS.values()) < set(PHASES)


@pytest.mark.rule("shard 14/4")
@pytest.mark.virtual_time
async def test_waiting_for_a_thread_is_of_the_snapshot_and_the_way_back_of_the_last_phase() -> None:
    """So that no other phase looks slow when the machine has too little processor."""

    async def slow(work: Callable[[], T]) -> T:
        await asyncio.sleep(3)
        result = work()
        await asyncio.sleep(4)
        return result

    provider = ScriptedProvider()
    provider.add(machine("m1", MachineState.IDLE))
    world = World(provider, compute=slow)
    world.connect("c1").report(need("c1", "4"))

    def spent() -> list[float]:
        phases = ("snapread", "phase1", "phase2", "phase3")
        return [world.metric("cycle_phase_duration_seconds_sum", phase=phase) for phase in phases]

    await world.cycle()
    before = spent()
    await world.cycle()

    assert [after - earlier for earlier, after in zip(before, spent(), strict=True)] == [3, 0, 0, 4]
