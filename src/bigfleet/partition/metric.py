"""Counts in closed form what still fits on a host, and computes what a placement costs: the dedicated metric.

docs/spec/partition.md §8. A host's *allocation vector* counts, for each size that the policy allows and from the
largest disk to the smallest, how many instances of that size could still be added. A placement costs the difference of
the vectors before and after it, the *lost allocations*; of equal losses the one that leaves less disk is better. The
smallest (lost allocations, disk left) wins, compared element by element.

The design's own table, with hosts that are empty or filled to a quarter, a half or three quarters. A quarter instance
prefers the host that is three quarters full, then the one a quarter full, then the half full one, then the empty one:

>>> quarter, half, full = (Size.of(memory_mib=n * 8_000 - 40, disk_mib=n * 50_000 - 40) for n in (1, 2, 4))
>>> sizes = (full, half, quarter)
>>> def host(filled: int) -> Room:
...     return Room.of(memory_mib=(4 - filled) * 8_000, disk_mib=(4 - filled) * 50_000)
>>> def cost(filled: int, taken: int) -> Key:
...     after = host(filled).less(memory_mib=taken * 8_000 - 20, disk_mib=taken * 50_000 - 20)
...     return key_of(sizes, host(filled), after)
>>> for filled in (3, 1, 2, 0):
...     print(filled, cost(filled, 1))
3 ((0, 0, 1), 20)
1 ((0, 0, 1), 100020)
2 ((0, 1, 1), 50020)
0 ((1, 1, 1), 150020)

A half instance prefers the half full host, then the one a quarter full, then the empty one:

>>> for filled in (2, 1, 0):
...     print(filled, cost(filled, 2))
2 ((0, 1, 2), 20)
1 ((0, 1, 2), 50020)
0 ((1, 1, 2), 100020)

Where the policy also allows three quarters, a quarter instance does better on the half full host than on the one that
is a quarter full:

>>> sizes = (full, Size.of(memory_mib=24_000 - 40, disk_mib=150_000 - 40), half, quarter)
>>> for filled in (2, 1):
...     print(filled, cost(filled, 1))
2 ((0, 0, 1, 1), 50020)
1 ((0, 1, 0, 1), 100020)

Free memory and free disk must stay above zero, hence sizes a little below nominal. This module never asks whether an
instance may be placed; `bigfleet.partition.hosts` does.
"""

from collections.abc import Sequence
from operator import add, sub
from typing import Final, NamedTuple

#: One number for each size of the policy.
Vector = tuple[int, ...]
#: What a placement costs: lost allocations, then MiB of disk left; smaller is better.
Key = tuple[Vector, int]

#: More than anybody has of a resource that is not limited.
_NO_LIMIT: Final = 1 << 120
#: From here on a count comes from no resource of a host.
_COUNT_MAX: Final = 1 << 80
#: From here on doubles skip whole numbers; a limit up there is none.
_EXACT_DOUBLE_MAX: Final = 1 << 53


class UnlimitedSize(Exception):
    """Nothing limits how often a size fits, so there is nothing to compare; `position` is that of the size."""

    def __init__(self, position: int) -> None:
        super().__init__(f"nothing limits how often size {position} fits")
        self.position = position


class Size(NamedTuple):
    """What one instance takes of a host; for test instances the lower bounds of a policy interval."""

    memory_mib: int
    disk_mib: int
    vcpus: int
    #: Share of a host's spindles where they are shared.
    spindle_use: int
    #: Spindles of its own where storage is exclusive; a test instance has none.
    spindles: int

    @classmethod
    def of(
        cls, *, memory_mib: int = 0, disk_mib: int = 0, vcpus: int = 0, spindle_use: int = 0, spindles: int = 0
    ) -> "Size":
        """Return a size by names."""
        return cls(memory_mib, disk_mib, vcpus, spindle_use, spindles)


class HostLimits(NamedTuple):
    """What a host allows at most; fixed while it stands."""

    is_exclusive: bool
    #: Virtual CPUs that the policy's ratio allows; None: no limit.
    vcpus_max: int | None
    #: Sum of `spindle_use` that the policy's ratio allows; an exclusive host uses none.
    spindle_use_max: int


