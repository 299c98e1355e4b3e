"""Updates the hosts of a cluster as instances come and go, and offers, chooses and carves room on them.

Both `hail-dedicated` and the partitioned provider use it (docs/spec/partition.md §5 and §9, docs/spec/provider.md §22).
Choosing and taking are two steps, so a caller may inspect a choice and drop it. This module never does I/O and never
logs: it returns choices, with counts of the reasons for refusals.
"""

from collections.abc import Collection, Iterable
from typing import Final

from bigfleet.partition.cluster import GanetiCluster
from bigfleet.partition.hosts import HostGroup, PartitionedHost, Role, as_primary
from bigfleet.partition.instance import Instance
from bigfleet.partition.metric import Room, Size, Vector, allocation_vector
from bigfleet.partition.policy import PolicyRefusal
from bigfleet.partition.search import PlacementChoice, SearchOutcome, choose_host, choose_pair

#: Above whatever a host can have in use.
_NO_USE_LIMIT: Final = 1 << 62
_UNSUPPORTED: Final = "Unsupported number of nodes, only one or two  supported"


class NothingToTry(Exception):
    """A group has no candidate for an instance; its text is the reason as `hail` gives it."""


class NoSuchInstance(KeyError):
    """No instance of that name was taken here."""


class Allocator:
    """A cluster's hosts, and the instances that came since it was read.

    Not safe for concurrent calls: placements are serial by nature.
    """

    def __init__(self, cluster: GanetiCluster, *, force: bool = False) -> None:
        self.cluster = cluster
        self._force = force
        self._taken: dict[str, tuple[Instance, tuple[PartitionedHost, ...]]] = {}
        self._by_name = {host.name: host for host in cluster.hosts}

    def host(self, name: str) -> PartitionedHost:
        """Return a host by its name; of equal names the last. Raises KeyError."""
        return self._by_name[name]

    def vector(self, name: str) -> Vector:
        """Return how many more of each size fit on a host, by decreasing lower disk bound of its group's intervals.

        A host that is offline, drained or not capable takes nothing. Raises UnlimitedSize.
        """
        host = self._by_name[name]
        return host.allocation_vector() if host.is_candidate else (0,) * len(host.group.policy.sizes)

    def how_often(self, name: str, instance: Instance) -> int:
        """Return how many more instances like this one fit on a host, with its disks, spindles and tags, in one step.

        Raises UnlimitedSize where nothing limits it.
        """
        host = self._by_name[name]
        if not host.is_candidate or host.group.policy.refusal(instance, is_exclusive=host.is_exclusive) is not None:
            return 0
        if isinstance(as_primary(host, instance), PolicyRefusal):
            return 0
        if instance.exclusion_tags:
            return 1
        is_local = instance.is_local
        size = Size(
            instance.memory_mib,
            instance.disk_mib if is_local else 0,
            instance.vcpus if instance.uses_vcpus else 0,
            instance.spindle_use if is_local else 0,
            (instance.spindles or 0) if is_local else 0,
        )
        # Who takes no spindle is not asked how often spindles are used, whatever the ratio is.
        limits = host.limits if is_local else host.limits._replace(spindle_use_max=_NO_USE_LIMIT)
        return allocation_vector((size,), _room_for(host.room, instance), limits)[0]

    def choose(
        self,
        group: HostGroup,
        instance: Instance,
        *,
        hosts: int = 1,
        among: Collection[str] | None = None,
        of: Iterable[PartitionedHost] | None = None,
    ) -> SearchOutcome:
        """Return the host, or the pair (`hosts` = 2), of a group on which the instance loses least.

        `among` limits the candidates to these names, `of` to these hosts (both: to what is in both); the order stays
        that of the cluster or of `of`, and the last of equals wins. Raises NothingToTry without candidates and
        UnlimitedSize where an interval of the group has no lower bound at all.
        """
        if not group.networks.issuperset(instance.networks):
            raise NothingToTry(
                f"The group {group.name} is not connected to a network required by instance {instance.name}"
            )
        if hosts not in (1, 2):
            raise NothingToTry(_UNSUPPORTED)
        candidates = [
            host
            for host in (self.cluster.hosts if of is None else of)
            if host.group is group and host.is_candidate and (among is None or host.name in among)
        ]
        if len(candidates) < hosts:
            raise NothingToTry("No online nodes" if hosts == 1 else "Not enough online nodes")
        choose = choose_host if hosts == 1 else choose_pair
        return choose(candidates, instance, group.policy, force=self._force)

    def take(self, instance: Instance, choice: PlacementChoice) -> None:
        """Carve the instance out of the chosen hosts, which must not have changed since."""
        primary = choice.hosts[0]
        primary.take_primary(instance, choice.rooms[0])
        for host, room in zip(choice.hosts[1:], choice.rooms[1:], strict=True):
            host.take_secondary(instance, room, primary.index)
        self._taken[instance.name] = (instance, choice.hosts)

    def restore(self, instance: Instance, *names: str) -> tuple[PartitionedHost, ...]:
        """Put an instance back where it is known to be, primary host first, whether it fits or not.

        For an allocator that is made again from a cluster's message, which does not count what was taken since. Raises
        KeyError for a host that is not there, before anything changes.
        """
        hosts = tuple(self._by_name[name] for name in names)
        for host in hosts:
            host.put(instance, hosts[0].index)
        self._taken[instance.name] = (instance, hosts)
        return hosts

    def release(self, name: str) -> tuple[PartitionedHost, ...]:
        """Give the room of a taken instance back and return its hosts. Raises NoSuchInstance."""
        try:
            instance, hosts = self._taken.pop(name)
        except KeyError:
            raise NoSuchInstance(name) from None
        for host in hosts:
            host.give_back(instance, hosts[0].index)
        return hosts

    def standing_on(self, name: str) -> list[tuple[Instance, Role]]:
        """Return what is on a host, in the order in which it came."""
        return list(self._by_name[name].instances)


def _room_for(room: Room, instance: Instance) -> Room:
    """Return the room as far as an instance that fits takes of it: what it leaves alone is no limit to more of them."""
    if instance.is_forthcoming:
        room = Room(*room[5:10], *room[5:10], room.reserve_mib, True)
    elif not instance.uses_memory:
        room = room._replace(memory_mib=room.planned_memory_mib, is_reserve_broken=True)
    if not instance.is_local:
        room = room._replace(disk_mib=1, planned_disk_mib=1, spindles=0, planned_spindles=0)
    return room
