"""Serves `Shard.Session`: protobuf frames in and out of the shard's session registry.

docs/spec/wire.md §4 and §8, docs/spec/shard.md §10. The receive loop only routes; the writer is the other direction of
the same stream. Each end of a session here ends it in the registry. It decides nothing about machines.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc import aio

from bigfleet.model.frames import (
    BootstrapResponse,
    DrainForecast,
    DrainResult,
    Hello,
    MalformedMessage,
    NodeStatus,
    ReclaimAck,
)
from bigfleet.model.ids import identifier_fault
from bigfleet.rpc.aborted_calls import release_frames
from bigfleet.rpc.security.identity import SESSION, Denied, Gate
from bigfleet.rpc.servers.first_frames import Crowded, FirstFrames
from bigfleet.rpc.servers.malformed_frames import MALFORMED_FRAMES_MAX, MALFORMED_SECONDS, MalformedFrames
from bigfleet.rpc.wire.convert_session import (
    ReceivedOperatorFrame,
    ReceivedRollUp,
    operator_frame_from_bytes,
    shard_frame_to_wire,
)
from bigfleet.rpc.wire.gen import shard_pb2
from bigfleet.rpc.wire.message_limits import SCANNED_BYTES_MIN, frame_elements_fault, frame_size_fault
from bigfleet.shard.cycle.controller import Shard
from bigfleet.shard.sessions.known_clusters import CLUSTERS_MAX
from bigfleet.shard.sessions.outbox import CloseReason, SessionClosed
from bigfleet.shard.sessions.registry import Session as OperatorSession

_SERVICE = shard_pb2.DESCRIPTOR.services_by_name["Shard"]
SERVICE_NAME = _SERVICE.full_name
SESSION_METHOD = _SERVICE.methods_by_name["Session"].name
HELLO_TIMEOUT_SECONDS = 10.0
#: The first frame of a session, which comes from a peer whose cluster is not known yet.
HELLO_BYTES_MAX = 64 * 1024
#: Any frame of an operator; the largest roll-up that the bounds of docs/spec/wire.md §2 are used for has a few MiB.
FRAME_BYTES_MAX = 32 * 1024 * 1024
#: What a session may send in the long run, and how far it may be ahead of that: two of the largest frames.
BYTES_PER_SECOND_MAX = 8 * 1024 * 1024
BYTES_BURST_SECONDS = 2 * FRAME_BYTES_MAX / BYTES_PER_SECOND_MAX
#: A stream that takes nothing for this long is given up (docs/spec/shard.md §10.4).
WRITE_TIMEOUT_SECONDS = 60.0
#: How long an ended stream may take its status; behind a peer that reads nothing it would wait for ever.
STATUS_TIMEOUT_SECONDS = 5.0

_log = structlog.get_logger("bigfleet.rpc.session")

_STATUS: Mapping[CloseReason, tuple[grpc.StatusCode, str]] = {
    CloseReason.REPLACED: (grpc.StatusCode.ABORTED, "replaced by a newer session of this cluster"),
    CloseReason.OVERFLOWED: (grpc.StatusCode.RESOURCE_EXHAUSTED, "a frame that must be delivered found no room"),
    CloseReason.UNRESPONSIVE: (grpc.StatusCode.RESOURCE_EXHAUSTED, "the stream took nothing for a minute"),
    CloseReason.STOPPING: (grpc.StatusCode.UNAVAILABLE, "the shard is shutting down"),
    CloseReason.MISROUTED: (grpc.StatusCode.INVALID_ARGUMENT, "a later Hello named another cluster_id"),
    CloseReason.MALFORMED: (grpc.StatusCode.INVALID_ARGUMENT, "a frame could not be read"),
    CloseReason.BROKEN: (grpc.StatusCode.INTERNAL, "the shard could not continue the stream; its log says why"),
    CloseReason.GONE: (grpc.StatusCode.CANCELLED, "the operator ended the stream"),
}

#: Frames come as bytes: most of them are roll-ups that need no parsing.
_Context = aio.ServicerContext[bytes, shard_pb2.ShardMessage]


class SessionServicer:
    """One shard's sessions over gRPC."""

    def __init__(self, shard: Shard, gate: Gate | None = None, *, hello_bytes_max: int = HELLO_BYTES_MAX) -> None:
        """`hello_bytes_max` bounds the first frame; the server's own limit bounds the others."""
        self._shard = shard
        self._gate = gate or Gate()
        self._hello_bytes_max = hello_bytes_max
        self._first_frames = FirstFrames()
        self._malformed = MalformedFrames()
        #: Large frames are counted one at a time: a scan shares the interpreter with the loop.
        self._scans = asyncio.Lock()

    async def Session(self, _frames: object, context: _Context) -> None:
        """Serve one operator until either side ends; the status says why (docs/spec/wire.md §4)."""
        try:
            await self._serve(context)
        except aio.AbortError as error:
            # gRPC has the status; it raises the error again by itself.
            release_frames(error)

    async def _serve(self, context: _Context) -> None:
        identity = await self._admit(context)
        sessions = self._shard.sessions
        if not sessions.is_stopping:
            # With a certificate the peer is known before anything of it is read, in plain text by its Hello.
            await self._check_readable(context, identity)
            hello = await self._hello(context, identity)
            peer = identity or hello.cluster_id
            await self._check_readable(context, peer)
            # On its own: with a first write that is cancelled, gRPC would send it twice and the status never.
            await context.send_initial_metadata(())
        if sessions.is_stopping:
            await context.abort(*_STATUS[CloseReason.STOPPING])
        if not self._shard.known_clusters.has_room_for(hello.cluster_id):
            self._shard.metrics.shed.labels("clusters").inc()
            advice = "retire those that are gone, or add a shard"
            _log.warning(
                "session.refused",
                cluster=hello.cluster_id,
                reason="too many clusters",
                most=CLUSTERS_MAX,
                advice=advice,
            )
            text = f"the shard knows {CLUSTERS_MAX} other clusters; {advice}"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        session = sessions.open(hello)
        stream = _Stream(self._shard, session, context, self._scans)
        writer = asyncio.create_task(stream.write())
        tasks = [writer, asyncio.create_task(stream.read()), asyncio.create_task(self._shard.serve_rollups(session))]
        try:
            reason = await session.outbox.ended()
            # A frame that is half sent goes out whole, if the peer takes it.
            await asyncio.wait([writer], timeout=STATUS_TIMEOUT_SECONDS)
        finally:
            sessions.close(session, CloseReason.GONE)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if reason is CloseReason.MALFORMED:
            self._malformed.add(peer, asyncio.get_running_loop().time())
        code, text = _STATUS[reason]
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_SECONDS):
                await context.abort(code, f"{text}: {stream.fault}" if stream.fault else text)
        except TimeoutError:
            _log.info("session.status_undelivered", cluster=session.cluster, code=code.name)

    async def _admit(self, context: _Context) -> str:
        """Return the identity of a peer that may open sessions, "" in plain text; no frame of another peer is read."""
        try:
            identity = self._gate.check(context, SESSION)
        except Denied as denied:
            await self._refuse(context, denied)
            raise AssertionError("abort always raises") from None
        return "" if identity is None else identity.uri

    async def _refuse(self, context: _Context, denied: Denied) -> None:
        self._gate.log_refusal(context, SESSION, denied, self._shard.metrics.session_identity_rejected)
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(denied))

    async def _check_readable(self, context: _Context, peer: str) -> None:
        """Return unless too many frames of the peer could not be read lately."""
        wait_seconds = self._malformed.wait_seconds(peer, asyncio.get_running_loop().time())
        if wait_seconds:
            self._shard.metrics.shed.labels("malformed_frames").inc()
            limit = f"{MALFORMED_FRAMES_MAX} frames could not be read in {MALFORMED_SECONDS:.0f} s"
            text = f"{limit}; mend the operator, and come again in {wait_seconds:.0f} s"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)

    async def _hello(self, context: _Context, identity: str) -> Hello:
        try:
            async with self._first_frames.waiting(identity, HELLO_TIMEOUT_SECONDS):
                content = await _next_frame(context)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no Hello within 10 s")
        except Crowded:
            self._shard.metrics.shed.labels("first_frames").inc()
            text = "too many sessions wait for their first frame; send it with the call, and come again in 10 s"
            await context.abort(grpc.StatusCode.UNAVAILABLE, text)
        frame, code, fault = _read_hello(content, self._hello_bytes_max)
        # The bytes are not kept for as long as the status takes.
        del content
        if frame is None:
            self._malformed.add(identity, asyncio.get_running_loop().time())
            await context.abort(code, fault)
            raise AssertionError("abort always raises")
        try:
            self._gate.check_cluster(context, frame.cluster_id)
        except Denied as denied:
            await self._refuse(context, denied)
        wrong = identifier_fault(frame.cluster_id)
        if wrong is not None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"hello.cluster_id {wrong}")
        return frame


