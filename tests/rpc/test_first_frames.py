"""Sessions without a first frame make room for others, the oldest of those with the most first (wire.md §2)."""

import asyncio
import re
from collections.abc import Callable

import grpc
import pytest

from bigfleet.rpc.servers import malformed_frames
from bigfleet.rpc.servers import session as session_server
from bigfleet.rpc.servers.first_frames import Crowded, FirstFrames
from bigfleet.rpc.servers.malformed_frames import MalformedFrames
from bigfleet.rpc.wire.gen import capacity_pb2, shard_pb2
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


@pytest.mark.rule("shard 4.4/6")
async def test_a_peer_that_sends_no_messages_gets_no_session_for_a_minute() -> None:
    """After three such frames; it is sent when to come again, and other clusters get theirs."""
    async with live_shard() as live:
        for _ in range(3):
            peer = await live.connect("broken")
            await peer.say_bytes(b"\xff\xff")
            assert (await peer.end())[0] is grpc.StatusCode.INVALID_ARGUMENT
        refused = live.dial()
        await refused.try_to_say(hello=shard_pb2.Hello(cluster_id="broken"))
        code, text = await refused.end()
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert re.fullmatch(r"3 frames could not be read in 60 s; .* come again in \d+ s", text)
        assert live.world.metric("shed_total", limit="malformed_frames") == 1
        await live.connect("honest")


@pytest.mark.rule("shard 4.4/6")
def test_a_minute_later_the_peer_may_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count begins anew; peers are bounded."""
    frames = MalformedFrames()
    for second in (0.0, 10.0, 20.0):
        assert frames.wait_seconds("a", second) == 0
        frames.add("a", second)
    assert frames.wait_seconds("a", 20.0) == 40.0
    assert frames.wait_seconds("b", 20.0) == 0
    assert frames.wait_seconds("a", 60.0) == 0
    frames.add("a", 60.0)
    assert frames.wait_seconds("a", 61.0) == 0
    monkeypatch.setattr(malformed_frames, "PEERS_MAX", 3)
    for number in range(10):
        frames.add(f"c{number}", 61.0)
    frames.add("", 61.0)
    assert len(frames._peers) == 3
