"""Every RPC of `Coordinator` over real gRPC, and every status code of docs/spec/wire.md §4, with both stores."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bigfleet.rpc.servers.coordinator import JOIN_TEXT, SERVICE_NAME
from bigfleet.rpc.wire.gen import coordinator_pb2 as pb
from bigfleet.rpc.wire.gen import provider_pb2
from tests.coordinator.replica_world import (
    PROVIDER,
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
from tests.coordinator.stores.etcd_process import cluster_of

Code = grpc.StatusCode


@pytest.fixture(params=["sqlite", "etcd"])
async def served(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Served]:
    """A leader on either store."""
    if request.param == "sqlite":
        async with serving(sqlite_store(tmp_path / "c.db")) as one:
            yield await one.led()
        return
    async with cluster_of(request.getfixturevalue("etcd"), tmp_path, 1) as cluster, serving(etcd_store(cluster)) as one:
        yield await one.led()


async def registered(served: Served, *shards: str, provider: str = PROVIDER) -> int:
    """Let shards report once and return the term."""
    term = 0
    for shard_id in shards:
        ack = await served.stub.ReportShard(report(shard_id, summary=pb.ShardSummary(provider_address=provider)))
        term = ack.coordinator_term
    return term


# ---- reports -----------------------------------------------------------------------------------------------------


@pytest.mark.rule("coordinator 4/4")
async def test_a_first_report_registers_the_shard_and_asks_for_its_view(served: Served) -> None:
    ack = await served.stub.ReportShard(report(clusters=["c1"], shard_epoch=4))

    assert (ack.acknowledged, ack.want_ownership, list(ack.instructions)) == (True, True, [])
    assert ack.coordinator_term > 0
    (entry,) = (await served.stub.ListShards(pb.ListShardsRequest())).shards
    assert (entry.shard_id, entry.address, entry.shard_epoch, entry.alive) == ("east-0", "east-0:7780", 4, True)
    assert entry.last_heartbeat_unix_ns >= entry.registered_at_unix_ns > 0
    (binding,) = (await served.stub.ListClusters(pb.ListClustersRequest())).clusters
    assert (binding.cluster_id, binding.shard_id) == ("c1", "east-0")
    assert binding.last_reported_unix_ns == entry.last_heartbeat_unix_ns


@pytest.mark.rule("coordinator 4/4", "coordinator 12/9")
async def test_reports_are_ordered_by_epoch_and_cycle(served: Served) -> None:
    async def acknowledged(*, cycle: int, shard_epoch: int) -> bool:
        return bool((await served.stub.ReportShard(report(cycle=cycle, shard_epoch=shard_epoch))).acknowledged)

    assert await acknowledged(cycle=5, shard_epoch=1)
    assert not await acknowledged(cycle=4, shard_epoch=1)
    assert await acknowledged(cycle=5, shard_epoch=1)
    assert await acknowledged(cycle=1, shard_epoch=2)
    assert not await acknowledged(cycle=9, shard_epoch=1)

    assert served.value("reports_total", outcome="ok") == 3
    assert served.value("reports_total", outcome="out_of_order") == 1
    assert served.value("reports_total", outcome="superseded") == 1


@pytest.mark.rule("coordinator 4/6", "coordinator 12/10")
async def test_an_empty_list_clears_the_shortfalls(served: Served) -> None:
    short = pb.Shortfall(deficit=provider_pb2.Resources(resources={"cpu": "8"}), profile_fingerprint="f", age_cycles=3)
    await served.stub.ReportShard(report(cycle=1, shortfalls=[short]))
    (before,) = (await served.stub.ListShardReports(pb.ListShardReportsRequest(shard_id="east-0"))).reports
    await served.stub.ReportShard(report(cycle=2))
    (after,) = (await served.stub.ListShardReports(pb.ListShardReportsRequest())).reports

    assert list(before.shortfalls) == [short]
    assert list(after.shortfalls) == []
    assert after.cycle == 2


@pytest.mark.rule("coordinator 12/12")
async def test_a_new_address_is_recorded_at_the_next_report(served: Served) -> None:
    await served.stub.ReportShard(report(cycle=1))
    await served.stub.ReportShard(report(cycle=2, shard_address="moved:7780"))

    (entry,) = (await served.stub.ListShards(pb.ListShardsRequest())).shards
    assert entry.address == "moved:7780"


@pytest.mark.rule("coordinator 4/7", "coordinator 12/14")
async def test_a_cluster_of_two_shards_is_shown_as_a_conflict(served: Served) -> None:
    await served.stub.ReportShard(report("east-0", clusters=["c1"]))
    await served.stub.ReportShard(report("east-1", clusters=["c1"]))

    (binding,) = (await served.stub.ListClusters(pb.ListClustersRequest())).clusters
    assert (binding.shard_id, list(binding.conflicting_shard_ids)) == ("east-0", ["east-1"])
    assert served.value("cluster_conflicts") == 1


@pytest.mark.rule("coordinator 3/9", "coordinator 12/7")
async def test_a_term_above_the_leaders_raises_it(served: Served) -> None:
    term = await registered(served, "east-0")
    ack = await served.stub.ReportShard(report(cycle=2, coordinator_term=term + 5_000))

    assert ack.coordinator_term == term + 5_000 + 1_000_000
    assert served.value("term_raised_total") == 1


@pytest.mark.rule("coordinator 3/9", "coordinator 12/7")
async def test_a_term_that_this_leader_gave_to_nobody_is_raised(served: Served) -> None:
    """A store that was wiped counts its terms again: the shard has instructions of that term from another leader."""
    term = await registered(served, "east-0")
    assert (await served.stub.ReportShard(report(cycle=2, coordinator_term=term))).coordinator_term == term
    assert served.value("term_raised_total") == 0
    ack = await served.stub.ReportShard(report(shard_id="west-0", coordinator_term=term))

    assert ack.coordinator_term == term + 1_000_000
    again = await served.stub.ReportShard(report(shard_id="west-0", cycle=2, coordinator_term=ack.coordinator_term))
    assert again.coordinator_term == ack.coordinator_term
    assert served.value("term_raised_total") == 1


@pytest.mark.rule("coordinator 4/3")
@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"shard_id": ""}, "shard_id: is empty"),
        ({"shard_id": "a b"}, "shard_id: has the character ' ' at position 1"),
        ({"shard_epoch": -1}, "shard_epoch: is -1"),
        ({"coordinator_term": 2**62 + 1}, f"coordinator_term {2**62 + 1} is above"),
        ({"shard_address": "x" * 1025}, "shard_address: has 1025 bytes, at most 1024"),
        ({"shortfalls": [pb.Shortfall()] * 101}, "shortfalls: has 101 rows, at most 100"),
        (
            {"shortfalls": [pb.Shortfall(deficit=provider_pb2.Resources(resources={"cpu": "many"}))]},
            "shortfalls[0].deficit['cpu']: ",
        ),
        (
            {"summary": pb.ShardSummary(idle_by_type_zone=[pb.CapacityCount()] * 65)},
            "summary.idle_by_type_zone: has 65 rows, at most 64",
        ),
        (
            {"summary": pb.ShardSummary(per_zone_counts={str(index): 1 for index in range(257)})},
            "summary.per_zone_counts: has 257 keys, at most 256",
        ),
        ({"ownership": pb.Ownership()}, "ownership.base: is 0, and must be ALL (1) or DOMAINS (2)"),
        (
            {"ownership": owning(adopted=[pb.Adoption(machine_id="m", shard_id="s", instruction_id="7")])},
            "ownership.adopted[0].instruction_id: '7' names no term and number",
        ),
        (
            {
                "ownership": owning(
                    adopted=[pb.Adoption(machine_id="m", shard_id="s", instruction_id="7-1")],
                    disowned=[pb.Adoption(machine_id="m", shard_id="s", instruction_id="7-2")],
                )
            },
            "ownership.disowned[0].machine_id: 'm' has another row",
        ),
        ({"ownership": owning(*["z"] * 10_001)}, "ownership.domains: has 10001 rows, at most 10000"),
    ],
)
async def test_a_malformed_report_is_refused_by_the_name_of_its_field(
    tmp_path: Path, fields: dict[str, Any], told: str
) -> None:
    async with serving(sqlite_store(tmp_path / "c.db")) as served:
        await served.led()
        message = report()
        message.MergeFrom(pb.ShardReport(**fields))
        if "shard_id" in fields:
            message.shard_id = str(fields["shard_id"])

        code, text = await refused(served.stub.ReportShard(message))

        assert code is Code.INVALID_ARGUMENT
        assert text.startswith(told)
        assert not (await served.stub.ListShards(pb.ListShardsRequest())).shards
        assert served.value("reports_total", outcome="refused") == 1


# ---- domains -----------------------------------------------------------------------------------------------------


def domain(zone: str, shard_id: str = "east-0", key: str = ZONE) -> pb.AssignDomainRequest:
    return pb.AssignDomainRequest(topology_key=key, topology_value=zone, shard_id=shard_id)


@pytest.mark.rule("coordinator 4/10")
async def test_a_domain_is_assigned_delivered_and_released(served: Served) -> None:
    term = await registered(served, "east-0")
    await served.stub.AssignDomain(domain("a"))
    await served.stub.AssignDomain(domain("a"))
    first = await served.stub.ReportShard(report(cycle=2, coordinator_term=term, ownership=owning()))
    (told,) = first.instructions
    (listed,) = (await served.stub.ListInstructions(pb.ListInstructionsRequest())).instructions
    ack = pb.InstructAck(instruction_id=told.instruction_id, outcome=pb.InstructAck.OUTCOME_ACCEPTED)
    taken = await served.stub.ReportShard(
        report(cycle=3, coordinator_term=term, ownership=owning("a"), instruction_acks=[ack])
    )

    assert (told.assign_domain.topology_key, told.assign_domain.topology_value) == (ZONE, "a")
    assert (listed.state, listed.attempts, listed.shard_id) == (pb.InstructionStatus.STATE_DELIVERED, 1, "east-0")
    assert listed.why == f"{ZONE}=a is assigned to east-0, which does not list it"
    assert not taken.instructions
    assert served.value("instructions_total", kind="assign_domain", state="done") == 1

    request = pb.UnassignDomainRequest(topology_key=ZONE, topology_value="a")
    await served.stub.UnassignDomain(request)
    await served.stub.UnassignDomain(request)
    (row,) = (await served.stub.ListDomainAssignments(pb.ListDomainAssignmentsRequest())).assignments
    assert (row.shard_id, row.topology_value, row.releasing) == ("east-0", "a", True)
    code, text = await refused(served.stub.AssignDomain(domain("a")))
    assert code is Code.ALREADY_EXISTS
    assert text == f"{ZONE}=a is still being released by shard 'east-0'"
    (unassign,) = (
        await served.stub.ReportShard(report(cycle=4, coordinator_term=term, ownership=owning("a")))
    ).instructions
    assert unassign.unassign_domain.topology_value == "a"
    await served.stub.ReportShard(report(cycle=5, coordinator_term=term, ownership=owning()))
    assert not (await served.stub.ListDomainAssignments(pb.ListDomainAssignmentsRequest())).assignments


@pytest.mark.rule("coordinator 4/10")
async def test_what_cannot_be_assigned_is_refused_with_its_code(served: Served) -> None:
    await registered(served, "east-0", "east-1")
    await served.stub.AssignDomain(domain("a"))

    assert await refused(served.stub.AssignDomain(domain("a", "east-1"))) == (
        Code.ALREADY_EXISTS,
        f"{ZONE}=a belongs to shard 'east-0'",
    )
    assert await refused(served.stub.AssignDomain(domain("a", "west"))) == (
        Code.NOT_FOUND,
        "shard 'west' is not registered",
    )
    assert (await refused(served.stub.AssignDomain(domain("", "east-0"))))[0] is Code.INVALID_ARGUMENT
    assert (await refused(served.stub.AssignDomain(domain("b", ""))))[0] is Code.INVALID_ARGUMENT
    code, text = await refused(served.stub.AssignDomain(domain("r1", "east-1", key="rack")))
    assert code is Code.INVALID_ARGUMENT
    assert "share one topology key" in text
    assert await refused(served.stub.UnassignDomain(pb.UnassignDomainRequest(topology_key=ZONE))) == (
        Code.INVALID_ARGUMENT,
        "topology_value: is empty",
    )


# ---- shards and clusters -----------------------------------------------------------------------------------------


@pytest.mark.rule("coordinator 4/11", "coordinator 5/2", "coordinator 12/13")
async def test_a_live_shard_is_removed_by_force_alone(served: Served) -> None:
    await registered(served, "east-0", "east-1")
    await served.stub.BindCluster(pb.BindClusterRequest(cluster_id="c1", shard_id="east-0"))
    await served.stub.AssignDomain(domain("a"))

    code, text = await refused(served.stub.RemoveShard(pb.RemoveShardRequest(shard_id="east-0")))
    await served.stub.RemoveShard(pb.RemoveShardRequest(shard_id="east-0", force=True))

    assert code is Code.ABORTED
    assert text.startswith("shard 'east-0' reported within the last 90 s")
    assert [entry.shard_id for entry in (await served.stub.ListShards(pb.ListShardsRequest())).shards] == ["east-1"]
    assert not (await served.stub.ListClusters(pb.ListClustersRequest())).clusters
    assert not (await served.stub.ListDomainAssignments(pb.ListDomainAssignmentsRequest())).assignments
    assert not (await served.stub.ListShardReports(pb.ListShardReportsRequest(shard_id="east-0"))).reports
    assert await refused(served.stub.RemoveShard(pb.RemoveShardRequest(shard_id="east-0"))) == (
        Code.NOT_FOUND,
        "shard 'east-0' is not registered",
    )


@pytest.mark.rule("coordinator 4/11")
async def test_a_young_leader_removes_nobody_without_force(tmp_path: Path) -> None:
    async with serving(sqlite_store(tmp_path / "c.db")) as before:
        await (await before.led()).stub.ReportShard(report())
    async with serving(sqlite_store(tmp_path / "c.db")) as served:
        await served.led()
        (entry,) = (await served.stub.ListShards(pb.ListShardsRequest())).shards
        code, text = await refused(served.stub.RemoveShard(pb.RemoveShardRequest(shard_id="east-0")))

        assert (entry.alive, entry.last_heartbeat_unix_ns) == (False, 0)
        assert code is Code.ABORTED
        assert text.startswith("this leader is younger than 90 s")


@pytest.mark.rule("coordinator 2/4")
async def test_a_cluster_is_bound_once_for_ever(served: Served) -> None:
    await registered(served, "east-0", "east-1")
    bind = pb.BindClusterRequest(cluster_id="c1", shard_id="east-0")
    await served.stub.BindCluster(bind)
    await served.stub.BindCluster(bind)

    assert await refused(served.stub.BindCluster(pb.BindClusterRequest(cluster_id="c1", shard_id="east-1"))) == (
        Code.ALREADY_EXISTS,
        "cluster 'c1' is bound to shard 'east-0'",
    )
    assert (await refused(served.stub.BindCluster(pb.BindClusterRequest(cluster_id="c2", shard_id="west"))))[
        0
    ] is Code.NOT_FOUND
    assert await refused(served.stub.BindCluster(pb.BindClusterRequest(shard_id="east-0"))) == (
        Code.INVALID_ARGUMENT,
        "cluster_id: is empty",
    )


# ---- quotas and providers ----------------------------------------------------------------------------------------


def quota(region: str = "eu-west-1", **slots: int) -> pb.SetQuotaRequest:
    return pb.SetQuotaRequest(allocation=pb.QuotaAllocation(provider="aws", region=region, per_shard=slots))


@pytest.mark.rule("coordinator 4/12")
async def test_quotas_are_replaced_listed_in_order_and_deleted(served: Served) -> None:
    await registered(served, "e0", "e1")
    await served.stub.SetQuota(quota("us", e0=1))
    await served.stub.SetQuota(quota("eu", e0=5, e1=7))
    await served.stub.SetQuota(quota("eu", e1=9))

    rows = (await served.stub.ListQuotas(pb.ListQuotasRequest())).allocations
    assert [(row.provider, row.region, dict(row.per_shard)) for row in rows] == [
        ("aws", "eu", {"e1": 9}),
        ("aws", "us", {"e0": 1}),
    ]
    await served.stub.SetQuota(quota("eu"))
    assert len((await served.stub.ListQuotas(pb.ListQuotasRequest())).allocations) == 1
    assert (await refused(served.stub.SetQuota(quota("eu", e0=-1))))[0] is Code.INVALID_ARGUMENT
    assert (await refused(served.stub.SetQuota(quota("", e0=1))))[0] is Code.INVALID_ARGUMENT
    assert (await refused(served.stub.SetQuota(quota("eu", west=1))))[0] is Code.NOT_FOUND


@pytest.mark.rule("coordinator 4/12")
async def test_providers_are_replaced_listed_and_deleted(served: Served) -> None:
    async def put(name: str, address: str) -> None:
        entry = pb.ProviderEntry(name=name, address=address, region="eu")
        await served.stub.UpsertProvider(pb.UpsertProviderRequest(provider=entry))

    await put("b", "b:1")
    await put("a", "a:1")
    await put("a", "a:2")
    rows = (await served.stub.ListProviders(pb.ListProvidersRequest())).providers
    assert [(row.name, row.address, row.region) for row in rows] == [("a", "a:2", "eu"), ("b", "b:1", "eu")]
    await put("a", "")
    assert len((await served.stub.ListProviders(pb.ListProvidersRequest())).providers) == 1
    assert await refused(put("", "a:1")) == (Code.INVALID_ARGUMENT, "provider.name: is empty")
    assert (await refused(put("a", "nowhere")))[0] is Code.INVALID_ARGUMENT


# ---- the rest ----------------------------------------------------------------------------------------------------


@pytest.mark.rule("coordinator 4/13")
async def test_there_is_no_raft_cluster_to_join(served: Served) -> None:
    assert await refused(served.stub.JoinRaftCluster(pb.JoinRaftClusterRequest())) == (Code.UNIMPLEMENTED, JOIN_TEXT)


@pytest.mark.rule("coordinator 1/6")
async def test_health_is_served_beside_it(served: Served) -> None:
    async with in_plain_text(served.port) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICE_NAME):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.rule("coordinator 4/5")
async def test_a_write_that_the_store_refuses_is_unavailable_and_takes_nothing(tmp_path: Path) -> None:
    store = sqlite_store(tmp_path / "c.db")
    async with serving(store) as served:
        await registered(await served.led(), "east-0")
        store._connection.execute("PRAGMA query_only = 1")

        known = await served.stub.ReportShard(report(cycle=2))
        code, text = await refused(served.stub.ReportShard(report("east-1")))
        store._connection.execute("PRAGMA query_only = 0")

        assert known.acknowledged
        assert code is Code.UNAVAILABLE
        assert text.startswith("store unreachable: ")
        assert [entry.shard_id for entry in (await served.stub.ListShards(pb.ListShardsRequest())).shards] == ["east-0"]
        assert served.value("apply_total", outcome="error") == 1
        assert served.value("apply_total", outcome="success") == 1