async def _next_frame(context: _Context) -> bytes | None:
    """Return the operator's next frame, None at the end of its direction of the stream.

    Not by the iterator that gRPC offers, which keeps the last frame in a reference cycle of its own.
    """
    content = await context.read()
    return content if isinstance(content, bytes) else None


def _read_hello(content: bytes | None, bytes_max: int) -> tuple[Hello | None, grpc.StatusCode, str]:
    """Return the Hello of the first frame; without one, the status and text for the peer."""
    size_bytes = len(content) if content is not None else 0
    if size_bytes > bytes_max:
        text = f"the first frame has {size_bytes} bytes, at most {bytes_max} are read"
        return None, grpc.StatusCode.RESOURCE_EXHAUSTED, text
    try:
        frame = operator_frame_from_bytes(content, None) if content is not None else None
    except (DecodeError, MalformedMessage) as error:
        return None, grpc.StatusCode.INVALID_ARGUMENT, f"the first frame could not be read: {error}"
    if not isinstance(frame, Hello):
        return None, grpc.StatusCode.INVALID_ARGUMENT, "the first frame of a session must be hello"
    return frame, grpc.StatusCode.OK, ""


class _Stream:
    """The two directions of one session's stream. Whichever of them ends ends the session."""

    def __init__(
        self, shard: Shard, session: OperatorSession, context: _Context, scans: asyncio.Lock | None = None
    ) -> None:
        self._shard = shard
        self._scans = scans or asyncio.Lock()
        self._session = session
        self._context = context
        self._has_logged_unknown = False
        self._read_bytes = 0
        #: When the session's rate has paid for all that was read.
        self._paid_seconds = 0.0
        #: What was wrong with the frame that ended the session, for the status.
        self.fault = ""

    async def write(self) -> None:
        """Write what the outbox holds until it ends."""
        reason = CloseReason.GONE
        try:
            async with asyncio.timeout(None) as timeout:
                while True:
                    frame = self._session.outbox.take()
                    if frame is None:
                        timeout.reschedule(None)
                        frame = await self._session.outbox.next()
                    self._limit(timeout)
                    await self._context.write(shard_frame_to_wire(frame))
        except SessionClosed:
            return
        except TimeoutError:
            reason = CloseReason.UNRESPONSIVE
        except (aio.UsageError, aio.InternalError):
            # The operator is gone; the second is what gRPC raises when it goes during the write.
            return
        except Exception:
            reason = CloseReason.BROKEN
            _log.exception("session.write_failed", cluster=self._session.cluster)
        finally:
            self._shard.sessions.close(self._session, reason)

    def _limit(self, timeout: asyncio.Timeout) -> None:
        """End the write of a frame at its limit; frames that follow each other within a second have one timer."""
        end_seconds = asyncio.get_running_loop().time() + WRITE_TIMEOUT_SECONDS
        set_seconds = timeout.when()
        if set_seconds is None or end_seconds - set_seconds > min(1.0, WRITE_TIMEOUT_SECONDS / 2):
            timeout.reschedule(end_seconds)

    async def read(self) -> None:
        """Route the operator's frames until the stream or the session ends."""
        reason = CloseReason.GONE
        try:
            cluster = self._session.cluster
            while (content := await _next_frame(self._context)) is not None:
                if not self._shard.sessions.is_current(self._session):
                    return
                self._read_bytes += len(content)
                fault = await self._fault_of(content)
                if fault is not None:
                    reason, self.fault = CloseReason.MALFORMED, str(fault)
                    return
                if not self._shard.sessions.is_current(self._session):
                    return
                known = self._shard.intake.digest_of(cluster)
                # Of the roll-ups of a cluster that has to wait only the newest is parsed.
                frame = operator_frame_from_bytes(content, known, parses_rollups=not self._session.is_deferred)
                # The wait for the next frame keeps nothing of this one.
                del content
                if isinstance(frame, Hello) and frame.cluster_id != cluster:
                    reason = CloseReason.MISROUTED
                    return
                self._route(frame)
                del frame
                await self._rest()
        except (DecodeError, MalformedMessage) as error:
            reason, self.fault = CloseReason.MALFORMED, str(error)
        except (aio.AbortError, aio.UsageError):
            # The stream ended under the reader; its writer says why.
            return
        except Exception:
            reason = CloseReason.BROKEN
            _log.exception("session.read_failed", cluster=self._session.cluster)
        finally:
            self._shard.sessions.close(self._session, reason)

    async def _fault_of(self, content: bytes) -> MalformedMessage | None:
        """Return why a frame must not be parsed, None if it may be.

        The fault is not raised: its traceback would keep the bytes.
        """
        fault = frame_size_fault(content)
        if fault is None and len(content) >= SCANNED_BYTES_MIN and not self._repeats(content):
            async with self._scans:
                fault = await asyncio.to_thread(frame_elements_fault, content)
        return fault

    def _repeats(self, content: bytes) -> bool:
        known = self._shard.intake.digest_of(self._session.cluster)
        return ReceivedRollUp.repeated(content, known) is not None

    async def _rest(self) -> None:
        """Return when the session's rate allows for the next frame; until then the peer's windows fill up."""
        now_seconds = asyncio.get_running_loop().time()
        self._paid_seconds = max(self._paid_seconds, now_seconds) + self._read_bytes / BYTES_PER_SECOND_MAX
        self._read_bytes = 0
        wait_seconds = self._paid_seconds - now_seconds - BYTES_BURST_SECONDS
        if wait_seconds > 0:
            self._shard.metrics.shed.labels("session_bytes").inc()
            limit = f"over the limit of {BYTES_PER_SECOND_MAX:,} bytes a second"
            self._shard.sessions.announce_rest(
                self._session, f"{limit}; the next frame is read in {wait_seconds:.1f} s"
            )
            await asyncio.sleep(wait_seconds)

    def _route(self, frame: ReceivedOperatorFrame | None) -> None:
        """Hand a frame to whom it concerns."""
        sessions, session = self._shard.sessions, self._session
        match frame:
            case Hello():
                sessions.acknowledge_hello(session)
            case ReceivedRollUp():
                sessions.receive_rollup(session, frame)
            case BootstrapResponse():
                sessions.receive_bootstrap_response(session, frame)
            case ReclaimAck():
                sessions.receive_reclaim_ack(session, frame)
            case DrainResult():
                if not sessions.receive_drain_result(session, frame):
                    self._drop("drain_result", machine=frame.machine_id)
            case DrainForecast():
                if not sessions.receive_drain_forecast(session, frame):
                    self._drop("drain_forecast", machine=frame.machine_id)
            case NodeStatus():
                if not sessions.on_node_status(session, frame):
                    self._drop("node_status", machine=frame.machine_id)
            case None:
                self._drop("unknown")

    def _drop(self, kind: str, machine: str = "") -> None:
        self._shard.metrics.session_frames_dropped.labels(kind).inc()
        if kind == "unknown" and not self._has_logged_unknown:
            self._has_logged_unknown = True
            _log.info(
                "session.unknown_frame_received",
                cluster=self._session.cluster,
                advice="its operator may be newer than the shard",
            )
        _log.debug("session.frame_dropped", cluster=self._session.cluster, kind=kind, machine=machine)


def add_to_server(servicer: SessionServicer, server: aio.Server) -> None:
    """Register the service on a server."""
    # The generated registration would parse every frame before anybody could look at its bytes.
    session: Any = grpc.stream_stream_rpc_method_handler(
        servicer.Session,
        response_serializer=shard_pb2.ShardMessage.SerializeToString,
    )
    handlers = {SESSION_METHOD: session}
    # The stubs know nothing of the second of these, which the generated code calls too.
    registry: Any = server
    registry.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))
    registry.add_registered_method_handlers(SERVICE_NAME, handlers)
