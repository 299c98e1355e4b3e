"""Defines `bigfleet sim`: runs, lists, replays and shrinks simulations (docs/spec/simulation.md).

Exit 0 if everything held, 1 for a violation or a run that differs from its trace, 2 for a wrong call. Two equal calls
print equal summaries; progress goes to standard error. It writes only files that were asked for.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bigfleet.cli.flags.help_text import HelpGroup
from bigfleet.cli.flags.switches import SwitchCommand
from bigfleet.cli.flags.values import parse_positive_duration_seconds
from bigfleet.cli.runtime.failures import RunFault, UsageFault
from bigfleet.cli.runtime.terminal import echo

if TYPE_CHECKING:
    from collections.abc import Callable

    from bigfleet.cli.sim.seeds import SeedRun
    from bigfleet.model.clock import Clock
    from bigfleet.sim.world.run import WorldResult

FAULT_WORLD = "faults"
OPERATOR_WORLD = "operator"
#: Scenarios whose course a seed draws.
_DRAWN = (FAULT_WORLD, OPERATOR_WORLD)
SEEDS_MAX = 10_000_000
_WHERE_CLOSED_LOOPS_ARE = f"beside {FAULT_WORLD} and {OPERATOR_WORLD}, scenarios are in tests/cases/sim of a checkout"

app = typer.Typer(cls=HelpGroup, help="Run the real components under simulated time and faults.", no_args_is_help=True)

_Seed = Annotated[int | None, typer.Option("--seed", min=0, metavar="N", help="Seed of the run; by default 1.")]
_Seeds = Annotated[
    str | None, typer.Option("--seeds", metavar="A..B", help="Run all seeds from A to B; only for faults and operator.")
]
_Steps = Annotated[
    int | None,
    typer.Option(
        "--steps",
        min=1,
        max=100_000,
        metavar="K",
        help="Length in cycles of the scenario, or in steps of ten virtual seconds of faults; by "
        "default set by scenario or seed.",
    ),
]
_FaultSteps = Annotated[
    int | None,
    typer.Option("--steps", min=1, max=100_000, metavar="K", help="Length in steps of ten virtual seconds."),
]
_Jobs = Annotated[
    int | None,
    typer.Option("--jobs", min=1, max=256, metavar="N", help="Number of seeds to run in parallel; by default 1."),
]
_TwiceEvery = Annotated[
    int | None,
    typer.Option("--twice-every", min=1, metavar="N", help="Run every N-th seed twice and compare."),
]
_TraceOut = Annotated[
    Path | None, typer.Option("--trace", metavar="FILE", help="Write the trace to this file, for sim replay.")
]
_Timeline = Annotated[
    Path | None, typer.Option("--timeline", metavar="FILE", help="Write an HTML page of the run to this file.")
]
_For = Annotated[
    str | None,
    typer.Option(
        "--for", metavar="DURATION", help="Run seeds from --seed on for this time; only for faults and operator."
    ),
]
_RequireMarks = Annotated[
    bool, typer.Option("--require-marks", help="Also fail if the seeds never reached one of the expected states.")
]
_Trace = Annotated[Path, typer.Argument(metavar="TRACE", help="Trace that sim run --trace wrote.")]


@app.callback()
def sim() -> None:
    """Run the real components under simulated time and faults."""


@app.command("list", cls=SwitchCommand)
def list_scenarios() -> None:
    """List scenarios, faults and invariants."""
    from bigfleet.sim.checkers.handovers import INVARIANTS
    from bigfleet.sim.checkers.liveness import CHECKS, L2_SENTENCE
    from bigfleet.sim.operator_world.convergence import SENTENCES
    from bigfleet.sim.operator_world.plan import KUBERNETES_FAULTS
    from bigfleet.sim.plan_generator import ALL_FAULTS
    from bigfleet.sim.world.run import SILENCE_CHANGES_NOTHING

    echo(f"{FAULT_WORLD}: shards, coordinator, provider and clusters under faults that the seed draws")
    echo(f"{OPERATOR_WORLD}: the operator and the pod controller on a simulated Kubernetes under such faults")
    closed_loops = _closed_loops()
    for name in closed_loops:
        echo(f"{name}: {_description_of(name)}")
    if not closed_loops:
        echo(f"closed-loop scenarios: none here; {_WHERE_CLOSED_LOOPS_ARE}")
    echo(f"\nfaults: {', '.join(ALL_FAULTS)}")
    echo(f"faults of {OPERATOR_WORLD} alone: {', '.join(KUBERNETES_FAULTS)}\n")
    sentences = [(each.name, each.sentence) for each in INVARIANTS]
    sentences += [(name, " ".join((check.__doc__ or "").split())) for name, check in CHECKS]
    sentences += [("S12", SILENCE_CHANGES_NOTHING), ("L2", L2_SENTENCE), *SENTENCES]
    # Safety before liveness before the operator's, S2 before S10.
    for name, sentence in sorted(set(sentences), key=lambda pair: ("SLK".index(pair[0][0]), int(pair[0][1:]), pair[1])):
        echo(f"{name:<4} {sentence}")


@app.command(cls=SwitchCommand)
def run(
    scenario: Annotated[str, typer.Argument(help="Scenario to run; see sim list.")] = FAULT_WORLD,
    seed: _Seed = None,
    seeds: _Seeds = None,
    duration: _For = None,
    steps: _Steps = None,
    jobs: _Jobs = None,
    twice_every: _TwiceEvery = None,
    require_marks: _RequireMarks = False,
    trace: _TraceOut = None,
    page: _Timeline = None,
) -> None:
    """Run a scenario, or random faults with one seed or many."""
    from bigfleet.cli.sim.seeds import run_seeds

    first, is_many, writes = 1 if seed is None else seed, seeds is not None or duration is not None, trace or page
    of_many = require_marks or jobs is not None or twice_every is not None
    if scenario not in _DRAWN:
        _check_name(scenario)
        if is_many or writes or of_many:
            raise UsageFault(
                f"--seeds, --for, --jobs, --twice-every, --require-marks, --trace and --timeline are for {FAULT_WORLD},"
                f" not for {scenario}; leave them out"
            )
    if scenario == OPERATOR_WORLD and (writes or require_marks):
        raise UsageFault(
            f"--require-marks, --trace and --timeline are for {FAULT_WORLD}, not for {scenario}; leave them out"
        )
    if seeds is not None and (seed is not None or duration is not None or writes):
        raise UsageFault("--seeds does not go with --seed, --for, --trace or --timeline; name one seed for those")
    if duration is not None and writes:
        raise UsageFault("--for does not go with --trace or --timeline; name one seed for those")
    if of_many and not is_many:
        raise UsageFault("--jobs, --twice-every and --require-marks are for many seeds; add --seeds or --for")
    named = None if seeds is None else _range(seeds)
    seconds = None if duration is None else parse_positive_duration_seconds(duration, "--for")
    _check_writable(trace, page)
    _keep_kernels()
    of_operators = scenario == OPERATOR_WORLD
    each_of = partial(run_seeds, steps=steps, jobs=jobs or 1, twice_every=twice_every, of_operators=of_operators)
    if scenario not in _DRAWN:
        _run_scenario(scenario, first, steps)
    elif named is not None:
        _run_many(each_of(named), require_marks, known=len(named), of_operators=of_operators)
    elif seconds is not None:
        from bigfleet.cli.runtime.system import SystemClock

        seeds_of_time = each_of(_until(first, SystemClock(), seconds))
        _run_many(seeds_of_time, require_marks, known=None, of_operators=of_operators)
    elif of_operators:
        _run_operators(first, steps)
    else:
        _run_one(first, steps, trace, page)


def _run_one(seed: int, steps: int | None, trace: Path | None, page: Path | None) -> None:
    from bigfleet.cli.sim.report import seed_lines
    from bigfleet.cli.sim.seeds import plan_of, seed_run
    from bigfleet.sim.world.run import run_plan

    with _progress(f"seed {seed}", None):
        result = run_plan(plan_of(seed, steps))
    for line in seed_lines(seed_run(result)):
        echo(line)
    _write(result, trace, page)
    if result.violations:
        raise typer.Exit(1)


def _run_operators(seed: int, steps: int | None) -> None:
    from bigfleet.cli.sim.report import seed_lines
    from bigfleet.cli.sim.seeds import run_operator_seed

    with _progress(f"seed {seed}", None):
        run = run_operator_seed(seed, steps)
    for line in seed_lines(run):
        echo(line)
    if run.violations:
        raise typer.Exit(1)


def _until(first: int, clock: "Clock", seconds: float) -> Iterator[int]:
    """Yield seed after seed until so much time has passed."""
    end_seconds = clock.monotonic_seconds() + seconds
    for seed in count(first):
        if clock.monotonic_seconds() >= end_seconds:
            return
        yield seed


def _run_many(runs: Iterable["SeedRun"], require_marks: bool, *, known: int | None, of_operators: bool = False) -> None:
    from bigfleet.cli.sim.report import total_lines
    from bigfleet.cli.sim.seeds import Total
    from bigfleet.sim.checkers.marks import MARKS

    total = Total()
    with _progress("seeds", known) as advance:
        for each in runs:
            total.add(each)
            advance()
    lines = total_lines(total, (), OPERATOR_WORLD) if of_operators else total_lines(total, MARKS)
    for line in lines:
        echo(line)
    if total.failures or (require_marks and not all(total.reached[mark] for mark in MARKS)):
        raise typer.Exit(1)


def _run_scenario(name: str, seed: int, cycles_max: int | None) -> None:
    from bigfleet.cli.sim.report import outcome_lines
    from bigfleet.sim.scenarios.runner import run as run_closed
    from bigfleet.sim.scenarios.scenario_file import ScenarioFault

    try:
        with _progress(name, None):
            outcome = run_closed(name, seed, cycles_max=cycles_max)
    except ScenarioFault as fault:
        raise UsageFault(str(fault)) from fault
    for line in outcome_lines(outcome):
        echo(line)
    if not outcome.is_met:
        raise typer.Exit(1)


@app.command(cls=SwitchCommand)
def replay(trace: _Trace) -> None:
    """Run a trace again and report the first difference."""
    from bigfleet.cli.sim.report import violation_lines
    from bigfleet.cli.sim.seeds import seed_run
    from bigfleet.sim.world.run import run_plan
    from bigfleet.sim.world.trace_files import TraceFileFault, first_difference, read_trace

    _keep_kernels()
    try:
        former = read_trace(trace)
    except TraceFileFault as fault:
        raise UsageFault(str(fault)) from fault
    with _progress(f"seed {former.plan.seed}", None):
        result = run_plan(former.plan)
    difference = first_difference(former.entries, result.journal.entries)
    if difference is not None:
        for which, entry in zip(("the trace", "this run "), difference, strict=True):
            echo(f"{which}: {entry.line if entry is not None else 'ends here'}")
    for line in violation_lines(seed_run(result)):
        echo(line)
    echo(f"trace hash: {result.trace_hash}")
    if former.trace_hash != result.trace_hash:
        raise RunFault(f"the run differs from {trace}: the trace was written by other code or with other libraries")
    echo("the same course as in the trace")
    if result.violations:
        raise typer.Exit(1)


@app.command(cls=SwitchCommand)
def shrink(
    seed: Annotated[int, typer.Option("--seed", min=0, metavar="N", help="Seed that fails.")],
    steps: _FaultSteps = None,
    runs: Annotated[int, typer.Option("--runs", min=1, max=10_000, help="Maximum number of runs.")] = 60,
    trace: _TraceOut = None,
    page: _Timeline = None,
) -> None:
    """Find the smallest run in which a failing seed violates the same invariant."""
    from bigfleet.cli.sim.report import seed_lines
    from bigfleet.cli.sim.seeds import plan_of, seed_run
    from bigfleet.sim.world.shrink import NothingFails
    from bigfleet.sim.world.shrink import shrink as shrink_plan

    _check_writable(trace, page)
    _keep_kernels()
    try:
        with _progress(f"shrinking seed {seed}", runs) as advance:
            result = shrink_plan(plan_of(seed, steps), runs_max=runs, on_run=lambda *_run: advance())
    except NothingFails as fault:
        raise UsageFault(f"{fault}; name a seed that fails") from fault
    plan = result.plan
    echo(f"faults: {', '.join(plan.faults) or 'none'}")
    echo(f"machines: {sum(pool.count for pool in plan.pools)} in {len(plan.pools)} pools")
    echo(f"clusters: {', '.join('+'.join(kind.name for kind in kinds) for kinds in plan.clusters)}")
    for line in seed_lines(seed_run(result)):
        echo(line)
    _write(result, trace, page)


def _write(result: "WorldResult", trace: Path | None, page: Path | None) -> None:
    from bigfleet.sim.world.timeline import timeline
    from bigfleet.sim.world.trace_files import write_trace

    if trace is not None:
        with _writing(trace):
            write_trace(trace, result)
    if page is not None:
        with _writing(page):
            page.write_text(timeline(result), encoding="utf-8")


def _check_writable(trace: Path | None, page: Path | None) -> None:
    """Find out before a run that may take hours, not after it, that what it is to leave behind has no place.

    Raises UsageFault. A file that is there is left as it is, and one that is not is not left behind.
    """
    if trace is not None and trace == page:
        raise UsageFault(f"--trace and --timeline are both {trace}; name two files")
    for path in (trace, page):
        if path is None:
            continue
        with _writing(path):
            if path.is_fifo() or path.is_char_device():  # a reader would take it for the end
                continue
            file = Path(os.path.realpath(path))  # a link to nothing yet stays a link
            is_new = not file.exists()
            file.open("ab").close()
            if is_new:
                file.unlink()


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Report a file that cannot be written in one line. Raises UsageFault."""
    try:
        yield
    except OSError as error:
        raise UsageFault(f"{path}: {error.strerror}; name a file that can be written") from error


