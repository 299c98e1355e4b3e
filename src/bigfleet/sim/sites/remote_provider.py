"""Carries a shard's calls to a provider over the simulated network, in the bytes of the real wire.

The provider is the kit's core, in a process of its own. A call that was taken goes on after its caller has gone.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from bigfleet.model.clock import Clock
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.provider.kit.core import AcceptedCall, CapacityCore
from bigfleet.provider.records.fence import Token
from bigfleet.provider.records.record import Record
from bigfleet.provider.records.refusal import Refused
from bigfleet.provider.testing import settled
from bigfleet.rpc.servers.provider import join_list
from bigfleet.rpc.wire.convert_machine import machine_from_wire, machine_to_wire
from bigfleet.rpc.wire.gen import provider_pb2
from bigfleet.rpc.wire.list_response import read_listing
from bigfleet.shard.ports import FenceToken, ListedMachine, Listing, ProviderRefusal, RefusalKind, TransitionAck
from bigfleet.sim.kernel.network import ConnectionLost, Network
from bigfleet.sim.kernel.processes import Process

CoreCall = Callable[[CapacityCore], Coroutine[Any, Any, AcceptedCall]]


class ProviderHost(Protocol):
    """A provider's place, as shards reach it."""

    @property
    def process(self) -> Process:
        """The process of the moment."""

    def serving(self) -> CapacityCore:
        """Return the core. Raises Refused while none serves."""

    async def listing(self, since: bytes) -> bytes:
        """Return the bytes of an answer to List. Raises Refused."""


class RemoteProvider:
    """One shard process's way to a provider; implements `bigfleet.shard.ports.Provider`."""

    def __init__(
        self,
        *,
        site: ProviderHost,
        network: Network,
        clock: Clock,
        caller: str,
        on_call: Callable[[str, str, FenceToken, str], None],
        synchronous_create: bool = False,
    ) -> None:
        """`on_call` takes (method, machine, token, "") before a mutating call leaves, and its answer's name after.

        `synchronous_create` answers a Create with the machine at rest.
        """
        self._site = site
        self._network = network
        self._clock = clock
        self._caller = caller
        self._on_call = on_call
        self._synchronous_create = synchronous_create

    async def create(self, machine_id: MachineId, token: FenceToken) -> TransitionAck:
        """Give a slot a host."""
        return await self._mutate(
            "create", machine_id, token, lambda core: core.create(machine_id, token=Token(*token))
        )

    async def configure(
        self, machine_id: MachineId, cluster: ClusterId, blob: bytes, metadata: Mapping[str, str], token: FenceToken
    ) -> TransitionAck:
        """Bind an idle machine to a cluster."""
        return await self._mutate(
            "configure",
            machine_id,
            token,
            lambda core: core.configure(machine_id, cluster, blob, dict(metadata), token=Token(*token)),
        )

    async def drain(self, machine_id: MachineId, grace_seconds: int, token: FenceToken) -> TransitionAck:
        """Take a machine back from its cluster."""
        return await self._mutate(
            "drain", machine_id, token, lambda core: core.drain(machine_id, grace_seconds, token=Token(*token))
        )

    async def delete(self, machine_id: MachineId, token: FenceToken) -> TransitionAck:
        """Give the host back."""
        return await self._mutate(
            "delete", machine_id, token, lambda core: core.delete(machine_id, token=Token(*token))
        )

    async def get(self, machine_id: MachineId) -> ListedMachine:
        """Return the record of one machine."""

        async def work() -> bytes:
            return _record_bytes(await self._site.serving().get(machine_id))

        return _record(await self._carried(work))

    async def list(self, since_revision: bytes) -> Listing:
        """Return every record, or what changed since the cursor."""
        return await read_listing(await self._carried(lambda: self._site.listing(since_revision)), self._clock)

    async def _mutate(self, method: str, machine_id: MachineId, token: FenceToken, call: CoreCall) -> TransitionAck:
        async def work() -> tuple[str, bytes]:
            core = self._site.serving()
            ack = await call(core)
            is_settled = method == "create" and self._synchronous_create
            return ack.operation_id, _record_bytes(await settled(core, machine_id) if is_settled else ack.record)

        self._on_call(method, machine_id, token, "")
        try:
            operation_id, content = await self._carried(work)
        except ProviderRefusal as refusal:
            self._on_call(method, machine_id, token, refusal.kind.value)
            raise
        except asyncio.CancelledError:
            self._on_call(method, machine_id, token, "cancelled")
            raise
        self._on_call(method, machine_id, token, "ok")
        return TransitionAck(operation_id=operation_id, record=_record(content))

    async def _carried(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        try:
            return await self._network.call(self._caller, self._site.process, work)
        except ConnectionLost as lost:
            raise ProviderRefusal(RefusalKind.UNKNOWN_OUTCOME, f"UNAVAILABLE: {lost}") from lost
        except Refused as refused:
            text = f"{refused.code.value}: {refused.message}"
            raise ProviderRefusal(RefusalKind.of_status(refused.code.name), text) from refused


async def list_bytes(core: CapacityCore, since: bytes) -> bytes:
    """Return the bytes of the core's answer to List, equal in every process."""
    joined = join_list(await core.list((), 0, since))
    # The bytes of a map differ between processes, and with them their digests: here they are put in order.
    return provider_pb2.MachineList.FromString(joined).SerializeToString(deterministic=True)


def _record_bytes(record: Record) -> bytes:
    return machine_to_wire(record.machine, record.metadata).SerializeToString()


def _record(content: bytes) -> ListedMachine:
    return ListedMachine(*machine_from_wire(provider_pb2.Machine.FromString(content)))
