"""Connects the partitioned provider to the allocator of `bigfleet.partition`.

docs/spec/provider.md §22, docs/spec/partition.md §8 to §10. Only this module imports both packages. This module does
not decide where an instance goes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from bigfleet.partition.allocator import Allocator, NothingToTry
from bigfleet.partition.answer import describe
from bigfleet.partition.cluster import read_cluster
from bigfleet.partition.document import WrongInput
from bigfleet.partition.hosts import HostGroup
from bigfleet.partition.instance import Instance
from bigfleet.partition.metric import UnlimitedSize
from bigfleet.partition.policy import Bounds, Policy
from bigfleet.provider.backends.partitioned.ports import (
    CarveSize,
    ClusterFault,
    GroupFacts,
    HostFacts,
    HostPlacement,
    NoRoom,
    UnlimitedInterval,
    Willingness,
)


class PartitionAllocator:
    """The `Allocator` of `bigfleet.provider.backends.partitioned.ports`."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._groups: dict[str, HostGroup] = {group.name: group for group in allocator.cluster.groups}

    @property
    def groups(self) -> Sequence[GroupFacts]:
        """Every group, in the order of the file."""
        return [
            GroupFacts(
                group.name,
                Willingness(group.allocation.value),
                tuple(_size(interval.least) for interval in group.policy.by_disk),
                tuple(at for at, each in enumerate(group.policy.by_disk) if _is_unlimited(each.least, group.policy)),
            )
            for group in self._allocator.cluster.groups
        ]

    @property
    def hosts(self) -> Sequence[HostFacts]:
        """Every host, in the order of the file."""
        return [
            HostFacts(host.name, host.group.name, host.is_exclusive, host.is_candidate)
            for host in self._allocator.cluster.hosts
        ]

    def vector(self, host: str) -> tuple[int, ...]:
        """Return how many more of each size fit. Raises UnlimitedInterval."""
        try:
            return self._allocator.vector(host)
        except UnlimitedSize as error:
            group = self._allocator.host(host).group.name
            raise UnlimitedInterval(
                f"group {group}: interval {error.position + 1} fits on {host} without end"
            ) from error

    def how_often(self, host: str, size: CarveSize) -> int:
        """Return how many more real instances of a size fit."""
        return self._allocator.how_often(host, instance_of("", size))

    def free_disk_mib(self, host: str) -> int:
        """Return the disk that is free."""
        return self._allocator.host(host).room.disk_mib

    def place(self, group: str, instance: str, size: CarveSize, among: Sequence[str]) -> HostPlacement | NoRoom:
        """Choose the host of these that loses least and take its room."""
        carved = instance_of(instance, size)
        try:
            outcome = self._allocator.choose(
                self._groups[group], carved, of=[self._allocator.host(name) for name in among]
            )
        except NothingToTry as reason:
            return NoRoom(str(reason))
        if outcome.choice is None:
            return NoRoom(describe(outcome))
        note = describe(outcome)
        self._allocator.take(carved, outcome.choice)
        lost, _disk_left_mib = outcome.choice.key
        return HostPlacement(outcome.choice.hosts[0].name, note, lost)

    def restore(self, host: str, instance: str, size: CarveSize) -> None:
        """Take the room of an instance that is known to be there."""
        self._allocator.restore(instance_of(instance, size), host)

    def release(self, instance: str) -> None:
        """Give the room of an instance back."""
        self._allocator.release(instance)


def make_allocator(document: Mapping[str, Any]) -> PartitionAllocator:
    """Return the allocator of a document's cluster part. Raises ClusterFault naming owner and key."""
    try:
        return PartitionAllocator(Allocator(read_cluster(document)))
    except WrongInput as error:
        raise ClusterFault(str(error)) from error


def instance_of(name: str, size: CarveSize) -> Instance:
    """Return the real instance of a size: plain, running, with all its disks and spindles."""
    return Instance(
        name=name,
        memory_mib=size.memory_mib,
        vcpus=size.vcpus,
        disk_mib=size.disk_mib * size.disk_count,
        disks_mib=(size.disk_mib,) * size.disk_count,
        spindles=size.spindles_per_disk * size.disk_count,
        spindle_use=size.spindles,
    )


def _size(least: Bounds) -> CarveSize:
    return CarveSize(least.memory_mib, least.vcpus, least.disk_mib, least.disks, least.spindle_use)


def _is_unlimited(least: Bounds, policy: Policy) -> bool:
    return least.memory_mib <= 0 and least.disk_mib <= 0 and (least.vcpus <= 0 or policy.vcpu_ratio < 0)
