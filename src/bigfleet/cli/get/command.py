"""Defines `bigfleet get`: its flags, and the call to the shard for each subcommand (docs/operating.md).

Exit 0 if the shard answered, 1 if it cannot be reached, rejects the call or is not ready, 2 for a wrong call. Nothing
here changes a shard.
"""

import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Final

import typer

from bigfleet.cli.flags.groups import taking
from bigfleet.cli.flags.help_text import HelpGroup
from bigfleet.cli.flags.switches import SwitchCommand
from bigfleet.cli.flags.values import parse_positive_duration_seconds
from bigfleet.cli.get.coordinator_command import add_to as add_coordinator_lists
from bigfleet.cli.get.shared import Looking
from bigfleet.cli.runtime.failures import UsageFault

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bigfleet.cli.get.columns import TableColumn
    from bigfleet.cli.get.records import Record
    from bigfleet.cli.get.sources import Source
    from bigfleet.rpc.clients.shardread import ShardReader

METRICS_ADDRESS: Final = "127.0.0.1:8780"
METRICS_ADDRESS_VARIABLE: Final = "BIGFLEET_SHARD_METRICS_ADDR"

app = typer.Typer(cls=HelpGroup, help="List what a running shard or coordinator knows.", no_args_is_help=True)

_MetricsAddr = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help=f"The shard's --metrics-addr address, for --totals; else {METRICS_ADDRESS_VARIABLE}, {METRICS_ADDRESS}.",
    ),
]
_Totals = Annotated[bool, typer.Option("--totals", help="Show totals over all clusters, from the shard's metrics.")]
_Cluster = Annotated[str, typer.Option("--cluster", "-c", metavar="ID", help="Only this cluster.")]
_Limit = Annotated[int, typer.Option(min=0, metavar="N", help="Maximum number of rows; 0 is all.")]
# Given more than once, or as a list with commas.
_States = Annotated[list[str] | None, typer.Option(metavar="STATE", help="Only this state, such as Idle; repeatable.")]
_Type = Annotated[str, typer.Option("--type", "--instance-type", metavar="TYPE", help="Only this instance type.")]
_Zone = Annotated[str, typer.Option(metavar="ZONE", help="Only this zone.")]
_CapacityTypes = Annotated[
    list[str] | None, typer.Option(metavar="TYPE", help="Only this capacity type, such as Spot; repeatable.")
]
_Flags = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FLAG",
        help="Only machines with this flag: pending, held, stuck, unjoined or reserved; repeatable, all must apply.",
    ),
]
_Machine = Annotated[str, typer.Option("--machine", "-m", metavar="ID", help="Only this machine.")]
_Kinds = Annotated[list[str] | None, typer.Option(metavar="KIND", help="Only this kind, such as Reclaim; repeatable.")]
_Outcomes = Annotated[
    list[str] | None,
    typer.Option(metavar="OUTCOME", help="Only this outcome, such as fenced or running; repeatable."),
]
_Since = Annotated[str, typer.Option(metavar="DURATION", help="Only actions decided within this time, such as 15m.")]
_ActionLimit = Annotated[int, typer.Option(min=0, max=10_000, metavar="N", help="Maximum number of rows; 0 is 1,000.")]


@app.callback()
def get() -> None:
    """Hold the subcommands together."""


@app.command(cls=SwitchCommand)
@taking(Looking)
def machines(
    looking: Looking,
    cluster: _Cluster = "",
    state: _States = None,
    type_: _Type = "",
    zone: _Zone = "",
    capacity_type: _CapacityTypes = None,
    flag: _Flags = None,
) -> None:
    """List machines, by id."""
    from bigfleet.cli.get import columns, flag_values, sources
    from bigfleet.rpc.wire.convert_machine import state_to_wire
    from bigfleet.rpc.wire.gen import provider_pb2, shardread_pb2

    request = shardread_pb2.ListMachinesRequest(
        cluster_id=flag_values.cluster_id(cluster),
        instance_type=type_,
        zone=zone,
        states=[state_to_wire(one) for one in flag_values.machine_states(state or ())],
        capacity_types=[
            provider_pb2.CapacityType.ValueType(one) for one in flag_values.capacity_types(capacity_type or ())
        ],
        flags=flag_values.machine_flags(flag or ()),
    )
    _show_shard(sources.machines(request), columns.MACHINES, "machine", looking)


@app.command(cls=SwitchCommand)
@taking(Looking)
def needs(
    looking: Looking,
    cluster: _Cluster = "",
    limit: _Limit = 0,
) -> None:
    """List rows of demand and their supply after the last cycle, highest priority first."""
    from bigfleet.cli.get import columns, flag_values, sources

    source = sources.needs(flag_values.cluster_id(cluster), limit)
    _show_shard(source, columns.NEEDS, "need", looking)


