"""Checks whether an instance fits on a host, as primary or as secondary, and computes what is left of the host.

docs/spec/partition.md §6 and §7: the first refusal in the listed order is the reason. Asking changes nothing; a host
changes only when the caller adds an instance. This module never compares hosts.
"""

from collections import Counter
from enum import Enum
from math import floor
from typing import Final

from bigfleet.partition.instance import Instance
from bigfleet.partition.metric import HostLimits, Room, Vector, allocation_vector, vcpus_allowed
from bigfleet.partition.policy import AllocationPolicy, Policy, PolicyRefusal

#: Beyond this a limit on shared spindles is none that an integer could reach.
_USE_MAX: Final = 1 << 60


class Role(Enum):
    """What a host is to an instance."""

    PRIMARY = "primary"
    SECONDARY = "secondary"


class HostGroup:
    """A group of hosts under one policy."""

    __slots__ = ("allocation", "index", "name", "networks", "policy", "uuid")

    def __init__(
        self,
        *,
        index: int,
        name: str,
        uuid: str,
        policy: Policy,
        allocation: AllocationPolicy = AllocationPolicy.PREFERRED,
        networks: frozenset[str] = frozenset(),
    ) -> None:
        #: Position in the message.
        self.index = index
        self.name = name
        self.uuid = uuid
        self.policy = policy
        self.allocation = allocation
        #: Networks that its hosts are connected to.
        self.networks = networks


class PartitionedHost:
    """A host: fixed limits, the room that is left, and what stands on it."""

    __slots__ = (
        "cpus",
        "disk_total_mib",
        "exclusion_tags",
        "group",
        "index",
        "instances",
        "is_candidate",
        "is_exclusive",
        "limits",
        "missing_disk_mib",
        "missing_memory_mib",
        "name",
        "reserves_mib",
        "room",
        "spindles_total",
        "vector",
    )

    def __init__(
        self,
        *,
        index: int,
        name: str,
        group: HostGroup,
        room: Room,
        cpus: float = 0.0,
        disk_total_mib: float = 0.0,
        spindles_total: int = 0,
        is_exclusive: bool = True,
        is_candidate: bool = True,
    ) -> None:
        #: Position in the message; decides ties.
        self.index = index
        self.name = name
        self.group = group
        self.room = room
        self.cpus = cpus
        self.disk_total_mib = disk_total_mib
        self.spindles_total = spindles_total
        self.is_exclusive = is_exclusive
        #: Neither offline nor drained, and able to run instances.
        self.is_candidate = is_candidate
        self.limits = _limits(group.policy, cpus, spindles_total, is_exclusive=is_exclusive)
        #: Memory reserved for failing over, by the index of the primary host.
        self.reserves_mib: dict[int, int] = {}
        #: Exclusion tags of its primaries, and how many have each.
        self.exclusion_tags: Counter[str] = Counter()
        self.instances: list[tuple[Instance, Role]] = []
        #: Memory and disk that the records claim and the host does not show (docs/spec/partition.md §1).
        self.missing_memory_mib = 0
        self.missing_disk_mib = 0
        #: Its allocation vector as long as its room is the same; None: not counted yet.
        self.vector: Vector | None = None

    def allocation_vector(self) -> Vector:
        """Return how many more of each size of its group fit. Raises UnlimitedSize."""
        if self.vector is None:
            self.vector = allocation_vector(self.group.policy.sizes, self.room, self.limits)
        return self.vector

    def take_primary(self, instance: Instance, room: Room) -> None:
        """Let an instance come that was found to fit, leaving this room."""
        self.room, self.vector = room, None
        self.exclusion_tags.update(instance.exclusion_tags)
        self.instances.append((instance, Role.PRIMARY))

    def take_secondary(self, instance: Instance, room: Room, primary_index: int) -> None:
        """Let the mirror of an instance come."""
        self.room, self.vector = room, None
        if not instance.is_forthcoming:
            self.reserves_mib[primary_index] = self.reserves_mib.get(primary_index, 0) + instance.failover_mib
        self.instances.append((instance, Role.SECONDARY))

    def put(self, instance: Instance, primary_index: int) -> None:
        """Let an instance be there without asking whether it fits, as primary or as secondary."""
        room = _moved(self, instance, is_primary=primary_index == self.index, sign=-1)
        if primary_index == self.index:
            self.take_primary(instance, room)
            return
        self.take_secondary(instance, room, primary_index)
        reserve_mib = max(0, *self.reserves_mib.values()) if self.reserves_mib else 0
        self.room = room._replace(reserve_mib=reserve_mib, is_reserve_broken=room.memory_mib <= reserve_mib)

    def give_back(self, instance: Instance, primary_index: int) -> None:
        """Take back what an instance took that came after the message was written, as primary or as secondary."""
        is_primary = primary_index == self.index
        if is_primary:
            self.exclusion_tags.subtract(instance.exclusion_tags)
        elif not instance.is_forthcoming:
            self.reserves_mib[primary_index] -= instance.failover_mib
        self.room, self.vector = _moved(self, instance, is_primary=is_primary, sign=1), None
        self.instances.remove((instance, Role.PRIMARY if is_primary else Role.SECONDARY))