class Room(NamedTuple):
    """What is free and what is used on a host.

    `planned_*` also count instances that are forthcoming; they refuse, and nothing else. Amounts may be negative where
    a host is overcommitted.
    """

    memory_mib: int
    disk_mib: int
    spindles: int
    vcpus_used: int
    spindle_use: int
    planned_memory_mib: int
    planned_disk_mib: int
    planned_spindles: int
    planned_vcpus_used: int
    planned_spindle_use: int
    #: Memory reserved for instances that fail over to this host; test instances must leave it.
    reserve_mib: int
    #: The reserve is not there anyway, so it is not asked for.
    is_reserve_broken: bool

    @classmethod
    def of(cls, *, memory_mib: int, disk_mib: int, spindles: int = 0, vcpus_used: int = 0) -> "Room":
        """Return the room of a host without forthcoming instances and without a reserve."""
        return cls(
            memory_mib, disk_mib, spindles, vcpus_used, 0, memory_mib, disk_mib, spindles, vcpus_used, 0, 0, False
        )

    def less(self, *, memory_mib: int, disk_mib: int, spindles: int = 0, vcpus: int = 0) -> "Room":
        """Return the room when so much more is taken, for real."""
        return self._replace(
            memory_mib=self.memory_mib - memory_mib,
            disk_mib=self.disk_mib - disk_mib,
            spindles=self.spindles - spindles,
            vcpus_used=self.vcpus_used + vcpus,
            planned_memory_mib=self.planned_memory_mib - memory_mib,
            planned_disk_mib=self.planned_disk_mib - disk_mib,
            planned_spindles=self.planned_spindles - spindles,
            planned_vcpus_used=self.planned_vcpus_used + vcpus,
        )


#: A host of exclusive storage whose CPUs are not counted.
UNLIMITED_CPUS: Final = HostLimits(is_exclusive=True, vcpus_max=None, spindle_use_max=0)


def is_over_ratio(vcpus: int, cpus: float, ratio: float) -> bool:
    """Return whether so many virtual CPUs are more than the ratio allows; a negative ratio allows all.

    Divides as doubles do: something of nothing is infinite, and nothing of nothing is over no ratio.
    """
    if ratio < 0:
        return False
    if cpus == 0:
        return vcpus > 0
    return ratio < vcpus / cpus


def vcpus_allowed(cpus: float, ratio: float) -> int | None:
    """Return the largest number of virtual CPUs within the ratio, by the double test itself; None: no limit."""
    if ratio < 0 or cpus < 0:
        return None
    guess = ratio * cpus
    if guess >= _EXACT_DOUBLE_MAX:
        return None
    most = int(guess)
    # The product is off by a rounding at most; the quotient is what decides.
    while not is_over_ratio(most + 1, cpus, ratio):
        most += 1
    while is_over_ratio(most, cpus, ratio):
        most -= 1
    return most


def allocation_vector(sizes: Sequence[Size], room: Room, limits: HostLimits = UNLIMITED_CPUS) -> Vector:
    """Return how often each size alone could be added, one after another, under the strict rules.

    Constant time a size: every test is monotone, so the count is the smallest quotient. Raises UnlimitedSize where
    nothing limits it.
    """
    memory, disk, spindles, vcpus, use, *planned, reserve, is_broken = room
    planned_memory, planned_disk, planned_spindles, planned_vcpus, planned_use = planned
    if reserve > 0 and not is_broken:
        memory -= reserve
    if planned_memory < memory:
        memory = planned_memory
    if planned_disk < disk:
        disk = planned_disk
    if planned_spindles < spindles:
        spindles = planned_spindles
    shared = not limits.is_exclusive
    if shared:
        spindles = _NO_LIMIT
    use_left = limits.spindle_use_max - (max(use, planned_use) if shared else 0)
    vcpus_left = _NO_LIMIT
    if limits.vcpus_max is not None:
        vcpus_left = limits.vcpus_max - (planned_vcpus if planned_vcpus > vcpus else vcpus)
    if memory <= 0 or disk <= 0 or spindles < 0 or vcpus_left < 0 or use_left < 0:
        return (0,) * len(sizes)
    counts: list[int] = []
    for size_memory, size_disk, size_vcpus, size_use, size_spindles in sizes:
        count = (memory - 1) // size_memory if size_memory > 0 else _NO_LIMIT
        if size_disk > 0 and (fits := (disk - 1) // size_disk) < count:
            count = fits
        if size_vcpus > 0 and (fits := vcpus_left // size_vcpus) < count:
            count = fits
        if size_spindles > 0 and (fits := spindles // size_spindles) < count:
            count = fits
        if shared and size_use > 0 and (fits := use_left // size_use) < count:
            count = fits
        if count >= _COUNT_MAX:
            raise UnlimitedSize(len(counts))
        counts.append(count)
    return tuple(counts)


def lost_allocations(before: Vector, after: Vector) -> Vector:
    """Return what a placement loses; negative only where a forced one makes a reserve void."""
    return tuple(map(sub, before, after))


def both(first: Vector, second: Vector) -> Vector:
    """Return the losses of a pair of hosts, component by component."""
    return tuple(map(add, first, second))


def key_of(sizes: Sequence[Size], before: Room, after: Room, limits: HostLimits = UNLIMITED_CPUS) -> Key:
    """Return what it costs to bring a host from one room to the other; smaller is better."""
    loss = lost_allocations(allocation_vector(sizes, before, limits), allocation_vector(sizes, after, limits))
    return loss, after.disk_mib
