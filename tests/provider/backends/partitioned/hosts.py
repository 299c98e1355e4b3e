"""Hosts files for tests, a driver that does at once what it is asked, and the long way to what must be on offer.

Hosts are quarters of 8,000 MiB memory and 50,000 MiB disk; sizes are a little smaller, so that hosts can be full.
"""

import asyncio
import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bigfleet.cli.provider.allocator import instance_of, make_allocator
from bigfleet.partition.allocator import Allocator
from bigfleet.partition.cluster import read_cluster
from bigfleet.provider.backend import FoundKind, MachineView, Op
from bigfleet.provider.backends.partitioned.backend import PartitionedBackend, PartitionedReadiness
from bigfleet.provider.backends.partitioned.book import InstanceBook, MemoryInstanceBook, read_records
from bigfleet.provider.backends.partitioned.hosts_file import HostsFile, fleet_of
from bigfleet.provider.backends.partitioned.ports import Carved, CarveSize, Driver, Standing
from bigfleet.provider.backends.partitioned.restoring import instances_of, restored
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.kit.options import CoreOptions
from bigfleet.provider.storage.sqlite import SqliteProviderStore
from bigfleet.provider.storage.store import MemoryStore, Store
from tests.provider.harness import make_core, started

MEMORY_MIB, DISK_MIB = 8_000, 50_000
SIZES = {"full": 4, "half": 2, "quarter": 1}
RECONCILE_SECONDS = 10.0
#: Two inventory passes, whatever their jitter.
PASSES_SECONDS = 25.0


def bounds(quarters: int, *, disks: int = 1, spindles: int = 1) -> dict[str, int]:
    """Return an end of an interval."""
    return {
        "memory-size": quarters * MEMORY_MIB - 40,
        "cpu-count": quarters,
        "disk-size": (quarters * DISK_MIB - 40) // disks,
        "disk-count": disks,
        "nic-count": 1,
        "spindle-use": spindles,
    }


def group(name: str, sizes: Sequence[str] = tuple(SIZES), *, policy: str = "preferred", **more: int) -> dict[str, Any]:
    """Return a node group; the intervals of its policy come in the order that is the least helpful."""
    intervals = [bounds(SIZES[size], **more) for size in sorted(sizes)]
    return {
        "name": name,
        "alloc_policy": policy,
        "networks": [],
        "tags": [],
        "ipolicy": {
            "minmax": [{"min": each, "max": each} for each in intervals],
            "std": intervals[0] if intervals else bounds(1),
            "disk-templates": ["plain"],
            "vcpu-ratio": 1.0,
            "spindle-ratio": 32.0,
        },
    }


def node(group_name: str, quarters: int = 4, *, filled: int = 0, spindles: int = 4, **flags: bool) -> dict[str, Any]:
    """Return a host of so many quarters, some of them filled by nobody's instances."""
    free = quarters - filled
    return {
        "group": group_name,
        "offline": False,
        "drained": False,
        "ndparams": {"exclusive_storage": True},
        "total_memory": quarters * MEMORY_MIB,
        "reserved_memory": 0,
        "free_memory": free * MEMORY_MIB,
        "total_disk": quarters * DISK_MIB,
        "free_disk": free * DISK_MIB,
        "total_cpus": quarters,
        "reserved_cpus": filled,
        "total_spindles": spindles,
        "free_spindles": spindles,
        **flags,
    }


def document(
    nodes: Mapping[str, dict[str, Any]],
    groups: Sequence[dict[str, Any]] = (),
    zones: Mapping[str, str] | None = None,
    *,
    prefixes: Mapping[str, str] | None = None,
    **instances: dict[str, Any],
) -> dict[str, Any]:
    """Return a hosts file; groups are known by their names, and all hosts are in zone `z` but where `zones` says so.

    `prefixes` come before the names of a group's intervals, which are its sizes otherwise.
    """
    groups = groups or [group("g")]
    names = {
        each["name"]: [(prefixes or {}).get(each["name"], "") + _name(pair["min"]) for pair in _by_disk(each)]
        for each in groups
    }
    return copy.deepcopy(
        {
            "cluster_tags": [],
            "enabled_hypervisors": ["fake"],
            "nodegroups": {each["name"]: each for each in groups},
            "nodes": dict(nodes),
            "instances": instances,
            "bigfleet": {
                "groups": {
                    name: {"intervals": [{"name": size, "price_usd_per_hour": 0.25} for size in sizes]}
                    for name, sizes in names.items()
                },
                "nodes": {name: {"zone": (zones or {}).get(name, "z")} for name in nodes},
            },
        }
    )


