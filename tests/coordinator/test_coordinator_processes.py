"""Real coordinator processes on a real etcd: killed, stopped, found again by whoever asks a follower."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue

import grpc
import pytest

from bigfleet.rpc.wire.gen import coordinator_pb2 as pb
from bigfleet.rpc.wire.gen import coordinator_pb2_grpc
from tests.coordinator.coordinator_process import Running, coordinator
from tests.coordinator.stores.etcd_process import Cluster
from tests.patience import PATIENCE_SECONDS, wait_until


def leads(one: Running) -> bool:
    return "bigfleet_coordinator_leader 1.0" in one.page("/metrics")[1]


def until_leading(one: Running, *, is_so: bool = True) -> None:
    wait_until(lambda: leads(one) is is_so, one.log.read_text, poll_seconds=0.02)


@contextmanager
def two_replicas(member: Cluster, folder: Path, *, lease_ttl: str) -> Iterator[tuple[Running, Running]]:
    """Run two replicas on one store; the first was there before."""
    flags = ["--store", f"etcd://{member.endpoints[0]}/bigfleet", "--lease-ttl", lease_ttl]
    with coordinator(folder, *flags, "--id", "r0") as first, coordinator(folder, *flags, "--id", "r1") as second:
        yield first, second


@pytest.mark.rule("coordinator 12/2")
async def test_a_killed_leader_is_followed_by_another_and_a_follower_sends_commands_on(
    member: Cluster, tmp_path: Path
) -> None:
    with two_replicas(member, tmp_path, lease_ttl="5s") as (first, second):
        until_leading(first)
        before = first.report("east-0", clusters=["blue"])
        assert not leads(second)
        # Asked, the follower names the leader, and the command goes there.
        assert [row["shard"] for row in second.records("get", "shards")] == ["east-0"]
        assert second.run("admin", "assign-domain", "zone=a", "east-0").returncode == 0

        first.process.kill()
        until_leading(second)

        after = second.report("east-0", 2, coordinator_term=before.coordinator_term)
        assert after.coordinator_term > before.coordinator_term
        assert after.want_ownership
        assert [row["value"] for row in second.records("get", "domains")] == ["a"]
        assert second.page("/readyz")[0] == 200


@pytest.mark.rule("coordinator 3/10")
async def test_a_leader_that_is_stopped_in_order_leaves_at_once(member: Cluster, tmp_path: Path) -> None:
    with two_replicas(member, tmp_path, lease_ttl="600s") as (first, second):
        until_leading(first)
        first.process.terminate()
        assert first.process.wait(PATIENCE_SECONDS) == 0
        # Long before the lease has run out.
        until_leading(second)


@pytest.mark.rule("coordinator 3/4", "coordinator 12/3")
@pytest.mark.slow
async def test_a_leader_that_was_paused_beyond_its_lease_writes_nothing_when_it_goes_on(
    member: Cluster, tmp_path: Path
) -> None:
    """The write waits at its door while it stands still, so that it is the first thing that it does."""
    with two_replicas(member, tmp_path, lease_ttl="5s") as (first, second):
        until_leading(first)
        before = first.report("east-0")
        told: Queue[tuple[grpc.StatusCode, str]] = Queue()
        with grpc.insecure_channel(first.address) as channel:
            stub = coordinator_pb2_grpc.CoordinatorStub(channel)
            stub.ListShards(pb.ListShardsRequest(), timeout=PATIENCE_SECONDS)
            first.process.send_signal(signal.SIGSTOP)
            request = pb.AssignDomainRequest(topology_key="zone", topology_value="late", shard_id="east-0")

            def write() -> None:
                try:
                    stub.AssignDomain(request, timeout=PATIENCE_SECONDS)
                except grpc.RpcError as error:
                    told.put((error.code(), error.details() or ""))
                else:
                    told.put((grpc.StatusCode.OK, ""))

            late = threading.Thread(target=write)
            late.start()
            try:
                until_leading(second)
                term = second.report("east-0", 2, coordinator_term=before.coordinator_term).coordinator_term
            finally:
                first.process.send_signal(signal.SIGCONT)
            late.join(PATIENCE_SECONDS)

        code, text = told.get_nowait()
        assert code is grpc.StatusCode.FAILED_PRECONDITION, text
        assert term > before.coordinator_term
        assert second.records("get", "domains") == []
        until_leading(first, is_so=False)
