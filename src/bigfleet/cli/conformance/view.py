"""Shows a run to a person: a line for each behaviour as it ends, then the verdict with every failure in full.

This module must not hide a skip.
"""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from bigfleet.conformance.behaviour import Behaviour
from bigfleet.conformance.profiles import ConformanceProfile
from bigfleet.conformance.runner import BehaviourOutcome, ConformanceReport, Result, Verdict

_STYLES = {
    BehaviourOutcome.PASSED: "green",
    BehaviourOutcome.FAILED: "bold red",
    BehaviourOutcome.SKIPPED: "yellow",
    BehaviourOutcome.NOT_RUN: "dim",
}
_VERDICT_STYLES = {Verdict.CERTIFIED: "bold green", Verdict.FAILED: "bold red", Verdict.INCOMPLETE: "bold yellow"}


class RunView:
    """A listener that prints; a context, because a terminal shows a bar meanwhile."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=total)

    def __enter__(self) -> "RunView":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begins(self, behaviour: Behaviour) -> None:
        """Show what runs."""
        self._progress.update(self._task, description=behaviour.id)

    def ended(self, result: Result) -> None:
        """Print how a behaviour ended, and why when it did not pass."""
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(f"{result.outcome.value:8}", style=_STYLES[result.outcome])
        line.append(f"{result.behaviour.id:9}", style="bold")
        line.append(f"{result.seconds:7.2f} s  {result.behaviour.title}")
        self._console.print(line, soft_wrap=not self._console.is_terminal)
        self._progress.advance(self._task)


def print_summary(report: ConformanceReport, console: Console) -> None:
    """Print every failure with what repeats it, a table by profile, and the verdict of each profile last."""
    for result in report.results:
        if result.outcome is BehaviourOutcome.FAILED:
            _print_failure(result, report.plan.seed, console)
    for reason in dict.fromkeys(r.reason for r in report.results if r.outcome is BehaviourOutcome.SKIPPED):
        console.print(f"skipped: {reason}", style="yellow", markup=False, highlight=False)
    console.print(_table(report))
    verdict = report.verdict
    counts = ", ".join(
        f"{report.count(outcome)} {outcome.value}" for outcome in BehaviourOutcome if report.count(outcome)
    )
    console.print(Text.assemble((verdict.value, _VERDICT_STYLES[verdict]), f": {counts or 'nothing ran'}"))
    by_profile = [
        Text.assemble(f"{profile.title}: ", (each.value, _VERDICT_STYLES[each]))
        for profile, each in report.verdicts.items()
    ]
    console.print(Text(", ").join(by_profile), soft_wrap=True)


def _print_failure(result: Result, seed: int, console: Console) -> None:
    id = result.behaviour.id
    console.print(f"\n{id}: {result.behaviour.title}", style="bold red", markup=False, highlight=False)
    console.print(f"  {result.reason}", markup=False, highlight=False)
    console.print(f"  seed {seed}; again with --seed {seed} --only {id}", markup=False, highlight=False)
    console.print(f"  the last {len(result.calls)} calls:", markup=False, highlight=False)
    for line in result.calls:
        console.print(f"  {line}", style="dim", markup=False, highlight=False, soft_wrap=True)


def _table(report: ConformanceReport) -> Table:
    table = Table("profile", *(outcome.value for outcome in BehaviourOutcome))
    for profile in ConformanceProfile:
        if profile in report.plan.profiles:
            results = [result for result in report.results if result.behaviour.profile is profile]
            counts = [sum(result.outcome is outcome for result in results) for outcome in BehaviourOutcome]
            table.add_row(profile.title, *(str(count) if count else "-" for count in counts))
    return table
