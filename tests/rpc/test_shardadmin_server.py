"""`ShardAdmin` over real gRPC: what it refuses, and what a dry run leaves as it was (docs/spec/wire.md §12)."""

from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from bigfleet.model.states import MachineState
from bigfleet.rpc.wire.gen import shardadmin_pb2 as pb
from bigfleet.rpc.wire.gen import shardadmin_pb2_grpc
from tests.rpc.live_shard import live_shard
from tests.rpc.security.tls_world import ADMIN, CLUSTER, READONLY, SHARD, Certificates, secure_channel, secure_shard
from tests.shard.world import ScriptedProvider, World, machine

Code = grpc.StatusCode


async def world_with(machines: int) -> World:
    """Return a world that has decided, with machines of `c1`."""
    world = World(ScriptedProvider())
    world.provider.add(*(machine(f"m{n}", MachineState.CONFIGURED, cluster="c1") for n in range(machines)))
    await world.cycle()
    return world


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    """Return the status of a call that fails."""
    with pytest.raises(aio.AioRpcError) as error:
        await call
    return error.value.code(), error.value.details() or ""


@pytest.mark.parametrize(
    ("fields", "code", "text"),
    [
        ({"cluster_id": ""}, Code.INVALID_ARGUMENT, "cluster_id is empty"),
        ({"cluster_id": "c 1"}, Code.INVALID_ARGUMENT, "cluster_id has the character"),
        ({"cluster_id": "c1", "hold_seconds": -1}, Code.INVALID_ARGUMENT, "hold_seconds -1"),
        ({"cluster_id": "c1", "hold_seconds": 2_592_001}, Code.INVALID_ARGUMENT, "hold_seconds 2592001"),
        ({"cluster_id": "c1", "reason": "x" * 1_025}, Code.INVALID_ARGUMENT, "reason has 1025 bytes"),
        ({"cluster_id": "c1", "reason": "a\x1b[2Jb"}, Code.INVALID_ARGUMENT, "reason has a control character"),
        ({"cluster_id": "c9"}, Code.NOT_FOUND, "cluster 'c9' is unknown"),
    ],
)
async def test_a_wrong_call_is_refused_and_changes_nothing(fields: dict[str, Any], code: Code, text: str) -> None:
    async with live_shard(await world_with(1)) as live:
        found = await refusal(live.admin.RetireCluster(pb.RetireClusterRequest(**fields)))
        assert (found[0], text in found[1]) == (code, True), found
        assert live.shard.retirement.records == {}


async def test_a_dry_run_says_what_is_left_and_changes_nothing() -> None:
    async with live_shard(await world_with(3)) as live:
        answer = await live.admin.RetireCluster(pb.RetireClusterRequest(cluster_id="c1", dry_run=True))
        assert [(each.machines, each.instance_type, each.price_per_hour) for each in answer.machines] == [(3, "t4", 3)]
        assert (answer.rows, answer.connected, answer.HasField("retired")) == (0, False, False)
        assert live.shard.retirement.records == {}
        answer = await live.admin.RetireCluster(pb.RetireClusterRequest(cluster_id="c1", reason="gone"))
        assert (answer.retired.cluster_id, answer.retired.reason, answer.retired.owner) == ("c1", "gone", "")


async def test_a_connected_cluster_needs_force_also_in_a_dry_run() -> None:
    async with live_shard(await world_with(1)) as live:
        await live.connect("c1")
        for is_dry in (True, False):
            request = pb.RetireClusterRequest(cluster_id="c1", dry_run=is_dry)
            code, text = await refusal(live.admin.RetireCluster(request))
            assert (code, "is connected" in text) == (Code.ABORTED, True)
        answer = await live.admin.RetireCluster(pb.RetireClusterRequest(cluster_id="c1", force=True))
        assert answer.connected
        assert answer.HasField("retired")


@pytest.mark.rule("shard 4.3/4")
async def test_a_shard_that_has_read_no_inventory_retires_nothing() -> None:
    """It would answer that it does not know a cluster whose machines it has not read."""
    async with live_shard() as live:
        code, text = await refusal(live.admin.RetireCluster(pb.RetireClusterRequest(cluster_id="c1")))
        assert (code, "has not read its inventory" in text) == (Code.UNAVAILABLE, True)


async def test_an_administrator_alone_retires_a_cluster_and_is_recorded(tmp_path: Path) -> None:
    """The table of all RPCs by role is in tests/rpc/security/test_identity_first.py."""
    certificates = Certificates.make(tmp_path)
    async with secure_shard(certificates.files(SHARD), await world_with(1)) as shard:
        for bearer in (READONLY, CLUSTER, SHARD, ADMIN):
            async with secure_channel(shard.port, certificates.files(bearer)) as channel:
                stub: Any = shardadmin_pb2_grpc.ShardAdminStub(channel)
                request = pb.RetireClusterRequest(cluster_id="c1")
                if bearer is not ADMIN:
                    code, _ = await refusal(stub.RetireCluster(request))
                    assert code is Code.PERMISSION_DENIED
                    assert shard.world.shard.retirement.records == {}
                else:
                    answer = await stub.RetireCluster(request)
                    assert answer.retired.owner == "bigfleet://admin"
