"""Defines `bigfleet explain`: finds the row or machine that a name means, and asks the shard for the explanation.

Exit 0 if the shard explained it, 1 if the shard cannot be reached or knows no such row or machine, 2 for a wrong call.
An explanation is computed off the shard's loop, takes seconds at most for any size of fleet, and changes nothing.
"""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Final

import typer

from bigfleet.cli.flags.groups import taking
from bigfleet.cli.flags.help_text import HelpGroup
from bigfleet.cli.flags.switches import SwitchCommand
from bigfleet.cli.get.shared import QueryFlags
from bigfleet.cli.runtime.failures import RunFault, UsageFault
from bigfleet.cli.runtime.terminal import echo
from bigfleet.cli.visible_text import visible_json

if TYPE_CHECKING:
    from rich.console import Console

    from bigfleet.cli.get.records import Record
    from bigfleet.rpc.clients.shardread import ShardReader
    from bigfleet.rpc.wire.gen import shardread_pb2

#: Rows that an ambiguous beginning names.
NAMED_MAX: Final = 5
#: Width of a page where there is no terminal.
WIDTH: Final = 120

app = typer.Typer(
    cls=HelpGroup, help="Explain the decisions of the last cycle of a running shard.", no_args_is_help=True
)


@app.callback()
def explain() -> None:
    """Hold the subcommands together."""


@app.command(cls=SwitchCommand)
@taking(QueryFlags)
def need(
    asking: QueryFlags,
    cluster: Annotated[str, typer.Argument(metavar="CLUSTER", help="Cluster of the row.")],
    need_id: Annotated[
        str, typer.Argument(metavar="NEED", help="Id of the row as in bigfleet get needs, or a prefix of it.")
    ],
) -> None:
    """Explain what a row of demand received."""
    from bigfleet.cli.explain.page import show_need
    from bigfleet.cli.get.flag_values import cluster_id
    from bigfleet.cli.get.records import event_record, need_record, time_text

    if not (cluster and need_id):
        raise UsageFault("CLUSTER and NEED must not be empty; bigfleet get needs lists the rows")
    name = cluster_id(cluster)

    def ask(reader: "ShardReader") -> "Record":
        explained = reader.explain_need(_row_meant(reader, name, need_id))
        return {
            "cycle": explained.cycle,
            "computedAt": time_text(explained.computed_at_unix_nanos),
            "need": need_record(explained.need),
            "events": [event_record(event) for event in explained.events],
            "truncated": explained.truncated,
        }

    _explain(asking, ask, show_need)


@app.command(cls=SwitchCommand)
@taking(QueryFlags)
def machine(
    asking: QueryFlags,
    machine_id: Annotated[str, typer.Argument(metavar="MACHINE", help="Id of the machine.")],
) -> None:
    """Explain the binding of a machine and its actions."""
    from bigfleet.cli.explain.page import show_machine
    from bigfleet.cli.get.records import action_record, event_record, machine_record, time_text
    from bigfleet.rpc.wire.gen import shardread_pb2

    def ask(reader: "ShardReader") -> "Record":
        explained = reader.explain_machine(shardread_pb2.ExplainMachineRequest(machine_id=machine_id))
        return {
            "cycle": explained.cycle,
            "computedAt": time_text(explained.computed_at_unix_nanos),
            "machine": machine_record(explained.machine),
            "events": [event_record(event) for event in explained.events],
            "actions": [action_record(action) for action in explained.actions],
        }

    _explain(asking, ask, show_machine)


def _explain(
    asking: QueryFlags, ask: "Callable[[ShardReader], Record]", show: "Callable[[Console, Record], None]"
) -> None:
    import msgspec
    import yaml

    from bigfleet.cli.get.flag_values import output_form
    from bigfleet.cli.get.output import quiet_when_unread
    from bigfleet.cli.get.sources import connected
    from bigfleet.cli.runtime.console import output_console
    from bigfleet.cli.runtime.early_end import ended_by_interrupt

    address, tls, form = asking.address(), asking.tls(), output_form(asking.output)
    with ended_by_interrupt(), connected(address, tls) as reader:
        explained = ask(reader)
    with quiet_when_unread():
        if form == "json":
            echo(visible_json(msgspec.json.format(msgspec.json.encode(explained), indent=2).decode()))
        elif form == "yaml":
            yaml.safe_dump(explained, sys.stdout, sort_keys=False, allow_unicode=True)
        else:
            show(output_console(WIDTH), explained)


def _row_meant(reader: "ShardReader", cluster: str, asked: str) -> "shardread_pb2.ExplainNeedRequest":
    """Return the one row of the cluster whose id begins so. Raises RunFault for none, UsageFault for several."""
    from bigfleet.cli.get.records import need_id
    from bigfleet.rpc.wire.gen import shardread_pb2

    listing = reader.needs(shardread_pb2.InspectNeedsRequest(cluster_id=cluster))
    if not listing.cycle:
        raise RunFault(f"the shard at {reader.address} is not ready yet: it has finished no cycle to explain")
    keys = {(view.profile_fingerprint, view.need.group) for view in listing.entries}
    found = {need_id(*key): key for key in keys if need_id(*key).startswith(asked.lower())}
    if not found:
        raise RunFault(
            f"cycle {listing.cycle} had no row of cluster {cluster!r} whose id begins with {asked!r}; "
            "bigfleet get needs lists the rows"
        )
    if len(found) > 1:
        named = ", ".join(sorted(found)[:NAMED_MAX])
        rest = f" and {len(found) - NAMED_MAX:,} more" if len(found) > NAMED_MAX else ""
        raise UsageFault(f"{asked!r} matches {len(found):,} rows of {cluster!r}: {named}{rest}; give more of the id")
    ((fingerprint, group),) = found.values()
    return shardread_pb2.ExplainNeedRequest(cluster_id=cluster, profile_fingerprint=fingerprint, group=group)