def _closed_loops() -> list[str]:
    """Return the names of the closed-loop scenarios; none outside of a checkout."""
    from bigfleet.sim.scenarios.runner import scenarios
    from bigfleet.sim.scenarios.scenario_file import ScenarioFault

    try:
        return scenarios()
    except ScenarioFault:
        return []


def _description_of(scenario: str) -> str:
    """Return the first sentence of what a closed-loop scenario says of itself, or what is wrong with its file."""
    from bigfleet.sim.scenarios.runner import scenario_of
    from bigfleet.sim.scenarios.scenario_file import ScenarioFault

    try:
        about = " ".join(scenario_of(scenario).about.split())
    except ScenarioFault as fault:
        return str(fault)
    return f"{about.partition('. ')[0].rstrip('.')}."


def _check_name(scenario: str) -> None:
    """Raise UsageFault for a scenario that is not there, with those that are."""
    known = _closed_loops()
    if scenario not in known:
        there_are = f"there are {', '.join([*_DRAWN, *known])}" if known else _WHERE_CLOSED_LOOPS_ARE
        raise UsageFault(f"there is no scenario {scenario!r} here; {there_are}")


def _range(text: str) -> range:
    first, dots, last = text.partition("..")
    if not (dots and first.isascii() and first.isdigit() and last.isascii() and last.isdigit() and len(text) < 40):
        raise UsageFault(f"--seeds {text!r} is not a range; write A..B, such as 1..200")
    seeds = range(int(first), int(last) + 1)
    if not seeds:
        raise UsageFault(f"--seeds {text!r} is an empty range; write the lower one first: {last}..{first}")
    if int(last) - int(first) >= SEEDS_MAX:
        raise UsageFault(f"--seeds {text!r} names more than {SEEDS_MAX:,} seeds; name fewer, or give --for")
    return seeds


def _keep_kernels() -> None:
    from bigfleet.cli.runtime.kernel_cache import keep_kernels

    keep_kernels()


@contextmanager
def _progress(what: str, total: int | None) -> "Iterator[Callable[[], None]]":
    """Show a bar on standard error when a person looks at it."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from bigfleet.cli.runtime.console import TerminalConsole

    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(
        *columns, console=TerminalConsole(file=sys.stderr), transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
