"""Turns the hosts file into lines of slots, and counts the room of each host.

docs/spec/libvirt-provider.md §2. Each host is a group of its own, so that a slot names the host it is on. Slots of
different types are alternatives for the same room, as those of partitioned hosts are (docs/spec/provider.md §22).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from bigfleet.provider.backend import Slot
from bigfleet.provider.backends.libvirt.hosts_file import RESET, GuestType, KvmHost, KvmHosts, KvmHostsFault
from bigfleet.provider.backends.libvirt.names import domain_name
from bigfleet.provider.backends.partitioned.hosts_file import HOST_LABEL, HostPlace, HostsFile, Line
from bigfleet.provider.backends.partitioned.ports import (
    CarveSize,
    GroupFacts,
    HostFacts,
    HostPlacement,
    NoRoom,
    Willingness,
)
from bigfleet.provider.records.reset import RESET_LABEL
from bigfleet.provider.records.validate import facts_fault
from bigfleet.provider.storage.codec import intern_map

_MIB_PER_GIB: Final = 1024
_MILLI: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignUse:
    """What domains take that are not machines of ours."""

    vcpus: int = 0
    memory_mib: int = 0


class GuestLine(Line):
    """The slots of one host and type; the instance of a slot is its domain."""

    __slots__ = ()

    def instance(self, number: int) -> str:
        """Return the name of the domain of a slot."""
        return domain_name(f"{self.prefix}{number:03d}")


class HostRooms:
    """Keeps the room of all hosts. A machine has only one host to be on, so nothing is chosen."""

    def __init__(self, hosts: KvmHosts, foreign: Mapping[str, ForeignUse]) -> None:
        sizes = tuple(_size(guest) for guest in hosts.types.values())
        self.groups: Sequence[GroupFacts] = [GroupFacts(name, Willingness.PREFERRED, sizes, ()) for name in hosts.hosts]
        self.hosts: Sequence[HostFacts] = [HostFacts(name, name, True, True) for name in hosts.hosts]
        self._sizes = sizes
        #: Free thousandths of processors, MiB of memory and MiB of disk; below zero where more stands than fits.
        self._free = {
            host.name: [
                host.milli_cpus - foreign.get(host.name, ForeignUse()).vcpus * _MILLI,
                host.memory_mib - foreign.get(host.name, ForeignUse()).memory_mib,
                host.disk_mib,
            ]
            for host in hosts.hosts.values()
        }
        self._standing: dict[str, tuple[str, CarveSize]] = {}

    def vector(self, host: str) -> tuple[int, ...]:
        """Return how many more of each type fit."""
        return tuple(self.how_often(host, size) for size in self._sizes)

    def how_often(self, host: str, size: CarveSize) -> int:
        """Return how many more of a size fit."""
        pairs = zip(self._free[host], _amounts(size), strict=True)
        return max(0, min(free // amount for free, amount in pairs if amount > 0))

    def free_disk_mib(self, host: str) -> int:
        """Return the disk that is free."""
        return max(0, self._free[host][2])

    def place(self, group: str, instance: str, size: CarveSize, among: Sequence[str]) -> HostPlacement | NoRoom:
        """Take the room on the one host of a group."""
        before = self.vector(group)
        if group not in among or not self.how_often(group, size):
            return NoRoom(f"host {group} has no room for it any more; take another slot")
        self.restore(group, instance, size)
        lost = tuple(old - new for old, new in zip(before, self.vector(group), strict=True))
        return HostPlacement(group, f"host {group}", lost)

    def restore(self, host: str, instance: str, size: CarveSize) -> None:
        """Take the room of a machine that is known to be there."""
        self.release(instance)
        self._standing[instance] = (host, size)
        self._change(host, size, -1)

    def release(self, instance: str) -> None:
        """Give the room of a machine back."""
        standing = self._standing.pop(instance, None)
        if standing is not None:
            self._change(*standing, 1)

    def _change(self, host: str, size: CarveSize, sign: int) -> None:
        self._free[host] = [free + sign * amount for free, amount in zip(self._free[host], _amounts(size), strict=True)]


def _amounts(size: CarveSize) -> tuple[int, int, int]:
    return size.vcpus * _MILLI, size.memory_mib, size.disk_mib


def _size(guest: GuestType) -> CarveSize:
    return CarveSize(memory_mib=guest.memory_mib, vcpus=guest.vcpus, disk_mib=guest.disk_mib, disks=1, spindles=0)


def fleet_of(hosts: KvmHosts, provider: str, foreign: Mapping[str, ForeignUse]) -> HostsFile:
    """Return the lines and the rooms of hosts. Raises KvmHostsFault for ids or labels that no record may have."""
    lines = {line.prefix: line for host in hosts.hosts.values() for line in _lines(hosts, host, provider)}
    return HostsFile(
        allocator=HostRooms(hosts, foreign),
        hosts=MappingProxyType(
            {host.name: HostPlace(group=host.name, zone=host.zone, labels=host.labels) for host in hosts.hosts.values()}
        ),
        offline=frozenset(),
        lines=MappingProxyType(lines),
        intervals={name: tuple(hosts.types) for name in hosts.hosts},
        warnings=tuple(_warnings(hosts)),
    )


def _lines(hosts: KvmHosts, host: KvmHost, provider: str) -> Iterable[Line]:
    for position, guest in enumerate(hosts.types.values()):
        resources = intern_map(
            {"cpu": str(guest.vcpus), "memory": f"{guest.memory_mib}Mi", "ephemeral-storage": f"{guest.disk_mib}Mi"}
        )
        cpu_usd_per_hour = guest.vcpus * host.price_usd_per_vcpu_hour
        memory_usd_per_hour = guest.memory_mib / _MIB_PER_GIB * host.price_usd_per_gib_hour
        line = GuestLine(
            group=host.name,
            zone=host.zone,
            position=position,
            willingness=Willingness.PREFERRED,
            size=_size(guest),
            prefix="/".join((provider, host.zone, host.name, guest.name, "")),
            instance_prefix="",
            template=Slot(
                id="",
                instance_type=guest.name,
                zone=host.zone,
                capacity_type=host.capacity_type,
                resources=resources,
                allocatable=resources if guest.allocatable is None else intern_map(guest.allocatable),
                labels=intern_map({**host.labels, HOST_LABEL: host.name, RESET_LABEL: RESET}),
                price_usd_per_hour=round(cpu_usd_per_hour + memory_usd_per_hour, 9),
            ),
        )
        fault = facts_fault(line.slot(0))
        if fault is not None:
            raise KvmHostsFault(f"machines of type {guest.name} on host {host.name}: {fault.text}")
        yield line


def _warnings(hosts: KvmHosts) -> Iterable[str]:
    """Yield a sentence for each type that fits on no host, even when that is empty."""
    rooms = HostRooms(hosts, {})
    for guest in hosts.types.values():
        if not any(rooms.how_often(name, _size(guest)) for name in hosts.hosts):
            yield f"machines of type {guest.name} fit on no host"


def host_of(machine_id: str) -> str:
    """Return the name of the host that a machine is on, by its id; "" for an id that is not ours."""
    parts = machine_id.rsplit("/", 3)
    return parts[1] if len(parts) == 4 else ""