def _limits(policy: Policy, cpus: float, spindles_total: int, *, is_exclusive: bool) -> HostLimits:
    try:
        use_max = max(-_USE_MAX, min(_USE_MAX, floor(policy.spindle_ratio * spindles_total)))
    except OverflowError:  # a product or a number of spindles beyond the doubles
        use_max = _USE_MAX
    return HostLimits(is_exclusive, vcpus_allowed(cpus, policy.vcpu_ratio), use_max)


def as_primary(host: PartitionedHost, instance: Instance, *, force: bool = False) -> Room | PolicyRefusal:
    """Return what is left when the instance comes as a primary, or why it cannot. `force` leaves out soft checks."""
    room = host.room
    planned = _planned_primary(host, instance)
    if instance.is_forthcoming:
        refusal = None if force else _planned_refusal(host, instance, planned)
        return planned if refusal is None else refusal
    memory = room.memory_mib - instance.memory_mib if instance.uses_memory else room.memory_mib
    disk, use = room.disk_mib, room.spindle_use
    if instance.is_local:
        disk -= instance.disk_mib
        if not host.is_exclusive:
            use += instance.spindle_use
    spindles = _spindles_left(host, room.spindles, instance)
    vcpus = room.vcpus_used + instance.vcpus if instance.uses_vcpus else room.vcpus_used
    is_short = memory <= room.reserve_mib
    if memory <= 0:
        return PolicyRefusal.MEMORY
    if instance.is_local and disk <= 0:
        return PolicyRefusal.DISK
    if instance.is_local and spindles < 0:
        return PolicyRefusal.SPINDLES
    if not force:
        if instance.is_local and use > host.limits.spindle_use_max:
            return PolicyRefusal.DISK
        if is_short and not room.is_reserve_broken:
            return PolicyRefusal.MEMORY
        if host.limits.vcpus_max is not None and vcpus > host.limits.vcpus_max:
            return PolicyRefusal.VCPUS
        if host.exclusion_tags and any(host.exclusion_tags[tag] for tag in instance.exclusion_tags):
            return PolicyRefusal.TAGS
        refusal = _planned_refusal(host, instance, planned)
        if refusal is not None:
            return refusal
    return Room(memory, disk, spindles, vcpus, use, *planned[5:10], room.reserve_mib, is_short)


def _spindles_left(host: PartitionedHost, spindles: int, instance: Instance) -> int:
    """Return the spindles left, below zero where the instance's disks have not said how many they need."""
    if not host.is_exclusive:
        return 0
    return -1 if instance.spindles is None else spindles - instance.spindles


def _planned_primary(host: PartitionedHost, instance: Instance) -> Room:
    """Return the room in which the instance is planned, and nothing else changed."""
    room = host.room
    is_local = instance.is_local
    return Room(
        *room[:5],
        room.planned_memory_mib - instance.memory_mib,
        room.planned_disk_mib - instance.disk_mib if is_local else room.planned_disk_mib,
        _spindles_left(host, room.planned_spindles, instance),
        room.planned_vcpus_used + instance.vcpus if instance.uses_vcpus else room.planned_vcpus_used,
        room.planned_spindle_use + instance.spindle_use
        if is_local and not host.is_exclusive
        else room.planned_spindle_use,
        *room[10:],
    )