@app.command(cls=SwitchCommand)
@taking(Looking)
def shortfalls(
    looking: Looking,
    cluster: _Cluster = "",
    limit: _Limit = 0,
) -> None:
    """List rows of demand that neither machines nor running drains cover, highest priority first."""
    from bigfleet.cli.get import columns, flag_values, sources

    source = sources.shortfalls(flag_values.cluster_id(cluster), limit)
    _show_shard(source, columns.SHORTFALLS, "shortfall", looking)


@app.command(cls=SwitchCommand)
@taking(Looking)
def clusters(
    looking: Looking,
    cluster: _Cluster = "",
) -> None:
    """Show demand, shortfall, machines and cost of each cluster."""
    from bigfleet.cli.get import columns, flag_values, sources

    source = sources.clusters(flag_values.cluster_id(cluster))
    _show_shard(source, columns.CLUSTERS, "cluster", looking)


@app.command(cls=SwitchCommand)
@taking(Looking)
def actions(
    looking: Looking,
    cluster: _Cluster = "",
    machine: _Machine = "",
    kind: _Kinds = None,
    outcome: _Outcomes = None,
    since: _Since = "",
    limit: _ActionLimit = 0,
) -> None:
    """List actions, newest first."""
    from bigfleet.cli.get import columns, flag_values, sources
    from bigfleet.rpc.wire.gen import shardread_pb2

    since_seconds = parse_positive_duration_seconds(since, "--since") if since else 0.0
    chosen = {"kinds": flag_values.action_kinds(kind or ()), "outcomes": flag_values.outcomes(outcome or ())}
    cluster_id = flag_values.cluster_id(cluster)

    def source(reader: "ShardReader") -> "Iterator[Record]":
        # At each look: "the last 15 minutes" moves on.
        request = shardread_pb2.ListActionsRequest(
            cluster_id=cluster_id,
            machine_id=machine,
            since_unix_nanos=time.time_ns() - int(since_seconds * 1e9) if since_seconds else 0,
            limit=limit,
            **chosen,
        )
        return sources.actions(request)(reader)

    _show_shard(source, columns.ACTIONS, "action", looking)


@app.command(cls=SwitchCommand)
@taking(Looking)
def sessions(
    looking: Looking,
    cluster: _Cluster = "",
    totals: _Totals = False,
    metrics_addr: _MetricsAddr = None,
) -> None:
    """List connected and missing operators, by cluster."""
    from bigfleet.cli.get import columns, flag_values, sources
    from bigfleet.cli.get.session_figures import session_records

    if not totals:
        if metrics_addr is not None:
            raise UsageFault("--metrics-addr needs --totals; add --totals")
        _show_shard(sources.sessions(flag_values.cluster_id(cluster)), columns.SESSIONS, "session", looking)
        return
    if cluster:
        raise UsageFault("--totals shows totals over all clusters; leave --cluster out")
    # Not through the option: in the environment it may stand for other calls than this one.
    text = metrics_addr or os.environ.get(METRICS_ADDRESS_VARIABLE) or METRICS_ADDRESS
    address = flag_values.dialled(text, "--metrics-addr")
    _show(lambda: session_records(address), columns.SESSION_TOTALS, "figure", looking)


@app.command(cls=SwitchCommand)
@taking(Looking)
def exchanges(
    looking: Looking,
    cluster: _Cluster = "",
) -> None:
    """List exchanges of machines for cheaper ones: under way, ended in the last 24 h, and proposed, by cluster."""
    from bigfleet.cli.get import columns, flag_values, sources

    _show_shard(sources.exchanges(flag_values.cluster_id(cluster)), columns.EXCHANGES, "exchange", looking)


add_coordinator_lists(app)


def _show_shard(source: "Source", columns: "Sequence[TableColumn]", noun: str, looking: Looking) -> None:
    from bigfleet.cli.get.sources import connected

    address, tls = looking.address(), looking.tls()

    def look() -> "Iterator[Record]":
        with connected(address, tls) as reader:
            yield from source(reader)

    _show(look, columns, noun, looking)


def _show(
    look: "Callable[[], Iterator[Record]]", columns: "Sequence[TableColumn]", noun: str, looking: Looking
) -> None:
    from bigfleet.cli.get.flag_values import output_form, watch_seconds
    from bigfleet.cli.get.output import quiet_when_unread
    from bigfleet.cli.get.watching import Shown, show_once, watch
    from bigfleet.cli.runtime.console import TerminalConsole

    shown = Shown(look=look, columns=columns, noun=noun, form=output_form(looking.output))
    seconds = watch_seconds(watch=looking.watch, interval=looking.interval)
    console = TerminalConsole(highlight=False)
    with quiet_when_unread():
        if seconds is None:
            show_once(shown, console)
        else:
            watch(shown, console, interval_seconds=seconds)
