"""What the closed forms stand for, done the long way: counting by adding, and trying every host and every pair."""

from collections import Counter
from collections.abc import Sequence

from bigfleet.partition.hosts import PartitionedHost, as_primary, as_secondary
from bigfleet.partition.instance import Instance
from bigfleet.partition.metric import Key, Room, Size, Vector, both, lost_allocations
from bigfleet.partition.policy import PolicyRefusal

#: More than fits on any host of the tests.
COUNT_MAX = 2_000


def with_room(host: PartitionedHost, room: Room) -> PartitionedHost:
    """Return the same host with other room, without exclusion tags."""
    return PartitionedHost(
        index=host.index,
        name=host.name,
        group=host.group,
        room=room,
        cpus=host.cpus,
        spindles_total=host.spindles_total,
        is_exclusive=host.is_exclusive,
    )


def test_instance(size: Size) -> Instance:
    """Return the instance that a size stands for: plain, running, without disks of its own."""
    return Instance(
        name="test",
        memory_mib=size.memory_mib,
        vcpus=size.vcpus,
        disk_mib=size.disk_mib,
        disks_mib=(),
        spindles=size.spindles,
        spindle_use=size.spindle_use,
    )


def counted(host: PartitionedHost, room: Room, instance: Instance) -> int:
    """Return how often an instance can be added, one after another."""
    for count in range(COUNT_MAX):
        after = as_primary(with_room(host, room), instance)
        if isinstance(after, PolicyRefusal):
            return count
        room = after
    raise AssertionError(f"more than {COUNT_MAX} fit")


def counted_vector(host: PartitionedHost, room: Room) -> Vector:
    """Return the allocation vector of a host with some room."""
    return tuple(counted(host, room, test_instance(size)) for size in host.group.policy.sizes)


def counted_loss(host: PartitionedHost, room: Room) -> Vector:
    """Return what is lost when a host comes to have that room."""
    return lost_allocations(counted_vector(host, host.room), counted_vector(host, room))


class Tried:
    """Every host, or every ordered pair, one by one: the best, the successes, and the reasons against the others."""

    def __init__(self) -> None:
        self.best: tuple[Key, tuple[PartitionedHost, ...]] | None = None
        self.successes = 0
        self.refusals: Counter[PolicyRefusal] = Counter()

    def add(self, key: Key | PolicyRefusal, *hosts: PartitionedHost) -> None:
        """Count one; the last of equals is the best."""
        if isinstance(key, PolicyRefusal):
            self.refusals[key] += 1
            return
        self.successes += 1
        if self.best is None or key <= self.best[0]:
            self.best = (key, hosts)


def _primary(host: PartitionedHost, instance: Instance, *, force: bool) -> Room | PolicyRefusal:
    policy = host.group.policy.refusal(instance, is_exclusive=host.is_exclusive)
    return policy or as_primary(host, instance, force=force)


def try_hosts(hosts: Sequence[PartitionedHost], instance: Instance, *, force: bool) -> Tried:
    """Try every host."""
    tried = Tried()
    for host in hosts:
        room = _primary(host, instance, force=force)
        tried.add(room if isinstance(room, PolicyRefusal) else (counted_loss(host, room), room.disk_mib), host)
    return tried


def try_pairs(hosts: Sequence[PartitionedHost], instance: Instance, *, force: bool) -> Tried:
    """Try every ordered pair of different hosts."""
    tried = Tried()
    for host in hosts:
        room = _primary(host, instance, force=force)
        for other in hosts:
            if other is host:
                continue
            if isinstance(room, PolicyRefusal):
                tried.add(room, host, other)
                continue
            mirror = as_secondary(other, instance, known_mib=other.reserves_mib.get(host.index, 0))
            if isinstance(mirror, PolicyRefusal):
                tried.add(mirror, host, other)
                continue
            loss = both(counted_loss(host, room), counted_loss(other, mirror))
            tried.add((loss, room.disk_mib + mirror.disk_mib), host, other)
    return tried
