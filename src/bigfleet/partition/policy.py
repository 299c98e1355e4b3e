"""Decides which instances a group of hosts admits, and with which sizes its hosts are measured.

docs/spec/partition.md §2, §7 and §8. A policy is a list of intervals; an instance is admitted when one of them holds
it, and refused for the reason that the first one gives. This module never looks at a host.
"""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from bigfleet.partition.instance import Instance
from bigfleet.partition.metric import Size


class PolicyRefusal(Enum):
    """Why an instance does not go where it was tried; in the order in which they are reported."""

    MEMORY = "FailMem"
    DISK = "FailDisk"
    VCPUS = "FailCPU"
    TAGS = "FailTags"
    DISK_COUNT = "FailDiskCount"
    SPINDLES = "FailSpindles"

    # Members are equal by identity; the enum's own hash is a Python call for each refusal that is counted.
    __hash__ = object.__hash__


class AllocationPolicy(Enum):
    """How willingly a group takes instances; the better one has the smaller rank."""

    PREFERRED = "preferred"
    LAST_RESORT = "last_resort"
    UNALLOCABLE = "unallocable"

    @property
    def rank(self) -> int:
        """Return 0 for the most willing."""
        return 0 if self is AllocationPolicy.PREFERRED else 1 if self is AllocationPolicy.LAST_RESORT else 2


class Bounds(NamedTuple):
    """One end of an interval. The number of network cards is part of the message and is never checked."""

    memory_mib: int
    vcpus: int
    #: Of each single disk.
    disk_mib: int
    disks: int
    spindle_use: int


class Interval(NamedTuple):
    """Sizes between two bounds, both included."""

    least: Bounds
    most: Bounds

    def refusal(self, instance: Instance, *, is_exclusive: bool) -> PolicyRefusal | None:
        """Return the first reason against the instance: what is too small, then what is too big."""
        spindles = instance.spindles if is_exclusive else instance.spindle_use
        for bounds, sign in ((self.least, 1), (self.most, -1)):
            if (instance.memory_mib - bounds.memory_mib) * sign < 0:
                return PolicyRefusal.MEMORY
            if any((disk_mib - bounds.disk_mib) * sign < 0 for disk_mib in instance.disks_mib):
                return PolicyRefusal.DISK
            if (instance.vcpus - bounds.vcpus) * sign < 0:
                return PolicyRefusal.VCPUS
            if spindles is None or (spindles - bounds.spindle_use) * sign < 0:
                return PolicyRefusal.SPINDLES
            if instance.template != "diskless" and (len(instance.disks_mib) - bounds.disks) * sign < 0:
                return PolicyRefusal.DISK_COUNT
        return None


class Policy:
    """The intervals of a group, and the ratios that limit its hosts."""

    __slots__ = ("by_disk", "intervals", "sizes", "spindle_ratio", "templates", "vcpu_ratio")

    def __init__(
        self, *, intervals: Sequence[Interval], templates: frozenset[str], vcpu_ratio: float, spindle_ratio: float
    ) -> None:
        #: As listed; none admits everything.
        self.intervals = tuple(intervals)
        self.templates = templates
        #: Virtual CPUs for each CPU of a host; negative: unlimited.
        self.vcpu_ratio = vcpu_ratio
        #: Instances' use for each spindle of a host that shares them.
        self.spindle_ratio = spindle_ratio
        #: The intervals by decreasing lower disk bound, equal ones as listed.
        self.by_disk = sorted(self.intervals, key=lambda interval: -interval.least.disk_mib)
        #: The test instances: lower bounds of those, without spindles of their own.
        self.sizes = tuple(
            Size(least.memory_mib, least.disk_mib, least.vcpus, least.spindle_use, 0) for least, _ in self.by_disk
        )

    def refusal(self, instance: Instance, *, is_exclusive: bool) -> PolicyRefusal | None:
        """Return why no interval holds the instance on such a host, or None."""
        reasons = [interval.refusal(instance, is_exclusive=is_exclusive) for interval in self.intervals]
        if reasons and None not in reasons:
            return reasons[0]
        return None if instance.template in self.templates else PolicyRefusal.DISK
