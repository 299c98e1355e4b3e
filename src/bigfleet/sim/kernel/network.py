"""Simulates the network: calls and streams with delays, resets, stalls, partitions and slow readers.

A link has a direction. Messages on a link that is cut wait. A peer that is unreachable for `KEEPALIVE_SECONDS` is
disconnected, as by a keepalive. A call that a server has accepted continues after its caller is gone. This module must
not read the messages, and a stream never loses a part and delivers the rest.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from bigfleet.model.clock import Clock
from bigfleet.model.ids import Rng
from bigfleet.sim.kernel.processes import Process

T = TypeVar("T")
F = TypeVar("F")

#: A peer that is not heard of for so long is given up.
KEEPALIVE_SECONDS = 30.0
#: How often a waiting reader looks whether its link is whole.
_LOOK_SECONDS = 5.0
#: Frames on their way in one direction; a writer waits for room.
FRAMES_MAX = 64


class ConnectionLost(Exception):
    """The other side cannot be reached, or the connection to it broke."""


@dataclass(slots=True)
class Link:
    """One direction between two processes."""

    delay_seconds_min: float = 0.001
    delay_seconds_max: float = 0.02
    #: Of a message, that its connection breaks in its place.
    reset_share: float = 0.0
    #: Nothing arrives while it is set.
    is_cut: bool = False
    #: Nothing arrives before that time.
    stalled_until_seconds: float = 0.0
    #: How long a reader takes with each frame of a stream.
    reads_seconds: float = 0.0


class Network:
    """All links of the world, made when they are first used."""

    def __init__(self, clock: Clock, rng: Rng) -> None:
        self.clock = clock
        self._rng = rng
        self._links: dict[tuple[str, str], Link] = {}
        #: Open streams, in the order in which they were opened.
        self.connections: list[Connection[Any, Any]] = []
        #: What new links are like.
        self.usual = Link()

    def link(self, source: str, target: str) -> Link:
        """Return the link from one name to another."""
        known = self._links.get((source, target))
        if known is None:
            usual = self.usual
            known = self._links[source, target] = Link(
                delay_seconds_min=usual.delay_seconds_min,
                delay_seconds_max=usual.delay_seconds_max,
                reset_share=usual.reset_share,
            )
        return known

    def links_of(self, name: str) -> list[Link]:
        """Return every known link from or to a name."""
        return [link for ends, link in sorted(self._links.items()) if name in ends]

    def heal(self) -> None:
        """End every fault of the network; what is under way arrives."""
        self.usual.reset_share = 0.0
        for link in self._links.values():
            link.is_cut, link.reset_share, link.stalled_until_seconds, link.reads_seconds = False, 0.0, 0.0, 0.0

    def delay_seconds(self, link: Link) -> float:
        """Draw how long a message takes."""
        return self._rng.uniform(link.delay_seconds_min, link.delay_seconds_max)

    def is_reset(self, link: Link) -> bool:
        """Draw whether the connection breaks with this message."""
        return link.reset_share > 0 and self._rng.random() < link.reset_share

    async def travel(self, source: str, target: str) -> None:
        """Return when a message has arrived. Raises ConnectionLost when it never will."""
        link = self.link(source, target)
        await self.clock.sleep(self.delay_seconds(link))
        if self.is_reset(link):
            raise ConnectionLost(f"the connection from {source} to {target} was reset")
        await self.clock.sleep(link.stalled_until_seconds - self.clock.monotonic_seconds())
        given_up_seconds = self.clock.monotonic_seconds() + KEEPALIVE_SECONDS
        while link.is_cut:
            if self.clock.monotonic_seconds() >= given_up_seconds:
                raise ConnectionLost(f"nothing from {source} reaches {target}")
            await self.clock.sleep(1.0)

    async def call(self, source: str, target: Process, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Carry a call to a process and its answer back. Raises ConnectionLost, or what the work raises."""
        await self.travel(source, target.name)
        if not target.is_alive:
            raise ConnectionLost(f"{target.name} is not there")
        task = await target.outcome(work(), name=f"call-{target.name}")
        if task is None:
            raise ConnectionLost(f"{target.name} went away with the call")
        # An error of the work is carried back like an answer.
        error = task.exception()
        await self.travel(target.name, source)
        if error is not None:
            raise error
        return task.result()

    def connect(self, client: Process, server: Process) -> "Connection[Any, Any]":
        """Open a stream between two processes; its first frame shows whether the server is there."""
        connection: Connection[Any, Any] = Connection(self, client, server)
        self.connections = [each for each in self.connections if not each.is_broken]
        self.connections.append(connection)
        return connection

    def close_streams_of(self, process: Process) -> None:
        """Break the streams of a process that has died at once, as its operating system does; else peers look."""
        for connection in self.connections:
            if process in (connection.client, connection.server):
                connection.break_off("a process died")


