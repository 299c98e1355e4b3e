"""Fixtures and markers that every test may use."""

import asyncio
import gc
import os
import signal
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import settings

from bigfleet.cli.runtime.kernel_cache import keep_kernels
from bigfleet.cli.runtime.program import VALIDATE_VARIABLE
from bigfleet.model.validation import switch_validation_on
from bigfleet.sim.kernel.virtual_time import VirtualTimeLoop
from tests.engine.proof import in_proportion
from tests.lengths import LENGTHS, lengths_named_in, may_choose

# Before gRPC's core is first imported: it would start its threads again in a child of ours that forks before it runs
# another program, which now and then kills the child.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# No example has a deadline: a busy machine may take any time for it. What else is set, as in CI, is kept. A property
# that sets no number runs Hypothesis's 100 examples at CI's number of fleets, and a quarter of them in a quick look.
settings.register_profile("bigfleet", settings(), deadline=None, max_examples=min(100, in_proportion(400)))
settings.load_profile("bigfleet")

#: Property that a test leaves for each case it ran: (kind, "plain" or "topology").
KINDS = {"engine case": "cases", "engine fleet": "fleets"}
#: Property that a proof by examples leaves: (kind, (examples that ran, examples that held)), and how it is told.
PROOFS = {
    "engine equality": "{ran:,} random fleets, {held:,} equal",
    "engine records": "{ran:,} random fleets, {held:,} explained alike",
    "engine odd numbers": "{ran:,} random fleets, {held:,} equal",
    "incremental decisions": "{ran:,} after random changes, {held:,} equal to full ones",
    "handovers": "{ran:,} random courses of shards and leaders, {held:,} without a second owner",
    "handover states": "{ran:,} states of handover reached, {held:,} sound",
    "fleets at rest": "{ran:,} random fleets of shards with constant demand came to rest after {held:,} moves",
    "swinging fleets": "{ran:,} random fleets of shards with swinging demand, {held:,} moves, each after its cooldown",
    "oscillations": "{ran:,} times to and fro without one of {held:,} defences, none with all of them",
    "leaders lost in a drain": "at {ran:,} moments a leader died, {held:,} times one drain was wasted, never two",
    "donors": "{ran:,} random fleets, in {held:,} every donor kept its margin",
    "kill points": "{ran:,} points of an action at which a shard died, {held:,} carried on by the next one",
    "hail answers": "{ran:,} random messages to Ganeti's hail and to ours, {held:,} answered alike",
    "closed loops": "{ran:,} random fleets, {held:,} came to rest",
    "closed loops of the excepted kind": "{ran:,} met, {held:,} shown to be of it",
}


_DEMONSTRATIONS = Path(__file__).parent / "up"


def pytest_configure(config: pytest.Config) -> None:
    """Let compiled kernels outlive the run, and log errors as they are."""
    # Nothing that collecting tests makes is garbage, and looking for it takes a third of the collection's time.
    gc.disable()
    keep_kernels()
    switch_validation_on()
    os.environ[VALIDATE_VARIABLE] = "1"
    # Started by nohup or in the background of a script, every process would inherit that interrupts are ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Drawn with every local of every frame an error takes longer to log than the calls of some tests may take.
    plain = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[*structlog.get_config()["processors"][:-1], plain])


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add an option that runs the tests of one rule."""
    parser.addoption("--rule", metavar="RULE", help='run only the tests of a rule, such as "shard 9.2/4"')


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave a module unread of which `-m` chooses no test: to import them all takes a worker ten seconds."""
    if collection_path.suffix != ".py" or may_choose(config.getoption("-m"), lengths_named_in(collection_path)):
        return None
    return True


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let each worker read the modules from another one on, so that each compiles a part of them for all."""
    report = yield
    worker = getattr(collector.config, "workerinput", None)
    if worker is not None and isinstance(collector, pytest.Directory) and report.result:
        first = len(report.result) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        report.result = [*report.result[first:], *report.result[:first]]
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests, and deselect those that do not prove the rule of `--rule`.

    Raises UsageError for a marker from another module.
    """
    # They wait for processes, up to two minutes each: begun last, they leave cores idle at the end of a run.
    # Workers have read them in different orders.
    items.sort(key=lambda item: (item.path.parent != _DEMONSTRATIONS, item.path))
    for item in items:
        unnamed = {name for name in LENGTHS if item.get_closest_marker(name)} - lengths_named_in(item.path)
        if unnamed:
            raise pytest.UsageError(f"{item.nodeid} has the markers {unnamed}, which its module has to name")
    rule = config.getoption("--rule")
    if rule is None:
        return
    proves = {item: any(rule in mark.args for mark in item.iter_markers("rule")) for item in items}
    config.hook.pytest_deselected(items=[item for item in items if not proves[item]])
    items[:] = [item for item in items if proves[item]]


def pytest_collection_finish() -> None:
    """Keep what all tests share out of later collections of garbage; they take a tenth of a run otherwise."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Give a test marked `virtual_time` a VirtualTimeLoop, every other one the loop of the platform."""
    if item.get_closest_marker("virtual_time") is not None:
        return {"virtual": VirtualTimeLoop}
    return {"real": asyncio.new_event_loop}


@pytest.fixture(autouse=True)
def _garbage_is_collected() -> Iterator[None]:
    """A program that is run within a test may end the collection of garbage for its short life; the worker lives on."""
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def _logging_stays_as_it_is() -> Iterator[None]:
    """Fail a test that leaves logging otherwise configured: a later one of its process would hear nothing."""
    before = _logging()
    yield
    after = _logging()
    structlog.configure(**before)
    assert after == before


def _logging() -> dict[str, Any]:
    """Return how logging is configured now."""
    config = structlog.get_config()
    return {**config, "processors": list(config["processors"])}


def _properties(terminalreporter: pytest.TerminalReporter, kind: str) -> list[Any]:
    """Return what the tests left under one name."""
    return [
        value
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, ())
        for name, value in getattr(report, "user_properties", ())
        if name == kind
    ]


def _planted(name: str, invariant: str, found: tuple[int, str] | None, known: int) -> str:
    """Return the line of a planted defect; its known seed is tried first, and one that misses it costs a world."""
    how = "not found" if found is None else f"seed {found[0]}: {found[1][:110]}"
    if found is not None and found[0] != known:
        how = f"not by seed {known}, which is tried first; {how}"
    return f"planted: {name:<52} {invariant:<4} {how}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many cases, fleets and examples ran: a proof that ran on nothing proves nothing."""
    for kind, plural in KINDS.items():
        ran = _properties(terminalreporter, kind)
        if ran:
            terminalreporter.write_line(
                f"{kind.split()[0]} {plural}: {len(ran)} run, of them {ran.count('plain')}"
                " need neither Same nor spread nor folding"
            )
    for kind, sentence in PROOFS.items():
        counts = _properties(terminalreporter, kind)
        if counts:
            told = sentence.format(ran=sum(ran for ran, _ in counts), held=sum(held for _, held in counts))
            terminalreporter.write_line(f"{kind}: {told}")
    for planted in _properties(terminalreporter, "planted defect"):
        terminalreporter.write_line(_planted(*planted))
    worlds = _properties(terminalreporter, "fault worlds")
    if worlds:
        held = sum(held for _ran, held, _hours in worlds)
        hours = sum(hours for _ran, _held, hours in worlds)
        terminalreporter.write_line(f"fault worlds: {len(worlds):,} seeds, {hours:,.1f} simulated hours, {held:,} held")
