"""Defines `bigfleet provider admin --state FILE …`: administers a running provider over its admin socket.

docs/spec/provider.md §13, §14. Exit 0 if done, 1 if refused or not running, 2 for a wrong call. The provider decides
and writes the audit line; this module does not open the state file.
"""

import json
from collections.abc import Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any

import typer

from bigfleet.cli.flags.help_text import HelpGroup
from bigfleet.cli.flags.switches import SwitchCommand
from bigfleet.cli.runtime.failures import RunFault, UsageFault
from bigfleet.cli.runtime.terminal import echo

app = typer.Typer(cls=HelpGroup, help="Inspect and repair a running provider.", no_args_is_help=True)

_State = Annotated[Path | None, typer.Option("--state", metavar="FILE", help="State file of the running provider.")]
_Output = Annotated[str, typer.Option("--output", "-o", help="table or json.")]


@app.callback()
def admin(context: typer.Context, state: _State = None, output: _Output = "table") -> None:
    """Hold the options that every command of a person shares."""
    if output not in ("table", "json"):
        raise UsageFault(f"--output: {output!r} is unknown; choose table or json")
    context.obj = (state, output)


@app.command(cls=SwitchCommand)
def status(context: typer.Context) -> None:
    """Show counts, failed machines, held-back losses and the state of the store."""
    _show(context, _ask(context, "status"), _status_tables)


@app.command(cls=SwitchCommand)
def recover(
    context: typer.Context,
    machine_id: Annotated[str, typer.Argument(metavar="ID", help="A FAILED machine.")],
    to: Annotated[
        str, typer.Option("--to", help="State to set: speculative (it has no host), idle or configured (it serves).")
    ],
    confirm_out_of_service: Annotated[
        bool, typer.Option("--confirm-out-of-service", help="Confirm that the machine runs no pods of its cluster.")
    ] = False,
) -> None:
    """Set the state of a FAILED machine to what you have found."""
    from bigfleet.provider.kit.administration import TARGETS

    if to not in TARGETS:
        raise UsageFault(f"--to: {to!r} is unknown; choose {', '.join(TARGETS)}")
    body = {"machine_id": machine_id, "to": to, "confirm_out_of_service": confirm_out_of_service}
    _show(context, _ask(context, "recover", body), _recovered_table)


@app.command("accept-losses", cls=SwitchCommand)
def accept_losses(context: typer.Context) -> None:
    """Confirm held-back losses: the hosts are gone."""
    _show(context, _ask(context, "accept-losses"), _accepted_table)


@app.command(cls=SwitchCommand)
def quarantine(context: typer.Context) -> None:
    """List rejected facts of the backend, with reasons."""
    _show(context, _ask(context, "quarantine"), _quarantine_table)


@app.command("reset-cursors", cls=SwitchCommand)
def reset_cursors(context: typer.Context) -> None:
    """Invalidate list cursors after the state file was restored from a backup."""
    _show(context, _ask(context, "reset-cursors"), _cursors_table)


def _ask(context: typer.Context, command: str, body: Mapping[str, object] | None = None) -> dict[str, Any]:
    from bigfleet.cli.provider.admin_socket import AdminConnection, admin_path

    state, _output = context.obj
    if state is None:
        raise UsageFault(
            "--state is missing: name the provider's state file before the command, as in "
            f"bigfleet provider admin --state FILE {context.info_name}"
        )
    path = admin_path(state)
    connection = AdminConnection(path)
    try:
        connection.request("POST", f"/{command}", body=json.dumps(body or {}))
        response = connection.getresponse()
        answer = json.loads(response.read())
    except OSError as error:
        why = error.strerror or "no answer"
        raise RunFault(
            f"no provider answers at {path}: {why}; check that it runs with --state {state} under your user"
        ) from error
    except ValueError as error:
        raise RunFault(f"{path}: the answer is not JSON; another program listens there") from error
    finally:
        connection.close()
    if response.status != HTTPStatus.OK:
        raise RunFault(str(answer.get("error", response.reason)))
    assert isinstance(answer, dict), "every answer of the provider is an object"
    return answer


def _show(
    context: typer.Context, answer: dict[str, Any], tables: Callable[[dict[str, Any]], list[tuple[str, list[Any]]]]
) -> None:
    """Print an answer; `tables` gives titles, each with rows whose first one is the head."""
    _state, output = context.obj
    if output == "json":
        echo(json.dumps(answer, indent=2))
        return
    from rich.table import Table

    from bigfleet.cli.runtime.console import TerminalConsole

    console = TerminalConsole()
    for title, (head, *rows) in tables(answer):
        table = Table(*head, title=title, title_justify="left")
        for row in rows:
            table.add_row(*map(str, row))
        console.print(table)


def _status_tables(answer: dict[str, Any]) -> list[tuple[str, list[Any]]]:
    brake, store = answer["brake"], answer["store"]
    facts = [
        ("quarantined facts", answer["quarantined"]),
        ("brake", f"engaged, {brake['held']} losses held" if brake["engaged"] else "released"),
        ("store", "up" if store["is_up"] else "DOWN"),
        ("store bytes", f"{store['bytes']:,}"),
        ("revision", f"{store['revision']:,}"),
        ("tombstones", f"{store['tombstones']:,}"),
        ("incarnation", store["incarnation"]),
        *answer["substrate"].items(),
    ]
    tables: list[tuple[str, list[Any]]] = [
        ("machines", [("state", "machines"), *((state, f"{n:,}") for state, n in answer["machines"].items())]),
        ("provider", [("fact", "value"), *facts]),
    ]
    if answer["failed"]:
        head = ("machine", "for seconds", "cluster", "host", "error", "recovery")
        keys = ("machine_id", "seconds", "cluster", "host", "error", "recovery")
        tables.append(("failed, oldest first", [head, *(tuple(row[key] for key in keys) for row in answer["failed"])]))
    if brake["engaged"]:
        losses = [(loss["machine_id"], loss["effect"]) for loss in brake["losses"]]
        tables.append(("held back by the brake", [("machine", "what would happen"), *losses]))
    return tables


def _recovered_table(answer: dict[str, Any]) -> list[tuple[str, list[Any]]]:
    return [("recovered", [("machine", "before", "after"), (answer["machine_id"], answer["before"], answer["after"])])]


def _accepted_table(answer: dict[str, Any]) -> list[tuple[str, list[Any]]]:
    return [(f"{len(answer['accepted'])} losses accepted", [("machine",), *((i,) for i in answer["accepted"])])]


def _quarantine_table(answer: dict[str, Any]) -> list[tuple[str, list[Any]]]:
    rows = [(fault["id"], fault["reason"], fault["text"]) for fault in answer["faults"]]
    return [(f"{len(rows)} refused facts", [("id", "reason", "what is wrong"), *rows])]


def _cursors_table(answer: dict[str, Any]) -> list[tuple[str, list[Any]]]:
    return [("cursors ended", [("incarnation before", "after"), (answer["before"], answer["after"])])]
