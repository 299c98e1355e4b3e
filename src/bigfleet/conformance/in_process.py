"""Runs the suite against a core of the kit without a network, for tests of both (docs/spec/provider.md §16, §23).

With a virtual clock a whole run takes a moment. Nothing of the suite but this module may import the kit.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields

from bigfleet.conformance.ports import (
    Answer,
    Configure,
    Create,
    Delete,
    Drain,
    Get,
    HostSeen,
    ListSeen,
    MachineSeen,
    Mutation,
    ProviderClient,
    ProviderUnderTest,
    Request,
    SiteFault,
    SiteMissing,
    Status,
)
from bigfleet.conformance.profiles import ConformanceProfile, Lane
from bigfleet.conformance.runner import ConformanceReport, Plan, Runner
from bigfleet.model.clock import Clock
from bigfleet.model.ids import IdSource, Rng
from bigfleet.model.machine import Machine
from bigfleet.provider.kit.core import AcceptedCall, CapacityCore
from bigfleet.provider.records.fence import Token as CoreToken
from bigfleet.provider.records.record import Record
from bigfleet.provider.records.refusal import Refused


class CoreClient:
    """Carries the suite's requests to a core; the map of a Configure is handed over as it is."""

    def __init__(self, core: CapacityCore) -> None:
        self.core = core

    async def call(self, request: Request) -> Answer:
        """Carry a request. A refusal is a status, and a bug of the core is INTERNAL, as over the wire."""
        try:
            if isinstance(request, Create | Configure | Drain | Delete):
                return _acked(await self._mutate(request))
            if isinstance(request, Get):
                return Answer(status=Status.OK, machine=machine_seen(await self.core.get(request.machine_id)))
            listing = await self.core.list(request.states, request.results_max, request.since)
        except Refused as refused:
            return Answer(status=Status[refused.code.value], details=refused.message)
        except Exception as error:  # what gRPC would make of it
            return Answer(status=Status.INTERNAL, details=f"{type(error).__name__}: {error}")
        seen = ListSeen(
            machines=tuple(machine_seen(record) for record in listing.records),
            revision=listing.revision,
            removed_ids=listing.removed_ids,
            tombstones=listing.tombstones,
        )
        return Answer(status=Status.OK, listing=seen)

    async def _mutate(self, request: Mutation) -> AcceptedCall:
        token = CoreToken(*request.token)
        match request:
            case Create():
                return await self.core.create(request.machine_id, token=token)
            case Configure():
                return await self.core.configure(
                    request.machine_id, request.cluster, request.blob, request.metadata, token=token
                )
            case Drain():
                return await self.core.drain(request.machine_id, request.grace_seconds, token=token)
            case Delete():
                return await self.core.delete(request.machine_id, token=token)


def _acked(ack: AcceptedCall) -> Answer:
    return Answer(status=Status.OK, operation_id=ack.operation_id, machine=machine_seen(ack.record))


def machine_seen(record: Record) -> MachineSeen:
    """Return a record as the suite reads it."""
    machine: Machine = record.machine
    return MachineSeen(
        host=HostSeen(*machine.host) if machine.host.is_present else None,
        metadata=record.metadata,
        **{name: getattr(machine, name) for name in _AS_THEY_ARE},
    )


#: Fields that a record has under the same name.
_AS_THEY_ARE = tuple(each.name for each in fields(MachineSeen) if each.name not in ("host", "metadata"))


class ClientSite:
    """A provider in this process, reached over the given clients."""

    def __init__(self, connections: Sequence[ProviderClient], address: str = "in process") -> None:
        assert len(connections) >= 2, "the suite wants two connections"
        self.connections: Sequence[ProviderClient] = connections
        self.address = address

    async def restart(self) -> None:
        """Raise SiteFault: nothing kills what lives in this process."""
        raise SiteFault(f"{self.address}: a provider in this process is not restarted")

    async def close(self) -> None:
        """Do nothing: who made the provider ends it."""


class OneSite:
    """The same provider for the lanes that need no start of their own."""

    def __init__(self, site: ProviderUnderTest) -> None:
        self._site = site

    async def open(self, lane: Lane) -> ProviderUnderTest:
        """Return the site. Raises SiteMissing for lanes that start their provider."""
        if lane in (Lane.DURABLE, Lane.FAULT):
            raise SiteMissing(f"the {lane.value} behaviours start their provider themselves")
        return self._site


async def certify(
    core: CapacityCore,
    *,
    clock: Clock,
    ids: IdSource,
    make_rng: Callable[[str], Rng],
    plan: Plan | None = None,
) -> ConformanceReport:
    """Run the suite before a started core, core and cloud by default. Raises SiteFault for too few slots."""
    client = CoreClient(core)
    plan = plan or Plan(profiles=frozenset({ConformanceProfile.CORE, ConformanceProfile.CLOUD}))
    site = ClientSite((client, CoreClient(core)))
    return await Runner(plan, OneSite(site), clock=clock, ids=ids, make_rng=make_rng).run()
