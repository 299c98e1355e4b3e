"""Prints a plan: actions, cost, shortfalls with reasons, and the differences that patches make.

Equal actions share a line with their count; `--output json` names every machine. This module does not decide, and it
computes sums only.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from bigfleet.cli.plan.bound import CostBound
from bigfleet.cli.plan.planning import Cost, Difference, FleetPlan, PlannedAction, PlannedShortfall
from bigfleet.cli.plan.settling import Settled
from bigfleet.engine.decision import ActionKind
from bigfleet.engine.explain.explanation import Explanation
from bigfleet.engine.explain.sentences import amounts_text, dollars_text, sentences

#: Machines that a line of the table names.
NAMED_MAX: Final = 2
#: Lines of actions that a table shows; the rest is counted.
LINES_MAX: Final = 200
_WHAT: Final = {
    ActionKind.BOOTSTRAP: ("to bind", "green"),
    ActionKind.PROVISION: ("to make", "cyan"),
    ActionKind.RECLAIM: ("to reclaim", "yellow"),
    ActionKind.PREEMPT: ("to preempt", "magenta"),
    ActionKind.DELETE: ("to release", "blue"),
}


def show_plan(console: Console, plan: FleetPlan, title: str = "Plan") -> None:
    """Print a whole plan."""
    _title(console, title)
    if plan.actions:
        console.print(_actions_table(plan.actions))
    console.print(_counts(plan.actions))
    console.print()
    console.print(_costs_table([("before", plan.before), ("after", plan.after)]))
    _show_shortfalls(console, plan)


def show_settled(console: Console, settled: Settled) -> None:
    """Print what every cluster holds at rest, what that costs and what stays short."""
    _title(console, "At rest")
    held = _held(settled)
    if held:
        console.print(_held_table(held))
    carried_out = ", ".join(
        f"{settled.actions[kind]:,} {kind.label}" for kind in ActionKind if settled.actions.get(kind)
    )
    cycles = "1 cycle" if settled.cycles == 1 else f"{settled.cycles:,} cycles"
    _print(console, f"{cycles} with actions until rest: {carried_out}." if carried_out else "Nothing had to be done.")
    cost = settled.plan.before
    _print(
        console,
        f"The clusters hold {_machines_text(cost.serving_machines)} for {dollars_text(cost.serving_usd_per_hour)}/h; "
        f"{_machines_text(cost.idle_machines)} for {dollars_text(cost.idle_usd_per_hour)}/h idle.",
    )
    _show_shortfalls(console, settled.plan)


def _machines_text(count: int) -> str:
    return "1 machine" if count == 1 else f"{count:,} machines"


#: Cluster, row, instance type, zone and capacity type that machines share.
_Line = tuple[str, str, str, str, str]


def _held(settled: Settled) -> dict[_Line, list[float]]:
    """Return the prices of the machines that are held, by what they share."""
    rows_of = settled.rows_of
    held: dict[_Line, list[float]] = {}
    for cluster, machines in settled.clusters.items():
        for machine in machines:
            names, kind = rows_of.get(machine.id, []), machine.capacity_type.label
            rest = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
            line = (cluster, ", ".join(names[:NAMED_MAX]) + rest, machine.instance_type, machine.zone, kind)
            held.setdefault(line, []).append(machine.price_usd_per_hour)
    return dict(sorted(held.items()))


def _held_table(held: Mapping[_Line, Sequence[float]]) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("cluster", "rows", "n", "instance type", "zone", "paid as", "$/h"):
        table.add_column(name, justify="right" if name in ("n", "$/h") else "left", overflow="fold")
    for line, each in list(held.items())[:LINES_MAX]:
        cluster, row, *machine = line
        cells = (cluster, row, f"{len(each):,}", *machine, dollars_text(math.fsum(each)))
        table.add_row(*(Text(cell) for cell in cells))
    if len(held) > LINES_MAX:
        table.add_row(Text("…"), Text(f"{len(held) - LINES_MAX:,} more lines; --output json names every machine"))
    return table


def show_difference(console: Console, difference: Difference) -> None:
    """Print what a changed plan does differently."""
    console.print()
    _title(console, "What if")
    if difference.is_empty:
        console.print("Nothing changes.")
        return
    if difference.added:
        console.print("Done only with the change:")
        console.print(_actions_table(difference.added))
    if difference.dropped:
        console.print("No longer done with the change:")
        console.print(_actions_table(difference.dropped))
    console.print(_counts(difference.changed.actions, head="In all with the change"))
    console.print()
    costs = [
        ("before", difference.base.before),
        ("after", difference.base.after),
        ("before, changed", difference.changed.before),
        ("after, changed", difference.changed.after),
    ]
    console.print(_costs_table(costs))
    for name, base, changed in difference.shortfalls:
        _print(console, f"{name} lacks {amounts_text(changed)}; without the change {amounts_text(base)}.")


def show_bound(console: Console, bound: CostBound) -> None:
    """Print how far the cost of what is newly taken is from the least conceivable."""
    console.print()
    _title(console, "Bound")
    if not bound.rows:
        _print(console, "No new machines are taken, so there is no cost to bound.")
        return
    rows = "1 row" if bound.rows == 1 else f"{bound.rows:,} rows"
    if not bound.ours_usd_per_hour:
        _print(console, f"New machines for {rows} cost nothing, and nothing costs less.")
        return
    above = (
        f"the plan is at most {100 * bound.gap:.1f}% above the best"
        if math.isfinite(bound.gap)
        else "parts of machines that cost nothing would do, so there is no share to report"
    )
    _print(
        console,
        f"New machines for {rows} cost {dollars_text(bound.ours_usd_per_hour)}/h, expected interruptions included. No "
        f"choice among the {bound.classes:,} classes of machines costs less than "
        f"{dollars_text(bound.least_usd_per_hour)}/h: {above}.",
    )


def show_explanation(console: Console, plan: FleetPlan, explanation: Explanation | list[str], about: str) -> None:
    """Print why a row or a machine is decided as it is."""
    console.print()
    _title(console, f"Why {about}")
    said = explanation if isinstance(explanation, list) else sentences(explanation, row_name=plan.row_name)
    for sentence in said:
        _print(console, sentence)


def _title(console: Console, text: str) -> None:
    console.print(Text(text, style="bold"))


def _print(console: Console, text: str, *, indent: int = 0) -> None:
    # As text: ids may hold what rich would take for markup.
    console.print(Padding(Text(text), (0, 0, 0, indent), expand=False) if indent else Text(text))


def _counts(actions: Iterable[PlannedAction], head: str = "In all") -> Text:
    counts = dict.fromkeys(_WHAT, 0)
    for planned in actions:
        counts[planned.action.kind] += 1
    return Text(f"{head}: " + ", ".join(f"{counts[kind]:,} {what}" for kind, (what, _style) in _WHAT.items()) + ".")


def _actions_table(actions: Sequence[PlannedAction]) -> RenderableType:
    groups: dict[tuple[ActionKind, tuple[str, ...]], list[PlannedAction]] = {}
    for planned in actions:
        machine = planned.machine
        line: tuple[str, ...] = (
            machine.instance_type,
            machine.zone,
            machine.capacity_type.label,
            str(planned.action.cluster),
            planned.need_id,
        )
        groups.setdefault((planned.action.kind, line), []).append(planned)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("action", "n", "instance type", "zone", "paid as", "cluster", "row", "$/h", "machines"):
        table.add_column(
            name, justify="right" if name in ("n", "$/h") else "left", overflow="fold", no_wrap=name in ("action", "n")
        )
    for (kind, line), group in list(groups.items())[:LINES_MAX]:
        price = math.fsum(planned.machine.price_usd_per_hour for planned in group)
        names = [planned.machine.id for planned in group]
        rest = len(names) - NAMED_MAX
        shown = ", ".join(names[:NAMED_MAX]) + (f" +{rest:,}" if rest > 0 else "")
        cells = [Text(cell) for cell in (f"{len(group):,}", *line, dollars_text(price), shown)]
        table.add_row(Text(kind.label, style=_WHAT[kind][1]), *cells)
    if len(groups) > LINES_MAX:
        table.add_row(Text("…"), Text(f"{len(groups) - LINES_MAX:,} more lines; --output json names every action"))
    return table


def _costs_table(costs: Sequence[tuple[str, Cost]]) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("cost of machines")
    for name, _cost in costs:
        table.add_column(name, justify="right")
    if len(costs) == 2:
        table.add_column("change", justify="right")
    rows = (
        ("serving clusters", [(cost.serving_usd_per_hour, cost.serving_machines) for _name, cost in costs]),
        ("idle", [(cost.idle_usd_per_hour, cost.idle_machines) for _name, cost in costs]),
        (
            "total",
            [(cost.total_usd_per_hour, cost.serving_machines + cost.idle_machines) for _name, cost in costs],
        ),
    )
    for name, figures in rows:
        cells = [f"{dollars_text(price)}/h ({machines:,})" for price, machines in figures]
        if len(figures) == 2:
            cells.append(_change(figures[0][0], figures[1][0]))
        table.add_row(name, *cells)
    return table


def _change(before: float, after: float) -> str:
    if before == after:
        return "none"
    if math.isinf(before) or math.isinf(after):
        return "unbounded"
    return f"{'+' if after > before else ''}{dollars_text(after - before)}/h"


def _show_shortfalls(console: Console, plan: FleetPlan) -> None:
    waiting = [short for short in plan.shortfalls if not short.lacks]
    short = [short for short in plan.shortfalls if short.lacks]
    if waiting:
        console.print()
        for one in waiting:
            _print(console, _waiting_sentence(one))
    console.print()
    if not short:
        console.print("Nothing stays short.")
        return
    _title(console, "Shortfalls")
    for one in short:
        _print(console, f"{one.need_id} of {one.row.need.cluster} lacks {amounts_text(one.lacks)}.")
        if one.waits_for:
            _print(console, _waiting_sentence(one), indent=2)
        for sentence in plan.shortfall_reasons(one):
            _print(console, sentence, indent=2)


def _waiting_sentence(short: PlannedShortfall) -> str:
    count = len(short.waits_for)
    if not count:
        return f"{short.need_id} waits for machines that are being drained for it."
    names = ", ".join(short.waits_for[:NAMED_MAX])
    rest = f" and {count - NAMED_MAX:,} more" if count > NAMED_MAX else ""
    return f"{short.need_id} waits until {names}{rest} {'has' if count == 1 else 'have'} drained."
