"""What a coordinator is given wrong is told in one line, and nothing is lost by it.

docs/spec/wire.md §4, docs/spec/coordinator.md §3 and §10: reports, files, stores and snapshots. What administrators
mistype is in `tests.cli.test_coordinator_command`.
"""

import asyncio
import json
import shutil
import sqlite3
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
import structlog

from bigfleet.coordinator.commands import AddShard, SetQuota
from bigfleet.coordinator.stores.protocol import LeaderInfo, StoreUnavailable
from bigfleet.coordinator.stores.snapshot import snapshot_of, write_snapshot
from bigfleet.coordinator.stores.sqlite import SqliteStateStore
from bigfleet.coordinator.tables import QuotaKey, Tables
from bigfleet.model.ids import ShardId
from bigfleet.rpc.etcd.client import EtcdClient, put
from bigfleet.rpc.wire.gen import capacity_pb2, provider_pb2
from bigfleet.rpc.wire.gen import coordinator_pb2 as pb
from tests.commands import run_here
from tests.coordinator.coordinator_process import coordinator
from tests.coordinator.replica_world import etcd_store, owning, refused, report, serving, sqlite_store
from tests.coordinator.stores.etcd_process import Cluster
from tests.patience import wait_until
from tests.processes import free_port

Code = grpc.StatusCode
IN = int(capacity_pb2.NodeSelectorRequirement.OPERATOR_IN)
EAST = ShardId("east-0")


def requirement(key: str, operator: int, *values: str) -> capacity_pb2.NodeSelectorRequirement:
    number = capacity_pb2.NodeSelectorRequirement.Operator.ValueType(operator)
    return capacity_pb2.NodeSelectorRequirement(key=key, operator=number, values=values)


def lacking(*requirements: capacity_pb2.NodeSelectorRequirement, bucket: int = 1) -> pb.Shortfall:
    """Return a shortfall of one CPU."""
    return pb.Shortfall(
        profile_fingerprint="f",
        age_cycles=1,
        deficit=provider_pb2.Resources(resources={"cpu": "1"}),
        requirements=requirements,
        interruption_penalty_bucket=capacity_pb2.PenaltyBucket.ValueType(bucket),
    )


# ---- reports -----------------------------------------------------------------------------------------------------


@pytest.mark.rule("coordinator 4/3")
@pytest.mark.parametrize(
    ("shortfall", "told"),
    [
        (lacking(requirement("", IN, "a")), "requirements[0].key: is empty"),
        (lacking(requirement("zone", IN)), "requirements[0].values: is empty, In needs at least one value"),
        (
            lacking(requirement("zone", 0, "a")),
            "requirements[0].operator: is 0, which is no operator that is known here",
        ),
        (
            lacking(requirement("zone", 99, "a")),
            "requirements[0].operator: is 99, which is no operator that is known here",
        ),
        (
            lacking(*[requirement("zone", IN, "a")] * 65),
            "requirements: has 65 requirements, at most 64 are allowed",
        ),
        (lacking(bucket=77), "interruption_penalty_bucket: is 77, penalty buckets are 0 to 27"),
    ],
)
async def test_a_malformed_requirement_is_named_by_its_place_and_the_last_report_stays(
    tmp_path: Path, shortfall: pb.Shortfall, told: str
) -> None:
    sound = lacking(requirement("zone", IN, "a"))
    async with serving(sqlite_store(tmp_path / "c.db")) as served:
        await (await served.led()).stub.ReportShard(report(shortfalls=[sound]))
        with structlog.testing.capture_logs() as logs:
            answer = await refused(served.stub.ReportShard(report(cycle=2, shortfalls=[sound, shortfall])))
        (kept,) = (await served.stub.ListShardReports(pb.ListShardReportsRequest())).reports

        assert answer == (Code.INVALID_ARGUMENT, f"shortfalls[1].{told}")
        assert (kept.cycle, list(kept.shortfalls)) == (1, [sound])
        assert served.value("reports_total", outcome="refused") == 1
        # The shard is named, or nobody would know whose reports those are that a metric counts.
        assert [(log["event"], log["shard"]) for log in logs if log["log_level"] == "warning"] == [
            ("coordinator.report_rejected", "east-0")
        ]


