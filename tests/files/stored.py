"""What tests of damaged state files share: each file with some content, and how a process reads it at its start."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import msgspec

from bigfleet.coordinator.commands import AddShard
from bigfleet.coordinator.stores.protocol import LeaderInfo
from bigfleet.coordinator.stores.sqlite import SqliteStateStore, StoreFault
from bigfleet.model.clock import NANOS_PER_SECOND
from bigfleet.model.ids import ClusterId, MachineId, ShardId
from bigfleet.model.machine import HostRef, Machine
from bigfleet.model.ownership import Base, Domain, Owned, OwnershipRow, OwnershipVersion, Reservation, RowKind
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.provider.backend import Slot
from bigfleet.provider.backends.partitioned.book import SqliteInstanceBook, StoredChoice
from bigfleet.provider.backends.partitioned.ports import Carved, CarveSize
from bigfleet.provider.backends.simulated.book import Entry, SimulatedHost, SqliteHostBook
from bigfleet.provider.records.fence import Mark
from bigfleet.provider.records.record import Pushed, Record
from bigfleet.provider.records.refusal import StartRefused
from bigfleet.provider.storage.blob_encryption import Sealed
from bigfleet.provider.storage.sqlite import SqliteProviderStore
from bigfleet.provider.storage.store import Batch
from bigfleet.provider.storage.view import Tombstone
from bigfleet.shard.ownership.retired_clusters import RetiredCluster
from bigfleet.shard.ownership.state_file import StateFile, StateFileFault

NOW_SECONDS = 1_800_000_000
ME = LeaderInfo("replica-0", "here:7790")


def nothing() -> None:
    """Do nothing."""


class Wall:
    """A clock whose wall stands at `NOW_SECONDS`."""

    def monotonic_seconds(self) -> float:
        """Return nothing of interest."""
        return 0.0

    def unix_nanos(self) -> int:
        """Return the wall's time."""
        return NOW_SECONDS * NANOS_PER_SECOND

    async def sleep(self, seconds: float) -> None:
        """Not needed here."""
        raise AssertionError("a file never waits")


class Write(Protocol):
    """Writes a state file."""

    def __call__(self, path: Path, changes: int, end: Callable[[], object] = nothing) -> None:
        """Start on the file, as a process does, write so many changes, and call `end` before it is closed."""
        ...


@dataclass(frozen=True)
class Stored:
    """A kind of state file. Both functions take the file's path and close what they open."""

    name: str
    write: Write
    #: Starts on the file; returns what outranks the starts before it, and all the rest.
    read: Callable[[Path], tuple[object, object]]
    #: What a start that is refused raises.
    refusal: type[Exception]
    #: Makes a file one of the last schema without checksums.
    former: str
    #: Whether each commit is counted, and not only what a start and a clean end find on the disk.
    is_power_safe: bool = True

    def path(self, directory: Path) -> Path:
        """Return the file's path in a directory."""
        return directory / self.name


# ---- a shard -----------------------------------------------------------------------------------------------------


def _shard(path: Path) -> StateFile:
    return StateFile.open(path.parent, shard_id="shard-0", clock=Wall())


def _write_shard(path: Path, changes: int, end: Callable[[], object] = nothing) -> None:
    with _shard(path) as file:
        for number in range(changes):
            machine = Machine(
                id=MachineId(f"released-{number}"),
                state=MachineState.IDLE,
                host=HostRef("p", f"h{number}"),
                labels={"zone": f"zone-{number}"},
            )
            rows = dict(file.ownership.owned.rows)
            rows[machine.id] = OwnershipRow(
                RowKind.RELEASED, OwnershipVersion(3, number), ShardId("shard-1"), number, machine
            )
            domains = {*file.ownership.owned.domains, Domain("rack", f"r{number}")}
            owned = Owned(base=Base.ALL, domains=frozenset(domains), leaving=frozenset(), rows=rows)
            reservation = Reservation(
                machine_id=MachineId(f"reserved-{number}"),
                to_shard=ShardId("shard-1"),
                instruction_id="i-1",
                is_ready=bool(number % 2),
                expires_unix_nanos=number,
                instance_type="t",
                zone="z",
            )
            file.ownership.commit(owned, {**file.ownership.reservations, reservation.machine_id: reservation})
            file.ownership.accept_term(number + 1)
            file.retirements.put(
                RetiredCluster(
                    cluster=ClusterId(f"gone-{number}"),
                    since_unix_nanos=number,
                    until_unix_nanos=number + 1,
                    owner="bigfleet://admin",
                    reason="decommissioned",
                )
            )
        end()


def _read_shard(path: Path) -> tuple[object, object]:
    with _shard(path) as file:
        held = file.ownership
        state = held.owned, dict(held.reservations), held.accepted_term, dict(file.retirements.records)
        return file.epoch, state


# ---- a provider --------------------------------------------------------------------------------------------------


