"""Real coordinator processes on a real etcd: killed, stopped, found again by whoever asks a follower."""

import time
from pathlib import Path

from tests.cli.live_fleet import PATIENCE_SECONDS
from tests.coordinator.coordinator_process import Running, coordinator
from tests.coordinator.etcd_process import Cluster


def leads(one: Running) -> bool:
    return "bigfleet_coordinator_leader 1.0" in one.page("/metrics")[1]


def until_leading(one: Running) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not leads(one):
        assert time.monotonic() < deadline, one.log.read_text()
        time.sleep(0.02)


async def test_a_killed_leader_is_followed_by_another_and_a_follower_sends_commands_on(
    member: Cluster, tmp_path: Path
) -> None:
    store = ["--store", f"etcd://{member.endpoints[0]}/bigfleet", "--lease-ttl", "2s"]
    with (
        coordinator(tmp_path, *store, "--id", "r0") as first,
        coordinator(tmp_path, *store, "--id", "r1") as second,
    ):
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


async def test_a_leader_that_is_stopped_in_order_leaves_at_once(member: Cluster, tmp_path: Path) -> None:
    store = ["--store", f"etcd://{member.endpoints[0]}/bigfleet", "--lease-ttl", "600s"]
    with (
        coordinator(tmp_path, *store, "--id", "r0") as first,
        coordinator(tmp_path, *store, "--id", "r1") as second,
    ):
        until_leading(first)
        first.process.terminate()
        assert first.process.wait(PATIENCE_SECONDS) == 0
        # Long before the lease has run out.
        until_leading(second)
