"""Prints the result of a run: one seed, many seeds, a closed-loop scenario.

Plain lines; the last one of a run is `trace hash: <hex>`. This module does not run anything or decides what counts as
failed.
"""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bigfleet.cli.sim.seeds import SeedRun, Total

if TYPE_CHECKING:
    from bigfleet.sim.scenarios.runner import ScenarioOutcome

_SHOWN_MAX = 10


def seed_lines(run: SeedRun) -> Iterator[str]:
    """Yield the summary of one seed."""
    yield (
        f"seed {run.seed}: {run.simulated_seconds:,.0f} simulated seconds, {run.cycles:,} cycles,"
        f" {run.faults.total():,} faults, {run.actions.total():,} actions, {run.checks.total():,} checks"
    )
    yield f"faults:  {_counted(run.faults)}"
    yield f"actions: {_counted(run.actions)}"
    yield f"reached: {_counted(run.reached)}"
    if run.violations:
        yield from violation_lines(run)
    else:
        yield "every invariant held"
    yield f"trace hash: {run.trace_hash}"


def violation_lines(run: SeedRun) -> Iterator[str]:
    """Yield the first broken invariants of a seed, each with its virtual time."""
    yield from _first(
        [f"VIOLATION {invariant} at {seconds:,.3f} s: {text}" for invariant, seconds, text in run.violations]
    )


def total_lines(total: Total, marks: tuple[str, ...], scenario: str = "") -> Iterator[str]:
    """Yield the summary of many seeds; the trace hash is one over all of theirs.

    `scenario` is what a person has to name to run one of them again.
    """
    yield (
        f"{total.seeds:,} seeds, {total.simulated_seconds / 3600:,.1f} simulated hours, {total.cycles:,} cycles,"
        f" {total.faults.total():,} faults, {total.actions.total():,} actions"
    )
    yield f"faults:  {_counted(total.faults)}"
    yield f"actions: {_counted(total.actions)}"
    yield f"checks:  {_counted(total.checks)}"
    yield f"reached: {_counted(total.reached)}"
    unreached = [mark for mark in marks if not total.reached[mark]]
    if unreached:
        yield f"never reached: {', '.join(unreached)}"
    for run in total.failed:
        invariant, seconds, text = run.violations[0]
        yield f"VIOLATION {invariant} in seed {run.seed} at {seconds:,.3f} s: {text}"
        yield f"  again with: bigfleet sim run {scenario + ' ' if scenario else ''}--seed {run.seed}"
    yield f"{total.failures:,} of {total.seeds:,} seeds failed" if total.failures else "every invariant held"
    yield f"trace hash: {total.trace_hash}"


def outcome_lines(outcome: "ScenarioOutcome") -> Iterator[str]:
    """Yield the summary of one closed-loop scenario."""
    actions = _counted(Counter(outcome.actions))
    yield f"{outcome.name}, seed {outcome.seed}: {outcome.cycles:,} cycles, actions {actions}"
    for verdict in outcome.verdicts:
        arm = f"[{verdict.arm}] " if verdict.arm else ""
        yield f"  {'ok ' if verdict.is_met else 'NOT'} {arm}{verdict.text}: {verdict.value:g}"
    if not outcome.verdicts:
        yield "  not asked: what must hold, which is about the end of the whole scenario; leave out --steps for it"
    yield from _first([f"  VIOLATION {violation}" for violation in outcome.violations])
    yield f"trace hash: {outcome.trace_hash}"


def _first(lines: list[str]) -> Iterator[str]:
    yield from lines[:_SHOWN_MAX]
    if len(lines) > _SHOWN_MAX:
        yield f"and {len(lines) - _SHOWN_MAX:,} more"


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())) or "none"
