"""Defines `bigfleet plan`: reads the files, decides, and prints the plan (docs/planning.md).

Exit 2 for a wrong call or a wrong file, else 0: a plan with rows that stay short is an answer, not a failure.
"""

import math
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from bigfleet.cli.runtime.failures import UsageFault, choice_of
from bigfleet.cli.runtime.terminal import echo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from bigfleet.cli.plan.bound import CostBound
    from bigfleet.cli.plan.exchanging import Exchanged
    from bigfleet.cli.plan.planning import Difference, FleetPlan, PlanInput
    from bigfleet.engine.explain.explanation import Explanation
    from bigfleet.exchange.values import ClusterExchanges, ExchangeMode
    from bigfleet.planner.problem import SchedulerOrder

OUTPUTS: Final = ("table", "json")
#: Width of the tables where there is no terminal.
WIDTH: Final = 120
SETTLED_WIDTH: Final = 80
#: Ids among which one similar to an unknown id is looked for; a million would take a minute.
_SIMILAR_MAX: Final = 10_000
_SOUGHT: Final = {"": "row or machine", "need": "row", "machine": "machine"}

_Inventory = Annotated[
    Path, typer.Option(metavar="FILE", help="Machines: JSON lines, CSV, Parquet or the nodes of a GPU trace.")
]
_Demand = Annotated[Path, typer.Option(metavar="FILE", help="Demand and overheads: YAML or JSON.")]
_Now = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="Current time, on the clock of idle_since; by default the latest of them."),
]
_Explain = Annotated[
    str | None,
    typer.Option(
        metavar="NEED|MACHINE", help="Explain the decision for a row or a machine, by id (need:ID, machine:ID)."
    ),
]
_WhatIf = Annotated[Path | None, typer.Option(metavar="FILE", help="Patch file; show what the patches change.")]
_Bound = Annotated[bool, typer.Option("--bound", help="Compare the cost with a lower bound (needs scipy).")]
_UntilSettled = Annotated[
    bool,
    typer.Option("--until-settled", help="Repeat until no action is left; show what each cluster then holds."),
]
_Scheduler = Annotated[
    str, typer.Option(metavar="ORDER", help="Scoring of the clusters' schedulers: least-allocated or most-allocated.")
]
_SpotPoolMax = Annotated[
    str,
    typer.Option(metavar="PERCENT", help="Maximum share of a cluster's supply from one Spot pool; 0% is no limit."),
]
_Exchange = Annotated[
    str,
    typer.Option(
        metavar="MODE",
        help="Exchanges of held machines for cheaper ones: off, propose (show them) or, with --until-settled, on "
        "(carry them out).",
    ),
]
_Output = Annotated[str, typer.Option(metavar="FORM", help="Output format: table or json.")]


def plan(
    inventory: _Inventory,
    demand: _Demand,
    now: _Now = None,
    explain: _Explain = None,
    what_if: _WhatIf = None,
    bound: _Bound = False,
    until_settled: _UntilSettled = False,
    scheduler: _Scheduler = "least-allocated",
    spot_pool_max: _SpotPoolMax = "50%",
    exchange: _Exchange = "off",
    output: _Output = "table",
) -> None:
    """Show what BigFleet would do with given machines and demand, and what it costs."""
    from bigfleet.cli.plan.inputs import read_demand, read_machines
    from bigfleet.cli.plan.patches import apply_patches
    from bigfleet.cli.plan.planning import difference_of, make_plan, plan_input
    from bigfleet.exchange.values import ExchangeMode
    from bigfleet.planner.problem import PlanSettings

    if output not in OUTPUTS:
        raise UsageFault(f"--output: {output!r} is unknown; choose one of {', '.join(OUTPUTS)}")
    if now is not None and not math.isfinite(now):
        raise UsageFault(f"--now: {now} is not a time; use seconds")
    if until_settled and (bound or explain is not None or what_if is not None):
        raise UsageFault("--until-settled shows a fleet at rest; leave out --explain, --what-if and --bound")
    mode = _exchange_mode(exchange, is_settled=until_settled)
    settings = PlanSettings(order=_order(scheduler), spot_pool_percent_max=_percent(spot_pool_max))
    machines, wanted = read_machines(inventory), read_demand(demand)
    given = plan_input(machines, wanted.needs, overheads=wanted.overheads, now_seconds=now, settings=settings)
    if until_settled:
        _print_settled(given, output, mode)
        return
    changed = apply_patches(given, what_if) if what_if is not None else None
    base = make_plan(given)
    difference = None if changed is None else difference_of(base, make_plan(changed))
    final = base if difference is None else difference.changed
    answer = _Answer(
        base=base,
        difference=difference,
        final=final,
        about=None if explain is None else _about(final, explain, base=base),
        bound=_bound_of(final) if bound else None,
        exchanges=_exchanges_of(final) if mode is ExchangeMode.PROPOSE else None,
    )
    if output == "json":
        _print_document(answer)
    else:
        _print_tables(answer)


def _order(name: str) -> "SchedulerOrder":
    from bigfleet.planner.problem import SchedulerOrder

    return choice_of(SchedulerOrder, "--scheduler", name)


def _exchange_mode(name: str, *, is_settled: bool) -> "ExchangeMode":
    from bigfleet.exchange.values import ExchangeMode

    mode = choice_of(ExchangeMode, "--exchange", name)
    if mode is ExchangeMode.ON and not is_settled:
        raise UsageFault("--exchange on: one cycle carries no exchange out; add --until-settled, or use propose")
    return mode


def _exchanges_of(plan: "FleetPlan") -> "list[ClusterExchanges]":
    from bigfleet.cli.plan.exchanges import ExchangeSearch

    return ExchangeSearch().exchanges_of(plan)


