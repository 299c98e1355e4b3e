"""Defines `bigfleet get shards|domains|quotas|providers|bindings|instructions|moves`.

These subcommands read a coordinator; those of `command` read a shard. `bigfleet get clusters` reads a shard, so the
coordinator's assignment of clusters to shards is `bindings`. Exit codes are those of `command`. This module does not
change a coordinator.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from bigfleet.cli.flags.groups import taking
from bigfleet.cli.flags.switches import SwitchCommand
from bigfleet.cli.get.coordinator_asking import LookingAtCoordinator, asked, caller_of

if TYPE_CHECKING:
    from bigfleet.cli.get.columns import TableColumn
    from bigfleet.cli.get.records import Record

_Shard = Annotated[str, typer.Option("--shard", metavar="ID", help="Only instructions to this shard.")]
_Either = Annotated[str, typer.Option("--shard", metavar="ID", help="Only moves from or to this shard.")]
_All = Annotated[bool, typer.Option("--all", help="Also list finished instructions that the leader remembers.")]


@taking(LookingAtCoordinator)
def shards(looking: LookingAtCoordinator) -> None:
    """List registered shards, their addresses and whether they report."""
    from bigfleet.cli.get import coordinator_records as records
    from bigfleet.rpc.wire.gen import coordinator_pb2 as pb

    def look() -> "Iterator[Record]":
        return records.shard_records(
            asked(caller_of(looking), "ListShards", pb.ListShardsRequest(), pb.ListShardsResponse)
        )

    _show(look, records.SHARDS, "shard", looking)


@taking(LookingAtCoordinator)
def domains(looking: LookingAtCoordinator) -> None:
    """List topology domains and their shards."""
    from bigfleet.cli.get import coordinator_records as records
    from bigfleet.rpc.wire.gen import coordinator_pb2 as pb

    def look() -> "Iterator[Record]":
        request, answer = pb.ListDomainAssignmentsRequest(), pb.ListDomainAssignmentsResponse
        return records.domain_records(asked(caller_of(looking), "ListDomainAssignments", request, answer))

    _show(look, records.DOMAINS, "domain", looking)


@taking(LookingAtCoordinator)
def quotas(looking: LookingAtCoordinator) -> None:
    """List the quotas of shards by provider and region."""
    from bigfleet.cli.get import coordinator_records as records
    from bigfleet.rpc.wire.gen import coordinator_pb2 as pb

    def look() -> "Iterator[Record]":
        return records.quota_records(
            asked(caller_of(looking), "ListQuotas", pb.ListQuotasRequest(), pb.ListQuotasResponse)
        )

    _show(look, records.QUOTAS, "quota", looking)


@taking(LookingAtCoordinator)
def providers(looking: LookingAtCoordinator) -> None:
    """List providers that have quotas."""
    from bigfleet.cli.get import coordinator_records as records
    from bigfleet.rpc.wire.gen import coordinator_pb2 as pb

    def look() -> "Iterator[Record]":
        request, answer = pb.ListProvidersRequest(), pb.ListProvidersResponse
        return records.provider_records(asked(caller_of(looking), "ListProviders", request, answer))

    _show(look, records.PROVIDERS, "provider", looking)


@taking(LookingAtCoordinator)
def bindings(looking: LookingAtCoordinator) -> None:
    """List clusters and their shards, with conflicting reports."""
    from bigfleet.cli.get import coordinator_records as records
    from bigfleet.rpc.wire.gen import coordinator_pb2 as pb

    def look() -> "Iterator[Record]":
        return records.binding_records(
            asked(caller_of(looking), "ListClusters", pb.ListClustersRequest(), pb.ListClustersResponse)
        )

    _show(look, records.BINDINGS, "binding", looking)


@taking(LookingAtCoordinator)
def instructions(looking: LookingAtCoordinator, shard: _Shard = "", all_: _All = False) -> None:
    """List instructions that shards have not acknowledged."""
    from bigfleet.cli.get import coordinator_records as records
    from bigfleet.cli.get.flag_values import shard_id
    from bigfleet.rpc.wire.gen import coordinator_pb2 as pb

    request = pb.ListInstructionsRequest(shard_id=shard_id(shard), include_finished=all_)

    def look() -> "Iterator[Record]":
        answer = asked(caller_of(looking), "ListInstructions", request, pb.ListInstructionsResponse)
        return records.instruction_records(answer)

    _show(look, records.INSTRUCTIONS, "instruction", looking)


@taking(LookingAtCoordinator)
def moves(looking: LookingAtCoordinator, shard: _Either = "") -> None:
    """List moves of machines between shards and their reasons."""
    from bigfleet.cli.get import coordinator_records as records
    from bigfleet.cli.get.flag_values import shard_id
    from bigfleet.rpc.wire.gen import coordinator_pb2 as pb

    request, wanted = pb.ListInstructionsRequest(include_finished=True), shard_id(shard)

    def look() -> "Iterator[Record]":
        answer = asked(caller_of(looking), "ListInstructions", request, pb.ListInstructionsResponse)
        return records.move_records(answer, shard=wanted)

    _show(look, records.MOVES, "move", looking)


def add_to(app: typer.Typer) -> None:
    """Add the subcommands to `bigfleet get`."""
    for command in (shards, domains, quotas, providers, bindings, instructions, moves):
        app.command(cls=SwitchCommand)(command)


def _show(
    look: "Callable[[], Iterator[Record]]", columns: "Sequence[TableColumn]", noun: str, looking: LookingAtCoordinator
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