@pytest.mark.rule("coordinator 4/3", "coordinator 3/13")
async def test_a_name_with_a_nul_reaches_no_table_and_the_file_opens_again(tmp_path: Path) -> None:
    """It parts the keys of the file: the next start could not have read the row, nor any snapshot of it."""
    path = tmp_path / "c.db"
    assign = pb.AssignDomainRequest(topology_key="zone", topology_value="a\0b", shard_id="east-0")
    quota = pb.QuotaAllocation(provider="aws", region="e\0u", per_shard={"east-0": 1})
    provider = pb.ProviderEntry(name="a\0s", address="p:9100", region="eu")
    async with serving(sqlite_store(path)) as served:
        stub = (await served.led()).stub
        term = (await stub.ReportShard(report())).coordinator_term
        answers = [
            await refused(stub.ReportShard(report(cycle=2, coordinator_term=term, ownership=owning("a\0b")))),
            await refused(stub.AssignDomain(assign)),
            await refused(stub.SetQuota(pb.SetQuotaRequest(allocation=quota))),
            await refused(stub.UpsertProvider(pb.UpsertProviderRequest(provider=provider))),
        ]
        tables = await served.store.load()

    assert {code for code, _text in answers} == {Code.INVALID_ARGUMENT}
    assert [text for _code, text in answers if "has the control character '\\x00'" not in text] == []
    again = sqlite_store(path)
    assert await again.load() == tables
    await again.close()


@pytest.mark.rule("coordinator 4/4", "coordinator 12/9")
async def test_a_superseded_process_is_told_so_and_changes_nothing(tmp_path: Path) -> None:
    async with serving(sqlite_store(tmp_path / "c.db")) as served:
        await (await served.led()).stub.ReportShard(report(shard_epoch=5, cycle=3))
        with structlog.testing.capture_logs() as logs:
            answer = await served.stub.ReportShard(report(shard_epoch=4, cycle=9, shard_address="elsewhere:1"))
        (entry,) = (await served.stub.ListShards(pb.ListShardsRequest())).shards

        assert (answer.acknowledged, list(answer.instructions)) == (False, [])
        assert (entry.shard_epoch, entry.address) == (5, "east-0:7780")
        assert [log["reason"] for log in logs if log["event"] == "coordinator.report_rejected"] == ["superseded"]


@pytest.mark.rule("coordinator 4/7", "coordinator 12/14")
async def test_a_cluster_that_two_shards_claim_is_logged_once(tmp_path: Path) -> None:
    async with serving(sqlite_store(tmp_path / "c.db")) as served:
        await (await served.led()).stub.ReportShard(report("east-0", clusters=["blue"]))
        with structlog.testing.capture_logs() as logs:
            for cycle in (1, 2):
                assert (await served.stub.ReportShard(report("east-1", cycle, clusters=["blue"]))).acknowledged

        told = [log for log in logs if log["event"] == "coordinator.cluster_reported_twice"]
        assert [(log["cluster"], log["bound_to"], log["also"]) for log in told] == [("blue", "east-0", "east-1")]


# ---- files -------------------------------------------------------------------------------------------------------


def written(path: Path) -> bytes:
    """Make a coordinator's file with a hundred quotas and return its bytes."""
    store = SqliteStateStore(path, leader=LeaderInfo("r0", ""))
    for step in (store.campaign(), store.commit(AddShard(EAST, "e:1", 1, 1))):
        _now(step)
    for number in range(100):
        _now(store.commit(SetQuota(QuotaKey("aws", f"region-{number:03}"), {EAST: number})))
    _now(store.close())
    return path.read_bytes()


def _now(step: Coroutine[Any, Any, object]) -> None:
    """Run a coroutine that never waits."""
    try:
        step.send(None)
    except StopIteration:
        return


def damaged_page(content: bytes) -> bytes:
    return content[:8192] + b"X" * 32 + content[8224:]


def cut_short(content: bytes) -> bytes:
    return content[:5000]


@pytest.mark.rule("coordinator 3/13")
@pytest.mark.parametrize("harm", [damaged_page, cut_short], ids=lambda harm: harm.__name__)
def test_a_file_that_was_damaged_ends_the_start_in_one_line_and_is_left_as_it_is(
    tmp_path: Path, harm: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "c.db"
    harmed = harm(written(path))
    path.write_bytes(harmed)

    done = run_here("coordinator", "--store", f"sqlite://{path}", "--listen", "127.0.0.1:0", "--metrics-addr", "off")

    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert f"--store: {path}: " in done.stderr
    assert done.stderr.rstrip().endswith("; move it and c.db.commits away, then restore a snapshot or start empty")
    assert path.read_bytes() == harmed


def test_a_path_that_no_file_can_have_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "c.db"):
        done = run_here(
            "coordinator", "--store", f"sqlite://{path}", "--listen", "127.0.0.1:0", "--metrics-addr", "off"
        )
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
        assert "choose a file in a directory that can be written" in done.stderr
        assert "Errno" not in done.stderr


# ---- etcd --------------------------------------------------------------------------------------------------------


