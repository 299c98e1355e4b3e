"""`bigfleet get`: its flags, and which question to the shard each of them makes (docs/operating.md).

Exit 0 when the shard answered, 1 when it cannot be reached, refuses or is not ready, 2 for a wrong call. Nothing here
changes a shard.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import typer

from bigfleet.cli.switches import SwitchCommand
from bigfleet.cli.tls_flags import TlsCa, TlsCert, TlsKey, read_tls
from bigfleet.cli.values import parse_positive_duration_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bigfleet.cli.get.columns import Column
    from bigfleet.cli.get.records import Record
    from bigfleet.cli.get.sources import Source
    from bigfleet.rpc.shardread_client import ShardReader
    from bigfleet.rpc.tls import TlsFiles

ADDRESS: Final = "127.0.0.1:7780"
METRICS_ADDRESS: Final = "127.0.0.1:8780"

app = typer.Typer(help="What a live shard knows: its machines, its demand and what it does.", no_args_is_help=True)

Addr = Annotated[
    str, typer.Option(metavar="HOST:PORT", envvar="BIGFLEET_SHARD_ADDR", help="The shard's --listen address.")
]
_MetricsAddr = Annotated[
    str,
    typer.Option(metavar="HOST:PORT", envvar="BIGFLEET_SHARD_METRICS_ADDR", help="The shard's --metrics-addr address."),
]
Output = Annotated[str, typer.Option("--output", "-o", metavar="FORM", help="table, json or yaml.")]
_Watch = Annotated[bool, typer.Option("--watch", "-w", help="Look again and again, until Ctrl-C.")]
_Interval = Annotated[
    str | None, typer.Option(metavar="DURATION", help="Time between two looks of --watch; 2s by default.")
]
_Cluster = Annotated[str, typer.Option("--cluster", "-c", metavar="ID", help="This cluster alone.")]
_Limit = Annotated[int, typer.Option(min=0, metavar="N", help="At most so many; 0 is all of them.")]
# Given more than once, or as a list with commas.
_States = Annotated[list[str] | None, typer.Option(metavar="STATE", help="In this state, such as Idle; repeatable.")]
_Type = Annotated[str, typer.Option("--type", "--instance-type", metavar="TYPE", help="Of this type.")]
_Zone = Annotated[str, typer.Option(metavar="ZONE", help="In this zone.")]
_CapacityTypes = Annotated[
    list[str] | None, typer.Option(metavar="TYPE", help="Paid for like this, such as Spot; repeatable.")
]
_Flags = Annotated[
    list[str] | None,
    typer.Option(metavar="FLAG", help="pending, held, stuck, unjoined or reserved; all that are given must hold."),
]
_Machine = Annotated[str, typer.Option("--machine", "-m", metavar="ID", help="About this machine alone.")]
_Kinds = Annotated[list[str] | None, typer.Option(metavar="KIND", help="Of this kind, such as Reclaim; repeatable.")]
_Outcomes = Annotated[
    list[str] | None,
    typer.Option(metavar="OUTCOME", help="With this end, such as fenced or running; repeatable."),
]
_Since = Annotated[str, typer.Option(metavar="DURATION", help="Decided within the last so long, such as 15m.")]
_ActionLimit = Annotated[
    int, typer.Option(min=0, max=10_000, metavar="N", help="At most so many; 0 is 1,000, and a shard lists 10,000.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """How an answer is shown."""

    output: str
    watch: bool
    interval: str | None


@app.callback()
def get() -> None:
    """Hold the subcommands together."""


@app.command(cls=SwitchCommand)
def machines(
    cluster: _Cluster = "",
    state: _States = None,
    type_: _Type = "",
    zone: _Zone = "",
    capacity_type: _CapacityTypes = None,
    flag: _Flags = None,
    addr: Addr = ADDRESS,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    output: Output = "table",
    watch: _Watch = False,
    interval: _Interval = None,
) -> None:
    """List machines as the shard knows them at this moment, by id."""
    from bigfleet.cli.get import columns, sources, wanted
    from bigfleet.rpc.convert_machine import state_to_wire
    from bigfleet.rpc.gen import provider_pb2, shardread_pb2

    request = shardread_pb2.ListMachinesRequest(
        cluster_id=wanted.cluster_id(cluster),
        instance_type=type_,
        zone=zone,
        states=[state_to_wire(one) for one in wanted.machine_states(state or ())],
        capacity_types=[provider_pb2.CapacityType.ValueType(one) for one in wanted.capacity_types(capacity_type or ())],
        flags=wanted.machine_flags(flag or ()),
    )
    way = _Way(output=output, watch=watch, interval=interval)
    tls = read_tls(tls_cert, tls_key, tls_ca)
    _show_shard(sources.machines(request), columns.MACHINES, "machine", way, addr, tls)


@app.command(cls=SwitchCommand)
def needs(
    cluster: _Cluster = "",
    limit: _Limit = 0,
    addr: Addr = ADDRESS,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    output: Output = "table",
    watch: _Watch = False,
    interval: _Interval = None,
) -> None:
    """List the rows of demand and what the last cycle gave them, the most urgent first."""
    from bigfleet.cli.get import columns, sources, wanted

    source = sources.needs(wanted.cluster_id(cluster), limit)
    way = _Way(output=output, watch=watch, interval=interval)
    _show_shard(source, columns.NEEDS, "need", way, addr, read_tls(tls_cert, tls_key, tls_ca))


@app.command(cls=SwitchCommand)
def shortfalls(
    cluster: _Cluster = "",
    limit: _Limit = 0,
    addr: Addr = ADDRESS,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    output: Output = "table",
    watch: _Watch = False,
    interval: _Interval = None,
) -> None:
    """List the rows that nothing covers, not even machines that are draining for them, the most urgent first."""
    from bigfleet.cli.get import columns, sources, wanted

    source = sources.shortfalls(wanted.cluster_id(cluster), limit)
    way = _Way(output=output, watch=watch, interval=interval)
    _show_shard(source, columns.SHORTFALLS, "shortfall", way, addr, read_tls(tls_cert, tls_key, tls_ca))


@app.command(cls=SwitchCommand)
def clusters(
    cluster: _Cluster = "",
    addr: Addr = ADDRESS,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    output: Output = "table",
    watch: _Watch = False,
    interval: _Interval = None,
) -> None:
    """Add up, for each cluster that reports demand or holds machines, what it wants, lacks, has and costs."""
    from bigfleet.cli.get import columns, sources, wanted

    source = sources.clusters(wanted.cluster_id(cluster))
    way = _Way(output=output, watch=watch, interval=interval)
    _show_shard(source, columns.CLUSTERS, "cluster", way, addr, read_tls(tls_cert, tls_key, tls_ca))


@app.command(cls=SwitchCommand)
def actions(
    cluster: _Cluster = "",
    machine: _Machine = "",
    kind: _Kinds = None,
    outcome: _Outcomes = None,
    since: _Since = "",
    limit: _ActionLimit = 0,
    addr: Addr = ADDRESS,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    output: Output = "table",
    watch: _Watch = False,
    interval: _Interval = None,
) -> None:
    """List what the shard did and does to machines, newest first; it remembers --action-history of them."""
    from bigfleet.cli.get import columns, sources, wanted
    from bigfleet.rpc.gen import shardread_pb2

    since_seconds = parse_positive_duration_seconds(since, "--since") if since else 0.0
    chosen = {"kinds": wanted.action_kinds(kind or ()), "outcomes": wanted.outcomes(outcome or ())}
    cluster_id = wanted.cluster_id(cluster)

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

    way = _Way(output=output, watch=watch, interval=interval)
    _show_shard(source, columns.ACTIONS, "action", way, addr, read_tls(tls_cert, tls_key, tls_ca))


@app.command(cls=SwitchCommand)
def sessions(
    metrics_addr: _MetricsAddr = METRICS_ADDRESS,
    output: Output = "table",
    watch: _Watch = False,
    interval: _Interval = None,
) -> None:
    """Show what the shard counts of its operators' sessions, from its metrics."""
    from bigfleet.cli.get import columns, wanted
    from bigfleet.cli.get.session_figures import session_records

    address = wanted.dialled(metrics_addr, "--metrics-addr")
    way = _Way(output=output, watch=watch, interval=interval)
    _show(lambda: session_records(address), columns.SESSIONS, "figure", way)


def _show_shard(
    source: "Source", columns: "Sequence[Column]", noun: str, way: _Way, addr: str, tls: "TlsFiles | None"
) -> None:
    from bigfleet.cli.get.sources import connected
    from bigfleet.cli.get.wanted import dialled

    address = dialled(addr, "--addr")

    def look() -> "Iterator[Record]":
        with connected(address, tls) as reader:
            yield from source(reader)

    _show(look, columns, noun, way)


def _show(look: "Callable[[], Iterator[Record]]", columns: "Sequence[Column]", noun: str, way: _Way) -> None:
    from rich.console import Console

    from bigfleet.cli.get.output import quiet_when_unread
    from bigfleet.cli.get.wanted import output_form, watch_seconds
    from bigfleet.cli.get.watching import Shown, show_once, watch

    shown = Shown(look=look, columns=columns, noun=noun, form=output_form(way.output))
    seconds = watch_seconds(watch=way.watch, interval=way.interval)
    console = Console(highlight=False)
    with quiet_when_unread():
        if seconds is None:
            show_once(shown, console)
        else:
            watch(shown, console, interval_seconds=seconds)
