"""Defines what the partitioned provider needs: an allocator that chooses hosts, a driver that carves instances.

docs/spec/provider.md §22. This module must not decide anything.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

from bigfleet.provider.backend import FoundKind, MachineView, Op


class Willingness(Enum):
    """How willingly a group takes instances; the values are those of its `alloc_policy`."""

    PREFERRED = "preferred"
    LAST_RESORT = "last_resort"
    UNALLOCABLE = "unallocable"


class CarveSize(NamedTuple):
    """Lower bounds of an interval: what its instances are carved with."""

    memory_mib: int
    vcpus: int
    #: Of each disk.
    disk_mib: int
    #: As the policy says; an instance has at least one.
    disks: int
    #: Of all disks together, before they are spread.
    spindles: int

    @property
    def disk_count(self) -> int:
        """Disks of an instance."""
        return max(1, self.disks)

    @property
    def spindles_per_disk(self) -> int:
        """Spindles of each disk, rounded up."""
        return -(-self.spindles // self.disk_count)


class GroupFacts(NamedTuple):
    """A group of hosts."""

    name: str
    willingness: Willingness
    #: One for each interval, by decreasing lower disk bound.
    sizes: tuple[CarveSize, ...]
    #: Positions of the sizes that neither memory nor disk nor CPUs limit.
    unlimited: tuple[int, ...]


class HostFacts(NamedTuple):
    """A physical host."""

    name: str
    group: str
    is_exclusive: bool
    #: Neither offline nor drained, and able to run instances.
    is_candidate: bool


class Carved(NamedTuple):
    """An instance and where it stands, or is to stand."""

    host: str
    instance: str
    size: CarveSize

    @property
    def ref(self) -> str:
        """What HostRef.ref says."""
        return f"{self.host}/{self.instance}"


class HostPlacement(NamedTuple):
    """A host that was chosen, and whose room is taken."""

    host: str
    #: The metric and the choice, for the log.
    note: str
    #: One number for each size of the group.
    lost: tuple[int, ...]


class NoRoom(NamedTuple):
    """No host takes the instance, and why."""

    text: str


class HostAllocator(Protocol):
    """Keeps the room of all hosts and chooses by the lost allocations (docs/spec/partition.md §8 to §10).

    Not safe for concurrent calls. Every `host` is the name of one.
    """

    @property
    def groups(self) -> Sequence[GroupFacts]:
        """Every group, in the order of the file."""
        ...

    @property
    def hosts(self) -> Sequence[HostFacts]:
        """Every host, in the order of the file."""
        ...

    def vector(self, host: str) -> tuple[int, ...]:
        """Return how many more of each size of its group fit; nothing on a host that is no candidate."""
        ...

    def how_often(self, host: str, size: CarveSize) -> int:
        """Return how many more real instances of a size fit, with their disks and spindles."""
        ...

    def free_disk_mib(self, host: str) -> int:
        """Return the disk that is free."""
        ...

    def place(self, group: str, instance: str, size: CarveSize, among: Sequence[str]) -> HostPlacement | NoRoom:
        """Choose the host of these that loses least, the last of equal ones, and take its room."""
        ...

    def restore(self, host: str, instance: str, size: CarveSize) -> None:
        """Take the room of an instance that is known to be there, whether it fits or not."""
        ...

    def release(self, instance: str) -> None:
        """Give the room of an instance back that was placed or restored."""
        ...


class UnlimitedInterval(Exception):
    """Nothing limits how often an interval fits; the text names group and interval."""


class ClusterFault(Exception):
    """The cluster part of the document is not understood; the text names owner and key."""


class MakeAllocator(Protocol):
    """Makes an allocator out of the cluster part of a document."""

    def __call__(self, document: Mapping[str, Any]) -> HostAllocator:
        """Return the allocator. Raises ClusterFault."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """An instance that a driver sees."""

    host: str
    instance: str
    node_name: str = ""
    #: The machine that it stands for, when the instance itself says so; else its name does.
    machine_id: str = ""


class Driver(Protocol):
    """Makes instances real. Every method is idempotent by `op.id`, may raise Transient, and is cancelled in time."""

    #: Seconds between two looks at readiness.
    ready_interval_seconds: float

    async def create(self, machine: MachineView, carved: Carved, op: Op) -> str:
        """Carve the instance on its host; return its node name, or nothing."""
        ...

    async def configure(self, machine: MachineView, carved: Carved, cluster: str, blob: bytes, op: Op) -> str:
        """Boot the instance into a cluster; return its node name, or nothing."""
        ...

    async def ready(self, machine: MachineView, carved: Carved, cluster: str, op: Op) -> bool:
        """Return whether its node is Ready."""
        ...

    async def drain(self, machine: MachineView, carved: Carved, grace_seconds: int, op: Op) -> None:
        """Take the instance out of its cluster."""
        ...

    async def delete(self, machine: MachineView, carved: Carved, op: Op) -> None:
        """Remove the instance; one that is gone is a success."""
        ...

    async def adopt(self, machine: MachineView, carved: Carved) -> FoundKind:
        """Say what is there."""
        ...

    async def inventory(self) -> Sequence[Standing]:
        """Return every instance that stands."""
        ...