def _planned_refusal(host: PartitionedHost, instance: Instance, planned: Room) -> PolicyRefusal | None:
    if planned.planned_memory_mib <= 0:
        return PolicyRefusal.MEMORY
    if instance.is_local:
        if planned.planned_disk_mib <= 0:
            return PolicyRefusal.DISK
        if planned.planned_spindles < 0:
            return PolicyRefusal.SPINDLES
        if planned.planned_spindle_use > host.limits.spindle_use_max:
            return PolicyRefusal.DISK
    if host.limits.vcpus_max is not None and planned.planned_vcpus_used > host.limits.vcpus_max:
        return PolicyRefusal.VCPUS
    return None


def as_secondary(host: PartitionedHost, instance: Instance, *, known_mib: int = 0) -> Room | PolicyRefusal:
    """Return what is left when the instance's mirror comes, or why it cannot.

    `known_mib` is the memory that the host keeps already for instances of the same primary host. No primary host is
    distinguished otherwise, so one answer serves all that the host does not know yet.
    """
    room, limits, failover = host.room, host.limits, instance.failover_mib
    if instance.template != "drbd":
        return PolicyRefusal.DISK
    planned_disk = room.planned_disk_mib - instance.disk_mib
    planned_spindles = _spindles_left(host, room.planned_spindles, instance)
    extra_use = 0 if host.is_exclusive else instance.spindle_use
    planned_use = room.planned_spindle_use + extra_use
    disk, spindles, use, reserve, is_short = (*room[1:3], room.spindle_use, room.reserve_mib, room.is_reserve_broken)
    if not instance.is_forthcoming:
        disk -= instance.disk_mib
        spindles = _spindles_left(host, spindles, instance)
        use += extra_use
        reserve = max(reserve, known_mib + failover)
        is_short = room.memory_mib <= reserve
        if disk <= 0:
            return PolicyRefusal.DISK
        if spindles < 0:
            return PolicyRefusal.SPINDLES
        if use > limits.spindle_use_max:
            return PolicyRefusal.DISK
        if failover >= room.memory_mib or (is_short and not room.is_reserve_broken):
            return PolicyRefusal.MEMORY
    if planned_disk <= 0:
        return PolicyRefusal.DISK
    if planned_spindles < 0:
        return PolicyRefusal.SPINDLES
    if planned_use > limits.spindle_use_max:
        return PolicyRefusal.DISK
    if failover >= room.planned_memory_mib:
        return PolicyRefusal.MEMORY
    return Room(
        room.memory_mib,
        disk,
        spindles,
        room.vcpus_used,
        use,
        room.planned_memory_mib,
        planned_disk,
        planned_spindles,
        room.planned_vcpus_used,
        planned_use,
        reserve,
        is_short,
    )


def _moved(host: PartitionedHost, instance: Instance, *, is_primary: bool, sign: int) -> Room:
    """Return the room once an instance is gone (`sign` 1) or is there, fit or not (-1), but for its own reserve."""
    room, spindles = host.room, instance.spindles if host.is_exclusive and instance.spindles is not None else 0
    disk_mib = sign * instance.disk_mib if instance.is_local else 0
    use = sign * instance.spindle_use if instance.is_local and not host.is_exclusive else 0
    vcpus = sign * instance.vcpus if is_primary and instance.uses_vcpus else 0
    planned_memory_mib = sign * instance.memory_mib if is_primary else 0
    memory_mib = room.memory_mib + (planned_memory_mib if instance.uses_memory else 0)
    reserve_mib = max(0, *host.reserves_mib.values()) if host.reserves_mib else 0
    is_real = not instance.is_forthcoming
    return Room(
        memory_mib,
        room.disk_mib + disk_mib * is_real,
        room.spindles + sign * spindles * is_real,
        room.vcpus_used - vcpus * is_real,
        room.spindle_use - use * is_real,
        room.planned_memory_mib + planned_memory_mib,
        room.planned_disk_mib + disk_mib,
        room.planned_spindles + sign * spindles,
        room.planned_vcpus_used - vcpus,
        room.planned_spindle_use - use,
        reserve_mib,
        # Who is forthcoming takes nothing yet, so that nothing becomes short, or enough, by its leaving.
        memory_mib <= reserve_mib if is_real else room.is_reserve_broken,
    )
