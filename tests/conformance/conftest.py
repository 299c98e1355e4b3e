"""Prints, after the run, which behaviours failed on which mutant."""

import pytest

from tests.conformance.bench import MUTANT


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table of mutants that were tried, surviving ones with a dash."""
    tried = [
        value
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, ())
        for name, value in getattr(report, "user_properties", ())
        if name == MUTANT
    ]
    if not tried:
        return
    terminalreporter.section(f"{len(tried)} broken providers → behaviours of the area that failed")
    for name, failed in tried:
        terminalreporter.write_line(f"{name} → {', '.join(failed) or '-'}")
