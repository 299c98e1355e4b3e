"""Opens the operator's stream to its shard: `bigfleet.v1alpha1.Shard/Session` (docs/spec/wire.md §2, §8).

Frames go out serialised deterministically, so that equal demand gives equal bytes and costs the shard no parse. What
the codes of a broken stream mean to the operator is said here and nowhere else; this module does not retry.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import structlog
from grpc import aio

from bigfleet.model.frames import MalformedMessage, OperatorFrame, ShardFrame
from bigfleet.operator.ports import EndKind, SessionEnded
from bigfleet.rpc.security.tls import TlsFiles, channel_credentials
from bigfleet.rpc.security.tls_mismatch import with_tls_advice
from bigfleet.rpc.wire.convert_session import operator_frame_to_wire, shard_frame_from_wire
from bigfleet.rpc.wire.gen import shard_pb2

log = structlog.get_logger(__name__)

_SESSION_METHOD = "/bigfleet.v1alpha1.Shard/Session"
_MESSAGE_BYTES_MAX = 256 * 1024 * 1024
_KEEPALIVE_MILLIS = 20_000
_KEEPALIVE_TIMEOUT_MILLIS = 10_000
_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", _MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", _MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", _KEEPALIVE_MILLIS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MILLIS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A channel to an address that another one holds would share its connection, and with it the old certificate.
    ("grpc.use_local_subchannel_pool", 1),
)
_END_KINDS = {
    grpc.StatusCode.ABORTED: EndKind.REPLACED,
    grpc.StatusCode.PERMISSION_DENIED: EndKind.DENIED,
}

_Call = aio.StreamStreamCall[shard_pb2.OperatorMessage, shard_pb2.ShardMessage]


class GrpcSessionStream:
    """One Session call; see `bigfleet.operator.ports.SessionStream`."""

    def __init__(self, call: _Call, *, is_secure: bool) -> None:
        """`is_secure` says whether the call uses TLS."""
        self._call = call
        self._is_secure = is_secure

    async def send(self, frame: OperatorFrame) -> None:
        """Write one frame. Raises SessionEnded when the stream is over."""
        try:
            await self._call.write(operator_frame_to_wire(frame))
        except (aio.AioRpcError, asyncio.InvalidStateError) as error:
            # InvalidStateError is how grpc.aio says that the call had ended before this write began.
            raise await self._ended() from error

    async def receive(self) -> ShardFrame | None:
        """Read one frame, None for one of an unknown kind. Raises SessionEnded at the stream's end."""
        try:
            message = await self._call.read()
        except aio.AioRpcError as error:
            raise await self._ended() from error
        if not isinstance(message, shard_pb2.ShardMessage):  # aio.EOF: the shard closed the stream
            raise await self._ended()
        try:
            return shard_frame_from_wire(message)
        except MalformedMessage as error:
            # One frame that cannot be read costs itself; ending the stream would only bring it again in the resync.
            log.warning("operator.frame_skipped", error=str(error))
            return None

    async def _ended(self) -> SessionEnded:
        code = await self._call.code()
        details = with_tls_advice(await self._call.details() or "", is_secure=self._is_secure)
        text = f"{code.name}: {details}" if details else code.name
        return SessionEnded(_END_KINDS.get(code, EndKind.LOST), text)


class GrpcSessionDialer:
    """Dials one shard; a fresh channel each time, so that credentials are read again."""

    def __init__(self, shard_address: str, tls: TlsFiles | None = None) -> None:
        """Dial in plain text without `tls`."""
        self._shard_address = shard_address
        self._tls = tls

    @asynccontextmanager
    async def dial(self) -> AsyncIterator[GrpcSessionStream]:
        """Open the stream; it and its channel close with the context."""
        async with self._channel() as channel:
            session = channel.stream_stream(
                _SESSION_METHOD,
                request_serializer=_serialize,
                response_deserializer=shard_pb2.ShardMessage.FromString,
            )
            call = session(None)
            try:
                yield GrpcSessionStream(call, is_secure=self._tls is not None)
            finally:
                call.cancel()

    def _channel(self) -> aio.Channel:
        if self._tls is None:
            return aio.insecure_channel(self._shard_address, options=_CHANNEL_OPTIONS)
        credentials = channel_credentials(self._tls.current(), self._tls.authority)
        return aio.secure_channel(self._shard_address, credentials, options=_CHANNEL_OPTIONS)


def _serialize(message: shard_pb2.OperatorMessage) -> bytes:
    return message.SerializeToString(deterministic=True)
