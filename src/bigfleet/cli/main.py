"""The `bigfleet` command: its subcommands, and the one place that turns a failure into a line and an exit code.

Commands import what they need when they run, so that `--help` stays quick. No command prints a traceback for a user's
mistake.
"""

import os
import sys
from typing import Annotated, NoReturn

import typer

import bigfleet
from bigfleet.cli.audit.command import app as audit_app
from bigfleet.cli.certs.command import app as certs_app
from bigfleet.cli.engine.command import app as engine_app
from bigfleet.cli.explain.command import app as explain_app
from bigfleet.cli.faults import CommandFault
from bigfleet.cli.get.command import app as get_app
from bigfleet.cli.plan.command import plan
from bigfleet.cli.provider import app as provider_app
from bigfleet.cli.shard import shard
from bigfleet.cli.switches import SwitchCommand
from bigfleet.cli.up.command import up
from bigfleet.rpc.tls_floor import require_tls13

app = typer.Typer(
    name="bigfleet",
    help="One fleet of machines for many Kubernetes clusters: which machine serves which cluster, and why.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=SwitchCommand)(up)
app.command(cls=SwitchCommand)(shard)
app.command(cls=SwitchCommand)(plan)
app.add_typer(provider_app, name="provider")
app.add_typer(engine_app, name="engine")
app.add_typer(certs_app, name="certs")
app.add_typer(audit_app, name="audit")
app.add_typer(get_app, name="get")
app.add_typer(explain_app, name="explain")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bigfleet {bigfleet.installed_version()}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Hold the options that every command shares."""


def main() -> None:
    """Run the command line and exit: 0 done, 1 a run that failed, 2 a wrong call, which is told in one line."""
    # gRPC's core would print lines of its own beside ours; it reads this when it is first imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    require_tls13()
    try:
        code = app(prog_name="bigfleet", standalone_mode=False)
    except CommandFault as fault:
        typer.echo(f"bigfleet: {fault}", err=True)
        sys.exit(fault.exit_code)
    except typer.TyperException as fault:
        _fail_usage(fault)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


def _fail_usage(fault: typer.TyperException) -> NoReturn:
    # What click calls a usage error formats itself, with the option's name; its class is not public in typer.
    tell = getattr(fault, "format_message", fault.__str__)
    message = " ".join(tell().split()).rstrip(".")
    context = getattr(fault, "ctx", None)
    command = context.command_path if context is not None else "bigfleet"
    if message:  # a group without a command has printed its help, and that says it all
        typer.echo(f"{command}: {message}; see {command} --help", err=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
