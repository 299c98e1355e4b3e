"""Snapshots (docs/spec/coordinator.md §10): what is saved reads back equal, and what is damaged is refused."""

import asyncio
import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bigfleet.coordinator.commands import Command, CommandRefused, apply
from bigfleet.coordinator.replica import Export
from bigfleet.coordinator.stores.protocol import TERM_STEP, StoreUnavailable
from bigfleet.coordinator.stores.snapshot import (
    PIECE_BYTES,
    SnapshotFault,
    content_digest,
    export,
    read_meta,
    read_snapshot,
    snapshot_of,
    write_snapshot,
)
from bigfleet.coordinator.tables import Tables
from bigfleet.rpc.wire.gen import coordinator_pb2 as pb
from tests.coordinator.replica_world import Served, etcd_store, report, serving, sqlite_store
from tests.coordinator.stores.etcd_process import Cluster, until
from tests.coordinator.stores.random_commands import COMMANDS
from tests.patience import PATIENCE_SECONDS

NANOS = 1_000_000_000


def tables_after(commands: list[Command]) -> Tables:
    tables = Tables()
    for command in commands:
        try:
            tables = apply(tables, command)
        except CommandRefused:
            continue
    return tables


@pytest.mark.rule("coordinator 10/1")
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(COMMANDS, max_size=30))
def test_a_snapshot_reads_back_equal(tmp_path: Path, commands: list[Command]) -> None:
    tables = tables_after(commands)
    snapshot = snapshot_of(tables, term=7, index=3, saved_at_unix_nanos=NANOS)
    folder = tmp_path / f"s-{len(list(tmp_path.iterdir()))}"
    write_snapshot(folder, snapshot)

    restored = read_snapshot(folder)

    assert Tables().with_edits(restored.rows) == tables
    assert restored == read_snapshot(folder / "state.json")
    assert restored.term_above(0) == 7 + TERM_STEP
    assert restored.term_above(5_000_000) == 5_000_000 + TERM_STEP
    assert b"".join(snapshot.pieces()) == snapshot.document
    assert all(len(piece) <= PIECE_BYTES for piece in snapshot.pieces())


def saved(folder: Path) -> Path:
    write_snapshot(folder, snapshot_of(Tables(), term=7, index=3, saved_at_unix_nanos=NANOS))
    return folder


@pytest.mark.rule("coordinator 10/1")
def test_one_changed_byte_is_noticed(tmp_path: Path) -> None:
    folder = saved(tmp_path / "s")
    state = folder / "state.json"
    state.write_bytes(state.read_bytes().replace(b'"term":7', b'"term":8'))

    with pytest.raises(SnapshotFault, match=r"state\.json: is not what its meta\.json says, \d+ bytes; take another"):
        read_snapshot(folder)


@pytest.mark.rule("coordinator 10/3")
def test_a_snapshot_of_another_version_is_refused_by_name(tmp_path: Path) -> None:
    folder = saved(tmp_path / "s")
    meta = folder / "meta.json"
    meta.write_bytes(msgspec.json.encode(json.loads(meta.read_bytes()) | {"schema": 2}))

    with pytest.raises(SnapshotFault, match="has schema 2, this program knows 1; run a newer bigfleet"):
        read_snapshot(folder)


@pytest.mark.rule("coordinator 10/3")
def test_what_is_no_snapshot_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text("{}")

    with pytest.raises(SnapshotFault, match=r"meta\.json: .*schema.*; it is not the meta\.json of a snapshot"):
        read_snapshot(tmp_path)
    with pytest.raises(SnapshotFault, match="No such file or directory; name a directory"):
        read_snapshot(tmp_path / "no" / "where")
    with pytest.raises(SnapshotFault, match="exists already"):
        write_snapshot(tmp_path, snapshot_of(Tables(), term=1, index=1, saved_at_unix_nanos=NANOS))


@pytest.mark.rule("coordinator 10/2")
def test_exports_are_kept_up_to_a_number_and_latest_is_the_last(tmp_path: Path) -> None:
    for index in range(4):
        taken = snapshot_of(Tables(), term=7, index=index, saved_at_unix_nanos=index * 60 * NANOS)
        export(tmp_path, taken, keep=2)

    folders = sorted(each.name for each in tmp_path.iterdir())
    assert folders == ["19700101-000200-2", "19700101-000300-3", "latest"]
    assert read_meta((tmp_path / "latest" / "meta.json").read_bytes(), "latest").index == 3


@pytest.mark.rule("coordinator 10/2")
async def test_the_leader_exports_what_is_new_and_nothing_else(tmp_path: Path) -> None:
    to = Export(directory=tmp_path / "out", interval_seconds=0.02, keep=48)
    async with serving(sqlite_store(tmp_path / "c.db"), export_to=to) as served:
        await (await served.led()).stub.ReportShard(report("east-0"))

        def rows() -> int:
            path = to.directory / "latest" / "state.json"
            return len(json.loads(path.read_bytes())["tables"]["shards"]) if path.exists() else 0

        async with asyncio.timeout(PATIENCE_SECONDS):
            await until(lambda: rows() == 1)
            first = served.value("snapshot_last_success_timestamp_seconds")
            await served.stub.ReportShard(report("east-0", 2))
            await served.stub.ReportShard(report("east-1"))
            await until(lambda: rows() == 2)

        exported = [each.name for each in to.directory.iterdir() if each.is_dir() and not each.is_symlink()]
        # An export of the empty tables may have come before the first report.
        assert sorted(name.rpartition("-")[2] for name in exported)[-2:] == ["1", "2"]
        assert first


async def stream(served: Served) -> tuple[bytes, bytes]:
    frames = [frame async for frame in served.stub.SnapshotSave(pb.SnapshotSaveRequest())]
    assert all(frame.WhichOneof("payload") == "data" for frame in frames[1:])
    return frames[0].meta_json, b"".join(frame.data for frame in frames[1:])


@pytest.mark.rule("coordinator 10/4", "coordinator 10/6", "coordinator 13/3")
async def test_saved_over_the_wire_and_restored_into_etcd_the_tables_are_equal_and_the_term_is_higher(
    tmp_path: Path, member: Cluster
) -> None:
    async with serving(sqlite_store(tmp_path / "c.db")) as served:
        ack = await (await served.led()).stub.ReportShard(report(clusters=["c1"]))
        before = served.replica.leading().tables
        meta, document = await stream(served)
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "meta.json").write_bytes(meta)
    (tmp_path / "s" / "state.json").write_bytes(document)
    restored = read_snapshot(tmp_path / "s")

    store = etcd_store(member)
    await store.restore(restored.rows, term=restored.term_above(0), is_forced=False)
    with pytest.raises(StoreUnavailable, match=r"the store has \d+ rows already; --force replaces them"):
        await store.restore(restored.rows, term=restored.term_above(0), is_forced=False)
    async with serving(store) as again:
        await again.led()
        assert content_digest(again.replica.leading().tables) == content_digest(before)
        after = await again.stub.ReportShard(report(cycle=2, coordinator_term=ack.coordinator_term))
        assert after.coordinator_term > ack.coordinator_term + TERM_STEP
        # With a leader there, nothing is restored, by force neither.
        other = etcd_store(member, "restore")
        with pytest.raises(StoreUnavailable, match="a coordinator leads on this store; stop all replicas first"):
            await other.restore(restored.rows, term=1, is_forced=True)
        await other.close()