@pytest.mark.rule("coordinator 1/7")
@pytest.mark.slow
async def test_a_store_that_comes_late_is_waited_for_with_longer_and_longer_pauses(
    member: Cluster, tmp_path: Path
) -> None:
    member.kill()
    url = f"etcd://{member.endpoints[0]}/bigfleet"
    with coordinator(tmp_path, "--store", url, wait_for="/healthz") as waiting:
        _until(lambda: len(_pauses(waiting.log)) >= 6, waiting.log)
        assert waiting.page("/readyz")[0] == 503
        member.start()
        _until(lambda: waiting.page("/readyz")[0] == 200, waiting.log)
        pauses = _pauses(waiting.log)
        answer = waiting.report("east-0")

    assert pauses[:6] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
    assert answer.acknowledged


def _pauses(log: Path) -> list[float]:
    lines = (json.loads(line) for line in log.read_text().splitlines() if line.startswith("{"))
    told = [line for line in lines if line["event"] == "etcd.campaign_failed"]
    assert all("etcd at 127.0.0.1:" in line["error"] for line in told)
    return [line["retry_seconds"] for line in told]


def _until(is_so: Callable[[], bool], log: Path) -> None:
    wait_until(is_so, log.read_text)


@pytest.mark.rule("coordinator 10/4")
async def test_a_row_that_cannot_be_read_keeps_the_store_as_it_is_until_a_snapshot_replaces_it(
    member: Cluster, tmp_path: Path
) -> None:
    raw = EtcdClient(member.endpoints)
    await raw.txn([], [put(b"/bigfleet/shards/east-0", b"\xff nothing that was written by us")])
    store = etcd_store(member)
    with pytest.raises(StoreUnavailable, match="shards/east-0"):
        await store.load()
    await store.close()

    saved = tmp_path / "saved"
    write_snapshot(saved, snapshot_of(Tables(), term=7, index=3, saved_at_unix_nanos=1_000_000_000))
    url = f"etcd://{member.endpoints[0]}/bigfleet"
    restore = ("snapshot", "restore", str(saved), "--store", url)
    refusal = await asyncio.to_thread(run_here, *restore)
    before = (await raw.range(b"/bigfleet/shards/east-0")).items[0].value
    done = await asyncio.to_thread(run_here, *restore, "--force")
    after = (await raw.range(b"/bigfleet/shards/east-0")).items
    await raw.close()

    assert (refusal.returncode, "the store has 1 rows already; --force replaces them" in refusal.stderr) == (1, True)
    assert before.startswith(b"\xff")
    assert (done.returncode, after) == (0, ())


# ---- snapshots ---------------------------------------------------------------------------------------------------


@pytest.mark.rule("coordinator 10/3")
def test_a_snapshot_of_another_version_writes_nothing(tmp_path: Path) -> None:
    saved, target = tmp_path / "saved", tmp_path / "c.db"
    write_snapshot(saved, snapshot_of(Tables(), term=7, index=3, saved_at_unix_nanos=1_000_000_000))
    meta = saved / "meta.json"
    meta.write_bytes(msgspec.json.encode(json.loads(meta.read_bytes()) | {"schema": 2}))

    done = run_here("snapshot", "restore", str(saved), "--store", f"sqlite://{target}")

    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "has schema 2, this program knows 1; run a newer bigfleet" in done.stderr
    assert not target.exists()


@pytest.mark.rule("coordinator 10/5")
def test_a_restore_that_cannot_reach_its_store_says_that_nothing_was_written(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    write_snapshot(saved, snapshot_of(Tables(), term=7, index=3, saved_at_unix_nanos=1_000_000_000))

    done = run_here("snapshot", "restore", str(saved), "--store", f"etcd://127.0.0.1:{free_port()}/bigfleet")

    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert done.stderr.rstrip().endswith("; nothing was written")


@pytest.mark.rule("coordinator 3/13")
def test_after_a_damaged_file_a_snapshot_brings_everything_back(tmp_path: Path) -> None:
    """As the message says: away with the file, the snapshot in its place."""
    path, saved = tmp_path / "c.db", tmp_path / "saved"
    with coordinator(tmp_path, "--store", f"sqlite://{path}") as first:
        first.report("east-0", clusters=["blue"])
        assert first.run("snapshot", "save", str(saved)).returncode == 0
    path.write_bytes(cut_short(path.read_bytes()))
    with pytest.raises(sqlite3.DatabaseError):
        sqlite3.connect(path).execute("SELECT * FROM rows").fetchall()
    shutil.move(path, tmp_path / "damaged.db")
    assert run_here("snapshot", "restore", str(saved), "--store", f"sqlite://{path}").returncode == 0

    with coordinator(tmp_path, "--store", f"sqlite://{path}") as second:
        assert [row["cluster"] for row in second.records("get", "bindings")] == ["blue"]
