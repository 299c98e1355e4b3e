"""Prints what the proofs of the world of faults ran on: a proof that ran on nothing proves nothing."""

from typing import Any

import pytest


def _properties(reporter: pytest.TerminalReporter, kind: str) -> list[Any]:
    reports = (report for outcome in ("passed", "failed") for report in reporter.stats.get(outcome, ()))
    return [value for report in reports for name, value in getattr(report, "user_properties", ()) if name == kind]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table of planted defects, and how many worlds held."""
    for name, invariant, found in _properties(terminalreporter, "planted defect"):
        how = "not found" if found is None else f"seed {found[0]}: {found[1][:110]}"
        terminalreporter.write_line(f"planted: {name:<52} {invariant:<4} {how}")
    worlds = _properties(terminalreporter, "fault worlds")
    if worlds:
        held = sum(held for _ran, held, _hours in worlds)
        hours = sum(hours for _ran, _held, hours in worlds)
        terminalreporter.write_line(f"fault worlds: {len(worlds):,} seeds, {hours:,.1f} simulated hours, {held:,} held")
