"""The SQLite store: exact round trips, one holder, damaged and foreign files (docs/spec/provider.md §11)."""

import math
import resource
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import HostRef, Machine
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.provider.backend import Slot
from bigfleet.provider.records.fence import Mark
from bigfleet.provider.records.kinds import Kind
from bigfleet.provider.records.record import ErrorCode, Failure, Operation, Pushed, Record
from bigfleet.provider.records.refusal import StartRefused, StoreDown
from bigfleet.provider.storage.blob_encryption import Sealed
from bigfleet.provider.storage.codec import decode_record, encode_operation, encode_record
from bigfleet.provider.storage.sqlite import SCHEMA_VERSION, SqliteProviderStore
from bigfleet.provider.storage.store import Batch
from bigfleet.provider.storage.view import Tombstone
from tests.engine.proof import in_proportion
from tests.files.editing import as_of_schema, edit

INCARNATION = b"incarnat"
TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)
MAPS = st.dictionaries(TEXTS, TEXTS, max_size=3)
PRICES = st.floats(min_value=0, allow_nan=False, allow_infinity=False)


@st.composite
def records(draw: st.DrawFn) -> Record:
    machine_id = "m-" + str(draw(st.integers(0, 9)))
    slot = Slot(
        id=machine_id,
        instance_type="t",
        zone="z",
        capacity_type=CapacityType.SPOT,
        resources=draw(MAPS),
        allocatable=draw(MAPS),
        labels=draw(MAPS),
        price_usd_per_hour=draw(PRICES),
        interruption_probability=draw(st.floats(0, 1)),
        fixed=draw(st.booleans()),
    )
    machine = Machine(
        id=MachineId(machine_id),
        state=draw(st.sampled_from([s for s in MachineState if s])),
        host=HostRef(draw(TEXTS), draw(TEXTS)),
        cluster=ClusterId(draw(TEXTS)),
        instance_type="t",
        zone="z",
        capacity_type=CapacityType.SPOT,
        resources=draw(st.one_of(st.just(slot.resources), MAPS)),
        allocatable=draw(MAPS),
        labels=draw(MAPS),
        price_usd_per_hour=draw(PRICES),
        interruption_probability=draw(st.floats(0, 1)),
        last_error=draw(TEXTS),
        node_name=draw(TEXTS),
    )
    operation = Operation(
        id="op-1", kind=draw(st.sampled_from(Kind)), accepted_unix_nanos=draw(st.integers(0, 2**62)), attempt=2
    )
    failure = Failure(code=draw(st.sampled_from(ErrorCode)), source=MachineState.IDLE, hold_seconds=None)
    return Record(
        machine=machine,
        slot=slot,
        declared_price_usd_per_hour=draw(PRICES),
        declared_probability=draw(st.floats(0, 1)),
        metadata=draw(MAPS),
        state_since_unix_nanos=draw(st.integers(0, 2**62)),
        operation=draw(st.one_of(st.none(), st.just(operation))),
        pushed=draw(st.one_of(st.none(), st.just(Pushed(price_usd_per_hour=0.5, reclaim_notice=True)))),
        host_node_name=draw(TEXTS),
        failures_in_row=draw(st.integers(0, 5)),
        failure=draw(st.one_of(st.none(), st.just(failure))),
        revision=draw(st.integers(1, 2**40)),
        state_revision=draw(st.integers(0, 2**40)),
    )


@settings(max_examples=in_proportion(150), deadline=None)
@given(records())
def test_a_record_reads_back_as_it_was_written(record: Record) -> None:
    text, operation = encode_record(record), encode_operation(record.operation)
    read = decode_record(record.id, record.revision, record.state_since_unix_nanos, text, operation, record.pushed)
    assert read == record
    assert isinstance(read.machine.labels, MappingProxyType)


@settings(max_examples=25, deadline=None)
@given(st.lists(records(), max_size=6, unique_by=lambda record: record.id))
def test_a_batch_reads_back_as_it_was_committed(tmp_path_factory: pytest.TempPathFactory, batch: list[Record]) -> None:
    path = tmp_path_factory.mktemp("store") / "state.db"
    by_id = {record.id: record for record in batch}
    store = SqliteProviderStore(path)
    store.load(INCARNATION)
    mark = Mark(machine_id="m-1", shard_id="s\x00ü", epoch=-(2**63), sequence=2**63 - 1, used_unix_nanos=5)
    tombstone = Tombstone(machine_id="gone", revision=7, removed_unix_nanos=9)
    store.commit(Batch(head=99, floor=3, records=tuple(batch), marks=(mark,), tombstones=(tombstone,)))
    store.close()
    again = SqliteProviderStore(path)
    loaded = again.load(b"another1")
    again.close()
    assert (loaded.incarnation, loaded.head, loaded.floor) == (INCARNATION, 99, 3)
    assert {record.id: record for record in loaded.records} == by_id
    assert (loaded.marks, loaded.tombstones) == ((mark,), (tombstone,))


