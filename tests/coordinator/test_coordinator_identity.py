"""Who may call which RPC of `Coordinator` over TLS (docs/spec/wire.md §3), and in which order a call is checked."""

from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from bigfleet.cli.certs.issuing import Bearer
from bigfleet.rpc.wire.gen import coordinator_pb2 as pb
from bigfleet.rpc.wire.gen import coordinator_pb2_grpc
from tests.coordinator.replica_world import refused, report, serving, sqlite_store
from tests.rpc.security.tls_world import ADMIN, CLUSTER, HOSTS, READONLY, SHARD, Certificates, secure_channel

REPLICA = Bearer(name="replica", uris=("bigfleet://admin",), hosts=HOSTS)
NOBODY = Bearer(name="nobody", uris=("https://example.org/nobody",))
LISTS = ("Shards", "DomainAssignments", "ShardReports", "Quotas", "Providers", "Clusters", "Instructions")
CHANGES = {
    "AssignDomain": pb.AssignDomainRequest(topology_key="zone", topology_value="a", shard_id="s1"),
    "UnassignDomain": pb.UnassignDomainRequest(topology_key="zone", topology_value="a"),
    "BindCluster": pb.BindClusterRequest(cluster_id="c1", shard_id="s1"),
    "SetQuota": pb.SetQuotaRequest(allocation=pb.QuotaAllocation(provider="p", region="r", per_shard={"s1": 1})),
    "UpsertProvider": pb.UpsertProviderRequest(provider=pb.ProviderEntry(name="p", address="p:1")),
    "RemoveShard": pb.RemoveShardRequest(shard_id="s1", force=True),
}
DENIED = grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.rule("coordinator 4/2")
@pytest.mark.parametrize("bearer", [ADMIN, READONLY, SHARD, CLUSTER, NOBODY], ids=lambda bearer: bearer.name)
async def test_each_identity_may_call_what_its_role_allows_and_nothing_else(tmp_path: Path, bearer: Bearer) -> None:
    certificates = Certificates.make(tmp_path / "certs")
    replica_files, shard_files = certificates.files(REPLICA), certificates.files(SHARD)
    async with (
        serving(sqlite_store(tmp_path / "c.db"), tls=replica_files, dial_as=shard_files) as served,
        secure_channel(served.port, certificates.files(bearer)) as channel,
    ):
        await (await served.led()).stub.ReportShard(report("s1"))
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        allowed: set[str] = set()
        for name in LISTS:
            call = getattr(stub, f"List{name}")(getattr(pb, f"List{name}Request")())
            allowed |= {name} if await _is_answered(call) else set()
        for name, request in CHANGES.items():
            allowed |= {name} if await _is_answered(getattr(stub, name)(request)) else set()
        allowed |= {"ReportShard"} if await _is_answered(stub.ReportShard(report("s1", cycle=2))) else set()
        join, _ = await refused(stub.JoinRaftCluster(pb.JoinRaftClusterRequest()))
        saved = [chunk async for chunk in stub.SnapshotSave(pb.SnapshotSaveRequest())] if bearer is ADMIN else []

        expected = {
            "admin": {*LISTS, *CHANGES},
            "readonly": {*LISTS},
            "shard": {"ReportShard"},
            "cluster": set(),
            "nobody": set(),
        }
        assert allowed == expected[bearer.name]
        assert join is (grpc.StatusCode.UNIMPLEMENTED if bearer is ADMIN else DENIED)
        assert bool(saved) is (bearer is ADMIN)
        denied = served.value("identity_rejected_total", rpc="AssignDomain")
        assert denied == (0 if bearer is ADMIN else 1)


async def _is_answered(call: Any) -> bool:
    try:
        await call
    except aio.AioRpcError as error:
        if error.code() is DENIED:
            return False
        raise
    return True


@pytest.mark.rule("coordinator 4/1")
async def test_a_shard_reports_for_itself_alone_and_identity_is_told_first(tmp_path: Path) -> None:
    certificates = Certificates.make(tmp_path / "certs")
    files, shard_files = certificates.files(REPLICA), certificates.files(SHARD)
    async with serving(sqlite_store(tmp_path / "c.db"), tls=files, dial_as=shard_files) as served:
        await served.led()

        assert await refused(served.stub.ReportShard(report("s2"))) == (
            DENIED,
            "bigfleet://shard/s1 may not report for shard 's2'",
        )
        code, _ = await refused(served.stub.ReportShard(report("s 2")))
        assert code is DENIED
        code, _ = await refused(served.stub.ReportShard(report("s1", cycle=-1)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert served.value("reports_total", outcome="refused") == 3
        assert served.value("identity_rejected_total", rpc="ReportShard") == 2


@pytest.mark.rule("coordinator 4/1")
async def test_identity_is_checked_before_arguments_in_every_other_call(tmp_path: Path) -> None:
    certificates = Certificates.make(tmp_path / "certs")
    files, reader = certificates.files(REPLICA), certificates.files(READONLY)
    async with serving(sqlite_store(tmp_path / "c.db"), tls=files, dial_as=reader) as served:
        await served.led()

        code, text = await refused(served.stub.AssignDomain(pb.AssignDomainRequest()))

        assert (code, text) == (DENIED, "bigfleet://readonly may not call AssignDomain")
