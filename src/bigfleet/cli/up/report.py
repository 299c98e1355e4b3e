"""Reports the end of a run: one page for a person, and a JSON file for a program (docs/quick-start.md).

Amounts in the file are plain numbers in base units: cores, bytes, pieces. Figures are the shard's last answer, except
pods and cost, which come from the fleet check.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from bigfleet.cli.get.moves import Move
from bigfleet.cli.runtime.failures import RunFault
from bigfleet.cli.up.amounts import SHOWN, amount_text, covered_share, dimension_milli, duration_text, plain_numbers
from bigfleet.cli.up.check_text import check_document, check_table
from bigfleet.cli.up.fleet_check import FleetCheck
from bigfleet.cli.up.observer import FleetFigures, ShardTotals
from bigfleet.cli.up.state_dir import TimelinePoint
from bigfleet.model.quantity import MILLI
from bigfleet.model.states import TRANSITIONAL_STATES, CapacityType, MachineState
from bigfleet.model.vector import Vector

#: Lines of the table of covered demand over time.
COVERAGE_ROWS = 10
_BAR_CELLS = 20
_STATE_STYLES = {MachineState.CONFIGURED.label: "green", MachineState.FAILED.label: "red"}
#: Wider than any table: what a rendering would take if it could.
_WIDTH_MAX = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run came to."""

    figures: FleetFigures
    actions: Mapping[str, Mapping[str, int]]
    timeline: Sequence[TimelinePoint]
    shard_ids: Sequence[str]
    cycles: int
    #: On the wall clock, this process only.
    seconds: float
    restarts: int
    is_trace: bool
    #: The trace was replayed to its end.
    finished: bool
    #: The pods against the machines at the end.
    check: FleetCheck | None = None
    #: Between shards, oldest first; of several shards only.
    moves: Sequence[Move] = ()


def report_document(result: RunResult) -> dict[str, Any]:
    """Return the report as JSON values."""
    figures = result.figures
    document: dict[str, Any] = {
        "clusters": {
            cluster: {
                "demand": plain_numbers(one.demand),
                "bound_machines": one.bound_machines,
                "bound": plain_numbers(one.bound),
                "shortfall": plain_numbers(one.shortfall),
                "cost_usd_per_hour": round(one.cost_usd_per_hour, 4),
            }
            for cluster, one in figures.clusters.items()
        },
        "machines": machines_by_state(figures),
        "actions": result.actions,
        "shards": list(result.shard_ids),
        "moves": figures.moved_machines,
        "cycles": result.cycles,
        "seconds": round(result.seconds, 3),
        "restarts": result.restarts,
        "timeline": [msgspec.to_builtins(point) for point in result.timeline],
    }
    if result.check is not None:
        document["pods_and_cost"] = check_document(result.check)
    if figures.shards:
        document["by_shard"] = {shard: _shard_document(one) for shard, one in figures.shards.items()}
        document["move_log"] = [_move_document(move) for move in result.moves]
    return document


def _shard_document(one: ShardTotals) -> dict[str, Any]:
    return {
        "clusters": list(one.clusters),
        "machines": one.machines,
        "bound_machines": one.bound_machines,
        "demand": plain_numbers(one.demand),
        "bound": plain_numbers(one.bound),
        "shortfall": plain_numbers(one.shortfall),
        "covered": round(covered_share(one.demand, one.shortfall), 4),
    }


def _move_document(move: Move) -> dict[str, Any]:
    return {
        "id": move.move_id,
        "tier": move.tier,
        "from": move.donor,
        "to": move.recipient,
        "state": move.state.value,
        "machines": move.machines,
        "instance_type": move.instance_type or None,
        "zone": move.zone or None,
        "why": move.why,
        "reason": move.reason or None,
        "enqueued_unix_nanos": move.enqueued_unix_nanos,
    }


