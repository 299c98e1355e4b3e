"""Shards and a real coordinator over gRPC: machines go from one to the other (docs/spec/coordinator.md §8, §9)."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from bigfleet.cli.certs.issuing import Bearer
from bigfleet.link.client import Client, NotAnswered
from bigfleet.link.inbox import Inbox
from bigfleet.link.report_conversion import holding_of
from bigfleet.link.reporter import CoordinatorLink, ReportSnapshot
from bigfleet.model.ids import MachineId, ShardId
from bigfleet.model.instructions import Payload, Selector, TransferOwnership
from bigfleet.model.ownership import Base, Domain, RowKind
from bigfleet.model.shard_report import ShardReport, ShardSummary
from bigfleet.model.states import MachineState
from bigfleet.rpc.clients.coordinator import LEADER_HINT
from bigfleet.rpc.clients.shard_reports import GrpcCoordinator
from bigfleet.rpc.servers.coordinator import SERVICE_NAME
from bigfleet.rpc.wire.gen import coordinator_pb2 as pb
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.coordinator.replica_world import PROVIDER, ZONE, Served, serving, sqlite_store
from tests.rpc.security.tls_world import HOSTS, SHARD, Certificates
from tests.shard.ownership.handover_shard import ME, OTHER, HandoverShard
from tests.shard.world import ScriptedProvider, machine


class LinkedShard(HandoverShard):
    """A shard with its link to a coordinator."""

    def __init__(self, directory: Path, name: ShardId, provider: ScriptedProvider, *addresses: str) -> None:
        self.addresses = addresses
        super().__init__(directory, name=name, provider=provider)

    def start(self) -> None:
        super().start()
        self.inbox = Inbox(self.handover, accepted_term=self.file.accepted_term)
        assert self._state_file is not None
        self.reporter = CoordinatorLink(
            shard_id=self.name,
            epoch=self._state_file.epoch,
            advertised_address=f"{self.name}:7780",
            interval_seconds=30.0,
            source=self,
            inbox=self.inbox,
            client=Client(self.addresses, GrpcCoordinator(), LoopClock()),
            clock=LoopClock(),
        )

    def snapshot(self) -> ReportSnapshot:
        return ReportSnapshot(
            summary=ShardSummary(provider_address=PROVIDER),
            shortfalls=(),
            clusters=frozenset(),
            holding=holding_of(self.file.owned, self.file.reservations),
        )

    def has(self, machine_id: str) -> bool:
        """Return whether the machine is this shard's, by its file."""
        record = self.provider.records[machine_id]
        return self.owned.owns(record, "", me=self.name, inherits=frozenset(), stays=False)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(sqlite_store(tmp_path / "c.db")) as one:
        yield await one.led()


@pytest.fixture
async def pair(served: Served, tmp_path: Path) -> AsyncIterator[tuple[LinkedShard, LinkedShard]]:
    """Two shards behind one provider: the first has the domain za with three machines, the second zb with none."""
    provider = ScriptedProvider()
    provider.add(*(machine(name, MachineState.IDLE) for name in ("a", "b", "c")))
    two = [LinkedShard(tmp_path / name, name, provider, served.address) for name in (ME, OTHER)]
    for shard, zone in zip(two, ("za", "zb"), strict=True):
        await shard.reporter.exchange()
        await served.stub.AssignDomain(
            pb.AssignDomainRequest(topology_key=ZONE, topology_value=zone, shard_id=shard.name)
        )
    for _ in range(3):
        for shard in two:
            await shard.reporter.exchange()
    await two[0].read()
    # The second has found nothing of its own.
    two[1].has_read = True
    yield two[0], two[1]
    for shard in two:
        shard.close()


def tell_to_do(served: Served, shard: LinkedShard, payload: Payload) -> None:
    """Let the leader instruct a shard, as a rebalancing pass does."""
    leader = served.replica.leading().leader
    ledger = leader.ephemeral.ledger.enqueued(
        shard.name, payload, term=leader.term, now_seconds=LoopClock().monotonic_seconds()
    )
    leader.ephemeral = replace(leader.ephemeral, ledger=ledger)


