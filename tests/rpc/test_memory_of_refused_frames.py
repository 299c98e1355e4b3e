"""What a shard keeps of frames and sessions that have ended, with the garbage collector off as in production."""

import asyncio
import gc
import subprocess
import sys
from collections.abc import Iterator

import grpc
import pytest
from grpc import aio

from bigfleet.rpc.wire.gen import shard_pb2
from bigfleet.shard.sessions.outbox import Outbox
from tests.patience import PATIENCE_SECONDS, wait_until_async
from tests.rpc.live_shard import CROSSED, dial, live_shard

Code = grpc.StatusCode

FRAME_BYTES = 16 * 1024 * 1024
#: Serves a shard whose collector is off, with room for another sixteen such frames, until its input ends.
SHARD = """
import asyncio, gc, logging, pathlib, resource, sys
import structlog
from tests.rpc.live_shard import live_shard

structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


async def serve():
    async with live_shard() as live:
        await live.connect("warm")
        gc.collect()
        gc.disable()
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
        room = pages * resource.getpagesize() + 256 * 1024 * 1024
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
        print(live.port, flush=True)
        await asyncio.to_thread(sys.stdin.read)


asyncio.run(serve())
"""


@pytest.fixture
def no_collection() -> Iterator[None]:
    """The collector is off for the test, and there is nothing to collect when it begins."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.skipif(sys.platform != "linux", reason="measures with /proc and RLIMIT_AS")
async def test_frames_that_are_no_message_leave_no_memory_behind() -> None:
    """Forty frames of 16 MiB, alternately the first of a session and a later one, with room for sixteen."""
    shard = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SHARD, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert shard.stdin is not None
    assert shard.stdout is not None
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            port = int(await shard.stdout.readline())
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for number in range(40):
                peer = dial(channel)
                if number % 2:
                    await peer.say(hello=shard_pb2.Hello(cluster_id=f"c{number}"))
                await peer.try_to_say_bytes(b"\xff" * FRAME_BYTES)
                code, _ = await peer.end()
                assert code in (Code.RESOURCE_EXHAUSTED, Code.INVALID_ARGUMENT, CROSSED[0]), number
            honest = dial(channel)
            await honest.say(hello=shard_pb2.Hello(cluster_id="honest"))
            await honest.hear_ack("hello")
        shard.stdin.close()
        assert await shard.wait() == 0
    finally:
        if shard.returncode is None:
            shard.kill()
            await shard.wait()


def outboxes() -> list[Outbox]:
    """Return every outbox that is alive."""
    return [each for each in gc.get_objects() if type(each) is Outbox]


async def test_sessions_that_have_ended_are_freed_without_a_collection(no_collection: None) -> None:
    """Each end of a session: replaced, cancelled, refused for its first frame, ended by a frame that is no message."""
    before = {id(outbox) for outbox in outboxes()}
    async with live_shard() as live:
        for turn in range(3):
            for name in ("c1", "c2"):
                old, new = await live.connect(name), await live.connect(name)
                assert (await old.end())[0] is Code.ABORTED
                await new.say_bytes(b"\xff\xff")
                assert (await new.end())[0] is Code.INVALID_ARGUMENT
            refused = live.dial()
            await refused.say_bytes(b"\xff\xff")
            assert (await refused.end())[0] is Code.INVALID_ARGUMENT
            gone = await live.connect(f"gone{turn}")
            gone.vanish()
        await live.connect("last")
        # Of twenty sessions one stands, and one may be about to go.

        async def are_freed() -> bool:
            return sum(id(outbox) not in before for outbox in outboxes()) <= 2

        await wait_until_async(are_freed, poll_seconds=0.01)
