"""Defines the `bigfleet` command and its subcommands; `bigfleet.cli.runtime.program` runs it.

A command's module is imported when the command is called, and its libraries when it runs, so that every process starts
quickly. No command prints a traceback for a user's mistake.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar

import typer

import bigfleet
from bigfleet.cli.flags.lazy_group import CommandSource, LazyGroup
from bigfleet.cli.runtime.program import run_program
from bigfleet.cli.runtime.terminal import echo


class RootGroup(LazyGroup):
    """The subcommands of `bigfleet`, in the order of its help."""

    sources: ClassVar[Mapping[str, CommandSource]] = MappingProxyType(
        {
            "up": CommandSource(
                "bigfleet.cli.up.command",
                "Run a provider, shards and simulated clusters on this machine, and watch them.",
                "up",
            ),
            "coordinator": CommandSource(
                "bigfleet.cli.coordinator.command",
                "Run one replica of the coordinator.",
                "coordinator",
                "CoordinatorCommand",
            ),
            "operator": CommandSource(
                "bigfleet.cli.operator.command",
                "Connect this Kubernetes cluster to its shard.",
                "operator",
                "OperatorCommand",
            ),
            "pod-controller": CommandSource(
                "bigfleet.cli.pod_controller.command",
                "Create a CapacityRequest for each pod of a Kubernetes cluster.",
                "pod_controller",
                "PodControllerCommand",
            ),
            "plan": CommandSource(
                "bigfleet.cli.plan.command",
                "Show what BigFleet would do with given machines and demand, and what it costs.",
                "plan",
            ),
            "replay": CommandSource(
                "bigfleet.cli.replay.command",
                "Repeat recorded cycles and compare the decisions, also under other settings.",
                "replay",
            ),
            "conformance": CommandSource(
                "bigfleet.cli.conformance.command",
                "Certify a capacity provider: CERTIFIED, FAILED or INCOMPLETE for each profile.",
                "conformance",
            ),
            "hail": CommandSource(
                "bigfleet.cli.hail.command",
                "Answer a Ganeti IAllocator message for hosts with exclusive storage; also installed as "
                "hail-dedicated.",
                "hail",
                "HailCommand",
            ),
            "shard": CommandSource("bigfleet.cli.shard.command", "Run one shard, or back up its state."),
            "provider": CommandSource("bigfleet.cli.provider.command", "Run, write or administer a capacity provider."),
            "engine": CommandSource(
                "bigfleet.cli.engine.command", "Run test cases and fleets through a decision engine."
            ),
            "partition": CommandSource(
                "bigfleet.cli.partition.command", "Inspect partitioned hosts and compare placement orders."
            ),
            "certs": CommandSource("bigfleet.cli.certs.command", "Create certificates for mutual TLS."),
            "audit": CommandSource("bigfleet.cli.audit.command", "Check the audit log of a shard."),
            "get": CommandSource("bigfleet.cli.get.command", "List what a running shard or coordinator knows."),
            "explain": CommandSource(
                "bigfleet.cli.explain.command", "Explain the decisions of the last cycle of a running shard."
            ),
            "admin": CommandSource(
                "bigfleet.cli.admin.command", "Change the coordinator's tables: domains, shards, quotas."
            ),
            "cluster": CommandSource("bigfleet.cli.cluster.command", "Retire clusters that are gone."),
            "snapshot": CommandSource(
                "bigfleet.cli.snapshot.command", "Save the coordinator's tables, and restore a store from them."
            ),
            "sim": CommandSource(
                "bigfleet.cli.sim.command", "Run the real components under simulated time and faults."
            ),
            "kernels": CommandSource(
                "bigfleet.cli.kernels.command", "Compile the engine's kernels ahead of the first start."
            ),
        }
    )


app = typer.Typer(
    cls=RootGroup,
    name="bigfleet",
    help="Provision one fleet of machines for many Kubernetes clusters.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
