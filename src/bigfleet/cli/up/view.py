"""The live view of a run: who wants what, what serves it, what the shard just did, and how the processes fare.

On a terminal one screen that is drawn anew twice a second, otherwise one line every few seconds. The view reads what
others counted and never waits for anything.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.layout import Layout
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bigfleet.cli.up.amounts import SHOWN, amount_text, dimension_milli, duration_text
from bigfleet.cli.up.observer import LOST, RUNNING, FleetFigures, Observer, SeenAction
from bigfleet.cli.up.report import cluster_table, machine_table
from bigfleet.cli.up.supervisor import ChildStatus
from bigfleet.model.clock import Clock
from bigfleet.model.frames import UnmetReason

RATE_WINDOW_SECONDS: Final = 10.0
_HEADER_LINES: Final = 5
#: A table's head and its panel's borders.
_FRAME_LINES: Final = 3
#: At most four ways to pay, their sum, and the frame.
_MACHINE_LINES: Final = 8

#: What the engine's reasons say to a person (docs/spec/engine.md §11).
_REASONS: Final[Mapping[str, str]] = {
    "phase1.idle": "cheapest idle machine that fits",
    "phase1.speculative": "no idle one fits: cheapest to make",
    "phase2.inversion": "a higher priority needs it",
    "phase3.excess": "the cluster needs it no more",
    "phase3.unjoined": "its node never joined",
    "phase3.release": "idle for longer than its hold",
}
#: Why needs are short, in words that fit a line.
_SHORT: Final[Mapping[UnmetReason, str]] = {
    UnmetReason.PRIORITY_STARVED: "outranked",
    UnmetReason.NO_MATCHING_SUPPLY: "nothing fits",
    UnmetReason.TOPOLOGY_UNSATISFIABLE: "no domain fits",
    UnmetReason.PREEMPTION_EXHAUSTED: "wait for a drain",
    UnmetReason.BOOTSTRAP_REFUSED: "refused by the cluster",
}
_KIND_STYLES: Final[Mapping[str, str]] = {
    "Bootstrap": "green",
    "Provision": "cyan",
    "Reclaim": "yellow",
    "Preempt": "magenta",
    "Delete": "blue",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What the view shows beside the shard's figures."""

    title: str
    #: Virtual or trace seconds.
    position_seconds: float
    run_seconds: float
    #: None has no end.
    done_share: float | None
    children: list[ChildStatus]
    clusters_connected: int
    clusters: int
    #: HOST:PORT that `bigfleet get` and `bigfleet explain` ask.
    shard_address: str


