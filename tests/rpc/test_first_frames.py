"""Sessions without a first frame make room for others, the oldest of those with the most first (wire.md §2)."""

import asyncio
from collections.abc import Callable

import grpc
import pytest

from bigfleet.rpc.servers import session as session_server
from bigfleet.rpc.servers.first_frames import Crowded, FirstFrames
from bigfleet.rpc.wire.gen import capacity_pb2
from tests.patience import wait_until_async
from tests.rpc.live_shard import live_shard


class Crowd:
    """Sessions that wait for a first frame that never comes."""

    def __init__(self, first_frames: FirstFrames) -> None:
        self._first_frames = first_frames
        self.ended: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def come(self, name: str, identity: str) -> None:
        """Let one more come."""
        self.tasks.append(asyncio.create_task(self._wait(name, identity)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def _wait(self, name: str, identity: str) -> None:
        try:
            async with self._first_frames.waiting(identity, 10.0):
                await asyncio.sleep(60)
        except Crowded:
            self.ended.append(name)
        except TimeoutError:
            self.ended.append(f"{name} in time")


@pytest.mark.virtual_time
@pytest.mark.rule("shard 4.4/5")
@pytest.mark.parametrize(
    ("identity", "ended"),
    [
        # Three identities: the one that has most pays for any newcomer.
        (lambda name: {"a": "many", "b": "many", "c": "one"}.get(name, "new"), ["a"]),
        # Without identities the oldest goes.
        (lambda _name: "", ["a"]),
    ],
)
async def test_the_oldest_of_those_with_most_ends(identity: Callable[[str], str], ended: list[str]) -> None:
    first_frames = FirstFrames(most=3, per_identity_max=8)
    crowd = Crowd(first_frames)
    for name in "abcd":
        await crowd.come(name, identity(name))
    await asyncio.sleep(0.1)
    assert (crowd.ended, len(first_frames)) == (ended, 3)

    await asyncio.sleep(60)
    assert sorted(crowd.ended) == [*ended, "b in time", "c in time", "d in time"]
    assert len(first_frames) == 0


@pytest.mark.virtual_time
@pytest.mark.rule("shard 4.4/5")
async def test_one_identity_pays_for_its_own_crowd() -> None:
    """The third session of an identity that may have two ends its own oldest; others are not touched."""
    crowd = Crowd(FirstFrames(most=100, per_identity_max=2))
    for name, identity in (("honest", "other"), ("a", "crowd"), ("b", "crowd"), ("c", "crowd")):
        await crowd.come(name, identity)
    await asyncio.sleep(0.1)
    assert crowd.ended == ["a"]
    await asyncio.sleep(60)


@pytest.mark.rule("shard 4.4/5")
async def test_a_session_that_makes_room_is_sent_when_to_come_again() -> None:
    """Two silent ones wait where there is room for two; an operator gets its session and the older one its status."""
    async with live_shard() as live:
        live.sessions._first_frames = FirstFrames(most=2)
        silent = [live.dial() for _ in range(2)]

        async def wait() -> bool:
            return len(live.sessions._first_frames) == 2

        await wait_until_async(wait)
        await live.connect("c1")
        ends = [asyncio.create_task(peer.end()) for peer in silent]
        done, rest = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        (code, text) = done.pop().result()
        assert code is grpc.StatusCode.UNAVAILABLE
        assert text.endswith("come again in 10 s")
        assert live.world.metric("shed_total", limit="first_frames") == 1
        for task in rest:
            task.cancel()


@pytest.mark.rule("shard 4.4/4")
async def test_a_session_over_its_rate_of_bytes_is_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is 1,000 bytes a second here: what comes after 2,000 waits, with a reason, and is not lost."""
    monkeypatch.setattr(session_server, "BYTES_PER_SECOND_MAX", 1_000)
    monkeypatch.setattr(session_server, "BYTES_BURST_SECONDS", 2.0)
    async with live_shard() as live:
        peer = await live.connect("c1", "need-status")
        requirement = capacity_pb2.NodeSelectorRequirement(
            key="a" * 1_000, operator=capacity_pb2.NodeSelectorRequirement.OPERATOR_EXISTS
        )
        for stamp in (1, 2):
            row = capacity_pb2.CapacityNeed(requirements=[requirement], aggregate_resources={"cpu": str(stamp)})
            needs = capacity_pb2.ClusterCapacityNeeds(cluster_id="c1", timestamp_unix_nanos=stamp, needs=[row] * 3)
            await peer.say(rollup=needs)
        deferred = await peer.hear_ack("rollup_deferred")
        assert deferred.error.startswith("over the limit of 1,000 bytes a second; the next frame is read in ")
        while (await peer.hear_ack("rollup")).rollup_timestamp_unix_nanos != 2:
            pass
        assert live.world.metric("shed_total", limit="session_bytes") >= 1
