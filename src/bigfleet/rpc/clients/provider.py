"""Calls a capacity provider over gRPC: the six methods of `bigfleet.shard.ports.Provider`.

docs/spec/wire.md §2, §4 and §6, docs/spec/shard.md §9.6. What a status means to the shard is said here and nowhere
else, distinguished by code and never by text. This module must not retry: a repeated attempt needs a fresh token, which
only the caller has.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

import grpc
from google.protobuf.message import DecodeError, Message
from grpc import aio
from grpc_health.v1 import health_pb2

from bigfleet.model.clock import Clock
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.rpc.security.tls import TlsFiles, channel_credentials
from bigfleet.rpc.security.tls_mismatch import with_tls_advice
from bigfleet.rpc.wire.convert_machine import machine_from_wire
from bigfleet.rpc.wire.gen import provider_pb2
from bigfleet.rpc.wire.list_response import read_listing, unreadable
from bigfleet.rpc.wire.trailers import NOT_READY_TRAILER
from bigfleet.shard.ports import FenceToken, ListedMachine, Listing, ProviderRefusal, RefusalKind, TransitionAck

#: 500,000 records of 600 B are 300 MB.
RECEIVE_BYTES_MAX = 1024 * 1024 * 1024
#: Bytes retained of a provider's text; it reaches logs and the history of actions.
_DETAILS_CHARACTERS_MAX = 1024
#: How often the certificate's files are looked at, when there are calls.
_LOOK_SECONDS = 1.0

#: Of one HTTP/2 frame that is accepted. With gRPC's 16 KiB a List of 175 MB comes in 11,000 frames, which takes 2 s of
#: processor time; with this it takes 0.5 s.
_FRAME_BYTES_MAX = 4 * 1024 * 1024

_SERVICE = provider_pb2.DESCRIPTOR.services_by_name["CapacityProvider"].full_name
_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", RECEIVE_BYTES_MAX),
    # The provider says what is too large for it; -1 is no limit on this side.
    ("grpc.max_send_message_length", -1),
    ("grpc.http2.max_frame_size", _FRAME_BYTES_MAX),
    ("grpc.enable_retries", 0),
    # A service config from DNS could switch retries on, or change deadlines.
    ("grpc.service_config_disable_resolution", 1),
    # A provider that was restarted is called again at once, not after the two minutes of gRPC's own back-off.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Not a wait: how long one attempt to connect may take.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # Channels of one process to one address would share their back-off.
    ("grpc.use_local_subchannel_pool", 1),
)

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderDeadlines:
    """How long a call may take before its outcome counts as unknown."""

    #: Lifecycle calls and Get.
    call_seconds: float = 30.0
    list_seconds: float = 120.0


def _ignore_call(_method: str, _code: str, _seconds: float) -> None: ...


class GrpcProvider:
    """One provider, over one channel that reconnects by itself. Made on a running event loop.

    A channel presents the certificate that it was made with, so a new certificate gets a new channel; calls that are
    under way end on the old one.

    Each method raises ProviderRefusal when it is not answered with success. A task that is cancelled meanwhile gets its
    CancelledError; the call may have been applied then.
    """

    def __init__(
        self,
        address: str,
        *,
        deadlines: ProviderDeadlines | None = None,
        clock: Clock,
        on_call: Callable[[str, str, float], None] = _ignore_call,
        tls: TlsFiles | None = None,
    ) -> None:
        """Dial lazily, in plain text without `tls`.

        `on_call` is called with (method, status code, seconds) of each finished call, such as `Create`, `OK`.
        """
        self._deadlines = deadlines or ProviderDeadlines()
        self._clock = clock
        self._on_call = on_call
        self._address = address
        self._tls = tls
        self._pair = tls.current() if tls is not None else None
        self._look_again_at_seconds = 0.0
        self._channel = self._dial()
        self._methods = _methods(self._channel)
        #: Channels that a new certificate has replaced, until their last calls have ended.
        self._leaving: dict[aio.Channel, asyncio.Task[None]] = {}

    async def close(self) -> None:
        """Close the channel; calls that are under way end with an unknown outcome."""
        leaving = dict(self._leaving)
        for task in leaving.values():
            task.cancel()
        for channel in (*leaving, self._channel):
            await channel.close(grace=None)

    def _dial(self) -> aio.Channel:
        if self._tls is None or self._pair is None:
            return aio.insecure_channel(self._address, options=_CHANNEL_OPTIONS)
        credentials = channel_credentials(self._pair, self._tls.authority)
        return aio.secure_channel(self._address, credentials, options=_CHANNEL_OPTIONS)

    def _renew(self, tls: TlsFiles) -> None:
        """Change to a new channel when the certificate has changed."""
        now_seconds = self._clock.monotonic_seconds()
        if now_seconds < self._look_again_at_seconds:
            return
        self._look_again_at_seconds = now_seconds + _LOOK_SECONDS
        pair = tls.current()
        if pair is self._pair:
            return
        old, self._pair = self._channel, pair
        self._channel = self._dial()
        self._methods = _methods(self._channel)
        self._leaving[old] = asyncio.create_task(self._leave(old))

    async def _leave(self, channel: aio.Channel) -> None:
        """Close a channel that gets no more calls when the last one's deadline is over."""
        await self._clock.sleep(max(self._deadlines.call_seconds, self._deadlines.list_seconds))
        await channel.close(grace=None)
        del self._leaving[channel]

    async def create(self, machine_id: MachineId, token: FenceToken) -> TransitionAck:
        """Give a slot a host."""
        return await self._mutate(
            "Create",
            provider_pb2.CreateRequest(
                machine_id=machine_id,
                shard_id=token.shard_id,
                shard_epoch=token.epoch,
                sequence_number=token.sequence,
            ),
        )

    async def configure(
        self,
        machine_id: MachineId,
        cluster: ClusterId,
        blob: bytes,
        metadata: Mapping[str, str],
        token: FenceToken,
    ) -> TransitionAck:
        """Bind an idle machine to a cluster; `metadata` replaces what is stored."""
        return await self._mutate(
            "Configure",
            provider_pb2.ConfigureRequest(
                machine_id=machine_id,
                cluster_id=cluster,
                bootstrap_blob=blob,
                shard_id=token.shard_id,
                shard_epoch=token.epoch,
                sequence_number=token.sequence,
                shard_metadata=metadata,
            ),
        )

    async def drain(self, machine_id: MachineId, grace_seconds: int, token: FenceToken) -> TransitionAck:
        """Take a machine back from its cluster; a grace of 0 is at once."""
        return await self._mutate(
            "Drain",
            provider_pb2.DrainRequest(
                machine_id=machine_id,
                grace_period_seconds=grace_seconds,
                shard_id=token.shard_id,
                shard_epoch=token.epoch,
                sequence_number=token.sequence,
            ),
        )

    async def delete(self, machine_id: MachineId, token: FenceToken) -> TransitionAck:
        """Give the host back."""
        return await self._mutate(
            "Delete",
            provider_pb2.DeleteRequest(
                machine_id=machine_id,
                shard_id=token.shard_id,
                shard_epoch=token.epoch,
                sequence_number=token.sequence,
            ),
        )

    async def get(self, machine_id: MachineId) -> ListedMachine:
        """Return the record of one machine."""
        request = provider_pb2.MachineRef(id=machine_id)
        message = await self._call("Get", request, provider_pb2.Machine, self._deadlines.call_seconds)
        return ListedMachine(*machine_from_wire(message))

    async def list(self, since_revision: bytes) -> Listing:
        """Return every record, or what changed since the cursor when there is one; no filter and no cap."""
        request = provider_pb2.ListFilter(since_revision=since_revision)
        content = await self._content("List", request, self._deadlines.list_seconds)
        return await read_listing(content, self._clock)

    async def accepts_calls(self) -> bool:
        """Ask the provider's health service; a provider without one is taken for ready."""
        check = self._channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            answer = await check(health_pb2.HealthCheckRequest(), timeout=self._deadlines.call_seconds)
        except aio.AioRpcError as error:
            return error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        except aio.UsageError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def _mutate(self, method: str, request: Message) -> TransitionAck:
        ack = await self._call(method, request, provider_pb2.TransitionAck, self._deadlines.call_seconds)
        return TransitionAck(operation_id=ack.operation_id, record=ListedMachine(*machine_from_wire(ack.machine)))

    async def _call(self, method: str, request: Message, answer: type[M], deadline_seconds: float) -> M:
        return _parsed(answer, await self._content(method, request, deadline_seconds))

    async def _content(self, method: str, request: Message, deadline_seconds: float) -> bytes:
        if self._tls is not None:
            self._renew(self._tls)
        started_seconds = self._clock.monotonic_seconds()
        code = grpc.StatusCode.CANCELLED
        try:
            content: bytes = await self._methods[method](request.SerializeToString(), timeout=deadline_seconds)
            code = grpc.StatusCode.OK
        except aio.AioRpcError as error:
            code = error.code()
            details = with_tls_advice(error.details() or "", is_secure=self._tls is not None)[:_DETAILS_CHARACTERS_MAX]
            kind = RefusalKind.of_status(code.name)
            trailers = cast(Iterable[tuple[str, object]], error.trailing_metadata() or ())
            if NOT_READY_TRAILER in tuple(trailers):
                kind = RefusalKind.NOT_READY
            raise ProviderRefusal(kind, f"{code.name}: {details}" if details else code.name) from error
        except aio.UsageError as error:
            raise ProviderRefusal(RefusalKind.UNKNOWN_OUTCOME, "the connection to the provider is closed") from error
        except asyncio.CancelledError as error:
            if _is_task_cancelled():
                raise
            # `close` ended the call under a task that was not cancelled.
            raise ProviderRefusal(RefusalKind.UNKNOWN_OUTCOME, "the connection to the provider was closed") from error
        finally:
            self._on_call(method, code.name, self._clock.monotonic_seconds() - started_seconds)
        return content


def _methods(channel: aio.Channel) -> dict[str, "aio.UnaryUnaryMultiCallable[bytes, bytes]"]:
    return {
        # Bytes in and out: gRPC would log what it cannot parse and return None for it.
        method: channel.unary_unary(f"/{_SERVICE}/{method}", None, None)
        for method in ("Create", "Configure", "Drain", "Delete", "Get", "List")
    }


def _parsed(answer: type[M], content: bytes) -> M:
    try:
        return answer.FromString(content)
    except DecodeError as error:
        raise unreadable(answer.DESCRIPTOR.name) from error


def _is_task_cancelled() -> bool:
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
