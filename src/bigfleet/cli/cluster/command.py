"""Defines `bigfleet cluster`: one call each to a shard (docs/spec/wire.md §12).

Exit 0 if the change was made or shown, 1 if the shard cannot be reached or rejects it, 2 for a wrong call. No command
prompts: `retire` changes nothing without --confirm.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from bigfleet.cli.flags.groups import taking
from bigfleet.cli.flags.help_text import HelpGroup
from bigfleet.cli.flags.switches import SwitchCommand
from bigfleet.cli.flags.values import parse_positive_duration_seconds
from bigfleet.cli.get.shared import QueryFlags
from bigfleet.cli.runtime.failures import RunFault
from bigfleet.cli.runtime.terminal import echo
from bigfleet.model.clock import NANOS_PER_SECOND

if TYPE_CHECKING:
    from bigfleet.rpc.clients.shardadmin import ShardAdministrator
    from bigfleet.rpc.wire.gen import shardadmin_pb2

app = typer.Typer(cls=HelpGroup, help="Retire clusters that are gone.", no_args_is_help=True)

_Cluster = Annotated[str, typer.Argument(metavar="CLUSTER", help="Id of a cluster.")]
_Confirm = Annotated[bool, typer.Option("--confirm", help="Retire it; without this nothing is changed.")]
_Force = Annotated[bool, typer.Option("--force", help="Also while its operator is connected.")]
_Reason = Annotated[str, typer.Option(metavar="TEXT", help="Reason, written to the log and the audit log.")]
_For = Annotated[
    str, typer.Option("--for", metavar="DURATION", help="Refuse the cluster for at least this long, at most 30d.")
]

#: The flags of the address and the identity of a call.
_calling = taking(QueryFlags, without=("output",))


@app.callback()
def cluster() -> None:
    """Hold the subcommands together."""


@app.command(cls=SwitchCommand)
@_calling
def retire(
    calling: QueryFlags,
    cluster: _Cluster,
    confirm: _Confirm = False,
    force: _Force = False,
    reason: _Reason = "",
    for_: _For = "7d",
) -> None:
    """Show what a cluster has; with --confirm end its demand and have its machines reclaimed."""
    from bigfleet.rpc.wire.gen import shardadmin_pb2

    request = shardadmin_pb2.RetireClusterRequest(
        cluster_id=cluster,
        dry_run=not confirm,
        force=force,
        reason=reason,
        hold_seconds=max(1, int(parse_positive_duration_seconds(for_, "--for"))),
    )
    with _administrator(calling) as shard:
        answer = shard.retire_cluster(request)
    _show(cluster, answer, is_done=confirm)


@app.command(cls=SwitchCommand)
@_calling
def readmit(calling: QueryFlags, cluster: _Cluster) -> None:
    """Take the demand of a retired cluster again."""
    from bigfleet.rpc.wire.gen import shardadmin_pb2

    with _administrator(calling) as shard:
        shard.readmit_cluster(shardadmin_pb2.ReadmitClusterRequest(cluster_id=cluster))
    echo(f"{cluster} is admitted again: the shard accepts its next roll-up, and reclaims none of its machines before")


@contextmanager
def _administrator(calling: QueryFlags) -> Iterator["ShardAdministrator"]:
    """Yield the shard that the flags name, connected. Raises RunFault and UsageFault."""
    import grpc

    from bigfleet.cli.get.sources import shard_read_faults
    from bigfleet.cli.runtime.early_end import ended_by_interrupt
    from bigfleet.rpc.clients.shardadmin import ShardAdministrator
    from bigfleet.rpc.clients.shardread import ReadRefused

    address = calling.address()
    with ended_by_interrupt(), ShardAdministrator(address, tls=calling.tls()) as shard, shard_read_faults(address):
        shard.connect()
        try:
            yield shard
        except ReadRefused as fault:
            if fault.code is grpc.StatusCode.PERMISSION_DENIED:
                text = f"the shard at {address} rejects this identity: {fault}; it must be admin"
                raise RunFault(text) from fault
            if fault.code in (grpc.StatusCode.ABORTED, grpc.StatusCode.RESOURCE_EXHAUSTED):
                raise RunFault(f"the shard at {address}: {fault}") from fault
            raise


def _show(cluster: str, answer: "shardadmin_pb2.RetireClusterResponse", *, is_done: bool) -> None:
    from bigfleet.rpc.wire.convert_machine import state_from_wire

    for each in answer.machines:
        state = state_from_wire(each.state).label
        echo(f"{each.machines} × {each.instance_type or '(no type)'}, {state}, ${each.price_per_hour:,.2f} per hour")
    machines = sum(each.machines for each in answer.machines)
    cost = sum(each.price_per_hour for each in answer.machines)
    operator = "its operator is connected" if answer.connected else "its operator is not connected"
    echo(
        f"{cluster} has {machines} machines (${cost:,.2f} per hour), {answer.rows} rows of demand and {answer.actions} "
        f"actions under way; {operator}"
    )
    if answer.HasField("retired"):
        record = answer.retired
        owner = f" by {record.owner}" if record.owner else ""
        reason = f" ({record.reason})" if record.reason else ""
        echo(
            f"{cluster} is retired since {_moment(record.since_unix_nanos)}{owner}{reason}: its machines are reclaimed "
            f"within the safety limits, and it is refused until {_moment(record.until_unix_nanos)} at least"
        )
    if not is_done:
        echo(f"nothing was changed; bigfleet cluster retire {cluster} --confirm retires it")


def _moment(unix_nanos: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(unix_nanos // NANOS_PER_SECOND, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