def write_report(path: Path, result: RunResult) -> None:
    """Write the report. Raises RunFault when the file cannot be written."""
    try:
        path.write_text(json.dumps(report_document(result), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunFault(f"--report: {path}: {error.strerror}; name a file that can be written") from error


def machines_by_state(figures: FleetFigures) -> dict[str, int]:
    """Return how many machines are in each state, states without any left out, in the order of a machine's life."""
    counts: dict[str, int] = {}
    for state in MachineState:
        count = sum(count for (known, _capacity), count in figures.machines.items() if known is state)
        if count:
            counts[state.label] = count
    return counts


def summary(result: RunResult, *more: RenderableType) -> RenderableType:
    """Return one page about the run, with what more there is to say of it after its clusters."""
    parts: list[RenderableType] = [
        Text(""),
        _headline(result),
        cluster_table(result.figures, title="clusters, wanted → bound"),
    ]
    if result.check is not None:
        parts.append(check_table(result.check))
    parts += more
    if result.is_trace:
        parts.append(_coverage_table(result.timeline))
        parts.append(_model_table(result.timeline))
    parts += [machine_table(result.figures, title="machines"), _action_table(result.actions)]
    return Group(*parts)


def _headline(result: RunResult) -> Text:
    figures = result.figures
    covered = covered_share(figures.demand, figures.shortfall)
    text = Text(
        f"{duration_text(result.seconds)}, {result.cycles} cycles, {figures.bound_machines} machines serve "
        f"{len(figures.clusters)} clusters, {covered:.0%} of the demand is covered"
    )
    if result.is_trace:
        peak = max((point.bound_machines for point in result.timeline), default=0)
        end = "the trace was replayed to its end" if result.finished else "the trace continues at the next start"
        text.append(f"; peak {peak} machines; {end}")
    if figures.shards:
        text.append(f"; {figures.moved_machines} moved between {len(figures.shards)} shards")
    if result.restarts:
        text.append(f"; child processes restarted {result.restarts}×")
    return text


class Fitted:
    """The first of some renderings of one thing that is no wider than the console, else the last, cut."""

    def __init__(self, renderings: Sequence[Table | Text]) -> None:
        """`renderings` come widest first."""
        self._renderings = renderings

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the rendering that fits."""
        for rendering in self._renderings:
            if console.measure(rendering, options=options.update(max_width=_WIDTH_MAX)).maximum <= options.max_width:
                yield rendering
                return
        yield self._renderings[-1]


def fitted_table(
    title: str | None,
    heads: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    less: Sequence[str],
    *,
    last: str = "",
) -> Fitted:
    """Return a table that drops the columns `less`, one after the other, until it fits; `last` is a row of its own."""

    def without(dropped: Sequence[str]) -> Table:
        shown = [place for place, head in enumerate(heads) if head not in dropped]
        table = empty_table(title, *(heads[place] for place in shown))
        for cells in rows:
            table.add_row(*(cells[place] for place in shown))
        if last:
            table.add_row(Text(last, style="dim"))
        return table

    return Fitted([without(less[:count]) for count in range(len(less) + 1)])


def cluster_table(figures: FleetFigures, *, rows_max: int | None = None, title: str | None = None) -> Fitted:
    """Return one line per cluster: demand → what serves it in each dimension, what is on its way, what lacks.

    On a narrow terminal memory goes first, which follows cores here, then what is pending, then the GPUs.
    """
    rows: list[list[str | Text]] = [
        [
            cluster,
            *(served_text(one.demand, one.bound, dimension) for dimension, _head in SHOWN),
            str(one.bound_machines),
            str(one.pending_machines),
            short_text(one.shortfall),
            _dollars_text(one.cost_usd_per_hour),
        ]
        for cluster, one in list(figures.clusters.items())[:rows_max]
    ]
    heads = ("cluster", *(head for _dimension, head in SHOWN), "machines", "pending", "short", "$/h")
    hidden = len(figures.clusters) - len(rows)
    last = f"and {hidden} more" if hidden else ""
    return fitted_table(title, heads, rows, ("memory", "pending", "gpus"), last=last)


def _dollars_text(usd: float) -> str:
    return f"{usd:.2f}" if usd < 100 else f"{usd:.0f}"


def served_text(demand: Vector, bound: Vector, dimension: str) -> Text:
    """Return what is wanted → what serves it, in one dimension of `SHOWN`."""
    wanted, serving = dimension_milli(demand, dimension), dimension_milli(bound, dimension)
    return Text.assemble(
        amount_text(wanted, dimension),
        (" → ", "dim"),
        (amount_text(serving, dimension), "green" if serving >= wanted else "yellow"),
    )


def short_text(shortfall: Vector) -> Text:
    """Return the shortfall in every dimension of `SHOWN`, `-` for none."""
    shorts = []
    for dimension, head in SHOWN:
        milli = dimension_milli(shortfall, dimension)
        if milli:
            amount = amount_text(milli, dimension)
            shorts.append(amount if dimension == "memory" else f"{amount} {head}")
    return Text(" ".join(shorts), style="red") if shorts else Text("-", style="green")


def machine_table(figures: FleetFigures, *, title: str | None = None) -> Fitted:
    """Return how many machines of each way to pay are in each state, a line for each of the former and one for all.

    On a narrow terminal states without a machine are left out, then the states that pass are one column.
    """
    every = [(state.label, frozenset({state})) for state in MachineState if state]
    inhabited = frozenset(state for state, _kind in figures.machines)
    held = [column for column in every if column[1] & inhabited]
    lasting = [column for column in held if not column[1] & TRANSITIONAL_STATES]
    return Fitted(
        [
            _machine_table(figures, title, every),
            _machine_table(figures, title, held),
            _machine_table(figures, title, [*lasting, ("in transition", TRANSITIONAL_STATES)]),
        ]
    )


def _machine_table(
    figures: FleetFigures, title: str | None, columns: Sequence[tuple[str, frozenset[MachineState]]]
) -> Table:
    table = empty_table(title, "machines", *(label for label, _states in columns), "all")
    kinds = [kind for kind in CapacityType if any(known is kind for _state, known in figures.machines)]
    for label, shown in (*((kind.label, {kind}) for kind in kinds), ("all", set(kinds))):
        counts = [
            sum(count for (state, kind), count in figures.machines.items() if state in states and kind in shown)
            for _label, states in columns
        ]
        cells = [
            Text(str(count), style=_STATE_STYLES.get(head, "")) if count else "·"
            for count, (head, _states) in zip(counts, columns, strict=True)
        ]
        table.add_row(label, *cells, str(sum(counts)))
    return table


def empty_table(title: str | None, *heads: str) -> Table:
    """Return an empty table: the first column is text, the others are figures."""
    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 1),
        header_style="bold",
        title=title,
        title_justify="left",
        title_style="bold underline",
    )
    for position, head in enumerate(heads):
        table.add_column(head, justify="right" if position else "left", no_wrap=True)
    return table


def _action_table(actions: Mapping[str, Mapping[str, int]]) -> Table:
    table = empty_table("actions", "kind", "count", "outcomes")
    for kind, outcomes in actions.items():
        table.add_row(
            kind, str(sum(outcomes.values())), ", ".join(f"{count} {name}" for name, count in outcomes.items())
        )
    if not actions:
        table.add_row("none", "0", "")
    return table


def _coverage_table(timeline: Sequence[TimelinePoint]) -> Table:
    table = empty_table("demand covered over time", "trace time", "cpu", "memory", "gpus", "covered", "", "machines")
    for point in thinned(timeline, COVERAGE_ROWS):
        demand, lacking = _milli(point.demand), _milli(point.shortfall)
        share = covered_share(demand, lacking)
        filled = int(share * _BAR_CELLS)
        table.add_row(
            duration_text(point.seconds),
            *(amount_text(dimension_milli(demand, dimension), dimension) for dimension, _head in SHOWN),
            f"{share:.0%}",
            Text("█" * filled, style="green") + Text("░" * (_BAR_CELLS - filled), style="red"),
            str(point.bound_machines),
        )
    return table


def thinned(timeline: Sequence[TimelinePoint], points_max: int) -> list[TimelinePoint]:
    """Return so many points at most, evenly chosen, the first and the last among them."""
    if len(timeline) <= points_max:
        return list(timeline)
    step = (len(timeline) - 1) / (points_max - 1)
    return [timeline[round(number * step)] for number in range(points_max)]


def _model_table(timeline: Sequence[TimelinePoint]) -> Table:
    """Return the worst shortfall of each GPU model over the samples, and in how many samples there was one."""
    table = empty_table("shortfalls by GPU model", "model", "samples short", "worst cpu", "worst memory", "worst gpus")
    models = sorted({model for point in timeline for model in point.shortfall_by_model})
    for model in models:
        short = [_milli(point.shortfall_by_model[model]) for point in timeline if model in point.shortfall_by_model]
        worst = [max(dimension_milli(one, dimension) for one in short) for dimension, _head in SHOWN]
        table.add_row(
            model or "no GPU",
            f"{len(short)} of {len(timeline)}",
            *(amount_text(milli, dimension) for milli, (dimension, _head) in zip(worst, SHOWN, strict=True)),
        )
    if not models:
        table.add_row(Text("none", style="green"))
    return table


def _milli(numbers: Mapping[str, float]) -> dict[str, int]:
    return {name: round(number * MILLI) for name, number in numbers.items()}
