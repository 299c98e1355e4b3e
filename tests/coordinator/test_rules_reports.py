"""What a report costs, who is told of changes, and what moves nothing (docs/spec/coordinator.md §1, §4)."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import structlog

from bigfleet.cli.certs.issuing import Bearer
from bigfleet.coordinator.commands import Command
from bigfleet.coordinator.ephemeral_state import ReceivedReport
from bigfleet.coordinator.leader import Leader
from bigfleet.coordinator.leader_term import CoordinatorSettings
from bigfleet.coordinator.tables import Tables
from bigfleet.model.ids import ClusterId, ShardId
from bigfleet.model.ownership import Base, Owned
from bigfleet.rpc.wire.gen import coordinator_pb2 as pb
from bigfleet.rpc.wire.gen import coordinator_pb2_grpc
from bigfleet.sim.kernel.virtual_time import run_virtual
from tests.coordinator.fleet_world import CLOCK, Fleet, Want, machines_of, steady
from tests.coordinator.handover.handover_world import Backend, HandClock, HeldStore, run
from tests.coordinator.replica_world import report, serving, sqlite_store
from tests.rpc.security.tls_world import ADMIN, HOSTS, SHARD, Certificates, secure_channel

EAST = ShardId("east-0")
REPLICA = Bearer(name="replica", uris=("bigfleet://admin",), hosts=HOSTS)


class CountingStore(HeldStore):
    """A store that counts what it is asked."""

    def __init__(self) -> None:
        super().__init__(Backend(), 1)
        self.asked: Counter[str] = Counter()

    async def load(self) -> Tables:
        self.asked["load"] += 1
        return await super().load()

    async def is_leader(self) -> bool:
        self.asked["is_leader"] += 1
        return await super().is_leader()

    async def commit(self, command: Command) -> Tables:
        self.asked[type(command).__name__] += 1
        return await super().commit(command)


@pytest.fixture
def led() -> tuple[CountingStore, Leader]:
    store = CountingStore()
    won = run(store.campaign())
    return store, Leader(store, won, clock=HandClock(), report_cycle_seconds=30.0)


def said(leader: Leader, cycle: int, **fields: Any) -> ReceivedReport:
    given: dict[str, Any] = {"address": "e:1", "echoed_term": leader.term, "clusters": frozenset({ClusterId("c")})}
    return ReceivedReport(shard_id=EAST, epoch=1, cycle=cycle, **(given | fields))


@pytest.mark.rule("coordinator 4/8")
def test_a_report_that_changes_nothing_asks_nothing_of_the_store(led: tuple[CountingStore, Leader]) -> None:
    store, leader = led
    assert run(leader.report(said(leader, 1, echoed_term=0))).acknowledged
    assert store.asked == {"AddShard": 1, "BindClusters": 1}
    store.asked.clear()

    for cycle in range(2, 50):
        assert run(leader.report(said(leader, cycle, owned=Owned(base=Base.DOMAINS)))).acknowledged
    assert store.asked == {}

    run(leader.report(said(leader, 50, address="moved:1")))
    assert store.asked == {"UpdateShard": 1}


@pytest.mark.rule("coordinator 4/5")
def test_nothing_of_a_report_whose_write_fails_is_taken(led: tuple[CountingStore, Leader]) -> None:
    store, leader = led
    run(leader.report(said(leader, 1)))
    store._backend.holder = 99

    with pytest.raises(Exception, match="another replica leads"):
        run(leader.report(said(leader, 2, address="moved:1")))

    assert leader.ephemeral.known[EAST].report.cycle == 1


@pytest.mark.rule("coordinator 4/14")
async def test_every_change_is_logged_with_the_identity_of_who_asked_for_it(tmp_path: Path) -> None:
    certificates = Certificates.make(tmp_path / "certs")
    replica_files, shard_files = certificates.files(REPLICA), certificates.files(SHARD)
    async with (
        serving(sqlite_store(tmp_path / "c.db"), tls=replica_files, dial_as=shard_files) as served,
        secure_channel(served.port, certificates.files(ADMIN)) as channel,
    ):
        await (await served.led()).stub.ReportShard(report("s1"))
        admin = coordinator_pb2_grpc.CoordinatorStub(channel)
        with structlog.testing.capture_logs() as logs:
            await admin.AssignDomain(pb.AssignDomainRequest(topology_key="zone", topology_value="a", shard_id="s1"))
            await admin.RemoveShard(pb.RemoveShardRequest(shard_id="s1", force=True))

    changes = [(log["rpc"], log["by"]) for log in logs if log["event"] == "admin.command_executed"]
    assert changes == [("AssignDomain", "bigfleet://admin"), ("RemoveShard", "bigfleet://admin")]


@pytest.mark.rule("coordinator 1/5")
@pytest.mark.parametrize(
    "settings",
    [CoordinatorSettings(rebalance_interval_seconds=0.0), CoordinatorSettings(is_dry_run=True)],
    ids=["an interval of 0", "a dry run"],
)
def test_what_is_switched_off_moves_nothing(settings: CoordinatorSettings) -> None:
    fleet = Fleet(settings)
    fleet.add("a", [], Want(ClusterId("short"), ("m6i",), steady(4)))
    fleet.add("b", machines_of("b", "m6i", 20))

    async def course() -> None:
        async with fleet.running():
            await CLOCK.sleep(3_600.0)

    run_virtual(course)
    assert fleet.events == []


@pytest.mark.rule("coordinator 12/18")
def test_a_wall_clock_that_jumps_ages_nothing_and_keeps_nothing_young() -> None:
    """Durations run on the monotonic clock alone; the wall clock labels."""
    clock, jump_nanos = HandClock(), 0

    class Jumping(HandClock):
        def monotonic_seconds(self) -> float:
            return clock.seconds

        def unix_nanos(self) -> int:
            return int(clock.seconds * 1e9) + jump_nanos

    store = CountingStore()
    leader = Leader(store, run(store.campaign()), clock=Jumping(), report_cycle_seconds=30.0)
    run(leader.report(said(leader, 1)))
    jump_nanos = 365 * 86_400 * 10**9
    run(leader.report(said(leader, 2)))
    jump_nanos = -jump_nanos

    assert leader.ephemeral.is_fresh(EAST, clock.seconds)
    clock.seconds += 90.0
    assert leader.ephemeral.is_fresh(EAST, clock.seconds)
    clock.seconds += 0.1
    assert not leader.ephemeral.is_fresh(EAST, clock.seconds)
