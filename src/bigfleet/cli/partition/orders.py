"""Compares four orders of placement: fills equal hosts with random instances in each order and counts refusals.

The orders are the dedicated metric, first fit, best fit (least disk left) and balanced (most disk left). Instances take
a full host, a half or a quarter, and arrive until the given share of the room is requested. From empty hosts, up to all
of the room, a perfect order refuses none. These orders never place real instances.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from rich.table import Table

from bigfleet.model.ids import Rng
from bigfleet.partition.hosts import HostGroup, PartitionedHost, as_primary
from bigfleet.partition.instance import Instance
from bigfleet.partition.metric import Room
from bigfleet.partition.policy import Bounds, Interval, Policy
from bigfleet.partition.search import PlacementChoice, choose_host

T = TypeVar("T")

MEMORY_MIB: Final = 32_000
DISK_MIB: Final = 200_000
#: Free memory and disk must stay above zero, so the smallest instance that the policy takes is a little below nominal.
BELOW_MIB: Final = 40
#: What an instance itself stays below nominal.
SLACK_MIB: Final = 20
QUARTERS: Final = (1, 2, 4)
#: What may stand on a host at first, in quarters: nothing, or what creating and deleting for a while leaves.
STARTS: Final = {"empty": ((),), "partly filled": ((), (1,), (2,), (1, 1), (2, 1), (1, 1, 1))}
#: What arrives as a share of the room, percent. Beyond all of it no order can place everything, and one that refuses a
#: large instance has room for several small ones: there only the first refusal says something.
LOADS_PERCENT: Final = (70, 100, 150)
ALL_PERCENT: Final = 100

Order = Callable[[Sequence[PartitionedHost], Instance], PlacementChoice | None]


def _fitting(hosts: Sequence[PartitionedHost], instance: Instance) -> list[tuple[PartitionedHost, Room]]:
    tried = ((host, as_primary(host, instance)) for host in hosts)
    return [(host, room) for host, room in tried if isinstance(room, Room)]


def _choice(found: tuple[PartitionedHost, Room] | None) -> PlacementChoice | None:
    return None if found is None else PlacementChoice(((), found[1].disk_mib), (found[0],), (found[1],))


def dedicated(hosts: Sequence[PartitionedHost], instance: Instance) -> PlacementChoice | None:
    """Lose the fewest possible placements."""
    return choose_host(hosts, instance, hosts[0].group.policy).choice


def first_fit(hosts: Sequence[PartitionedHost], instance: Instance) -> PlacementChoice | None:
    """Take the first host that has room."""
    return _choice(next(iter(_fitting(hosts, instance)), None))


def best_fit(hosts: Sequence[PartitionedHost], instance: Instance) -> PlacementChoice | None:
    """Leave the least disk."""
    return _choice(min(_fitting(hosts, instance), key=lambda each: each[1].disk_mib, default=None))


def balanced(hosts: Sequence[PartitionedHost], instance: Instance) -> PlacementChoice | None:
    """Leave the most disk."""
    return _choice(max(_fitting(hosts, instance), key=lambda each: each[1].disk_mib, default=None))


ORDERS: Final[dict[str, Order]] = {
    "dedicated": dedicated,
    "first fit": first_fit,
    "best fit": best_fit,
    "balanced": balanced,
}


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What stands on each host at first, and what arrives, all in quarters of a host."""

    fillings: tuple[tuple[int, ...], ...]
    arrivals: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placements:
    """What one order made of one sequence."""

    placed: int
    #: Those placed before the first that was refused; all of them when none was.
    before_refusal: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """What every order made of the same sequences."""

    start: str
    load_percent: int
    sequences: tuple[Arrivals, ...]
    #: By order, one entry for each sequence.
    outcomes: dict[str, list[Placements]]


def _quarters(number: int) -> Bounds:
    return Bounds(
        memory_mib=number * MEMORY_MIB // 4,
        vcpus=number,
        disk_mib=number * DISK_MIB // 4,
        disks=1,
        spindle_use=number,
    )