def _by_disk(group_body: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted(group_body["ipolicy"]["minmax"], key=lambda pair: -pair["min"]["memory-size"])


def _name(least: dict[str, int]) -> str:
    return next(name for name, quarters in SIZES.items() if quarters * MEMORY_MIB - 40 == least["memory-size"])


def fleet(body: Mapping[str, Any], ours: Mapping[str, Carved] | None = None) -> HostsFile:
    return fleet_of(body, "p", make_allocator, ours or {})


class InstantDriver:
    """What it is asked for stands at once; a verb that fails does nothing."""

    ready_interval_seconds = 1.0

    def __init__(self) -> None:
        self.standing: dict[str, Standing] = {}
        self.calls: list[tuple[str, Carved]] = []
        self.fails: dict[str, Exception] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.found = FoundKind.CLEAN

    async def _do(self, verb: str, carved: Carved) -> None:
        self.calls.append((verb, carved))
        await self.gate.wait()
        if verb in self.fails:
            raise self.fails[verb]

    async def create(self, machine: MachineView, carved: Carved, op: Op) -> str:
        await self._do("create", carved)
        self.standing[carved.instance] = Standing(host=carved.host, instance=carved.instance)
        return f"node-{carved.instance}"

    async def configure(self, machine: MachineView, carved: Carved, cluster: str, blob: bytes, op: Op) -> str:
        await self._do("configure", carved)
        return ""

    async def ready(self, machine: MachineView, carved: Carved, cluster: str, op: Op) -> bool:
        return True

    async def drain(self, machine: MachineView, carved: Carved, grace_seconds: int, op: Op) -> None:
        await self._do("drain", carved)

    async def delete(self, machine: MachineView, carved: Carved, op: Op) -> None:
        await self._do("delete", carved)
        self.standing.pop(carved.instance, None)

    async def adopt(self, machine: MachineView, carved: Carved) -> FoundKind:
        return self.found if carved.instance in self.standing else FoundKind.NO_HOST

    async def inventory(self) -> Sequence[Standing]:
        return list(self.standing.values())


class Provider:
    """A core over partitioned hosts, with what a test wants to look at."""

    def __init__(
        self,
        body: Mapping[str, Any],
        *,
        driver: Driver | None = None,
        transition_timeout_seconds: float | None = None,
        book: InstanceBook | None = None,
        state: Path | None = None,
        store: Store | None = None,
        failed_hold_seconds: float = 0.0,
    ) -> None:
        driver = driver or InstantDriver()
        self._driver = driver
        self.book = book or MemoryInstanceBook()
        records = () if state is None else read_records(state)
        leases = restored(records, self.book.load())
        self.backend = PartitionedBackend(
            fleet(body, instances_of(leases)),
            driver,
            provider="p",
            book=self.book,
            records=records,
            leases=leases,
        )
        if state is not None:
            store = SqliteProviderStore(state, is_power_safe=False)
        self.core: CapacityCore = make_core(
            self.backend,
            store=store or MemoryStore(),
            readiness=PartitionedReadiness(self.backend, driver),
            options=CoreOptions(
                is_inline=True,
                reconcile_interval_seconds=RECONCILE_SECONDS,
                failed_hold_seconds=failed_hold_seconds,
                transition_timeout_seconds=transition_timeout_seconds,
            ),
        )

    @property
    def driver(self) -> InstantDriver:
        """The driver, where a test gave no other."""
        assert isinstance(self._driver, InstantDriver)
        return self._driver

    async def start(self) -> "Provider":
        await started(self.core)
        return self

    def change(self, body: Mapping[str, Any]) -> None:
        """Take another hosts file, as after a SIGHUP."""
        self.backend.replace_fleet(fleet(body, self.backend.ours))

    async def ids(self, *states: Any) -> list[str]:
        """Return the ids in these states."""
        return sorted(record.id for record in (await self.core.list(states)).records)

    async def ref(self, machine_id: str) -> str:
        return (await self.core.get(machine_id)).machine.host.ref


# ---- the long way ----------------------------------------------------------------------------------------------------


def allocator_with(body: Mapping[str, Any], ours: Mapping[str, Carved]) -> Allocator:
    """Return an allocator made again, with our instances where they are."""
    allocator = Allocator(read_cluster(body))
    for carved in ours.values():
        allocator.restore(instance_of(carved.instance, carved.size), carved.host)
    return allocator


def counted_slots(body: Mapping[str, Any], ours: Mapping[str, Carved]) -> dict[tuple[str, str, str], int]:
    """Return what is to be offered by group, zone and interval, counted by placing real instances one by one."""
    counts: defaultdict[tuple[str, str, str], int] = defaultdict(int)
    allocator = allocator_with(body, ours)
    for host in allocator.cluster.hosts:
        zone = body["bigfleet"]["nodes"][host.name]["zone"]
        names = [each["name"] for each in body["bigfleet"]["groups"][host.group.name]["intervals"]]
        for position, interval in enumerate(host.group.policy.by_disk):
            vector = allocator.vector(host.name)[position]
            least = interval.least
            size = CarveSize(least.memory_mib, least.vcpus, least.disk_mib, least.disks, least.spindle_use)
            counts[host.group.name, zone, names[position]] += min(vector, _real_count(body, ours, host.name, size))
    return _allowed(body, counts)


def _real_count(body: Mapping[str, Any], ours: Mapping[str, Carved], host: str, size: CarveSize) -> int:
    allocator = allocator_with(body, ours)
    group_here = allocator.host(host).group
    for count in range(100):
        if not allocator.host(host).is_candidate:
            return 0
        instance = instance_of(f"count-{count}", size)
        choice = allocator.choose(group_here, instance, among={host}).choice
        if choice is None:
            return count
        allocator.take(instance, choice)
    raise AssertionError("it fits without end")


def _allowed(body: Mapping[str, Any], counts: Mapping[tuple[str, str, str], int]) -> dict[tuple[str, str, str], int]:
    policies = {each["name"]: each["alloc_policy"] for each in body["nodegroups"].values()}
    preferred = {
        (zone, size) for (name, zone, size), count in counts.items() if count and policies[name] == "preferred"
    }
    return {
        (name, zone, size): count
        for (name, zone, size), count in counts.items()
        if count
        and policies[name] != "unallocable"
        and not (policies[name] == "last_resort" and (zone, size) in preferred)
    }


def cheapest_host(body: Mapping[str, Any], ours: Mapping[str, Carved], machine_id: str) -> str:
    """Return the host on which the machine's instance loses least, by trying all; the last of equal ones."""
    _, group_name, zone, interval, _ = machine_id.split("/")
    names = [each["name"] for each in body["bigfleet"]["groups"][group_name]["intervals"]]
    best: tuple[tuple[tuple[int, ...], int], str] | None = None
    for name, where in body["bigfleet"]["nodes"].items():
        before, after = allocator_with(body, ours), allocator_with(body, ours)
        host = after.host(name)
        if host.group.name != group_name or where["zone"] != zone or not host.is_candidate:
            continue
        least = host.group.policy.by_disk[names.index(interval)].least
        size = CarveSize(least.memory_mib, least.vcpus, least.disk_mib, least.disks, least.spindle_use)
        if not before.how_often(name, instance_of("x", size)):
            continue
        after.restore(instance_of("x", size), name)
        loss = tuple(b - a for b, a in zip(before.vector(name), after.vector(name), strict=True))
        key = (loss, host.room.disk_mib)
        if best is None or key <= best[0]:
            best = (key, name)
    assert best is not None, f"{machine_id} fits nowhere"
    return best[1]
