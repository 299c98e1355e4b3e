"""Runs closed-loop scenarios by name, for commands and tests.

docs/spec/simulation.md. A scenario is a file of a folder; its name is the file's. One run is one seed on virtual time,
and equal runs give equal journals. This module does not know a particular scenario.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

import structlog

from bigfleet.model.validation import validating
from bigfleet.operator.requests import UnmappableRequest
from bigfleet.shard.cycle.controller import Shard
from bigfleet.sim.kernel.loop import InOrder, run_kernel
from bigfleet.sim.scenarios import checks
from bigfleet.sim.scenarios.measures import Watch
from bigfleet.sim.scenarios.scenario_file import Crash, Scenario, ScenarioFault, Takes, read_scenario
from bigfleet.sim.scenarios.world import ClosedWorld, MakeShard
from bigfleet.sim.sites.stores import DurableAudit

#: The scenarios of a checkout; an installed package has none, and is given a folder.
FOLDER: Final = Path(__file__).parents[4] / "tests" / "cases" / "sim"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioVerdict:
    """One expectation of one arm, and what was measured."""

    #: "" for a scenario without arms.
    arm: str
    text: str
    value: float
    is_met: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioOutcome:
    """What came of one run."""

    name: str
    seed: int
    #: Of all arms together.
    cycles: int
    verdicts: tuple[ScenarioVerdict, ...]
    #: Broken invariants, each with its cycle.
    violations: tuple[str, ...]
    #: One line per cycle; arms follow each other.
    journal: tuple[str, ...]
    #: Actions that were carried out, by kind.
    actions: Mapping[str, int]

    @property
    def is_met(self) -> bool:
        """Return whether every expectation is met and no invariant was broken."""
        return not self.violations and all(verdict.is_met for verdict in self.verdicts)

    @property
    def trace_hash(self) -> str:
        """SHA-256 over the journal."""
        return hashlib.sha256("\n".join(self.journal).encode()).hexdigest()

    @property
    def faults(self) -> list[str]:
        """One line for each expectation that is not met, and for each invariant that was broken."""
        unmet = [
            f"{self.name}{f' [{v.arm}]' if v.arm else ''}: {v.text}, measured {v.value:g}"
            for v in self.verdicts
            if not v.is_met
        ]
        return [*unmet, *(f"{self.name}: {violation}" for violation in self.violations)]


def scenarios(folder: Path = FOLDER) -> list[str]:
    """Return the names of a folder's scenarios in order. Raises ScenarioFault when there are none."""
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    if not names:
        raise ScenarioFault(f"{folder}: there is no scenario file (*.yaml) here; name a folder that has some")
    return names


def scenario_of(name: str, folder: Path = FOLDER) -> Scenario:
    """Return a scenario. Raises ScenarioFault for a name that no file has, and for a wrong file."""
    known = scenarios(folder)
    if name not in known:
        raise ScenarioFault(f"{folder}: there is no scenario {name!r}; there are {', '.join(known)}")
    return read_scenario(folder / f"{name}.yaml")


def run(
    name: str,
    seed: int = 1,
    *,
    folder: Path = FOLDER,
    cycles_max: int | None = None,
    on_cycle: Callable[[int, int], None] = lambda _done, _of: None,
) -> ScenarioOutcome:
    """Run a scenario to its end. Raises ScenarioFault for an unknown name and a wrong file.

    With `cycles_max` it ends after so many cycles of each arm, and its expectations are not asked: they are about the
    end. `on_cycle` takes how many cycles are done, and of how many. Must not be called on a running event loop.
    """
    scenario = scenario_of(name, folder)
    return run_scenario(scenario, name=name, seed=seed, cycles_max=cycles_max, on_cycle=on_cycle)


