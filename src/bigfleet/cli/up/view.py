"""Draws the live view of a run: demand, supply, recent actions, and the state of the processes.

On a terminal one screen that is redrawn twice a second, otherwise one line every few seconds. The view reads figures
that others counted and never waits.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.layout import Layout
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bigfleet.cli.get.moves import Move
from bigfleet.cli.up.amounts import SHOWN, amount_text, covered_share, dimension_milli, duration_text
from bigfleet.cli.up.check_text import check_line
from bigfleet.cli.up.fleet_check import FleetCheck
from bigfleet.cli.up.observer import LOST, RUNNING, FleetFigures, SeenAction, Watcher
from bigfleet.cli.up.report import Fitted, cluster_table, machine_table
from bigfleet.cli.up.shard_tables import move_cells, shard_table
from bigfleet.cli.up.supervisor import ChildStatus
from bigfleet.model.clock import Clock
from bigfleet.model.frames import UnmetReason

RATE_WINDOW_SECONDS: Final = 10.0
_HEADER_LINES: Final = 6
#: A table's head and its panel's borders.
_FRAME_LINES: Final = 3
#: At most four ways to pay, their sum, and the frame.
_MACHINE_LINES: Final = 8
#: A line or two, and the frame.
_MOVE_LINES_MIN: Final = 4
_DECISION_LINES_MIN: Final = 3
#: More would push what is amiss off the line; the ids are in the state directory, too.
_CHILDREN_WITH_IDS_MAX: Final = 3

T = TypeVar("T")

#: What the engine's reasons say to a person (docs/spec/engine.md §11).
_REASONS: Final[Mapping[str, str]] = {
    "phase1.idle": "cheapest idle machine",
    "phase1.speculative": "no idle machine fits",
    "phase2.inversion": "higher priority needs it",
    "phase3.excess": "no longer needed",
    "phase3.unjoined": "node never joined",
    "phase3.release": "idle beyond its hold",
}
#: Why needs are short, in words that fit a line.
_SHORT: Final[Mapping[UnmetReason, str]] = {
    UnmetReason.PRIORITY_STARVED: "outranked",
    UnmetReason.NO_MATCHING_SUPPLY: "nothing fits",
    UnmetReason.TOPOLOGY_UNSATISFIABLE: "no domain fits",
    UnmetReason.PREEMPTION_EXHAUSTED: "wait for a drain",
    UnmetReason.BOOTSTRAP_REFUSED: "refused by the cluster",
    UnmetReason.BOOTSTRAP_FAILED: "machines do not start",
    UnmetReason.STOCKOUT: "out of stock",
    UnmetReason.REQUEST_TOO_LARGE: "too large for any machine",
    UnmetReason.CLUSTER_LIMIT: "limited by policy",
}
_KIND_STYLES: Final[Mapping[str, str]] = {
    "Bootstrap": "green",
    "Provision": "cyan",
    "Reclaim": "yellow",
    "Preempt": "magenta",
    "Delete": "blue",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The figures of the view that do not come from the shard."""

    title: str
    #: Virtual or trace seconds.
    position_seconds: float
    run_seconds: float
    #: None has no end.
    done_share: float | None
    children: list[ChildStatus]
    clusters_connected: int
    clusters: int
    #: How another terminal looks at the running fleet.
    look: str
    #: The pods against the machines; None before the first check.
    check: FleetCheck | None = None
    check_age_seconds: float = 0.0
    #: Between shards, oldest first.
    moves: Sequence[Move] = ()


