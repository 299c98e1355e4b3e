"""What `bigfleet sim` prints for people: one seed, many seeds, a scenario, the list of what can be run.

Plain lines; the last one of a run is `trace hash: <hex>`. Nothing here runs anything or decides what counts as failed.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bigfleet.cli.sim.seeds import SeedRun, Total

if TYPE_CHECKING:
    from bigfleet.sim.closed_loop.scenarios import Outcome

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
        yield from _violations(run)
    else:
        yield "every invariant held"
    yield f"trace hash: {run.trace_hash}"


def _violations(run: SeedRun) -> Iterator[str]:
    for invariant, seconds, text in run.violations[:_SHOWN_MAX]:
        yield f"VIOLATION {invariant} at {seconds:,.3f} s: {text}"


def total_lines(total: Total, hashes: Iterator[str], marks: tuple[str, ...]) -> Iterator[str]:
    """Yield the summary of many seeds; the trace hash is one over all of theirs."""
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
        yield f"  again with: bigfleet sim run --seed {run.seed}"
    yield f"{total.failures:,} of {total.seeds:,} seeds failed" if total.failures else "every invariant held"
    digest = hashlib.blake2b("\n".join(hashes).encode(), digest_size=16).hexdigest()
    yield f"trace hash: {digest}"


def outcome_lines(outcome: "Outcome") -> Iterator[str]:
    """Yield the summary of one closed-loop scenario."""
    actions = _counted(Counter(outcome.actions))
    yield f"{outcome.name}, seed {outcome.seed}: {outcome.cycles:,} cycles, actions {actions}"
    for verdict in outcome.verdicts:
        arm = f"[{verdict.arm}] " if verdict.arm else ""
        yield f"  {'ok ' if verdict.is_met else 'NOT'} {arm}{verdict.text}: {verdict.value:g}"
    yield from (f"  VIOLATION {violation}" for violation in outcome.violations[:_SHOWN_MAX])
    yield f"trace hash: {outcome.trace_hash}"


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())) or "none"
