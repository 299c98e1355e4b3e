"""Queues frames for one operator: bounded, coalescing, never blocking the sender.

docs/spec/shard.md §10.4. One writer takes frames out. Frames of the same key replace each other, the newer going to
the tail. Frames that must be delivered are never replaced or dropped; when no room is left for one the session ends.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from enum import Enum

from bigfleet.model.frames import (
    ECHO_RESYNC,
    Acknowledgement,
    AvailableCapacity,
    BootstrapRequest,
    DrainForecastRequest,
    NeedStatusUpdate,
    NodeStateUpdate,
    ReclaimInstruction,
    ShardFrame,
)
from bigfleet.model.validation import ensure, validate

#: Gives a frame as of the moment at which it is called.
Rendering = Callable[[], ShardFrame | None]


class CloseReason(Enum):
    """Why a session ended from our side; `rpc` turns it into a status code."""

    REPLACED = "replaced"
    OVERFLOWED = "overflowed"
    UNRESPONSIVE = "unresponsive"
    STOPPING = "stopping"
    MISROUTED = "misrouted"
    MALFORMED = "malformed"
    BROKEN = "broken"
    GONE = "gone"


class SessionClosed(Exception):
    """The outbox has ended; nothing more will come out of it."""

    def __init__(self, reason: CloseReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


def _do_nothing() -> None:
    pass


class Outbox:
    """The frames of one session.

    Invariant: at most `frames_max` frames wait, and at most one of each supersedes_key.
    """

    def __init__(
        self,
        frames_max: int,
        on_overflow: Callable[[], None] = lambda: None,
        on_loss: Callable[[], None] = lambda: None,
        waiting: "set[Outbox] | None" = None,
    ) -> None:
        """Hold at most `frames_max` frames.

        `on_overflow` is called if a frame that must be delivered finds no room, `on_loss` if another one is dropped.
        `waiting` holds this outbox for as long as frames wait in it.
        """
        self._frames_max = frames_max
        self._on_overflow = on_overflow
        self._on_loss = on_loss
        self._waiting = set() if waiting is None else waiting
        self._frames: OrderedDict[int, ShardFrame] = OrderedDict()
        self._by_key: dict[str, int] = {}
        self._next_number = 0
        self._wakeup = asyncio.Event()
        self._ended = asyncio.Event()
        self._resync: deque[Rendering] | None = None
        self._resync_wanted = False
        self.closed: CloseReason | None = None
        #: Frames dropped since the session opened.
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def has_lost(self) -> bool:
        """Return whether frames were dropped that a resync has to make up for."""
        return self._resync_wanted and self.closed is None

    @property
    def overflowed(self) -> bool:
        """Return whether frames were dropped that a resync has to make up for, and there is room for it again."""
        return self._resync_wanted and len(self._frames) * 2 <= self._frames_max

    @property
    def is_full(self) -> bool:
        """Return whether a frame more would push another one out, or be dropped."""
        return len(self._frames) >= self._frames_max

    @property
    def room(self) -> int:
        """How many frames that may wait find room without crowding out the rest: up to half of the outbox."""
        return max(0, self._frames_max // 2 - len(self._frames))

    def put(self, frame: ShardFrame) -> None:
        """Queue a frame; it may push out coalescing ones or end the session, it never waits."""
        if self.closed is not None:
            return
        key = _supersedes_key(frame)
        if key is not None:
            known = self._by_key.pop(key, None)
            if known is not None:
                del self._frames[known]
        if len(self._frames) >= self._frames_max and not self._make_room(key is None):
            return
        self._next_number += 1
        self._frames[self._next_number] = frame
        self._waiting.add(self)
        if key is not None:
            self._by_key[key] = self._next_number
        validate(self)
        self._wakeup.set()

    def start_resync(self, renderings: Iterable[Rendering]) -> None:
        """Send what these give at the moment of sending, None being left out, then an ack `resync`.

        They are rendered one by one as the stream takes them, so however many there are they need no room.
        """
        if self.closed is not None:
            return
        self._resync = deque(renderings)
        self._resync_wanted = False
        self._wakeup.set()

    def close(self, reason: CloseReason) -> None:
        """End the outbox; the first reason stays."""
        if self.closed is None:
            self.closed = reason
            self._frames.clear()
            self._waiting.discard(self)
            self._by_key.clear()
            self._resync = None
            # They refer to the session, which refers to this.
            self._on_overflow = self._on_loss = _do_nothing
            self._wakeup.set()
            self._ended.set()

    async def ended(self) -> CloseReason:
        """Wait for the end and return its reason; a writer that is stuck in its stream is no obstacle."""
        await self._ended.wait()
        assert self.closed is not None
        return self.closed

    async def next(self) -> ShardFrame:
        """Return the next frame, waiting for one. Raises SessionClosed once the outbox has ended."""
        while (frame := self.take()) is None:
            self._wakeup.clear()
            await self._wakeup.wait()
        return frame

    def take(self) -> ShardFrame | None:
        """Return the next frame, None while there is none. Raises SessionClosed once the outbox has ended."""
        if self.closed is not None:
            raise SessionClosed(self.closed)
        return self._take()

    def _take(self) -> ShardFrame | None:
        # Queued frames go first: a resync renders the present, so nothing older may follow it for the same machine.
        if self._frames:
            _number, frame = self._frames.popitem(last=False)
            if not self._frames:
                self._waiting.discard(self)
            key = _supersedes_key(frame)
            if key is not None:
                self._by_key.pop(key, None)
            validate(self)
            return frame
        while self._resync is not None:
            if not self._resync:
                self._resync = None
                return Acknowledgement(echo=ECHO_RESYNC)
            rendered = self._resync.popleft()()
            if rendered is not None:
                return rendered
        return None

    def validate(self) -> None:
        """Compare everything with the invariants. Raises InvariantBroken."""
        ensure(len(self._frames) <= self._frames_max, f"outbox: {len(self._frames)} frames, {self._frames_max} allowed")
        keys = [(key, n) for n, frame in self._frames.items() if (key := _supersedes_key(frame)) is not None]
        ensure(len(self._by_key) == len(keys), "outbox: two frames of one key, or a key without a frame")
        ensure(self._by_key == dict(keys), "outbox: a key names another frame")
        ensure((self in self._waiting) == bool(self._frames), "outbox: waits without a frame, or has one and does not")

    def _make_room(self, must_deliver: bool) -> bool:
        if not must_deliver:
            self._lose()
            return False
        if not self._by_key:
            on_overflow = self._on_overflow
            self.close(CloseReason.OVERFLOWED)
            on_overflow()
            return False
        oldest = next(iter(self._by_key))
        del self._frames[self._by_key.pop(oldest)]
        self._lose()
        return True

    def _lose(self) -> None:
        self.dropped += 1
        self._resync_wanted = True
        self._on_loss()


def _supersedes_key(frame: ShardFrame) -> str | None:
    match frame:
        case NodeStateUpdate() | AvailableCapacity() | NeedStatusUpdate() | DrainForecastRequest():
            return frame.supersedes_key
        case Acknowledgement() | BootstrapRequest() | ReclaimInstruction():
            return None
