"""Implements a backend without machines: every call succeeds at once, or waits until a test releases it.

docs/spec/provider.md §20. This module must not be served as a real provider without being asked for by name.
"""

import asyncio
from collections.abc import Iterable, Mapping

from bigfleet.model.states import CapacityType
from bigfleet.provider.backend import ExistingHost, Found, FoundKind, Host, Limits, MachineView, Op, Slot
from bigfleet.provider.records.kinds import Kind

_SHAPE = {"cpu": "7500m", "memory": "28Gi"}
_ZONES = ("zone-a", "zone-b", "zone-c")
_SPOT_EVERY = 3
SPOT_USD_PER_HOUR = 0.12
#: Within one hour: 5 % a month.
SPOT_PROBABILITY = 0.00007
ON_DEMAND_USD_PER_HOUR = 0.40
INSTANCE_TYPE = "fake.8x32"


def fake_slot(number: int, *, id: str) -> Slot:
    """Return slot `number` of the fake mix: every third SPOT, three zones in groups of three."""
    is_spot = number % _SPOT_EVERY == _SPOT_EVERY - 1
    return Slot(
        id=id,
        instance_type=INSTANCE_TYPE,
        zone=_ZONES[number // _SPOT_EVERY % len(_ZONES)],
        capacity_type=CapacityType.SPOT if is_spot else CapacityType.ON_DEMAND,
        resources=_SHAPE,
        allocatable=_SHAPE,
        price_usd_per_hour=SPOT_USD_PER_HOUR if is_spot else ON_DEMAND_USD_PER_HOUR,
        interruption_probability=SPOT_PROBABILITY if is_spot else 0.0,
    )


class FakeBackend:
    """`count` slots in memory. Hosts live as long as this object, so that a core can be restarted over it."""

    def __init__(self, count: int, *, resumable: frozenset[Kind] = frozenset(), limits: Limits | None = None) -> None:
        self.provider = "fake"
        self.limits = limits or Limits(resumable=resumable)
        self.slots = [fake_slot(number, id=f"fake-{number}") for number in range(count)]
        #: Host ref by machine id.
        self.hosts: dict[str, str] = {}
        #: Cluster by machine id.
        self.clusters: dict[str, str] = {}
        #: Every call that reached the backend, in order.
        self.calls: list[tuple[Kind, str, str]] = []
        self._held: set[Kind] = set()
        self._gates: dict[str, asyncio.Event] = {}

    def hold(self, kind: Kind) -> None:
        """Let machines stay in the transitional state of this kind until they are released."""
        self._held.add(kind)

    def unhold(self, kind: Kind) -> None:
        """Let new calls of this kind succeed at once again."""
        self._held.discard(kind)

    def release(self, machine_id: str) -> None:
        """Let the held call of a machine succeed. Raises KeyError when none is held."""
        self._gates.pop(machine_id).set()

    async def _enter(self, machine: MachineView, op: Op) -> None:
        self.calls.append((op.kind, machine.id, op.id))
        if op.kind in self._held:
            gate = self._gates.setdefault(machine.id, asyncio.Event())
            await gate.wait()

    async def inventory(self) -> Iterable[Slot]:
        """Return every slot, and the host of those that have one."""
        hosts = (ExistingHost.of(slot, host_ref=self.hosts[slot.id]) for slot in self.slots if slot.id in self.hosts)
        return [*self.slots, *hosts]

    async def create(self, machine: MachineView, op: Op) -> Host:
        """Make a host."""
        await self._enter(machine, op)
        ref = self.hosts.setdefault(machine.id, f"host-{machine.id}")
        return Host(ref=ref)

    async def configure(self, machine: MachineView, cluster: str, blob: bytes, op: Op) -> str | None:
        """Bind the host; its node is Ready at once."""
        await self._enter(machine, op)
        self.clusters[machine.id] = cluster
        return f"node-{machine.id}"

    async def drain(self, machine: MachineView, grace_seconds: int, op: Op) -> None:
        """Unbind the host."""
        await self._enter(machine, op)
        self.clusters.pop(machine.id, None)

    async def delete(self, machine: MachineView, op: Op) -> None:
        """Remove the host."""
        await self._enter(machine, op)
        self.hosts.pop(machine.id, None)
        self.clusters.pop(machine.id, None)

    async def adopt(self, machine: MachineView) -> Found:
        """Return what this object has of the machine."""
        return found_in_memory(machine, self.hosts, self.clusters)


def found_in_memory(machine: MachineView, hosts: Mapping[str, str], clusters: Mapping[str, str]) -> Found:
    """Return the answer of `adopt` where refs and clusters by machine id are all there is: a node is always Ready."""
    ref = hosts.get(machine.id)
    if ref is None:
        return Found(kind=FoundKind.NO_HOST)
    cluster = clusters.get(machine.id)
    if cluster is None:
        return Found(kind=FoundKind.CLEAN, host=Host(ref=ref))
    kind = FoundKind.SERVING if cluster == machine.cluster else FoundKind.DIRTY
    return Found(kind=kind, host=Host(ref=ref))