class LiveView:
    """Renders one run."""

    def __init__(self, observer: Watcher, status: Callable[[], RunStatus], clock: Clock) -> None:
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
            f"{f'; {why}' if why else ''}; {check_line(status.check, status.check_age_seconds)}"
            f"{self._shards_line(figures)}{troubles}"
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the screen of this moment, as high as the console; rich asks for it at each redraw."""
        height = options.height or console.height
        status, figures = self._status(), self._observer.figures
        layout = Layout()
        panels = self._shard_panels(status, figures, height) if figures.shards else self._panels(figures, height)
        layout.split_column(Layout(self._header(status), size=_HEADER_LINES), *panels)
        yield from console.render(layout, options.update_height(height))

    def _panels(self, figures: FleetFigures, height: int) -> list[Layout]:
        cluster_rows = max(1, min(len(figures.clusters), height - _HEADER_LINES - 2 * _MACHINE_LINES - _FRAME_LINES))
        return [
            _cluster_panel(figures, cluster_rows),
            Layout(_panel(machine_table(figures), "machines"), size=_MACHINE_LINES),
            Layout(self._decision_panel()),
        ]

    def _shard_panels(self, status: RunStatus, figures: FleetFigures, height: int) -> list[Layout]:
        """Return the screen of several shards; a low terminal drops the machines by state, and clusters."""
        shard_lines = len(figures.shards) + _FRAME_LINES
        left = height - _HEADER_LINES - shard_lines - _MOVE_LINES_MIN - _DECISION_LINES_MIN
        cluster_rows = max(1, min(len(figures.clusters), left - _FRAME_LINES - 1))
        left -= cluster_rows + _FRAME_LINES + (cluster_rows < len(figures.clusters))
        machines = [Layout(_panel(machine_table(figures), "machines"), size=_MACHINE_LINES)]
        return [
            Layout(_panel(shard_table(figures), "shards: wanted → bound"), size=shard_lines),
            _cluster_panel(figures, cluster_rows),
            *(machines if left >= _MACHINE_LINES else ()),
            Layout(
                _panel(_Newest(status.moves, move_cells), f"moves: {figures.moved_machines} machines so far"),
                minimum_size=_MOVE_LINES_MIN,
            ),
            Layout(self._decision_panel(), minimum_size=_DECISION_LINES_MIN),
        ]

    def _decision_panel(self) -> Panel:
        return _panel(_Newest(self._observer.actions.recent, _decision_cells), "last decisions")

    def _header(self, status: RunStatus) -> RenderableType:
        grid = Table.grid(expand=True)
        grid.add_row(self._run_line(status))
        has_ids = len(status.children) <= _CHILDREN_WITH_IDS_MAX
        grid.add_row(Fitted([_process_line(status, with_ids) for with_ids in ((True, False) if has_ids else (False,))]))
        grid.add_row(Text(check_line(status.check, status.check_age_seconds), no_wrap=True, overflow="ellipsis"))
        reporters = "all shards" if self._observer.figures.shards else "the shard"
        stale = "" if self._observer.answers else f"the figures below are the last that {reporters} reported"
        words = "; ".join(filter(None, (stale, short_words(self._observer.figures))))
        if words:
            grid.add_row(Text(words, style="yellow", no_wrap=True, overflow="ellipsis"))
        grid.add_row(Text(status.look, style="dim", no_wrap=True, overflow="ellipsis"))
        if status.done_share is not None:
            bar = Table.grid(expand=True, padding=(0, 1))
            bar.add_column(ratio=1)
            bar.add_column(width=5, justify="right")
            bar.add_row(ProgressBar(total=1.0, completed=status.done_share), f"{status.done_share:.0%}")
            grid.add_row(bar)
        return grid

    def _run_line(self, status: RunStatus) -> Fitted:
        name = ("BigFleet ", "bold")
        run = (
            (status.title, ""),
            ("  up ", "dim"),
            (duration_text(status.run_seconds), ""),
            ("  at ", "dim"),
            (duration_text(status.position_seconds), ""),
            (f"  {self.actions_per_second():.1f}", ""),
            (" actions/s", "dim"),
        )
        cycle = (("  cycle ", "dim"), (str(self._observer.cycles_total), ""))
        lines = ((name, *run, *cycle), (name, *run), run)
        return Fitted([Text.assemble(*parts, no_wrap=True, overflow="ellipsis") for parts in lines])

    def _shards_line(self, figures: FleetFigures) -> str:
        parts = [
            f"{shard} covers {covered_share(one.demand, one.shortfall):.0%} with {one.bound_machines} of {one.machines}"
            for shard, one in figures.shards.items()
        ]
        return f"; {', '.join(parts)}, {figures.moved_machines} moved" if parts else ""

    def _troubles(self, status: RunStatus) -> list[str]:
        troubles = [
            f"{child.name} restarted {child.restarts_total}x, last {child.last_end}"
            for child in status.children
            if child.restarts_total
        ]
        if not self._observer.answers:
            troubles.append("a shard does not answer" if self._observer.figures.shards else "the shard does not answer")
        if status.clusters_connected < status.clusters:
            troubles.append(f"{status.clusters_connected} of {status.clusters} clusters connected")
        return troubles


def _process_line(status: RunStatus, with_ids: bool) -> Text:
    """Return how the processes fare, and how many clusters are connected."""
    line = Text(no_wrap=True, overflow="ellipsis")
    for child in status.children:
        line.append("● ", style="green" if child.up else "red")
        line.append(child.name)
        if not child.up:
            line.append(" starting", style="dim")
        elif with_ids:
            line.append(f" {child.pid}", style="dim")
        if child.restarts_total:
            line.append(f" restarted {child.restarts_total}× ({child.last_end})", style="yellow")
        line.append("  ")
    connected = status.clusters_connected == status.clusters
    line.append("● ", style="green" if connected else "yellow")
    line.append(f"{status.clusters_connected}/{status.clusters} clusters connected")
    return line


def look_words(shard_address: str) -> str:
    """Return how another terminal looks at the running fleet."""
    return f"Inspect it with: bigfleet get clusters --addr {shard_address}"


def look_words_of_several(coordinator_address: str, shard_addresses: Mapping[str, str]) -> str:
    """Return the same for several shards, by id."""
    shards = ", ".join(f"{address} ({shard})" for shard, address in shard_addresses.items())
    return f"Inspect it with: bigfleet get moves --addr {coordinator_address}; bigfleet get clusters --addr {shards}"


def short_words(figures: FleetFigures) -> str:
    """Return how many needs are short and why, and how many machines never joined; "" when nothing is amiss."""
    parts = [f"{count} {_SHORT[reason]}" for reason, count in sorted(figures.unmet.items()) if reason in _SHORT]
    words = [f"needs short: {', '.join(parts)}"] if parts else []
    if figures.unjoined_machines:
        words.append(f"{figures.unjoined_machines} machines never joined")
    return "; ".join(words)


class _Newest(Generic[T]):
    """The newest of some things, newest first, as many as the panel has lines."""

    def __init__(self, things: Sequence[T], cells: Callable[[T], tuple[RenderableType, ...]]) -> None:
        """`things` come oldest first; `cells` are the four of a line, of which the last takes what is left of it."""
        self._things = things
        self._cells = cells

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table.grid(padding=(0, 1), expand=True)
        for _ in range(3):
            table.add_column(no_wrap=True)
        table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        lines = max(1, options.height or 10)
        for thing in list(self._things)[-lines:][::-1]:
            table.add_row(*self._cells(thing))
        yield table


def _decision_cells(action: SeenAction) -> tuple[Text, Text, Text, Text]:
    # There is one provider: its name in front of every id says nothing.
    machine = Text(action.machine_id.partition("/")[2] or action.machine_id, style="dim")
    if action.outcome not in (RUNNING, "success", "noop"):
        machine.append(f" ({action.outcome})", style="not dim" if action.outcome == LOST else "not dim red")
    return (
        Text(action.kind, style=_KIND_STYLES.get(action.kind, "")),
        Text(action.cluster_id or "-"),
        Text(_REASONS.get(action.reason, action.reason)),
        machine,
    )


def _cluster_panel(figures: FleetFigures, rows: int) -> Layout:
    return Layout(
        _panel(cluster_table(figures, rows_max=rows), "clusters: wanted → bound"),
        size=rows + _FRAME_LINES + (rows < len(figures.clusters)),
    )


def _panel(content: RenderableType, title: str) -> Panel:
    return Panel(content, title=title, title_align="left", border_style="blue")