async def test_assigned_domains_reach_the_shards_and_come_back_in_their_views(
    served: Served, pair: tuple[LinkedShard, LinkedShard]
) -> None:
    for shard, zone in zip(pair, ("za", "zb"), strict=True):
        assert (shard.owned.base, shard.owned.domains) == (Base.DOMAINS, frozenset({Domain(ZONE, zone)}))
        assert shard.file.accepted_term == served.replica.leading().term
    reports = (await served.stub.ListShardReports(pb.ListShardReportsRequest())).reports
    assert [[each.topology_value for each in report.ownership.domains] for report in reports] == [["za"], ["zb"]]


@pytest.mark.rule("coordinator 9.3/1")
@pytest.mark.parametrize("dies", ["nobody", "donor", "recipient"])
async def test_a_machine_goes_from_shard_to_shard_and_never_has_two_owners(
    served: Served, pair: tuple[LinkedShard, LinkedShard], dies: str
) -> None:
    donor, recipient = pair
    payload = TransferOwnership(from_shard=ME, to_shard=OTHER, selector=Selector(count=1, instance_type="t4"))
    tell_to_do(served, donor, payload)

    owners = []
    for _ in range(6):
        for shard in pair:
            await shard.reporter.exchange()
            owners.append(tuple(each.name for each in pair if each.has("a")))
        if dies != "nobody":
            dying = donor if dies == "donor" else recipient
            dying.start()
            await dying.read()

    assert owners[-1] == (OTHER,)
    assert set(owners) <= {(ME,), (), (OTHER,)}
    assert donor.owned.rows[MachineId("a")].kind is RowKind.DISOWNED
    assert recipient.owned.rows[MachineId("a")].kind is RowKind.ADOPTED
    if dies == "nobody":
        assert recipient.holds() == ["a"]
        assert donor.holds() == ["b", "c"]


async def test_the_answer_names_the_machines_and_their_records(
    served: Served, pair: tuple[LinkedShard, LinkedShard]
) -> None:
    donor, _recipient = pair
    tell_to_do(served, donor, TransferOwnership(from_shard=ME, to_shard=OTHER, selector=Selector(count=1)))

    assert await donor.reporter.exchange()

    (ack,) = donor.inbox.waiting()
    assert ack.machine_ids == ("a",)
    assert ack.machines == (donor.provider.records["a"],)
    await donor.reporter.exchange()
    assert not donor.inbox.waiting()


# ---- followers and addresses -------------------------------------------------------------------------------------


class Follower:
    """A replica that does not lead and names who does, or nobody."""

    def __init__(self, leader: str) -> None:
        self.leader = leader
        self.asked = 0

    async def report(self, _request: Any, context: Any) -> Any:
        self.asked += 1
        hint = ((LEADER_HINT, self.leader),) if self.leader else ()
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this replica does not lead", trailing_metadata=hint)


