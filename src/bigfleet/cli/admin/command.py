"""Defines `bigfleet admin`: one call each to the coordinator's leader (docs/spec/wire.md §10).

Exit 0 if the change was made or was already in force; 1 if the coordinator cannot be reached or rejects it; 2 for a
wrong call. No command prompts: a change that cannot be undone needs a flag of its own.
"""

from typing import TYPE_CHECKING, Annotated, Final

import typer

from bigfleet.cli.flags.groups import taking
from bigfleet.cli.flags.help_text import HelpGroup
from bigfleet.cli.flags.switches import SwitchCommand
from bigfleet.cli.get.coordinator_asking import AskingCoordinator
from bigfleet.cli.runtime.failures import UsageFault
from bigfleet.cli.runtime.terminal import echo
from bigfleet.cli.snapshot.command import app as snapshot_app

if TYPE_CHECKING:
    from google.protobuf.message import Message

#: Of a shard at one provider and region: what an int32 holds.
SLOTS_MAX: Final = 2**31 - 1

app = typer.Typer(cls=HelpGroup, help="Change the coordinator's tables: domains, shards, quotas.", no_args_is_help=True)
app.add_typer(snapshot_app, name="snapshot")

_Domain = Annotated[
    str, typer.Argument(metavar="KEY=VALUE", help="Topology domain, such as topology.kubernetes.io/zone=eu-west-1a.")
]
_Shard = Annotated[str, typer.Argument(metavar="SHARD", help="Id of a registered shard.")]
_Force = Annotated[
    bool,
    typer.Option("--force", help="Remove a shard that may still run. Make sure that its process has ended."),
]
_Slots = Annotated[
    list[str] | None, typer.Argument(metavar="SHARD=SLOTS", help="Slots per shard; without any the quota is deleted.")
]


#: Whom to call, and as whom; a change has one line for an answer.
_calling = taking(AskingCoordinator, without=("output",))


@app.callback()
def admin() -> None:
    """Hold the subcommands together."""


@app.command(cls=SwitchCommand)
@_calling
def assign_domain(calling: AskingCoordinator, domain: _Domain, shard: _Shard) -> None:
    """Assign a topology domain to a shard."""
    from bigfleet.rpc.wire.gen import coordinator_pb2 as pb

    key, value = _pair(domain)
    request = pb.AssignDomainRequest(topology_key=key, topology_value=value, shard_id=shard)
    _call(calling, "AssignDomain", request, pb.AssignDomainResponse)
    echo(f"{domain} is assigned to {shard}")


@app.command(cls=SwitchCommand)
@_calling
def unassign_domain(calling: AskingCoordinator, domain: _Domain) -> None:
    """Start to withdraw a domain from its shard; it keeps machines in use until they are idle."""
    from bigfleet.rpc.wire.gen import coordinator_pb2 as pb

    key, value = _pair(domain)
    request = pb.UnassignDomainRequest(topology_key=key, topology_value=value)
    _call(calling, "UnassignDomain", request, pb.UnassignDomainResponse)
    echo(f"{domain} is being released; bigfleet get domains lists it until its shard has left it")


@app.command(cls=SwitchCommand)
@_calling
def remove_shard(calling: AskingCoordinator, shard: _Shard, force: _Force = False) -> None:
    """Remove a shard with its clusters, domains and quotas."""
    from bigfleet.rpc.wire.gen import coordinator_pb2 as pb

    request = pb.RemoveShardRequest(shard_id=shard, force=force)
    _call(calling, "RemoveShard", request, pb.RemoveShardResponse)
    echo(f"{shard} is removed")


@app.command(cls=SwitchCommand)
@_calling
def bind_cluster(
    calling: AskingCoordinator,
    cluster: Annotated[str, typer.Argument(metavar="CLUSTER", help="Id of a cluster.")],
    shard: _Shard,
) -> None:
    """Bind a cluster to a shard; only remove-shard undoes it."""
    from bigfleet.rpc.wire.gen import coordinator_pb2 as pb

    request = pb.BindClusterRequest(cluster_id=cluster, shard_id=shard)
    _call(calling, "BindCluster", request, pb.BindClusterResponse)
    echo(f"{cluster} is bound to {shard}")


@app.command(cls=SwitchCommand)
@_calling
def set_quota(
    calling: AskingCoordinator,
    provider: Annotated[str, typer.Argument(metavar="PROVIDER", help="Name of a provider.")],
    region: Annotated[str, typer.Argument(metavar="REGION", help="Region of the provider.")],
    slots: _Slots = None,
) -> None:
    """Set the quotas of a provider in a region; shards that are not named get none."""
    from bigfleet.rpc.wire.gen import coordinator_pb2 as pb

    allocation = pb.QuotaAllocation(provider=provider, region=region, per_shard=_slots_of(slots or []))
    _call(calling, "SetQuota", pb.SetQuotaRequest(allocation=allocation), pb.SetQuotaResponse)
    echo(f"the quota of {provider} in {region} is {'set' if slots else 'deleted'}")


@app.command(cls=SwitchCommand)
@_calling
def set_provider(
    calling: AskingCoordinator,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the provider, as in quotas.")],
    address: Annotated[
        str,
        typer.Argument(
            metavar="HOST:PORT", help="Address as in the shards' --provider-addr; without it the provider is deleted."
        ),
    ] = "",
    region: Annotated[str, typer.Option(metavar="REGION", help="Region whose quota counts its slots.")] = "",
) -> None:
    """Set a provider's address, so that moved slots count towards quotas."""
    from bigfleet.rpc.wire.gen import coordinator_pb2 as pb

    provider = pb.ProviderEntry(name=name, address=address, region=region)
    _call(calling, "UpsertProvider", pb.UpsertProviderRequest(provider=provider), pb.UpsertProviderResponse)
    echo(f"{name} is {'set' if address else 'deleted'}")


def _call(calling: AskingCoordinator, method: str, request: "Message", answer: "type[Message]") -> None:
    from bigfleet.cli.get.coordinator_asking import asked, caller_of
    from bigfleet.cli.runtime.early_end import ended_by_interrupt

    with ended_by_interrupt():
        asked(caller_of(calling), method, request, answer)


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        raise UsageFault(f"{text!r} is not a domain; use KEY=VALUE, such as topology.kubernetes.io/zone=eu-west-1a")
    return key, value


def _slots_of(texts: list[str]) -> dict[str, int]:
    slots_of: dict[str, int] = {}
    for text in texts:
        shard, _, number = text.rpartition("=")
        is_number = number.isascii() and number.isdigit() and len(number) <= len(str(SLOTS_MAX))
        if not (shard and is_number and int(number) <= SLOTS_MAX):
            raise UsageFault(
                f"{text!r} is not a share of a quota; use SHARD=SLOTS, such as east-0=100, up to {SLOTS_MAX}"
            )
        if shard in slots_of:
            raise UsageFault(f"{shard!r} is given twice; name each shard once")
        slots_of[shard] = int(number)
    return slots_of
