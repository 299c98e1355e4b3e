"""Prints the figures of an evaluation as tables of at most 120 columns: by family, and against the thresholds."""

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Final

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from bench.quality.evaluation import Figure
from bench.quality.reports.criteria import Criterion

WIDTH: Final = 120
COLUMNS: Final = (
    *("family", "size", "start", "n", "pods", "$/h", "÷ packer", "÷ bound", "÷ int", "bad", "unfit", "lost", "short"),
    *("cyc", "extra", "cpu s"),
)
LEFT: Final = ("family", "size", "start")
KEY: Final = (
    "$/h: completed cost. ÷: completed cost over the packer's, the LP bound and the best integer answer, median/worst. "
    "bad: broken claims.\n"
    "unfit: share of pods without a place in first-fit-decreasing. lost: the same in the scheduler's order. short: "
    "called short, could be hosted.\n"
    "cyc: median cycles until rest. extra: actions beyond those needed. cpu s: median CPU seconds of the decisions."
)


def tables(figures: Sequence[Figure], *, title: str) -> Iterator[Table]:
    """Yield one table per candidate and scheduler, in order of first appearance."""
    groups = list(dict.fromkeys((figure.candidate, figure.scheduler) for figure in figures))
    for candidate, scheduler in groups:
        table = Table(title=f"{title}: {candidate}, {scheduler}", box=SIMPLE, padding=(0, 0), collapse_padding=True)
        for column in COLUMNS:
            table.add_column(column, justify="left" if column in LEFT else "right", no_wrap=True)
        chosen = [f for f in figures if (f.candidate, f.scheduler) == (candidate, scheduler)]
        kinds = dict.fromkeys((f.family, f.size, f.start) for f in chosen)
        for kind in sorted(kinds, key=_rank):
            table.add_row(*kind, *cells([f for f in chosen if (f.family, f.size, f.start) == kind]))
        table.add_section()
        for start in dict.fromkeys(f.start for f in chosen):
            table.add_row("all", "", start, *cells([f for f in chosen if f.start == start]))
        yield table


def _rank(kind: tuple[str, str, str]) -> tuple[str, int, str]:
    family, size, start = kind
    return family, ("small", "medium", "large").index(size), start


def cells(figures: Sequence[Figure]) -> list[str]:
    """Return the cells of one line, from the number of instances on."""
    pods = sum(figure.pods for figure in figures)
    needed = sum(figure.actions - figure.actions_unneeded for figure in figures)
    claimed = [figure.violations for figure in figures if figure.violations is not None]
    return [
        str(len(figures)),
        f"{median(figure.pods for figure in figures):.0f}",
        f"{median(figure.completed for figure in figures):.2f}",
        _spread(figures, lambda figure: figure.over_packer),
        _spread(figures, lambda figure: figure.over_bound),
        _spread(figures, lambda figure: figure.over_integer),
        str(sum(claimed)) if claimed else "–",
        f"{sum(figure.unplaced for figure in figures) / pods:.2%}",
        f"{sum(figure.lost for figure in figures) / pods:.2%}",
        str(sum(figure.short_hostable for figure in figures)),
        f"{median(figure.cycles for figure in figures):.0f}",
        f"{sum(figure.actions_unneeded for figure in figures) / needed:.0%}" if needed else "–",
        f"{median(figure.engine_seconds for figure in figures):.2f}",
    ]


def _spread(figures: Sequence[Figure], ratio: Callable[[Figure], float | None]) -> str:
    values = [value for figure in figures if (value := ratio(figure)) is not None]
    return f"{median(values):.2f}/{max(values):.2f}" if values else "–"


def criteria_table(criteria: Sequence[Criterion], candidate: str) -> Table:
    """Return the thresholds with what was reached."""
    table = Table(title=f"thresholds: {candidate}", box=SIMPLE)
    for column in ("what", "must reach (median / worst)", "reached", "met"):
        table.add_column(column)
    for one in criteria:
        table.add_row(
            one.what, one.target, one.reached or "–", "–" if one.is_met is None else "yes" if one.is_met else "no"
        )
    return table


def console() -> Console:
    """Return a console of exactly the width, so that two runs can be compared line by line."""
    return Console(width=WIDTH, highlight=False)
