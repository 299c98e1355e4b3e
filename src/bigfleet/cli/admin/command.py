"""Defines `bigfleet admin`: one call each to the coordinator's leader (docs/spec/wire.md §10).

Exit 0 when it was done, or was so already; 1 when the coordinator cannot be reached or refuses, 2 for a wrong call.
Nothing here asks back: what cannot be undone wants its own flag.
"""

from typing import TYPE_CHECKING, Annotated, Final

import typer

from bigfleet.cli.flags.groups import taking
from bigfleet.cli.flags.switches import SwitchCommand
from bigfleet.cli.get.coordinator_asking import AskingCoordinator
from bigfleet.cli.runtime.failures import UsageFault
from bigfleet.cli.snapshot.command import app as snapshot_app

if TYPE_CHECKING:
    from google.protobuf.message import Message

#: Of a shard at one provider and region: what an int32 holds.
SLOTS_MAX: Final = 2**31 - 1

app = typer.Typer(help="Change what the coordinator keeps: domains, shards, quotas.", no_args_is_help=True)
app.add_typer(snapshot_app, name="snapshot")

_Domain = Annotated[str, typer.Argument(metavar="KEY=VALUE", help="Such as topology.kubernetes.io/zone=eu-west-1a.")]
_Shard = Annotated[str, typer.Argument(metavar="SHARD", help="Id of a registered shard.")]
_Force = Annotated[bool, typer.Option("--force", help="Although it may be alive: its process is gone, I promise.")]
_Slots = Annotated[
    list[str] | None, typer.Argument(metavar="SHARD=SLOTS", help="What each shard may use; none deletes the row.")
]


#: Whom to call, and as whom; a change has one line for an answer.
_calling = taking(AskingCoordinator, without=("output",))


@app.callback()
def admin() -> None:
    """Hold the subcommands together."""


@app.command(cls=SwitchCommand)
@_calling
def assign_domain(calling: AskingCoordinator, domain: _Domain, shard: _Shard) -> None:
    """Give a topology domain to a shard, which hears of it with its next report."""
    from bigfleet.rpc.wire.gen import coordinator_pb2 as pb

    key, value = _pair(domain)
    request = pb.AssignDomainRequest(topology_key=key, topology_value=value, shard_id=shard)
    _call(calling, "AssignDomain", request, pb.AssignDomainResponse)
    typer.echo(f"{domain} is assigned to {shard}")


@app.command(cls=SwitchCommand)
@_calling
def unassign_domain(calling: AskingCoordinator, domain: _Domain) -> None:
    """Begin to take a domain from its shard, which keeps the machines that run something until demand lets them go."""
    from bigfleet.rpc.wire.gen import coordinator_pb2 as pb

    key, value = _pair(domain)
    request = pb.UnassignDomainRequest(topology_key=key, topology_value=value)
    _call(calling, "UnassignDomain", request, pb.UnassignDomainResponse)
    typer.echo(f"{domain} is being released; bigfleet get domains lists it until its shard has left it")


@app.command(cls=SwitchCommand)
@_calling
def remove_shard(calling: AskingCoordinator, shard: _Shard, force: _Force = False) -> None:
    """Remove a shard that is gone for good, with its clusters, domains and quotas."""
    from bigfleet.rpc.wire.gen import coordinator_pb2 as pb

    request = pb.RemoveShardRequest(shard_id=shard, force=force)
    _call(calling, "RemoveShard", request, pb.RemoveShardResponse)
    typer.echo(f"{shard} is removed")


@app.command(cls=SwitchCommand)
@_calling
def bind_cluster(
    calling: AskingCoordinator,
    cluster: Annotated[str, typer.Argument(metavar="CLUSTER", help="Id of a cluster.")],
    shard: _Shard,
) -> None:
    """Bind a cluster to a shard, before or in place of its first report; only removing the shard undoes it."""
    from bigfleet.rpc.wire.gen import coordinator_pb2 as pb

    request = pb.BindClusterRequest(cluster_id=cluster, shard_id=shard)
    _call(calling, "BindCluster", request, pb.BindClusterResponse)
    typer.echo(f"{cluster} is bound to {shard}")


@app.command(cls=SwitchCommand)
@_calling
def set_quota(
    calling: AskingCoordinator,
    provider: Annotated[str, typer.Argument(metavar="PROVIDER", help="Name of a provider.")],
    region: Annotated[str, typer.Argument(metavar="REGION", help="One of its regions.")],
    slots: _Slots = None,
) -> None:
    """Divide a provider's slots in one region among shards; what is not named has none."""
    from bigfleet.rpc.wire.gen import coordinator_pb2 as pb

    allocation = pb.QuotaAllocation(provider=provider, region=region, per_shard=_slots_of(slots or []))
    _call(calling, "SetQuota", pb.SetQuotaRequest(allocation=allocation), pb.SetQuotaResponse)
    typer.echo(f"the quota of {provider} in {region} is {'set' if slots else 'deleted'}")


@app.command(cls=SwitchCommand)
@_calling
def set_provider(
    calling: AskingCoordinator,
    name: Annotated[str, typer.Argument(metavar="NAME", help="What quotas call it.")],
    address: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="As shards name it in --provider-addr; none deletes the row.")
    ] = "",
    region: Annotated[str, typer.Option(metavar="REGION", help="The region whose quota its slots count to.")] = "",
) -> None:
    """Say where a provider listens, so that its slots are counted when they move between shards."""
    from bigfleet.rpc.wire.gen import coordinator_pb2 as pb

    provider = pb.ProviderEntry(name=name, address=address, region=region)
    _call(calling, "UpsertProvider", pb.UpsertProviderRequest(provider=provider), pb.UpsertProviderResponse)
    typer.echo(f"{name} is {'set' if address else 'deleted'}")


def _call(calling: AskingCoordinator, method: str, request: "Message", answer: "type[Message]") -> None:
    from bigfleet.cli.get.coordinator_asking import asked, caller_of

    asked(caller_of(calling), method, request, answer)


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        raise UsageFault(f"{text!r} is no domain; write KEY=VALUE, such as topology.kubernetes.io/zone=eu-west-1a")
    return key, value


def _slots_of(texts: list[str]) -> dict[str, int]:
    slots_of: dict[str, int] = {}
    for text in texts:
        shard, _, number = text.rpartition("=")
        is_number = number.isascii() and number.isdigit() and len(number) <= len(str(SLOTS_MAX))
        if not (shard and is_number and int(number) <= SLOTS_MAX):
            raise UsageFault(
                f"{text!r} is no share of a quota; write SHARD=SLOTS, such as east-0=100, up to {SLOTS_MAX}"
            )
        if shard in slots_of:
            raise UsageFault(f"{shard!r} is named twice; write each shard once")
        slots_of[shard] = int(number)
    return slots_of
