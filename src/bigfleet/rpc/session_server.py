"""Serves `Shard.Session`: protobuf frames in and out of the shard's session registry.

docs/spec/wire.md §4 and §8, docs/spec/shard.md §10. The receive loop only routes; the writer is the other direction of
the same stream. Whatever ends a session here ends it in the registry. It decides nothing about machines.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
import structlog
from grpc import aio

from bigfleet.model.frames import (
    BootstrapResponse,
    DrainResult,
    Hello,
    MalformedMessage,
    NodeStatus,
    OperatorFrame,
    ReclaimAck,
)
from bigfleet.model.ids import identifier_fault
from bigfleet.rpc.convert_session import operator_frame_from_wire, shard_frame_to_wire
from bigfleet.rpc.gen import shard_pb2, shard_pb2_grpc
from bigfleet.shard.controller import Shard
from bigfleet.shard.outbox import CloseReason, SessionClosed
from bigfleet.shard.sessions import RollUpOffer
from bigfleet.shard.sessions import Session as OperatorSession

SERVICE_NAME = shard_pb2.DESCRIPTOR.services_by_name["Shard"].full_name
HELLO_TIMEOUT_SECONDS = 10.0
#: A stream that takes nothing for this long is given up (docs/spec/shard.md §10.4).
WRITE_TIMEOUT_SECONDS = 60.0

_log = structlog.get_logger("bigfleet.rpc.session")

_STATUS: Mapping[CloseReason, tuple[grpc.StatusCode, str]] = {
    CloseReason.REPLACED: (grpc.StatusCode.ABORTED, "replaced by a newer session of this cluster"),
    CloseReason.OVERFLOWED: (grpc.StatusCode.RESOURCE_EXHAUSTED, "a frame that must be delivered found no room"),
    CloseReason.UNRESPONSIVE: (grpc.StatusCode.RESOURCE_EXHAUSTED, "the stream took nothing for 60 s"),
    CloseReason.STOPPING: (grpc.StatusCode.UNAVAILABLE, "the shard is shutting down"),
    CloseReason.MISROUTED: (grpc.StatusCode.INVALID_ARGUMENT, "a later Hello named another cluster_id"),
    CloseReason.MALFORMED: (grpc.StatusCode.INVALID_ARGUMENT, "a frame was malformed; the shard's log names the field"),
    CloseReason.GONE: (grpc.StatusCode.CANCELLED, "the operator ended the stream"),
}

_Context = aio.ServicerContext[shard_pb2.OperatorMessage, shard_pb2.ShardMessage]
_Stream = AsyncIterator[shard_pb2.OperatorMessage]


class SessionServicer(shard_pb2_grpc.ShardServicer):
    """One shard's sessions over gRPC."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    async def Session(self, request_iterator: _Stream, context: _Context) -> AsyncIterator[shard_pb2.ShardMessage]:
        """Serve one operator until either side ends; the status says why (docs/spec/wire.md §4)."""
        if self._shard.sessions.is_stopping:
            await context.abort(*_STATUS[CloseReason.STOPPING])
        hello = await self._hello(request_iterator, context)
        session = self._shard.sessions.open(hello)
        tasks = [
            asyncio.create_task(self._receive(session, request_iterator)),
            asyncio.create_task(self._shard.serve_rollups(session)),
        ]
        try:
            while True:
                frame = await session.outbox.next()
                yield shard_frame_to_wire(frame)
        except SessionClosed as closed:
            await context.abort(*_STATUS[closed.reason])
        finally:
            for task in tasks:
                task.cancel()
            self._shard.sessions.close(session, CloseReason.GONE)

    async def _hello(self, stream: _Stream, context: _Context) -> Hello:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_SECONDS):
                message = await anext(aiter(stream), None)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no Hello within 10 s")
        try:
            frame = operator_frame_from_wire(message) if message is not None else None
        except MalformedMessage as malformed:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(malformed))
        if not isinstance(frame, Hello):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first frame of a session must be hello")
        fault = identifier_fault(frame.cluster_id)
        if fault is not None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"hello.cluster_id {fault}")
        return frame

    async def _receive(self, session: OperatorSession, stream: _Stream) -> None:
        reason = CloseReason.GONE
        try:
            async for message in stream:
                if not self._shard.sessions.is_current(session):
                    return
                frame = operator_frame_from_wire(message)
                if frame is None:
                    self._note_unknown(session)
                elif not self._route(session, frame):
                    reason = CloseReason.MISROUTED
                    return
        except MalformedMessage as fault:
            _log.warning("frame_refused", cluster=session.cluster, place=fault.place, fault=fault.fault)
            reason = CloseReason.MALFORMED
        except (aio.AbortError, aio.UsageError):
            # The stream ended under the reader; its writer says why.
            return
        finally:
            self._shard.sessions.close(session, reason)

    def _route(self, session: OperatorSession, frame: OperatorFrame | RollUpOffer) -> bool:
        """Hand a frame to whom it concerns; False for a Hello of another cluster."""
        sessions = self._shard.sessions
        match frame:
            case Hello():
                if frame.cluster_id != session.cluster:
                    return False
                sessions.acknowledge_hello(session)
            case BootstrapResponse():
                sessions.receive_bootstrap_response(session, frame)
            case ReclaimAck():
                sessions.receive_reclaim_ack(session, frame)
            case DrainResult():
                if not sessions.receive_drain_result(session, frame):
                    _log.debug("drain_result_unasked", cluster=session.cluster, machine=frame.machine_id)
            case NodeStatus():
                if not sessions.on_node_status(session, frame):
                    _log.debug("node_status_misrouted", cluster=session.cluster, machine=frame.machine_id)
            case _:
                sessions.receive_rollup(session, frame)  # type: ignore[arg-type]  # all that is left is a roll-up
        return True

    def _note_unknown(self, session: OperatorSession) -> None:
        _log.info("unknown_frame", cluster=session.cluster)


def add_to_server(servicer: SessionServicer, server: aio.Server) -> None:
    """Register the service on a server."""
    register: Any = shard_pb2_grpc.add_ShardServicer_to_server
    register(servicer, server)
