"""Defines the `bigfleet` command and its subcommands; `bigfleet.cli.runtime.program` runs it.

Commands import what they need when they run, so that `--help` stays quick. No command prints a traceback for a user's
mistake.
"""

from typing import Annotated

import typer

import bigfleet
from bigfleet.cli.admin.command import app as admin_app
from bigfleet.cli.audit.command import app as audit_app
from bigfleet.cli.certs.command import app as certs_app
from bigfleet.cli.cluster.command import app as cluster_app
from bigfleet.cli.conformance.command import conformance
from bigfleet.cli.coordinator.command import CoordinatorCommand, coordinator
from bigfleet.cli.engine.command import app as engine_app
from bigfleet.cli.explain.command import app as explain_app
from bigfleet.cli.flags.help_text import HelpGroup
from bigfleet.cli.flags.switches import SwitchCommand
from bigfleet.cli.get.command import app as get_app
from bigfleet.cli.get.coordinator_command import add_to as add_coordinator_lists
from bigfleet.cli.hail.command import WORDS, hail
from bigfleet.cli.kernels.command import app as kernels_app
from bigfleet.cli.operator.command import OperatorCommand, operator
from bigfleet.cli.partition.command import app as partition_app
from bigfleet.cli.plan.command import plan
from bigfleet.cli.pod_controller.command import PodControllerCommand, pod_controller
from bigfleet.cli.provider.command import app as provider_app
from bigfleet.cli.replay.command import replay
from bigfleet.cli.runtime.program import run_program
from bigfleet.cli.runtime.terminal import echo
from bigfleet.cli.shard.command import app as shard_app
from bigfleet.cli.sim.command import app as sim_app
from bigfleet.cli.snapshot.command import app as snapshot_app
from bigfleet.cli.up.command import up

app = typer.Typer(
    cls=HelpGroup,
    name="bigfleet",
    help="Provision one fleet of machines for many Kubernetes clusters.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=SwitchCommand)(up)
app.add_typer(shard_app, name="shard")
app.command(cls=CoordinatorCommand)(coordinator)
app.command(cls=OperatorCommand)(operator)
app.command("pod-controller", cls=PodControllerCommand)(pod_controller)
app.command(cls=SwitchCommand)(plan)
app.command(cls=SwitchCommand)(replay)
app.command(cls=SwitchCommand)(conformance)
app.command(context_settings=WORDS, add_help_option=False)(hail)
app.add_typer(provider_app, name="provider")
app.add_typer(engine_app, name="engine")
app.add_typer(partition_app, name="partition")
app.add_typer(certs_app, name="certs")
app.add_typer(audit_app, name="audit")
app.add_typer(get_app, name="get")
app.add_typer(explain_app, name="explain")
app.add_typer(admin_app, name="admin")
app.add_typer(cluster_app, name="cluster")
app.add_typer(snapshot_app, name="snapshot")
app.add_typer(sim_app, name="sim")
app.add_typer(kernels_app, name="kernels")
add_coordinator_lists(get_app)


def _print_version(wanted: bool) -> None:
    if wanted:
        echo(f"bigfleet {bigfleet.installed_version()}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Hold the options that every command shares."""


def main() -> None:
    """Run the command line and exit: 0 done, 1 a run that failed, 2 a wrong call, which is reported in one line."""
    run_program(app, "bigfleet")


if __name__ == "__main__":
    main()
