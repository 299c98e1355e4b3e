"""Replicas of the coordinator on a real etcd: who answers, who is named, what a change of leader forgets and keeps."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bigfleet.coordinator.leader_term import CoordinatorSettings, Term
from bigfleet.coordinator.replica import CHANGES_MAX
from bigfleet.rpc.clients.coordinator import LEADER_HINT
from bigfleet.rpc.wire.gen import coordinator_pb2 as pb
from bigfleet.rpc.wire.gen import provider_pb2
from tests.coordinator.replica_world import (
    ZONE,
    Served,
    etcd_store,
    in_plain_text,
    owning,
    refused,
    report,
    serving,
    sqlite_store,
)
from tests.coordinator.stores.etcd_process import Cluster, until
from tests.patience import PATIENCE_SECONDS

Code = grpc.StatusCode


async def hint_of(served: Served) -> tuple[grpc.StatusCode, str]:
    """Return the status of a call and the leader that the replica names."""
    try:
        await served.stub.ListShards(pb.ListShardsRequest())
    except aio.AioRpcError as error:
        metadata: Any = error.trailing_metadata() or ()
        hints = [str(value) for key, value in metadata if key == LEADER_HINT]
        return error.code(), "".join(hints)
    return Code.OK, ""


async def knows_a_leader(served: Served) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        await until(lambda: served.replica.is_ready)


@pytest.mark.rule("coordinator 3/14", "coordinator 4/1", "coordinator 5/3", "coordinator 12/8")
async def test_a_follower_names_the_leader_and_takes_over_when_it_stops(member: Cluster) -> None:
    async with (
        serving(etcd_store(member, "r0", "r0:7790")) as first,
        serving(etcd_store(member, "r1", "r1:7790")) as second,
    ):
        leader, follower = (first, second)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await until(lambda: first.replica.is_leading or second.replica.is_leading)
        if second.replica.is_leading:
            leader, follower = second, first
        await knows_a_leader(follower)
        name = "r0" if leader is first else "r1"
        before = await leader.stub.ReportShard(report(clusters=["c1"], ownership=owning("a"), cycle=7))

        assert await hint_of(follower) == (Code.FAILED_PRECONDITION, f"{name}:7790")
        code, text = await refused(follower.stub.ReportShard(report()))
        assert (code, text) == (Code.FAILED_PRECONDITION, f"this replica is not the leader; {name} is")
        # Leadership is asked before anything else.
        assert (await refused(follower.stub.ReportShard(pb.ShardReport())))[0] is Code.FAILED_PRECONDITION
        assert (follower.value("leader"), leader.value("leader")) == (0, 1)

        await leader.die()
        await follower.led()
        (entry,) = (await follower.stub.ListShards(pb.ListShardsRequest())).shards
        reports = (await follower.stub.ListShardReports(pb.ListShardReportsRequest())).reports
        after = await follower.stub.ReportShard(report(cycle=8, coordinator_term=before.coordinator_term))

        # Tables stay; what was heard is gone, and asked for again.
        assert (entry.alive, entry.last_heartbeat_unix_ns, list(reports)) == (False, 0, [])
        assert after.coordinator_term > before.coordinator_term
        assert (after.acknowledged, after.want_ownership) == (True, True)
        (binding,) = (await follower.stub.ListClusters(pb.ListClustersRequest())).clusters
        assert binding.cluster_id == "c1"


@pytest.mark.rule("coordinator 12/4")
@pytest.mark.slow
async def test_without_a_quorum_known_shards_are_answered_until_the_lease_ends_and_then_nobody_is(
    three: Cluster,
) -> None:
    async with serving(etcd_store(three, ttl_seconds=10)) as served:
        await (await served.led()).stub.ReportShard(report())
        term = int(served.value("raft_term") or 0)
        for member in three.members[:2]:
            member.stop()
        known = await served.stub.ReportShard(report(cycle=2, coordinator_term=term))
        async with asyncio.timeout(PATIENCE_SECONDS):
            await until(lambda: not served.replica.is_leading)
        code, hint = await hint_of(served)
        for member in three.members[:2]:
            member.go_on()
        await served.led()
        again = await served.stub.ReportShard(report(cycle=3, coordinator_term=term))

        assert known.acknowledged
        assert (code, hint) == (Code.FAILED_PRECONDITION, "")
        assert again.coordinator_term > term


@pytest.mark.rule("coordinator 1/6", "coordinator 3/14")
async def test_a_replica_whose_store_cannot_be_reached_listens_and_is_not_ready(member: Cluster) -> None:
    member.kill()
    async with serving(etcd_store(member)) as served, in_plain_text(served.port) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        code, hint = await hint_of(served)

        assert not served.replica.is_ready
        assert (code, hint) == (Code.FAILED_PRECONDITION, "")
        answer = await health.Check(health_pb2.HealthCheckRequest(service=""))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING

        member.start()
        await served.led()
        assert (await served.stub.ReportShard(report())).acknowledged


@pytest.mark.rule("coordinator 4/9")
async def test_a_report_whose_sender_gives_up_is_taken_to_its_end(tmp_path: Path) -> None:
    async with serving(sqlite_store(tmp_path / "c.db")) as served:
        term = (await served.led()).replica.leading()
        begun, may_end = asyncio.Event(), asyncio.Event()

        async def slowly(_term: Term) -> None:
            begun.set()
            await may_end.wait()

        slow = asyncio.create_task(served.replica.change(slowly))
        await begun.wait()
        call = served.stub.ReportShard(report("east-0"))
        async with asyncio.timeout(PATIENCE_SECONDS):
            # The slow change and the report that waits for its turn behind it.
            await until(lambda: len(served.replica._changes) == 2)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not term.tables.shards

        may_end.set()
        await slow
        async with asyncio.timeout(PATIENCE_SECONDS):
            await until(lambda: bool(term.tables.shards))


@pytest.mark.rule("coordinator 4/9")
async def test_calls_that_wait_for_their_turn_are_bounded(tmp_path: Path) -> None:
    async with serving(sqlite_store(tmp_path / "c.db")) as served:
        await served.led()
        may_end = asyncio.Event()

        async def waiting(_term: Term) -> None:
            await may_end.wait()

        waiters = [asyncio.create_task(served.replica.change(waiting)) for _ in range(CHANGES_MAX)]
        await asyncio.sleep(0)
        code, text = await refused(served.stub.ReportShard(report()))
        may_end.set()
        await asyncio.gather(*waiters)

        assert code is Code.UNAVAILABLE
        assert text == f"store unreachable: {CHANGES_MAX} calls wait for it already; try again"
        assert (await served.stub.ReportShard(report())).acknowledged


@pytest.mark.rule("coordinator 7.2/2")
async def test_idle_machines_reach_a_starving_shard_over_the_wire(tmp_path: Path) -> None:
    settings = CoordinatorSettings(rebalance_interval_seconds=0.05, cooldown_seconds=0.5)
    async with serving(sqlite_store(tmp_path / "c.db"), settings=settings) as served:
        await served.led()
        donor: dict[str, Any] = {"summary": _summary(12), "ownership": owning("a")}
        short: dict[str, Any] = {"summary": _summary(0), "ownership": owning("b")}
        short["shortfalls"] = [_shortfall("31", age=6)]
        term = (await served.stub.ReportShard(report("east-1", **donor))).coordinator_term
        await served.stub.ReportShard(report("east-0", **short))
        release = None
        cycle = 2
        async with asyncio.timeout(PATIENCE_SECONDS):
            while release is None:
                ack = await served.stub.ReportShard(report("east-1", cycle, coordinator_term=term, **donor))
                release = next(iter(ack.instructions), None)
                cycle += 1

        transfer = release.transfer_ownership
        assert (transfer.from_shard_id, transfer.to_shard_id) == ("east-1", "east-0")
        assert (transfer.selector.count, transfer.selector.instance_type, transfer.selector.zone) == (2, "m6i", "a")
        listed = (await served.stub.ListInstructions(pb.ListInstructionsRequest(shard_id="east-1"))).instructions
        assert listed[0].why.startswith("east-0 lacks cpu 31 at priority 0 for 6 cycles: 2 idle machines of m6i in a")
        assert served.value("rebalance_moves_total", tier="1") == 1
        assert served.value("rebalance_machines_total", tier="1") == 2
        assert served.value("pending_instructions", shard="east-1") == 1

        # The donor gives two up and says so; the recipient is told with its next report.
        released = [
            pb.Release(
                machine_id=machine,
                to_shard_id="east-0",
                instruction_id=release.instruction_id,
                machine=provider_pb2.Machine(id=machine, state=provider_pb2.MACHINE_STATE_IDLE),
            )
            for machine in ("m1", "m2")
        ]
        acked = pb.InstructAck(
            instruction_id=release.instruction_id, outcome=pb.InstructAck.OUTCOME_ACCEPTED, machine_ids=["m1", "m2"]
        )
        given: dict[str, Any] = {
            "summary": _summary(10),
            "ownership": owning("a", released=released),
            "instruction_acks": [acked],
        }
        await served.stub.ReportShard(report("east-1", cycle, coordinator_term=term, **given))
        answer = await served.stub.ReportShard(report("east-0", 2, coordinator_term=term, **short))
        (adopt,) = answer.instructions
        assert adopt.instruction_id == f"{release.instruction_id}/adopt"
        assert list(adopt.transfer_ownership.machine_ids) == ["m1", "m2"]
        assert served.value("machines_unadopted") == 2


@pytest.mark.rule("coordinator 1/5")
async def test_what_a_dry_run_would_do_is_listed_with_finished_instructions(tmp_path: Path) -> None:
    settings = CoordinatorSettings(rebalance_interval_seconds=0.05, cooldown_seconds=0, is_dry_run=True)
    async with serving(sqlite_store(tmp_path / "c.db"), settings=settings) as served:
        await served.led()
        await served.stub.ReportShard(report("east-1", summary=_summary(12), ownership=owning("a")))
        shortfalls = [_shortfall("31", age=6)]
        await served.stub.ReportShard(
            report("east-0", summary=_summary(0), ownership=owning("b"), shortfalls=shortfalls)
        )
        listed: Any = ()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not listed:
                request = pb.ListInstructionsRequest(include_finished=True)
                listed = (await served.stub.ListInstructions(request)).instructions

        (status,) = listed
        assert status.why.startswith("dry run: east-0 lacks cpu 31")
        assert (status.state, status.shard_id) == (pb.InstructionStatus.STATE_CANCELLED, "east-1")
        assert status.instruction.transfer_ownership.selector.count == 2
        assert not (await served.stub.ListInstructions(pb.ListInstructionsRequest())).instructions
        assert not (await served.stub.ReportShard(report("east-1", 2))).instructions


def _summary(idle: int) -> pb.ShardSummary:
    rows = [
        pb.CapacityCount(
            instance_type="m6i",
            zone="a",
            capacity_type=provider_pb2.CAPACITY_TYPE_ON_DEMAND,
            count=idle,
            allocatable=provider_pb2.Resources(resources={"cpu": "16"}),
        )
    ]
    return pb.ShardSummary(provider_address="provider:9100", idle_by_type_zone=rows if idle else [])


def _shortfall(cpu: str, *, age: int) -> pb.Shortfall:
    return pb.Shortfall(
        deficit=provider_pb2.Resources(resources={"cpu": cpu}), profile_fingerprint=ZONE, age_cycles=age
    )
