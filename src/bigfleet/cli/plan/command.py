"""`bigfleet plan`: its flags, and the way from files to a plan that is shown (docs/planning.md).

Exit 2 for a wrong call or a wrong file, else 0: a plan that leaves rows short is an answer, not a failure.
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from bigfleet.cli.faults import UsageFault

if TYPE_CHECKING:
    from bigfleet.cli.plan.planning import Difference, Plan
    from bigfleet.engine.explain import Explanation

    _About = tuple[Plan, Explanation, str]

OUTPUTS: Final = ("table", "json")
#: Width of the tables where there is no terminal.
WIDTH: Final = 140

_Inventory = Annotated[Path, typer.Option(metavar="FILE", help="Machines: JSON lines, CSV, or nodes of a GPU trace.")]
_Demand = Annotated[Path, typer.Option(metavar="FILE", help="Rows of demand: a YAML or JSON list.")]
_Now = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="Time on the clock of idle_since; by default the latest of them."),
]
_Explain = Annotated[
    str | None, typer.Option(metavar="NEED|MACHINE", help="Say why: id of a row or a machine (need:ID, machine:ID).")
]
_WhatIf = Annotated[Path | None, typer.Option(metavar="FILE", help="Patches; shows what they would change.")]
_Output = Annotated[str, typer.Option(metavar="FORM", help="table or json.")]


def plan(
    inventory: _Inventory,
    demand: _Demand,
    now: _Now = None,
    explain: _Explain = None,
    what_if: _WhatIf = None,
    output: _Output = "table",
) -> None:
    """Show what BigFleet would do with these machines and this demand, what it costs and what stays short."""
    from bigfleet.cli.plan.inputs import read_machines, read_needs
    from bigfleet.cli.plan.patches import apply_patches
    from bigfleet.cli.plan.planning import difference_of, make_plan, plan_input

    if output not in OUTPUTS:
        raise UsageFault(f"--output: {output!r} is unknown; choose one of {', '.join(OUTPUTS)}")
    if now is not None and not math.isfinite(now):
        raise UsageFault(f"--now: {now} is no time; write seconds")
    given = plan_input(read_machines(inventory), read_needs(demand), now_seconds=now)
    changed = apply_patches(given, what_if) if what_if is not None else None
    base = make_plan(given)
    difference = None if changed is None else difference_of(base, make_plan(changed))
    about = None if explain is None else _about(base if difference is None else difference.changed, explain)
    if output == "json":
        _print_document(base, difference, about)
    else:
        _print_tables(base, difference, about)


def _about(plan: "Plan", asked: str) -> "_About":
    """Find what is to be explained: a row, else a machine, unless a prefix says which."""
    kind, colon, name = asked.partition(":")
    if not colon or kind not in ("need", "machine"):
        kind, name = "", asked
    is_need, is_machine = name in plan.needs_by_id, name in plan.snapshot.machines
    if not kind and is_need and is_machine:
        raise UsageFault(f"--explain: {name!r} is a row and a machine; write need:{name} or machine:{name}")
    if is_need and kind != "machine":
        return plan, plan.explain_need(name), name
    if is_machine and kind != "need":
        return plan, plan.explain_machine(name), name
    raise UsageFault(f"--explain: {name!r} is the id of no {kind or 'row and of no machine'}")


def _print_tables(base: "Plan", difference: "Difference | None", about: "_About | None") -> None:
    from rich.console import Console

    from bigfleet.cli.plan.tables import show_difference, show_explanation, show_plan

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=WIDTH, highlight=False)
    show_plan(console, base)
    if difference is not None:
        show_difference(console, difference)
    if about is not None:
        show_explanation(console, *about)


def _print_document(base: "Plan", difference: "Difference | None", about: "_About | None") -> None:
    import json

    from bigfleet.cli.plan.document import difference_document, explanation_document, plan_document

    document = {"plan": plan_document(base)}
    if difference is not None:
        document["what_if"] = difference_document(difference)
    if about is not None:
        document["explanation"] = explanation_document(*about)
    typer.echo(json.dumps(document, indent=2, allow_nan=False))