def run_scenario(
    scenario: Scenario,
    *,
    name: str,
    seed: int = 1,
    cycles_max: int | None = None,
    on_cycle: Callable[[int, int], None] = lambda _done, _of: None,
    make_shard: MakeShard = Shard,
) -> ScenarioOutcome:
    """Run a scenario that was read already, with another shard where a test plants a defect. Raises ScenarioFault."""
    arms = _arms(scenario)
    cycles = scenario.cycles if cycles_max is None else min(cycles_max, scenario.cycles)
    verdicts: list[ScenarioVerdict] = []
    watches: list[Watch] = []
    for number, arm in enumerate(arms):

        def on_done(done: int, number: int = number) -> None:
            on_cycle(number * cycles + done, len(arms) * cycles)

        course = partial(_run, scenario, arm, name=name, seed=seed, cycles=cycles, make_shard=make_shard)
        watch, asked = course(has_coordinator=scenario.coordinator, on_done=on_done)
        watches.append(watch)
        if scenario.coordinator and not scenario.shards:
            alone, _asked = course(has_coordinator=False, on_done=lambda _done: None)
            watch.violations += checks.unmoved(watch.journal, alone.journal)
        watch.violations[:] = [f"{arm.text}: {each}" if arm.text else each for each in watch.violations]
        verdicts += asked
    carried = [each.kind for watch in watches for each in watch.carried]
    return ScenarioOutcome(
        name=name,
        seed=seed,
        cycles=cycles * len(arms),
        verdicts=tuple(verdicts),
        violations=tuple(violation for watch in watches for violation in watch.violations),
        journal=tuple(line for watch in watches for line in watch.journal),
        actions={kind: carried.count(kind) for kind in sorted(set(carried))},
    )


class _Arm(NamedTuple):
    """One of the worlds of a scenario."""

    takes: Takes
    crash: Crash | None
    #: What distinguishes it from the others, "" where there are none.
    text: str


def _arms(scenario: Scenario) -> list[_Arm]:
    arms = [_Arm(takes, None, _text_of(takes)) for takes in scenario.arms] or [_Arm(scenario.takes, None, "")]
    if not scenario.crashes:
        return arms
    return [
        _Arm(arm.takes, crash, f"{arm.text}{', ' if arm.text else ''}{crash.process} dies at {crash.at_second:g} s")
        for arm in arms
        for crashes in scenario.crashes
        for crash in crashes.arms()
    ]


def _run(
    scenario: Scenario,
    arm: _Arm,
    *,
    name: str,
    seed: int,
    cycles: int,
    make_shard: MakeShard,
    has_coordinator: bool,
    on_done: Callable[[int], None],
) -> tuple[Watch, list[ScenarioVerdict]]:
    """Run one arm on a loop of its own; return what was seen, and what was asked if it ran to its end."""
    watch = Watch()

    async def course(disk: Path | None) -> list[ScenarioVerdict]:
        world = ClosedWorld(
            scenario,
            arm.takes,
            seed=seed,
            make_audit=lambda world, process: DurableAudit(lambda line: watch.audited(world, process, line)),
            make_shard=make_shard,
            disk=disk,
            crash=arm.crash,
        )
        async with world.running():
            for done in range(cycles):
                await world.run_cycle(lambda step: watch.decided(world, step))
                await watch.cycle_ended(world)
                on_done(done + 1)
        return list(_verdicts(world, watch, arm.text)) if cycles == scenario.cycles else []

    try:
        with _quietly(), validating(), TemporaryDirectory() as folder:
            disk = Path(folder) if has_coordinator else None
            return watch, run_kernel(lambda _loop: course(disk), InOrder())
    except UnmappableRequest as fault:
        raise ScenarioFault(f"{name}: {fault}") from fault


def _verdicts(world: ClosedWorld, watch: Watch, arm: str) -> Iterator[ScenarioVerdict]:
    for expectation in world.scenario.must_hold:
        value = watch.value(world, expectation)
        yield ScenarioVerdict(arm=arm, text=expectation.text, value=value, is_met=expectation.holds(value))


def _text_of(takes: Takes) -> str:
    parts = {name: getattr(takes, name) for name in takes.__struct_fields__}
    return ", ".join(f"{name} takes {cycles}" for name, cycles in parts.items() if cycles) or "nothing takes a cycle"


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep what the processes log off the terminal: a run is described by its journal."""
    before = structlog.get_config()
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory(), cache_logger_on_first_use=False)
    try:
        yield
    finally:
        structlog.configure(**before)