def empty_hosts(number: int) -> list[PartitionedHost]:
    """Return equal hosts of one group whose policy knows quarters, halves and full hosts."""
    intervals = []
    for quarters in QUARTERS:
        most = _quarters(quarters)
        least = most._replace(memory_mib=most.memory_mib - BELOW_MIB, disk_mib=most.disk_mib - BELOW_MIB)
        intervals.append(Interval(least, most))
    policy = Policy(intervals=intervals, templates=frozenset(("plain",)), vcpu_ratio=1.0, spindle_ratio=1.0)
    group = HostGroup(index=0, name="group", uuid="group", policy=policy)
    room = Room.of(memory_mib=MEMORY_MIB, disk_mib=DISK_MIB, spindles=4)
    return [
        PartitionedHost(index=index, name=f"host-{index}", group=group, room=room, cpus=4.0, spindles_total=4)
        for index in range(number)
    ]


def instance_of(quarters: int) -> Instance:
    """Return an instance of so many quarters of a host."""
    disk_mib = quarters * DISK_MIB // 4 - SLACK_MIB
    return Instance(
        name=f"{quarters}/4",
        memory_mib=quarters * MEMORY_MIB // 4 - SLACK_MIB,
        vcpus=quarters,
        disk_mib=disk_mib,
        disks_mib=(disk_mib,),
        spindles=quarters,
        spindle_use=quarters,
    )


def _one_of(options: Sequence[T], rng: Rng) -> T:
    return options[int(rng.random() * len(options))]


def random_arrivals(hosts: int, start: str, load_percent: int, rng: Rng) -> Arrivals:
    """Return hosts in one of the states to start from, and sizes in random order that add up to a share of the room."""
    fillings = tuple(_one_of(STARTS[start], rng) for _ in range(hosts))
    left = sum(4 - sum(filling) for filling in fillings) * load_percent // 100
    sizes = []
    while left:
        size = _one_of([quarters for quarters in QUARTERS if quarters <= left], rng)
        sizes.append(size)
        left -= size
    return Arrivals(fillings, tuple(sorted(sizes, key=lambda _: rng.random())))


def place_all(order: Order, sequence: Arrivals) -> Placements:
    """Place what arrives in one order; what is refused does not come again."""
    fleet = empty_hosts(len(sequence.fillings))
    for host, filling in zip(fleet, sequence.fillings, strict=True):
        for quarters in filling:
            choice = first_fit([host], instance_of(quarters))
            assert choice is not None, "the hosts to start from hold what they are filled with"
            host.take_primary(instance_of(quarters), choice.rooms[0])
    placed = 0
    before_refusal: int | None = None
    for quarters in sequence.arrivals:
        instance = instance_of(quarters)
        choice = order(fleet, instance)
        if choice is None:
            before_refusal = placed if before_refusal is None else before_refusal
            continue
        choice.hosts[0].take_primary(instance, choice.rooms[0])
        placed += 1
    return Placements(placed, placed if before_refusal is None else before_refusal)


def compare_orders(hosts: int, sequences: int, rng: Rng) -> list[Comparison]:
    """Return a comparison for every start and load, each order on the same sequences."""
    comparisons = []
    for start in STARTS:
        for load_percent in LOADS_PERCENT:
            several = tuple(random_arrivals(hosts, start, load_percent, rng) for _ in range(sequences))
            outcomes = {name: [place_all(order, each) for each in several] for name, order in ORDERS.items()}
            comparisons.append(Comparison(start, load_percent, several, outcomes))
    return comparisons


def table_of(comparisons: Sequence[Comparison], *, hosts: int, sequences: int) -> Table:
    """Return the table."""
    table = Table(title=f"full, half and quarter instances on {hosts:,} hosts, {sequences:,} random sequences each")
    for column in ("hosts at first", "load", "order"):
        table.add_column(column)
    for column in ("instances", "placed", "of them", "before the first refusal"):
        table.add_column(column, justify="right")
    for comparison in comparisons:
        arrived = sum(len(each.arrivals) for each in comparison.sequences)
        is_possible = comparison.load_percent <= ALL_PERCENT
        for name, outcomes in comparison.outcomes.items():
            placed = sum(each.placed for each in outcomes)
            table.add_row(
                comparison.start,
                f"{comparison.load_percent} %",
                name,
                f"{arrived:,}",
                f"{placed:,}" if is_possible else "–",
                f"{100 * placed / max(1, arrived):.2f} %" if is_possible else "–",
                f"{sum(each.before_refusal for each in outcomes):,}",
            )
        table.add_section()
    return table