def _percent(text: str) -> int:
    from bigfleet.shard.cluster_policy import PERCENT_REMEDY, percent_of

    percent = percent_of(text)
    if percent is None:
        raise UsageFault(f"--spot-pool-max: {text!r} is not a share; {PERCENT_REMEDY}")
    return percent


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """Everything that one call shows."""

    base: "FleetPlan"
    difference: "Difference | None"
    #: The plan with the change, if there is one: what is explained and bounded.
    final: "FleetPlan"
    #: The explanation, and the id that was asked for.
    about: "tuple[Explanation | list[str], str] | None"
    bound: "CostBound | None"
    #: What could be exchanged in each cluster; None if it was not asked for.
    exchanges: "list[ClusterExchanges] | None"


def _bound_of(plan: "FleetPlan") -> "CostBound":
    from bigfleet.cli.plan.bound import bound_of

    if plan.explained is not None:
        raise UsageFault("--bound: bounds plans of aggregates, this demand has shapes; leave --bound out")
    return bound_of(plan)


def _about(plan: "FleetPlan", asked: str, *, base: "FleetPlan") -> "tuple[Explanation | list[str], str]":
    """Find what is to be explained: a row, else a machine, unless a prefix says which; `base` has no change."""
    kind, colon, name = asked.partition(":")
    if not colon or kind not in ("need", "machine"):
        kind, name = "", asked
    is_need, is_machine = name in plan.needs_by_id, name in plan.snapshot.machines
    if not kind and is_need and is_machine:
        raise UsageFault(f"--explain: {name!r} is a row and a machine; write need:{name} or machine:{name}")
    if is_need and kind != "machine":
        return plan.explain_need(name), name
    if is_machine and kind != "need":
        return plan.explain_machine(name), name
    if (kind != "machine" and name in base.needs_by_id) or (kind != "need" and name in base.snapshot.machines):
        raise UsageFault(f"--explain: {name!r} does not exist after the change; explain it without --what-if")
    known = [*(plan.needs_by_id if kind != "machine" else ()), *(plan.snapshot.machines if kind != "need" else ())]
    near = get_close_matches(name, known[:_SIMILAR_MAX], n=1)
    where = f"did you mean {near[0]!r}?" if near else "rows have their ids in --demand, machines in --inventory"
    raise UsageFault(f"--explain: {name!r} is not the id of a {_SOUGHT[kind]}; {where}")


def _print_settled(given: "PlanInput", output: str, mode: "ExchangeMode") -> None:
    from bigfleet.cli.plan.settling import settle
    from bigfleet.exchange.values import ExchangeMode

    settled, exchanged = settle(given), None
    exchanges: Sequence[ClusterExchanges] | None = None
    if mode is ExchangeMode.ON:
        from bigfleet.cli.plan.exchanging import exchange_until_rest

        exchanged = exchange_until_rest(settled)
        settled, exchanges = exchanged.settled, exchanged.left
    elif mode is ExchangeMode.PROPOSE:
        exchanges = _exchanges_of(settled.plan)
    if output == "json":
        import json

        from bigfleet.cli.plan.document import settled_document

        settled_answer = settled_document(settled)
        if exchanges is not None:
            settled_answer["exchanges"] = _exchanges_document(exchanges, exchanged)
        echo(json.dumps(settled_answer, indent=2, allow_nan=False))
        return
    from bigfleet.cli.plan.tables import show_settled
    from bigfleet.cli.runtime.console import output_console

    console = output_console(SETTLED_WIDTH)
    show_settled(console, settled)
    if exchanges is not None:
        _show_exchanges(console, exchanges, exchanged)


def _print_tables(answer: _Answer) -> None:
    from bigfleet.cli.plan.tables import show_bound, show_difference, show_explanation, show_plan
    from bigfleet.cli.runtime.console import output_console

    console = output_console(WIDTH)
    show_plan(console, answer.base)
    if answer.difference is not None:
        show_difference(console, answer.difference)
    if answer.bound is not None:
        show_bound(console, answer.bound)
    if answer.about is not None:
        show_explanation(console, answer.final, *answer.about)
    if answer.exchanges is not None:
        _show_exchanges(console, answer.exchanges)


def _show_exchanges(
    console: "Console", exchanges: "Sequence[ClusterExchanges]", exchanged: "Exchanged | None" = None
) -> None:
    from bigfleet.cli.plan.exchanges import show_carried_out, show_exchanges

    if exchanged is not None:
        show_carried_out(console, exchanged.carried_out, exchanged.cost_before_usd_per_hour)
    show_exchanges(console, exchanges, is_rest=exchanged is not None)


def _exchanges_document(
    exchanges: "Sequence[ClusterExchanges]", exchanged: "Exchanged | None" = None
) -> dict[str, object]:
    from bigfleet.cli.plan.exchanges import carried_out_document, exchanges_document

    document = exchanges_document(exchanges)
    if exchanged is not None:
        document["cost_before_usd_per_hour"] = exchanged.cost_before_usd_per_hour
        document["carried_out"] = carried_out_document(exchanged.carried_out)
    return document


def _print_document(answer: _Answer) -> None:
    import json

    from bigfleet.cli.plan.document import bound_document, difference_document, explanation_document, plan_document

    document: dict[str, object] = {"plan": plan_document(answer.base)}
    if answer.difference is not None:
        document["what_if"] = difference_document(answer.difference)
    if answer.bound is not None:
        document["bound"] = bound_document(answer.bound)
    if answer.about is not None:
        document["explanation"] = explanation_document(answer.final, *answer.about)
    if answer.exchanges is not None:
        document["exchanges"] = _exchanges_document(answer.exchanges)
    echo(json.dumps(document, indent=2, allow_nan=False))
