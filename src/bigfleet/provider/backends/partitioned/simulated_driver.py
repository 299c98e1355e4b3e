"""Drives no hosts: instances boot, join, drain and go in the times of the simulated cloud.

docs/spec/provider.md §21, §22. The cloud is calm and outlives the provider. This module must not choose a host.
"""

from collections.abc import Sequence

from bigfleet.model.clock import Clock
from bigfleet.provider.backend import FoundKind, MachineView, Op, Slot
from bigfleet.provider.backends.partitioned.ports import Carved, Standing
from bigfleet.provider.backends.simulated.backend import SimulatedBackend, SimulatedReadiness
from bigfleet.provider.backends.simulated.cloud import SimulatedCloud
from bigfleet.provider.backends.simulated.fleet import SimulatedOffer

_HOST, _INSTANCE = "host", "instance"


class SimulatedDriver:
    """Carves in a `SimulatedCloud` that was opened without offers."""

    def __init__(self, cloud: SimulatedCloud, *, clock: Clock, time_scale: float) -> None:
        self._cloud = cloud
        self._backend = SimulatedBackend(cloud, provider="simulated", clock=clock)
        self._readiness = SimulatedReadiness(cloud, time_scale=time_scale)
        self.ready_interval_seconds = self._readiness.interval_seconds

    async def create(self, machine: MachineView, carved: Carved, op: Op) -> str:
        """Boot the instance; its dwell is that of the capacity type."""
        slot = Slot(
            id=machine.id,
            instance_type=machine.instance_type,
            zone=machine.zone,
            capacity_type=machine.capacity_type,
            # How an inventory finds it again, also after a restart.
            labels={_HOST: carved.host, _INSTANCE: carved.instance},
            price_usd_per_hour=machine.price_usd_per_hour,
        )
        self._cloud.offers[machine.id] = SimulatedOffer(
            slot=slot,
            own_price_usd_per_hour=machine.price_usd_per_hour,
            own_probability=0.0,
            on_demand_usd_per_hour=None,
            is_idle_at_start=False,
        )
        return (await self._backend.create(machine, op)).node_name

    async def configure(self, machine: MachineView, carved: Carved, cluster: str, blob: bytes, op: Op) -> str:
        """Hand the blob over; `ready` says when the node has joined."""
        return await self._backend.configure(machine, cluster, blob, op) or ""

    async def ready(self, machine: MachineView, carved: Carved, cluster: str, op: Op) -> bool:
        """Return whether the node has joined."""
        return await self._readiness.ready(machine, cluster, op)

    async def drain(self, machine: MachineView, carved: Carved, grace_seconds: int, op: Op) -> None:
        """Take the instance out of its cluster."""
        await self._backend.drain(machine, grace_seconds, op)

    async def delete(self, machine: MachineView, carved: Carved, op: Op) -> None:
        """Remove the instance."""
        await self._backend.delete(machine, op)

    async def adopt(self, machine: MachineView, carved: Carved) -> FoundKind:
        """Say what the cloud sees."""
        return (await self._backend.adopt(machine)).kind

    async def inventory(self) -> Sequence[Standing]:
        """Return every instance of the cloud."""
        standing = []
        for machine_id, host in self._cloud.hosts():
            made = self._cloud.made(machine_id)
            if made is not None:
                labels = made.labels
                standing.append(Standing(host=labels[_HOST], instance=labels[_INSTANCE], node_name=f"node-{host.ref}"))
        return standing