class View:
    """Renders one run."""

    def __init__(self, observer: Observer, status: Callable[[], Status], clock: Clock) -> None:
        self._observer = observer
        self._status = status
        self._clock = clock
        #: (time, actions so far) over the rate's window.
        self._totals: deque[tuple[float, int]] = deque()

    def actions_per_second(self) -> float:
        """Return the rate of new actions over the last seconds."""
        now_seconds = self._clock.monotonic_seconds()
        self._totals.append((now_seconds, self._observer.actions.total))
        while now_seconds - self._totals[0][0] > RATE_WINDOW_SECONDS:
            self._totals.popleft()
        first_seconds, first_total = self._totals[0]
        passed_seconds = now_seconds - first_seconds
        return (self._observer.actions.total - first_total) / passed_seconds if passed_seconds else 0.0

    def plain_line(self) -> str:
        """Return the run in one line, for a log."""
        status, figures = self._status(), self._observer.figures
        done = f" {status.done_share:.0%}" if status.done_share is not None else ""
        amounts = ", ".join(
            f"{head} {amount_text(dimension_milli(figures.demand, dimension), dimension)}"
            f"/{amount_text(dimension_milli(figures.bound, dimension), dimension)}"
            for dimension, head in SHOWN
        )
        short = ", ".join(
            f"{amount_text(dimension_milli(figures.shortfall, dimension), dimension)} {head}"
            for dimension, head in SHOWN
            if dimension_milli(figures.shortfall, dimension)
        )
        why = short_words(figures)
        troubles = "".join(f" [{trouble}]" for trouble in self._troubles(status))
        return (
            f"{duration_text(status.run_seconds)}{done} at {duration_text(status.position_seconds)}: "
            f"wanted/bound {amounts}; {figures.bound_machines} machines; short {short or 'nothing'}; "
            f"{self._observer.actions.total} actions, {self.actions_per_second():.1f}/s"
            f"{f'; {why}' if why else ''}{troubles}"
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the screen of this moment, as high as the console; rich asks for it at each redraw."""
        height = options.height or console.height
        status, figures = self._status(), self._observer.figures
        cluster_rows = max(1, min(len(figures.clusters), height - _HEADER_LINES - 2 * _MACHINE_LINES - _FRAME_LINES))
        layout = Layout()
        layout.split_column(
            Layout(self._header(status), size=_HEADER_LINES),
            Layout(
                _panel(cluster_table(figures, rows_max=cluster_rows), "clusters: wanted → bound"),
                size=cluster_rows + _FRAME_LINES + (cluster_rows < len(figures.clusters)),
            ),
            Layout(_panel(machine_table(figures), "machines"), size=_MACHINE_LINES),
            Layout(_panel(_Decisions(self._observer), "last decisions")),
        )
        yield from console.render(layout, options.update_height(height))

    def _header(self, status: Status) -> RenderableType:
        first = Text.assemble(
            ("BigFleet ", "bold"),
            status.title,
            ("  up ", "dim"),
            duration_text(status.run_seconds),
            ("  at ", "dim"),
            duration_text(status.position_seconds),
            f"  {self.actions_per_second():.1f}",
            (" actions/s", "dim"),
            ("  cycle ", "dim"),
            str(self._observer.cycles_total),
            no_wrap=True,
            overflow="ellipsis",
        )
        second = Text(no_wrap=True, overflow="ellipsis")
        for child in status.children:
            second.append("● ", style="green" if child.up else "red")
            second.append(child.name)
            second.append(f" {child.pid}" if child.up else " starting", style="dim")
            if child.restarts_total:
                second.append(f" restarted {child.restarts_total}× ({child.last_end})", style="yellow")
            second.append("  ")
        connected = status.clusters_connected == status.clusters
        second.append("● ", style="green" if connected else "yellow")
        second.append(f"{status.clusters_connected}/{status.clusters} clusters connected  ")
        words = short_words(self._observer.figures)
        if words:
            second.append(f"{words}  ", style="yellow")
        if not self._observer.answers:
            second.append("the figures below are the last that the shard told", style="yellow")
        grid = Table.grid(expand=True)
        grid.add_row(first)
        grid.add_row(second)
        grid.add_row(Text(look_words(status.shard_address), style="dim", no_wrap=True, overflow="ellipsis"))
        if status.done_share is not None:
            bar = Table.grid(expand=True, padding=(0, 1))
            bar.add_column(ratio=1)
            bar.add_column(width=5, justify="right")
            bar.add_row(ProgressBar(total=1.0, completed=status.done_share), f"{status.done_share:.0%}")
            grid.add_row(bar)
        return grid

    def _troubles(self, status: Status) -> list[str]:
        troubles = [
            f"{child.name} restarted {child.restarts_total}x, last {child.last_end}"
            for child in status.children
            if child.restarts_total
        ]
        if not self._observer.answers:
            troubles.append("the shard does not answer")
        if status.clusters_connected < status.clusters:
            troubles.append(f"{status.clusters_connected} of {status.clusters} clusters connected")
        return troubles


def look_words(shard_address: str) -> str:
    """Return how another terminal looks at the running fleet."""
    return f"look at it: bigfleet get clusters --addr {shard_address}"


def short_words(figures: FleetFigures) -> str:
    """Return how many needs are short and why, and how many machines never joined; "" when nothing is amiss."""
    parts = [f"{count} {_SHORT[reason]}" for reason, count in sorted(figures.unmet.items()) if reason in _SHORT]
    words = [f"needs short: {', '.join(parts)}"] if parts else []
    if figures.unjoined_machines:
        words.append(f"{figures.unjoined_machines} machines never joined")
    return "; ".join(words)


class _Decisions:
    """The newest actions, as many as the panel has lines."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table.grid(padding=(0, 1), expand=True)
        for _ in range(3):
            table.add_column(no_wrap=True)
        table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        lines = max(1, options.height or 10)
        for action in list(self._observer.actions.recent)[-lines:][::-1]:
            table.add_row(*_decision_cells(action))
        yield table


def _decision_cells(action: SeenAction) -> tuple[Text, Text, Text, Text]:
    why = Text(_REASONS.get(action.reason, action.reason))
    if action.outcome not in (RUNNING, "success", "noop"):
        why.append(f" ({action.outcome})", style="dim" if action.outcome == LOST else "red")
    return (
        Text(action.kind, style=_KIND_STYLES.get(action.kind, "")),
        Text(action.cluster_id or "-"),
        # There is one provider: its name in front of every id says nothing.
        Text(action.machine_id.partition("/")[2] or action.machine_id, style="dim"),
        why,
    )


def _panel(content: RenderableType, title: str) -> Panel:
    return Panel(content, title=title, title_align="left", border_style="blue")
