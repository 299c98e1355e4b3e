"""Turns a shard's calls to its provider into calls of the kit's core, for worlds that carry them in their own ways."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.provider.kit.core import AcceptedCall, CapacityCore
from bigfleet.provider.records.fence import Token
from bigfleet.provider.records.refusal import Refused
from bigfleet.shard.ports import FenceToken, ListedMachine, Listing, ProviderRefusal, RefusalKind, TransitionAck

CoreCall = Callable[[CapacityCore], Coroutine[Any, Any, AcceptedCall]]


class CoreProvider(ABC):
    """One shard process's way to a provider; implements `bigfleet.shard.ports.Provider`."""

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

    @abstractmethod
    async def get(self, machine_id: MachineId) -> ListedMachine:
        """Return the record of one machine. Raises ProviderRefusal."""

    @abstractmethod
    async def list(self, since_revision: bytes) -> Listing:
        """Return every record, or what changed since the cursor. Raises ProviderRefusal."""

    @abstractmethod
    async def _mutate(self, method: str, machine_id: MachineId, token: FenceToken, call: CoreCall) -> TransitionAck:
        """Carry a call to the core and return its answer. Raises ProviderRefusal."""


def refusal_of(refused: Refused) -> ProviderRefusal:
    """Return what a shard sees of the core's refusal."""
    return ProviderRefusal(RefusalKind.of_status(refused.code.name), f"{refused.code.value}: {refused.message}")
