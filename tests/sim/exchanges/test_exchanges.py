"""Exchanges in a world of faults: what must hold all the time holds, and planted defects are found."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from bigfleet.engine.decision import Options
from bigfleet.engine.shapes import fleet as shapes_fleet
from bigfleet.exchange import course as courses
from bigfleet.exchange.course import ExchangeCourse
from bigfleet.shard.actuation.stuck_transitions import StuckTransitions
from bigfleet.shard.cycle import guardrails
from bigfleet.shard.exchange import execution
from tests.sim.exchanges.world import FAULTS, ExchangeWorld

pytestmark = pytest.mark.virtual_time

HOURS = 60
#: Share of the minutes in which a fault happens.
OFTEN = 0.03


def drawn(world: ExchangeWorld) -> dict[str, Callable[[ExchangeWorld], None]]:
    """Return the faults of a world: some of them, so that one does not always hide another."""
    return {name: fault for name, fault in FAULTS.items() if world.random.random() < 0.5}


async def hold(seed: int) -> Counter[str]:
    """Let faults happen for hours and end; return how exchanges ended. Raises AssertionError for what did not hold."""
    world = ExchangeWorld(seed)
    await world.run(12 * HOURS, drawn(world), OFTEN)
    await world.run(9 * HOURS, {}, 0.0)
    assert world.breaches.found == []
    assert not world.short()
    assert not world.running
    return Counter(record.end for record in world.store.history.values())


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.long)])
async def test_what_must_hold_holds(seed: int) -> None:
    """No pod loses its place, and budget, time limits and cooling are kept, whatever happens."""
    await hold(seed)


@pytest.mark.slow
async def test_faults_end_exchanges_in_many_ways() -> None:
    """Without that the invariants would show nothing."""
    ends: Counter[str] = Counter()
    # Seed 103 ends no exchange in a way that these do not.
    for seed in (100, 101, 102, 104):
        ends += await hold(seed)

    assert ends["done"] > 10
    assert len(ends) >= 5


@pytest.mark.long
@pytest.mark.parametrize("part", range(8))
async def test_what_must_hold_holds_for_many_seeds(part: int) -> None:
    """Two hundred worlds."""
    for seed in range(1000 + 25 * part, 1025 + 25 * part):
        await hold(seed)


# ---- at rest -------------------------------------------------------------------------------------------------------


async def settle(seed: int, cycles: int) -> None:
    """At constant demand and prices exchanges end, and then there is none in so many cycles."""
    world = ExchangeWorld(seed, machines=4 + seed % 9)
    world.wanted = world.usual = world.random.randint(8, world.usual)
    world.report()
    await world.run(16 * HOURS, {}, 0.0)
    assert {record.end for record in world.store.history.values()} == {"done"}
    count, calls = len(world.store.history), len(world.provider.calls)
    await world.run(cycles, {}, 0.0)

    assert len(world.store.history) == count
    assert world.provider.calls[calls:] == []
    assert world.breaches.found == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
async def test_at_rest_nothing_is_exchanged(seed: int) -> None:
    """In a thousand cycles."""
    await settle(seed, 1000)


@pytest.mark.long
@pytest.mark.parametrize("part", range(8))
async def test_at_rest_nothing_is_exchanged_for_many_seeds(part: int) -> None:
    """Two hundred fleets."""
    for seed in range(2000 + 25 * part, 2025 + 25 * part):
        await settle(seed, 1000)


# ---- planted defects -----------------------------------------------------------------------------------------------


def _leaves_at_once(patch: pytest.MonkeyPatch) -> None:
    """Machines host nothing from the beginning of their exchange, and nothing holds them until what comes is there."""
    patch.setattr(ExchangeCourse, "leaving", property(lambda course: frozenset(course.remaining)))
    patch.setattr(ExchangeCourse, "retained", property(lambda course: frozenset()))
    sort_hosts = shapes_fleet.sort_hosts

    def without_leaving(cluster: Any, options: Options) -> None:
        sort_hosts(cluster, options)
        cluster.hosts[:] = [host for host in cluster.hosts if host.machine.id not in options.leaving]

    patch.setattr(shapes_fleet, "sort_hosts", without_leaving)
    patch.setattr(guardrails, "serving_for_replacements", lambda _view, _due, _decision: frozenset())
    # The decision would end the exchange that it cannot serve.
    patch.setattr(execution.ExchangeExecution, "decided", lambda self, decision: self._host.plans.decided(decision))


def _no_budget(patch: pytest.MonkeyPatch) -> None:
    """All machines of an exchange drain together."""
    patch.setattr(ExchangeCourse, "wave", ExchangeCourse.leaving)


def _no_limit(patch: pytest.MonkeyPatch) -> None:
    """An exchange waits for its machines for ever, also for those that are stuck."""
    patch.setattr(courses, "ACQUIRING_SECONDS_MAX", float("inf"))
    patch.setattr(StuckTransitions, "is_no_supply", lambda self, machine_id: False)


def _forgets(patch: pytest.MonkeyPatch) -> None:
    """Machines do not cool after an exchange that was abandoned."""
    patch.setattr(execution.ExchangeExecution, "cooling", lambda self, seconds: frozenset())


def _goes_on_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    """A new process leaves open what the old one began."""

    def put_ended(self: Any, record: Any) -> None:
        if record.end != "restarted":
            before(self, record)

    before = execution.ExchangeExecution._put_ended
    patch.setattr(execution.ExchangeExecution, "_put_ended", put_ended)


DEFECTS: Mapping[str, tuple[Callable[[pytest.MonkeyPatch], None], tuple[str, ...]]] = {
    "E1": (_leaves_at_once, ("boot-hangs",)),
    "E2": (_no_budget, ()),
    "E3": (_no_limit, ("boot-hangs",)),
    "E3 ": (_goes_on_after_a_restart, ("kill",)),
    "E4": (_forgets, ("price-back", "boot-fails")),
}


def seeds() -> Iterator[int]:
    """Return seeds to try."""
    return itertools.islice(itertools.count(500), 6)


@pytest.mark.slow
@pytest.mark.parametrize("name", DEFECTS)
async def test_a_planted_defect_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the invariant that it breaks, and without the defect the same worlds are sound."""
    plant, faults = DEFECTS[name]
    chosen = {each: FAULTS[each] for each in faults}
    for seed in seeds():
        with monkeypatch.context() as patch:
            plant(patch)
            world = ExchangeWorld(seed)
            await world.run(8 * HOURS, chosen, 0.2)
        if name.strip() in world.breaches.names():
            break
    else:
        raise AssertionError(f"{name} was not broken")
    sound = ExchangeWorld(seed)
    await sound.run(8 * HOURS, chosen, 0.2)
    assert sound.breaches.found == []
