"""Compares the outcome of a run with what must hold under overload (docs/spec/benchmarks.md), bound by bound."""

from collections.abc import Iterator
from dataclasses import dataclass

from bench.overload.run import Outcome
from bench.overload.scenario import MEBIBYTE, Scenario

#: Codes that name a limit; with them the peer is given the time to come again.
_SHED_CODES = ("RESOURCE_EXHAUSTED", "UNAVAILABLE", "rollup_deferred")
_RETRY_TEXT = " s"


@dataclass(frozen=True, slots=True)
class Bound:
    """One bound: its name, what was measured, what is wanted."""

    name: str
    measured: str
    wanted: str
    is_met: bool


def bounds(scenario: Scenario, outcome: Outcome, expected_checksum: str) -> Iterator[Bound]:
    """Yield each bound with what was measured; `expected_checksum` is that of a run without a flood."""
    ended = "; ".join(outcome.faults) or "yes"
    yield Bound("the run came to its end", ended, "yes", not outcome.faults)
    peak_mib, most_mib = outcome.memory.peak, scenario.memory_bytes / MEBIBYTE
    yield Bound("the shard survives", "yes" if outcome.has_survived else "no", "yes", outcome.has_survived)
    yield Bound("memory, peak", f"{peak_mib:.0f} MiB", f"≤ {most_mib:.0f} MiB", peak_mib <= most_mib)
    lost = outcome.sessions_lost
    because = f" ({'; '.join(outcome.lost_because)})" if lost else ""
    yield Bound("honest sessions lost", f"{lost}{because}", "0", lost == 0)
    for phase in ("flood", "after"):
        ratio = outcome.cycle_ratio(phase)
        wanted = f"≤ {scenario.cycle_ratio_max:g} × quiet"
        yield Bound(f"cycle time, {phase}", f"{ratio:.2f} × quiet", wanted, ratio <= scenario.cycle_ratio_max)
    undecided = outcome.undecided(scenario)
    yield Bound("honest demand that was not carried out", f"{undecided} clusters", "0", undecided == 0)
    is_equal = outcome.checksum == expected_checksum
    yield Bound("decisions for honest clusters", outcome.checksum, f"{expected_checksum}, as without a flood", is_equal)
    back = outcome.back_seconds
    yield Bound(
        "all is back after", f"{back:.1f} s", f"≤ {scenario.back_seconds_max:g} s", back <= scenario.back_seconds_max
    )
    if scenario.flood.greedy:
        reasons = [text for crowd in outcome.crowds.values() for text in crowd["reasons"] if is_reason(text)]
        yield Bound("those who are shed are given the reason", f"{len(reasons)} different texts", "≥ 1", bool(reasons))
        shed = sum(value for name, value in outcome.counted.items() if name.startswith("bigfleet_shard_shed_total"))
        yield Bound("what is shed is counted", f"{shed:.0f}", "≥ 1", shed >= 1)


def is_reason(text: str) -> bool:
    """Return whether a text that a client was given names a limit, and when to come again."""
    return text.startswith(_SHED_CODES) and "in " in text and _RETRY_TEXT in text
