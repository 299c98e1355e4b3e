"""The `bigfleet` command: its subcommands, and the one place that turns a failure into a line and an exit code.

Commands import what they need when they run, so that `--help` stays quick. No command prints a traceback for a user's
mistake.
"""

import sys
from typing import Annotated

import typer

import bigfleet
from bigfleet.cli.faults import CommandFault
from bigfleet.cli.provider import app as provider_app
from bigfleet.cli.shard import shard
from bigfleet.cli.up.command import up

app = typer.Typer(
    name="bigfleet",
    help="One fleet of machines for many Kubernetes clusters: which machine serves which cluster, and why.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(up)
app.command()(shard)
app.add_typer(provider_app, name="provider")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bigfleet {bigfleet.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Hold the options that every command shares."""


def main() -> None:
    """Run the command line and exit: 0 done, 1 a run that failed, 2 a wrong call."""
    try:
        app()
    except CommandFault as fault:
        typer.echo(f"bigfleet: {fault}", err=True)
        sys.exit(fault.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