def test_a_second_process_is_told_who_holds_the_file(tmp_path: Path) -> None:
    first, second = SqliteProviderStore(tmp_path / "s.db"), SqliteProviderStore(tmp_path / "s.db")
    first.load(INCARNATION)
    with pytest.raises(StartRefused, match=r"s\.db is in use by process \d+ on "):
        second.load(INCARNATION)
    first.close()
    second.load(INCARNATION)
    second.close()


@contextmanager
def no_room() -> Iterator[None]:
    """Let no file of this process take a byte while the context lasts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_start_on_a_full_disk_is_refused_with_the_name_of_the_file_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    first = SqliteProviderStore(path)
    first.load(INCARNATION)
    first.close()
    content = path.read_bytes()
    second = SqliteProviderStore(path)
    with no_room():
        second.lock()
        with pytest.raises(StartRefused, match=r"s\.db: .*; make room on its disk, or check disk"):
            second.load(INCARNATION)
    second.close()
    assert path.read_bytes() == content
    # With room it starts as ever.
    third = SqliteProviderStore(path)
    assert third.load(INCARNATION).incarnation == INCARNATION
    third.close()


def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    path.write_text("not a database, but somebody's text" * 100)
    before = path.read_bytes()
    with pytest.raises(StartRefused, match=r"s\.db: file is not a database"):
        SqliteProviderStore(path).load(INCARNATION)
    assert path.read_bytes() == before


def test_another_programs_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    with pytest.raises(StartRefused, match="not a provider's state file"):
        SqliteProviderStore(path).load(INCARNATION)


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    store = SqliteProviderStore(path)
    store.load(INCARNATION)
    store.close()
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version={SCHEMA_VERSION + 1}")
    with pytest.raises(StartRefused, match="newer BigFleet"):
        SqliteProviderStore(path).load(INCARNATION)


def test_a_row_that_does_not_read_back_names_its_machine(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    store = SqliteProviderStore(path)
    store.load(INCARNATION)
    store.close()
    edit(path, "INSERT INTO machines VALUES ('m-7', 1, 1, '{}', NULL)")
    with pytest.raises(StartRefused, match="machine m-7"):
        SqliteProviderStore(path).load(INCARNATION)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartRefused, match="No such file or directory"):
        SqliteProviderStore(tmp_path / "nowhere" / "s.db").load(INCARNATION)


def test_a_commit_that_the_disk_refuses_changes_nothing(tmp_path: Path) -> None:
    store = SqliteProviderStore(tmp_path / "s.db")
    store.load(INCARNATION)
    good = Tombstone(machine_id="a", revision=1, removed_unix_nanos=1)
    bad = Tombstone(machine_id="b", revision=2**70, removed_unix_nanos=1)
    with pytest.raises((StoreDown, OverflowError)):
        store.commit(Batch(head=2, floor=0, tombstones=(good, bad)))
    store.close()
    with pytest.raises(StoreDown, match="closed"):
        store.commit(Batch(head=2, floor=0))
    again = SqliteProviderStore(tmp_path / "s.db")
    assert again.load(INCARNATION).tombstones == ()
    again.close()
    assert math.isfinite(again.size_bytes())


def test_a_file_of_the_first_schema_is_migrated_in_one_transaction(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    store = SqliteProviderStore(path)
    incarnation = store.load(INCARNATION).incarnation
    store.close()
    as_of_schema(path, "DROP TABLE secrets", "PRAGMA user_version=1")
    store = SqliteProviderStore(path)
    assert store.load(b"another!").incarnation == incarnation
    store.commit(Batch(head=0, floor=0, sealed=(Sealed(machine_id="m", operation_id="op", text=b"x"),)))
    store.close()
    loaded = SqliteProviderStore(path).load(b"another!")
    assert loaded.sealed == (Sealed(machine_id="m", operation_id="op", text=b"x"),)
    with sqlite3.connect(path) as file:
        assert file.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
