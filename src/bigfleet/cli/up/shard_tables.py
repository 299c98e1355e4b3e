"""Draws tables of several shards: machines and demand of each, their course over time, and the moves.

The view and the summary show the same tables. This module does not call a process.
"""

from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from bigfleet.cli.get.moves import Move, MoveState
from bigfleet.cli.up.amounts import SHOWN, covered_share, duration_text
from bigfleet.cli.up.observer import FleetFigures, ShardTotals
from bigfleet.cli.up.report import COVERAGE_ROWS, Fitted, empty_table, fitted_table, served_text, short_text, thinned
from bigfleet.cli.up.state_dir import ShardPoint, TimelinePoint

#: Moves that a summary explains.
SUMMARY_MOVES_MAX: Final = 8
_STATE_STYLES: Final = {
    MoveState.PROPOSED: "dim",
    MoveState.ASKED: "cyan",
    MoveState.DRAINING: "magenta",
    MoveState.GIVEN: "yellow",
    MoveState.ARRIVED: "green",
    MoveState.FAILED: "red",
    MoveState.EXPIRED: "red",
    MoveState.CANCELLED: "dim",
}
#: What the coordinator calls a tier.
_TIERS: Final = {"idle": "tier 1", "speculative": "tier 2", "drain": "tier 3", "drained": "after tier 3"}


def shard_table(figures: FleetFigures, *, title: str | None = None) -> Fitted:
    """Return one line per shard: who reports to it, what it owns, how much it covers, demand → what serves it.

    On a narrow terminal the bound machines go first, then the clusters, then the GPUs.
    """
    # Memory follows cores here, and a line of a terminal has no room for both.
    shown = [(dimension, head) for dimension, head in SHOWN if dimension != "memory"]
    heads = ("shard", "clusters", "machines", "bound", "covered", *(head for _dimension, head in shown), "short")
    rows: list[list[str | Text]] = [
        [
            shard,
            clusters_text(one.clusters),
            str(one.machines),
            str(one.bound_machines),
            _covered_text(covered_share(one.demand, one.shortfall)),
            *(served_text(one.demand, one.bound, dimension) for dimension, _head in shown),
            short_text(one.shortfall),
        ]
        for shard, one in figures.shards.items()
    ]
    return fitted_table(title, heads, rows, ("bound", "clusters", "gpus"))


def clusters_text(clusters: Sequence[str]) -> str:
    """Return the one cluster of a shard, or how many there are."""
    return clusters[0] if len(clusters) == 1 else str(len(clusters))


def shard_points(figures: FleetFigures) -> dict[str, ShardPoint]:
    """Return the shards as a point of the timeline keeps them."""
    return {shard: _point(one) for shard, one in figures.shards.items()}


def _point(one: ShardTotals) -> ShardPoint:
    covered = covered_share(one.demand, one.shortfall)
    return ShardPoint(machines=one.machines, bound_machines=one.bound_machines, covered=round(covered, 4))


def shards_over_time(timeline: Sequence[TimelinePoint]) -> Table:
    """Return how much of its demand each shard covered with how many machines, and how many had moved, over time."""
    points = [point for point in timeline if point.shards]
    ids = sorted({shard for point in points for shard in point.shards})
    table = empty_table("covered demand, machines owned", "time", *ids, "moved")
    for point in thinned(points, COVERAGE_ROWS):
        cells = [_point_text(point.shards[shard]) if shard in point.shards else Text("-") for shard in ids]
        table.add_row(duration_text(point.seconds), *cells, str(point.moved_machines))
    return table


def _point_text(point: ShardPoint) -> Text:
    return Text.assemble(_covered_text(point.covered), f" {point.machines:4}")


def _covered_text(share: float) -> Text:
    return Text(f"{share:.0%}", style="green" if share >= 1 else "red")


def moves_text(moves: Sequence[Move]) -> RenderableType:
    """Return the last moves with their reasons, two lines each, newest last."""
    lines: list[RenderableType] = [Text("moves between shards", style="bold underline")]
    if not moves:
        lines.append(Text("none", style="green"))
    hidden = len(moves) - SUMMARY_MOVES_MAX
    if hidden > 0:
        lines.append(Text(f"and {hidden} before", style="dim"))
    for move in moves[-SUMMARY_MOVES_MAX:]:
        head = Text.assemble(move_words(move), ": ", (move.state.value, _STATE_STYLES[move.state]))
        lines += [head, Padding(Text(why_words(move), style="dim"), (0, 0, 0, 2))]
    return Group(*lines)


def move_words(move: Move) -> str:
    """Return who gives what to whom: `7-3 shard-1 → shard-0, 5 std.16x64 in sim-1b, idle (tier 1)`."""
    what = " ".join(filter(None, (str(move.machines), move.instance_type or "machines")))
    where = f" in {move.zone}" if move.zone else ""
    return f"{move.move_id} {move.donor} → {move.recipient}, {what}{where}, {move.tier} ({_TIERS[move.tier]})"


def why_words(move: Move) -> str:
    """Return the coordinator's reason, and the error of a shard that could not do it."""
    return f"{move.why} ({move.reason})" if move.reason else move.why


def move_line(move: Move) -> str:
    """Return one move for a log: when it is new with its reason, later with how far it is."""
    if move.state is MoveState.ASKED:
        return f"move {move_words(move)}: {why_words(move)}"
    return f"move {move_words(move)}: {move.state.value}{f' ({move.reason})' if move.reason else ''}"


def move_cells(move: Move) -> tuple[Text, str, str, Text]:
    """Return one move for a line of a panel."""
    return (
        Text(move.state.value, style=_STATE_STYLES[move.state]),
        f"{move.donor} → {move.recipient}",
        f"{move.machines} {move.tier}",
        Text(why_words(move), style="dim"),
    )