def record(number: int) -> Record:
    """Return a provider's record of a machine."""
    slot = Slot(
        id=f"m-{number}",
        instance_type="m6i.large",
        zone="z",
        capacity_type=CapacityType.SPOT,
        resources={"cpu": "2", "memory": "8Gi"},
        price_usd_per_hour=0.25,
    )
    machine = Machine(
        id=MachineId(slot.id),
        state=MachineState.CONFIGURED,
        host=HostRef("p", f"h{number}"),
        cluster=ClusterId("c1"),
        instance_type="m6i.large",
        zone="z",
        capacity_type=CapacityType.SPOT,
        resources=slot.resources,
        price_usd_per_hour=0.25,
    )
    return Record(
        machine=machine,
        slot=slot,
        declared_price_usd_per_hour=0.25,
        declared_probability=0.0,
        metadata={"assigned": "x"},
        state_since_unix_nanos=number,
        pushed=Pushed(price_usd_per_hour=0.5) if number % 2 else None,
        revision=number + 1,
    )


def _write_provider(path: Path, changes: int, end: Callable[[], object] = nothing) -> None:
    store = SqliteProviderStore(path)
    try:
        loaded = store.load(b"incarnat")
        for number in range(changes):
            store.commit(
                Batch(
                    head=loaded.head + number + 1,
                    floor=0,
                    records=(record(number),),
                    tombstones=(Tombstone(machine_id=f"gone-{number}", revision=number, removed_unix_nanos=9),),
                    marks=(Mark(machine_id=f"m-{number}", shard_id="s", epoch=7, sequence=number, used_unix_nanos=5),),
                    sealed=(Sealed(machine_id=f"m-{number}", operation_id="op-1", text=b"sealed"),),
                )
            )
        end()
    finally:
        store.close()


def _read_provider(path: Path) -> tuple[object, object]:
    store = SqliteProviderStore(path)
    try:
        loaded = store.load(b"another1")
        return loaded.incarnation, replace(loaded, incarnation=b"")
    finally:
        store.close()


# ---- what belongs to a provider ------------------------------------------------------------------------------------


def _write_cloud(path: Path, changes: int, end: Callable[[], object] = nothing) -> None:
    book = SqliteHostBook(path)
    try:
        book.load(NOW_SECONDS)
        for number in range(changes):
            host = SimulatedHost(ref=f"h{number}", number=number, created_by="op-1", running_unix_nanos=number)
            book.save([(f"m-{number}", Entry(host=host, billed_seconds=number, counters={"boot": number}))])
        end()
    finally:
        book.close()


def _read_cloud(path: Path) -> tuple[object, object]:
    book = SqliteHostBook(path)
    try:
        began, entries = book.load(NOW_SECONDS + 1)
        return began, {name: msgspec.to_builtins(entry) for name, entry in entries.items()}
    finally:
        book.close()


def _write_rooms(path: Path, changes: int, end: Callable[[], object] = nothing) -> None:
    book = SqliteInstanceBook(path, is_power_safe=True)

    async def put() -> None:
        for number in range(changes):
            carved = Carved("n", f"g-z-half-{number:03}", CarveSize(15_960, 2, 99_960, 1, number))
            await book.put(f"m-{number}", StoredChoice(operation_id="op-1", carved=carved))

    try:
        book.load()
        asyncio.run(put())
        end()
    finally:
        book.close()


def _read_rooms(path: Path) -> tuple[object, object]:
    book = SqliteInstanceBook(path, is_power_safe=True)
    try:
        return None, book.load()
    finally:
        book.close()


# ---- a coordinator -----------------------------------------------------------------------------------------------


def _write_coordinator(path: Path, changes: int, end: Callable[[], object] = nothing) -> None:
    async def write() -> None:
        store = SqliteStateStore(path, leader=ME)
        try:
            there = len((await store.campaign()).tables.shards)
            for number in range(there, there + changes):
                await store.commit(AddShard(ShardId(f"east-{number}"), "east:7780", number, 10))
            end()
        finally:
            await store.close()

    asyncio.run(write())


def _read_coordinator(path: Path) -> tuple[object, object]:
    async def read() -> tuple[object, object]:
        store = SqliteStateStore(path, leader=ME)
        try:
            won = await store.campaign()
            return won.term, (dict(won.tables.rows()), store.revision())
        finally:
            await store.close()

    return asyncio.run(read())


SHARD = Stored(
    "shard.db", _write_shard, _read_shard, StateFileFault, "UPDATE meta SET value = '3' WHERE key = 'schema'"
)
PROVIDER = Stored("provider.db", _write_provider, _read_provider, StartRefused, "PRAGMA user_version=2")
CLOUD = Stored(
    "provider.db.cloud", _write_cloud, _read_cloud, StartRefused, "PRAGMA user_version=1", is_power_safe=False
)
ROOMS = Stored("provider.db.rooms", _write_rooms, _read_rooms, StartRefused, "PRAGMA user_version=1")
COORDINATOR = Stored("coordinator.db", _write_coordinator, _read_coordinator, StoreFault, "PRAGMA user_version=1")
STATE_FILES = (SHARD, PROVIDER, CLOUD, ROOMS, COORDINATOR)
