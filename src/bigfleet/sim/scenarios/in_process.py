"""Connects a closed world without sockets: a shard's calls to a provider, an operator's session to a shard.

docs/spec/wire.md. Frames of a session go through their bytes, as they would over gRPC; each message takes its time. A
wire can be cut: what is sent then is lost, as with a process that died. Nothing here decides anything.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

from bigfleet.model.clock import Clock
from bigfleet.model.frames import (
    BootstrapResponse,
    DrainResult,
    Hello,
    NodeStatus,
    OperatorFrame,
    ReclaimAck,
    ShardFrame,
)
from bigfleet.model.ids import MachineId
from bigfleet.operator.ports import EndKind, SessionEnded
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.records.refusal import Refused
from bigfleet.provider.testing import settled
from bigfleet.rpc.wire.convert_session import (
    ReceivedRollUp,
    operator_frame_from_bytes,
    operator_frame_to_wire,
    shard_frame_from_wire,
    shard_frame_to_wire,
)
from bigfleet.shard.cycle.controller import Shard
from bigfleet.shard.ports import FenceToken, ListedMachine, Listing, ProviderRefusal, RefusalKind, TransitionAck
from bigfleet.shard.sessions.outbox import CloseReason, SessionClosed
from bigfleet.shard.sessions.registry import Session
from bigfleet.sim.sites.core_provider import CoreCall, CoreProvider, refusal_of

T = TypeVar("T")

#: One way between two processes.
WIRE_SECONDS: Final = 0.002


class KitProvider(CoreProvider):
    """Calls the core in this process; each way takes its time, unless the wire is cut."""

    def __init__(self, core: CapacityCore, clock: Clock, *, synchronous_create: bool = False) -> None:
        """`synchronous_create` answers a Create with the machine at rest."""
        self._core = core
        self._clock = clock
        self._synchronous_create = synchronous_create
        self.is_cut = False
        #: Mutating calls that reached the provider.
        self.calls = 0

    async def get(self, machine_id: MachineId) -> ListedMachine:
        """Return the record of one machine."""
        record = await self._carried(self._core.get(machine_id))
        return ListedMachine(record.machine, record.metadata)

    async def list(self, since_revision: bytes) -> Listing:
        """Return every record, or what changed since the cursor."""
        answer = await self._carried(self._core.list(since=since_revision))
        return Listing(
            records=[ListedMachine(record.machine, record.metadata) for record in answer.records],
            revision=answer.revision,
            removed_ids=answer.removed_ids,
            tombstones=answer.tombstones,
        )

    async def _mutate(self, method: str, machine_id: MachineId, token: FenceToken, call: CoreCall) -> TransitionAck:
        async def work() -> TransitionAck:
            self.calls += 1
            ack = await call(self._core)
            is_settled = method == "create" and self._synchronous_create
            record = await settled(self._core, machine_id) if is_settled else ack.record
            return TransitionAck(operation_id=ack.operation_id, record=ListedMachine(record.machine, record.metadata))

        return await self._carried(work())

    async def _carried(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            await self._cross()
            answer = await work
        except Refused as refused:
            raise refusal_of(refused) from refused
        finally:
            # Where the wire was cut on the way there, nothing was begun.
            work.close()
        await self._cross()
        return answer

    async def _cross(self) -> None:
        await self._clock.sleep(WIRE_SECONDS)
        if self.is_cut:
            raise ProviderRefusal(RefusalKind.UNKNOWN_OUTCOME, "the connection to the provider is cut")


class LocalDialer:
    """Dials whichever process of the shard serves sessions now."""

    def __init__(self, serving: Callable[[], Shard | None], heard: Callable[[Shard, str], None], clock: Clock) -> None:
        """`heard` is called with each roll-up that reaches a process, with its cluster."""
        self._serving = serving
        self._heard = heard
        self._clock = clock

    @asynccontextmanager
    async def dial(self) -> AsyncIterator["LocalStream"]:
        """Open a stream. Raises SessionEnded when no shard serves."""
        shard = self._serving()
        if shard is None or shard.sessions.is_stopping:
            raise SessionEnded(EndKind.LOST, "no shard serves sessions now")
        stream = LocalStream(shard, self._heard, self._clock)
        try:
            yield stream
        finally:
            stream.close()


class LocalStream:
    """One session; implements `bigfleet.operator.ports.SessionStream`."""

    def __init__(self, shard: Shard, heard: Callable[[Shard, str], None], clock: Clock) -> None:
        self._shard = shard
        self._heard = heard
        self._clock = clock
        self._session: Session | None = None
        self._rollups: asyncio.Task[None] | None = None

    async def send(self, frame: OperatorFrame) -> None:
        """Hand a frame to the shard. Raises SessionEnded once the session is over."""
        content = operator_frame_to_wire(frame).SerializeToString()
        await self._clock.sleep(WIRE_SECONDS)
        session, sessions = self._session, self._shard.sessions
        if session is None:
            if not isinstance(frame, Hello) or sessions.is_stopping:
                raise SessionEnded(EndKind.LOST, "the shard does not greet")
            self._session = session = sessions.open(frame)
            self._rollups = asyncio.create_task(self._shard.serve_rollups(session))
            return
        if not sessions.is_current(session):
            raise _ended(session)
        received = operator_frame_from_bytes(content, self._shard.intake.digest_of(session.cluster))
        match received:
            case ReceivedRollUp():
                self._heard(self._shard, session.cluster)
                sessions.receive_rollup(session, received)
            case BootstrapResponse():
                sessions.receive_bootstrap_response(session, received)
            case ReclaimAck():
                sessions.receive_reclaim_ack(session, received)
            case DrainResult():
                sessions.receive_drain_result(session, received)
            case NodeStatus():
                sessions.on_node_status(session, received)

    async def receive(self) -> ShardFrame | None:
        """Return the next frame. Raises SessionEnded once the session is over."""
        assert self._session is not None, "a session begins with Hello"
        try:
            frame = await self._session.outbox.next()
        except SessionClosed:
            raise _ended(self._session) from None
        content = shard_frame_to_wire(frame)
        await self._clock.sleep(WIRE_SECONDS)
        return shard_frame_from_wire(content)

    def close(self) -> None:
        """End the session, if it is not over."""
        if self._rollups is not None:
            self._rollups.cancel()
        if self._session is not None:
            self._shard.sessions.close(self._session, CloseReason.GONE)


def _ended(session: Session) -> SessionEnded:
    reason = session.outbox.closed
    kind = EndKind.REPLACED if reason is CloseReason.REPLACED else EndKind.LOST
    return SessionEnded(kind, reason.value if reason is not None else "the session is over")
