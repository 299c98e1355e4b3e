"""Computes what an instance takes of its hosts, given its template and state (docs/spec/partition.md §6).

This module never knows where an instance is.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Final

#: Disk templates in the order of Ganeti.
TEMPLATES: Final = ("diskless", "file", "sharedfile", "plain", "blockdev", "drbd", "rbd", "ext", "gluster")
_LOCAL: Final = frozenset(("plain", "drbd"))


class AdminState(Enum):
    """What the administrator wants of an instance."""

    UP = "up"
    DOWN = "down"
    OFFLINE = "offline"


class Instance:
    """An instance that is there, planned or wanted. An immutable value."""

    __slots__ = (
        "disk_mib",
        "disks_mib",
        "exclusion_tags",
        "failover_mib",
        "is_forthcoming",
        "is_local",
        "memory_mib",
        "name",
        "networks",
        "spindle_use",
        "spindles",
        "state",
        "tags",
        "template",
        "uses_memory",
        "uses_vcpus",
        "vcpus",
    )

    def __init__(
        self,
        *,
        name: str,
        memory_mib: int,
        vcpus: int,
        disk_mib: int,
        disks_mib: Sequence[int],
        spindles: int | None,
        spindle_use: int = 1,
        template: str = "plain",
        tags: Sequence[str] = (),
        exclusion_tags: Sequence[str] = (),
        networks: Sequence[str] = (),
        state: AdminState = AdminState.UP,
        is_forthcoming: bool = False,
    ) -> None:
        self.name = name
        self.memory_mib = memory_mib
        self.vcpus = vcpus
        #: What each of its hosts gives for it; the message says so, it is not the sum of the disks.
        self.disk_mib = disk_mib
        self.disks_mib = disks_mib
        #: Spindles of all its disks together; None where a disk has not said.
        self.spindles = spindles
        self.spindle_use = spindle_use
        self.template = template
        self.tags = tags
        #: Those of its tags that keep others with the same tag off its primary host.
        self.exclusion_tags = exclusion_tags
        #: Of its network cards.
        self.networks = networks
        self.state = state
        #: Planned: it takes nothing yet, and what is planned is refused to others.
        self.is_forthcoming = is_forthcoming
        self.is_local = template in _LOCAL
        self.uses_memory = state is AdminState.UP and not is_forthcoming
        self.uses_vcpus = state is not AdminState.OFFLINE
        #: Memory that its secondary host keeps for it.
        self.failover_mib = 0 if state is AdminState.OFFLINE else memory_mib

    def with_exclusion_tags(self, tags: Sequence[str]) -> "Instance":
        """Return the same instance with these exclusion tags."""
        return Instance(
            name=self.name,
            memory_mib=self.memory_mib,
            vcpus=self.vcpus,
            disk_mib=self.disk_mib,
            disks_mib=self.disks_mib,
            spindles=self.spindles,
            spindle_use=self.spindle_use,
            template=self.template,
            tags=self.tags,
            exclusion_tags=tags,
            networks=self.networks,
            state=self.state,
            is_forthcoming=self.is_forthcoming,
        )


def total_spindles(spindles: Sequence[int | None]) -> int | None:
    """Return the spindles of all disks together, None where a disk has not said; no disks have 0."""
    return None if None in spindles else sum(each for each in spindles if each is not None)