@asynccontextmanager
async def following(leader: str) -> AsyncIterator[tuple[Follower, str]]:
    server, follower = aio.server(), Follower(leader)
    handler = grpc.unary_unary_rpc_method_handler(
        follower.report, pb.ShardReport.FromString, pb.ReportAck.SerializeToString
    )
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE_NAME, {"ReportShard": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield follower, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@pytest.mark.rule("coordinator 8/2")
@pytest.mark.parametrize("names_leader", [True, False])
async def test_a_report_finds_the_leader_behind_a_follower_and_a_dead_address(
    served: Served, tmp_path: Path, names_leader: bool
) -> None:
    async with following(served.address if names_leader else "") as (follower, address):
        shard = LinkedShard(tmp_path, ME, ScriptedProvider(), "127.0.0.1:1", address, served.address)
        for _ in range(3):
            await shard.reporter.exchange()

        assert follower.asked == 1
        assert shard.reporter.untaken_in_a_row == 0
        assert shard.file.accepted_term == served.replica.leading().term
        shard.close()


async def test_why_nobody_answers_is_told() -> None:
    with pytest.raises(NotAnswered, match="UNAVAILABLE"):
        await GrpcCoordinator().report("127.0.0.1:1", ShardReport(shard_id=ME, epoch=1, cycle=1))


async def test_names_are_looked_up_and_one_that_has_no_address_stays_itself() -> None:
    coordinators = GrpcCoordinator()

    assert set(await coordinators.addresses("localhost:7790")) & {"127.0.0.1:7790", "[::1]:7790"}
    assert await coordinators.addresses("127.0.0.1:7790") == ("127.0.0.1:7790",)
    assert await coordinators.addresses("no.such.host.invalid:7790") == ("no.such.host.invalid:7790",)


# ---- with TLS ----------------------------------------------------------------------------------------------------


@pytest.mark.rule("shard 1/21", "coordinator 4/2")
async def test_a_shard_reports_with_its_certificate_and_for_nobody_else(tmp_path: Path) -> None:
    certificates = Certificates.make(tmp_path / "certs")
    replica = Bearer(name="replica", uris=("bigfleet://admin",), hosts=HOSTS)
    mine = certificates.files(SHARD)
    async with serving(sqlite_store(tmp_path / "c.db"), tls=certificates.files(replica), dial_as=mine) as served:
        await served.led()
        address = f"127.0.0.1:{served.port}"
        report = ShardReport(shard_id=ShardId("s1"), epoch=1, cycle=1)

        assert (await GrpcCoordinator(tls=mine).report(address, report)).acknowledged
        with pytest.raises(NotAnswered, match=r"PERMISSION_DENIED: bigfleet://shard/s1 may not report for shard 's2'"):
            await GrpcCoordinator(tls=mine).report(address, replace(report, shard_id=ShardId("s2")))
        with pytest.raises(NotAnswered, match="UNAVAILABLE"):
            await GrpcCoordinator().report(address, report)


WILDCARD, REPLICA = "*.bigfleet-coordinator.ns.svc", "bigfleet-coordinator-0.bigfleet-coordinator.ns.svc"


@pytest.mark.rule("coordinator 8/2")
@pytest.mark.parametrize(
    ("hosts", "dialled", "is_answered"),
    [
        pytest.param(("localhost",), "localhost", True, id="a name, by that name"),
        pytest.param(("127.0.0.1",), "127.0.0.1", True, id="an address, by that address"),
        pytest.param(("localhost",), "127.0.0.1", False, id="a name, by an address"),
        pytest.param(("127.0.0.1",), "localhost", False, id="an address, by a name"),
        pytest.param(("elsewhere.example",), "localhost", False, id="another name"),
    ],
)
async def test_a_coordinator_s_certificate_has_the_name_that_the_shard_was_given(
    tmp_path: Path, hosts: tuple[str, ...], dialled: str, is_answered: bool
) -> None:
    """Certificates of a cluster have only names, and a name is looked up for all of its addresses."""
    certificates = Certificates.make(tmp_path / "certs")
    replica = Bearer(name="replica", uris=("bigfleet://admin",), hosts=hosts)
    mine = certificates.files(SHARD)
    async with serving(sqlite_store(tmp_path / "c.db"), tls=certificates.files(replica), dial_as=mine) as served:
        await served.led()
        client = Client([f"{dialled}:{served.port}"], GrpcCoordinator(tls=mine), LoopClock())
        answer = await client.send(ShardReport(shard_id=ShardId("s1"), epoch=1, cycle=1))

        assert (answer is not None) is is_answered


@pytest.mark.rule("coordinator 8/2")
async def test_each_address_of_a_name_is_dialled_as_that_name(tmp_path: Path) -> None:
    """A wildcard, as the chart's certificate has it, matches the replica's name and no other."""
    certificates = Certificates.make(tmp_path / "certs")
    replica = Bearer(name="replica", uris=("bigfleet://admin",), hosts=(WILDCARD,))
    mine = certificates.files(SHARD)
    coordinators = GrpcCoordinator(tls=mine)
    assert set(await coordinators.addresses("localhost:7790")) & {
        "localhost:7790@127.0.0.1:7790",
        "localhost:7790@[::1]:7790",
    }
    assert await coordinators.addresses("127.0.0.1:7790") == ("127.0.0.1:7790",)
    assert await coordinators.addresses("no.such.host.invalid:7790") == ("no.such.host.invalid:7790",)

    async with serving(sqlite_store(tmp_path / "c.db"), tls=certificates.files(replica), dial_as=mine) as served:
        await served.led()
        report = ShardReport(shard_id=ShardId("s1"), epoch=1, cycle=1)

        assert (await coordinators.report(f"{REPLICA}:7790@{served.address}", report)).acknowledged
        with pytest.raises(NotAnswered, match="UNAVAILABLE"):
            await coordinators.report(f"elsewhere.example:7790@{served.address}", report)
