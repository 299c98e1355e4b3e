"""The engine of a shard: made off the loop before the shard is ready, one for its life, heard when it finds a fault."""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from structlog.testing import capture_logs

from bigfleet.engine.columns.objects import snapshot_of
from bigfleet.engine.columns.store import ColumnSnapshot
from bigfleet.engine.decision import Decision, Options, PhaseListener
from bigfleet.engine.reference import decide as reference
from bigfleet.model.need import Need
from bigfleet.model.states import MachineState
from bigfleet.shard.cycle.controller import Shard
from bigfleet.shard.cycle.engine_runner import EngineDivergence, fleet_engine
from bigfleet.shard.ports import ShardSettings
from tests.shard.world import ScriptedProvider, World, machine, need

pytestmark = pytest.mark.virtual_time

S = MachineState


@dataclass(frozen=True)
class Found:
    """A divergence."""

    decisions: int
    difference: str
    evidence: Mapping[str, object] = field(default_factory=dict)


class FakeEngine:
    """Decides like the reference, and finds itself wrong in the cycles that it is told."""

    def __init__(
        self, on_divergence: Callable[[EngineDivergence], None], diverges_at: frozenset[int] = frozenset()
    ) -> None:
        self.decisions = 0
        self.threads: list[int] = []
        self._on_divergence = on_divergence
        self._diverges_at = diverges_at

    def decide(
        self, view: ColumnSnapshot, demand: Sequence[Need], options: Options, /, *, on_phase: PhaseListener
    ) -> Decision:
        """Decide."""
        self.decisions += 1
        self.threads.append(threading.get_ident())
        if self.decisions in self._diverges_at:
            self._on_divergence(Found(self.decisions, "row 3: deficit differs", {"now_seconds": options.now_seconds}))
        return reference.decide(snapshot_of(view), demand, options, on_phase=on_phase)


class Makers:
    """Makes fake engines and remembers how it was asked to."""

    def __init__(self, diverges_at: frozenset[int] = frozenset()) -> None:
        self.asked: list[int] = []
        self.engines: list[FakeEngine] = []
        self._diverges_at = diverges_at

    def __call__(self, *, verify_every_cycles: int, on_divergence: Callable[[EngineDivergence], None]) -> FakeEngine:
        self.asked.append(verify_every_cycles)
        self.engines.append(FakeEngine(on_divergence, self._diverges_at))
        return self.engines[-1]


def idle_world(**arguments: Any) -> World:
    """Return a world with one Idle machine."""
    provider = ScriptedProvider()
    provider.add(machine("m1", S.IDLE))
    return World(provider, **arguments)


@pytest.mark.rule("shard 1/8")
async def test_one_engine_serves_a_shard_for_its_life() -> None:
    """What it keeps between cycles is what makes them quick."""
    makers = Makers()
    world = idle_world(make_engine=makers, settings=ShardSettings(engine_verify_every_cycles=7))
    for _ in range(3):
        await world.cycle()

    assert (makers.asked, [engine.decisions for engine in makers.engines]) == ([7], [3])


@pytest.mark.rule("shard 1/8")
async def test_a_divergence_is_told_with_its_evidence_and_the_answer_is_used() -> None:
    """Once each, at error level, and counted; the cycle goes on."""
    world = idle_world(make_engine=Makers(frozenset({2, 3})))
    world.connect("c1")
    await world.cycle()
    world.connect("c1").report(need("c1", "4"))
    with capture_logs() as logs:
        await world.cycle()
        await world.cycle()
        await world.cycle()

    told = [entry for entry in logs if entry["event"] == "engine.diverged"]
    assert [(entry["log_level"], entry["decisions"], entry["difference"]) for entry in told] == [
        ("error", 2, "row 3: deficit differs"),
        ("error", 3, "row 3: deficit differs"),
    ]
    assert list(told[0]["evidence"]) == ["now_seconds"]
    assert world.metric("engine_divergences_total") == 2
    assert ("Bootstrap", "m1", "success") in world.outcomes()


@pytest.mark.rule("shard 1/8")
async def test_the_engine_of_a_shard_checks_itself_as_often_as_it_is_told() -> None:
    """The one for large fleets takes the settings' number; 0 checks nothing and decides all the same."""
    for verify_every_cycles in (0, 1):
        world = idle_world(settings=ShardSettings(engine_verify_every_cycles=verify_every_cycles))
        world.connect("c1").report(need("c1", "4"))
        for _ in range(3):
            await world.cycle()

        assert world.metric("engine_divergences_total") == 0
        assert ("Bootstrap", "m1", "success") in world.outcomes()


# ---- before it is ready -----------------------------------------------------------------------------------------


class Held:
    """A compute that lets the making of an engine wait."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    async def __call__(self, work: Callable[[], Any]) -> Any:
        if not self.gate.is_set():
            await self.gate.wait()
        return work()


@pytest.mark.rule("shard 1/10", "shard 1/14")
async def test_a_shard_is_ready_when_its_engine_is_and_its_machines_are_known() -> None:
    """Reconciles run and sessions are served meanwhile; nothing is decided, and the first decision comes at once."""
    compute = Held()
    world = idle_world(compute=compute)
    operator = world.connect("c1")
    operator.report(need("c1", "4"))
    task = asyncio.create_task(world.shard.run())
    await world.shard._clock.sleep(25)
    assert (len(world.shard.inventory), world.shard.cycle, world.shard.is_ready) == (1, 3, False)
    assert (world.shard.view.cycle, world.outcomes(), world.metric("cycle_failures_total")) == (0, [], 0)

    compute.gate.set()
    await world.shard._clock.sleep(1)
    assert (world.shard.is_ready, world.shard.view.cycle, len(world.outcomes())) == (True, 4, 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.rule("shard 1/10")
async def test_an_engine_without_machines_is_not_ready() -> None:
    """An unread inventory is not an empty one."""
    world = idle_world()
    world.provider.list_fails = True
    await world.cycle()

    assert (world.shard._decider.is_ready, world.shard.is_ready) == (True, False)


async def test_an_engine_that_cannot_be_made_ends_the_shard() -> None:
    """A shard that will never decide must not look like one that has nothing to do."""

    def broken(*, verify_every_cycles: int, on_divergence: Callable[[EngineDivergence], None]) -> FakeEngine:
        raise OSError("no compiler")

    world = idle_world(make_engine=broken)
    with pytest.raises(ExceptionGroup) as raised:
        await world.shard.run()

    assert raised.group_contains(OSError, match="no compiler")


def test_the_engine_for_large_fleets_is_the_default() -> None:
    """Nobody has to ask for it."""
    default = Shard.__init__.__kwdefaults__
    assert default is not None
    assert default["make_engine"] is fleet_engine
