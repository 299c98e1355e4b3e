"""A shard at the other end of a session, as tests script it: a dialer whose streams are queues."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bigfleet.model import frames
from bigfleet.model.frames import OperatorFrame, ShardFrame
from bigfleet.operator.ports import EndKind, SessionEnded

EVERYTHING = frozenset(
    {
        frames.CAPABILITY_NODE_STATUS,
        frames.CAPABILITY_DRAIN_RESULT,
        frames.CAPABILITY_NEED_STATUS,
        frames.CAPABILITY_DRAIN_FORECAST,
    }
)


class FakeStream:
    """One session as the shard sees it."""

    def __init__(self) -> None:
        self.received: list[OperatorFrame] = []
        self._to_operator: asyncio.Queue[ShardFrame | SessionEnded | None] = asyncio.Queue()
        self._arrived = asyncio.Event()
        #: While it is clear, `send` waits as a stream does that takes nothing.
        self.takes = asyncio.Event()
        self.takes.set()

    # ---- the operator's side

    async def send(self, frame: OperatorFrame) -> None:
        await self.takes.wait()
        self.received.append(frame)
        self._arrived.set()

    async def receive(self) -> ShardFrame | None:
        frame = await self._to_operator.get()
        if isinstance(frame, SessionEnded):
            raise frame
        return frame

    # ---- the shard's side

    def say(self, frame: ShardFrame | None) -> None:
        self._to_operator.put_nowait(frame)

    def end(self, kind: EndKind = EndKind.LOST) -> None:
        self._to_operator.put_nowait(SessionEnded(kind, "the test ends it"))

    def of(self, kind: type) -> list[OperatorFrame]:
        return [frame for frame in self.received if isinstance(frame, kind)]

    async def wait_for(self, kind: type, count: int = 1) -> OperatorFrame:
        """Return the `count`-th frame of a kind once it is here."""
        while len(self.of(kind)) < count:
            self._arrived.clear()
            await self._arrived.wait()
        return self.of(kind)[count - 1]


class FakeShard:
    """Takes every dial while `up`; each gives a fresh stream, which answers the Hello unless told otherwise."""

    def __init__(self, *, capabilities: frozenset[str] = EVERYTHING, greets: bool = True) -> None:
        self.up = True
        self.streams: list[FakeStream] = []
        self.dialled_at_seconds: list[float] = []
        self.refusal = EndKind.LOST
        self._capabilities = capabilities
        self._greets = greets
        self._dialled = asyncio.Event()

    @asynccontextmanager
    async def dial(self) -> AsyncIterator[FakeStream]:
        self.dialled_at_seconds.append(asyncio.get_running_loop().time())
        if not self.up:
            raise SessionEnded(self.refusal, "nobody listens")
        stream = FakeStream()
        if self._greets:
            stream.say(frames.Acknowledgement(echo=frames.ECHO_HELLO, capabilities=self._capabilities))
        self.streams.append(stream)
        self._dialled.set()
        yield stream

    async def stream(self, number: int = 1) -> FakeStream:
        """Return the `number`-th stream once it is dialled."""
        while len(self.streams) < number:
            self._dialled.clear()
            await self._dialled.wait()
        return self.streams[number - 1]