class Pipe(Generic[F]):
    """One direction of a stream: frames arrive whole and in order, or the stream breaks."""

    def __init__(self, connection: "Connection[Any, Any]", source: str, target: str) -> None:
        self._connection = connection
        self._network = connection.network
        self._link = self._network.link(source, target)
        #: Frames with the second of their arrival.
        self._frames: deque[tuple[float, F]] = deque()
        self._last_arrival_seconds = 0.0
        self._cut_since_seconds: float | None = None

    async def send(self, frame: F) -> None:
        """Put a frame on its way; waits for room alone. Raises ConnectionLost."""
        connection = self._connection
        while len(self._frames) >= FRAMES_MAX and not connection.is_broken:
            await connection.turn(_LOOK_SECONDS)
        if not connection.is_broken and self._network.is_reset(self._link):
            connection.break_off("the connection was reset")
        connection.check()
        arrives = self._network.clock.monotonic_seconds() + self._network.delay_seconds(self._link)
        self._last_arrival_seconds = max(self._last_arrival_seconds, arrives)
        self._frames.append((self._last_arrival_seconds, frame))
        connection.stir()

    async def receive(self) -> F:
        """Return the next frame. Raises ConnectionLost."""
        connection, clock = self._connection, self._network.clock
        while True:
            connection.check()
            left_seconds = self._seconds_until_next()
            if left_seconds <= 0:
                break
            await connection.turn(left_seconds)
        if self._link.reads_seconds:
            await clock.sleep(self._link.reads_seconds)
            connection.check()
        _arrival, frame = self._frames.popleft()
        connection.stir()
        return frame

    def _seconds_until_next(self) -> float:
        """Return 0 when a frame is there, else how long to wait before looking again."""
        now_seconds = self._network.clock.monotonic_seconds()
        if not self._link.is_cut:
            self._cut_since_seconds = None
            if not self._frames:
                return _LOOK_SECONDS
            return max(self._frames[0][0], self._link.stalled_until_seconds) - now_seconds
        if self._cut_since_seconds is None:
            self._cut_since_seconds = now_seconds
        if now_seconds - self._cut_since_seconds >= KEEPALIVE_SECONDS:
            self._connection.break_off("the peer was not heard of")
            self._connection.check()
        return 1.0


class Connection(Generic[T, F]):
    """A stream: T goes to the server, F to the client. It ends for both when it breaks or a process dies."""

    def __init__(self, network: Network, client: Process, server: Process) -> None:
        self.network = network
        self.client = client
        self.server = server
        self.to_server: Pipe[T] = Pipe(self, client.name, server.name)
        self.to_client: Pipe[F] = Pipe(self, server.name, client.name)
        #: Why it broke; empty while it stands.
        self.reason = ""
        #: What the server said at its end: a status and a text.
        self.status: tuple[str, str] = ("UNAVAILABLE", "the connection broke")
        self._changed = asyncio.Event()

    @property
    def is_broken(self) -> bool:
        """Return whether it has ended."""
        if not self.reason and not (self.client.is_alive and self.server.is_alive):
            self.break_off("a process died")
        return bool(self.reason)

    def check(self) -> None:
        """Raise ConnectionLost when it has ended."""
        if self.is_broken:
            raise ConnectionLost(self.reason)

    def break_off(self, reason: str, status: tuple[str, str] | None = None) -> None:
        """End it for both sides; frames under way are lost."""
        if not self.reason:
            self.reason = reason
            self.status = status or self.status
            self.stir()

    def stir(self) -> None:
        """Let the waiter of this stream look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def turn(self, seconds_max: float) -> None:
        """Return when something has changed, or after that time."""
        changed = self._changed
        try:
            async with asyncio.timeout(seconds_max):
                await changed.wait()
        except TimeoutError:
            return

    async def broken(self) -> None:
        """Return once it has ended."""
        while not self.is_broken:
            await self.turn(_LOOK_SECONDS)
