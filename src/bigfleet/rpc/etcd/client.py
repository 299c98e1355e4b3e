"""Calls etcd v3 over gRPC: ranges, transactions, one lease, one watched key.

docs/spec/coordinator.md §3. It tries several endpoints in turn, first the one that answered last. A read is tried at
each of them; a transaction at one only, because only the caller knows what a lost answer means. This module does not
know the coordinator's tables.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import grpc
from grpc import aio

from bigfleet.rpc.grpc_server import MESSAGE_BYTES_MAX
from bigfleet.rpc.security.tls import KeyPair, TlsFiles, channel_credentials
from bigfleet.rpc.wire.gen import etcd_pb2, etcd_pb2_grpc

#: How long one endpoint may take to answer.
CALL_SECONDS = 2.0
#: Of the server's: a transaction with more operations is refused (`--max-txn-ops`).
TXN_OPERATIONS_MAX = 128

_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.enable_retries", 0),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.use_local_subchannel_pool", 1),
)
#: A member that has lost its leader ends the stream, in place of keeping it open and silent.
_NEEDS_LEADER = (("hasleader", "true"),)

T = TypeVar("T")


class EtcdUnavailable(Exception):
    """No endpoint answered; the message is the error of the last one."""


class NoAnswer(Exception):
    """A transaction was sent and not answered: it may have happened, or may yet."""


@dataclass(frozen=True, slots=True)
class Range:
    """What a range held, at which revision."""

    revision: int
    #: Keys ascending.
    items: tuple[etcd_pb2.KeyValue, ...]


@dataclass(slots=True, eq=False)
class _Dialled:
    """One channel for each endpoint, all with one certificate."""

    #: None is plain text.
    pair: KeyPair | None
    channels: tuple[aio.Channel, ...]
    #: Calls and watches that use one of the channels now.
    calls: int = 0

    async def close(self) -> None:
        for channel in self.channels:
            await channel.close(None)


class EtcdClient:
    """One client of one cluster; made on a running event loop.

    A channel presents the certificate that it was made with, so a new certificate gets new channels. Calls and watches
    that are under way end on the old ones.
    """

    def __init__(self, endpoints: Sequence[str], tls: TlsFiles | None = None) -> None:
        """Dial each endpoint lazily, in plain text without `tls`. There is at least one endpoint, as host:port."""
        self._endpoints = tuple(endpoints)
        self._tls = tls
        self._dialled = self._dial()
        #: Those of former certificates, until their last calls have ended.
        self._leaving: list[_Dialled] = []
        self._current = 0

    async def close(self) -> None:
        """Close the channels."""
        for dialled in (*self._leaving, self._dialled):
            await dialled.close()

    async def range(self, start: bytes, end: bytes = b"", *, revision: int = 0) -> Range:
        """Return one key, or all from `start` up to `end`; linearizable. Raises EtcdUnavailable."""
        request = etcd_pb2.RangeRequest(key=start, range_end=end, revision=revision)

        async def ask(channel: aio.Channel) -> etcd_pb2.RangeResponse:
            return await etcd_pb2_grpc.KVStub(channel).Range(request, timeout=CALL_SECONDS)

        answer = await self._at_any(ask)
        return Range(answer.header.revision, tuple(answer.kvs))

    async def txn(
        self,
        compare: Iterable[etcd_pb2.Compare],
        success: Iterable[etcd_pb2.RequestOp],
        failure: Iterable[etcd_pb2.RequestOp] = (),
    ) -> etcd_pb2.TxnResponse:
        """Run one transaction. Raises NoAnswer, and EtcdUnavailable when the server refused it."""
        request = etcd_pb2.TxnRequest(compare=compare, success=success, failure=failure)
        async with self._channel() as channel:
            try:
                return await etcd_pb2_grpc.KVStub(channel).Txn(request, timeout=CALL_SECONDS)
            except aio.AioRpcError as error:
                text = self._error_text(error)
                self._turn()
                if error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED):
                    raise EtcdUnavailable(text) from error
                raise NoAnswer(text) from error

    async def grant(self, ttl_seconds: int) -> int:
        """Return the id of a new lease. Raises EtcdUnavailable."""
        request = etcd_pb2.LeaseGrantRequest(TTL=ttl_seconds)

        async def ask(channel: aio.Channel) -> etcd_pb2.LeaseGrantResponse:
            return await etcd_pb2_grpc.LeaseStub(channel).LeaseGrant(request, timeout=CALL_SECONDS)

        return (await self._at_any(ask)).ID

    async def revoke(self, lease: int) -> None:
        """End a lease, and with it the keys that hang on it. Raises EtcdUnavailable."""
        request = etcd_pb2.LeaseRevokeRequest(ID=lease)

        async def ask(channel: aio.Channel) -> etcd_pb2.LeaseRevokeResponse:
            return await etcd_pb2_grpc.LeaseStub(channel).LeaseRevoke(request, timeout=CALL_SECONDS)

        await self._at_any(ask)

    async def keep_alive(self, lease: int) -> bool:
        """Renew a lease; False when there is none any more. Raises EtcdUnavailable."""

        async def ask(channel: aio.Channel) -> bool:
            call = etcd_pb2_grpc.LeaseStub(channel).LeaseKeepAlive(None, timeout=CALL_SECONDS, metadata=_NEEDS_LEADER)
            try:
                await call.write(etcd_pb2.LeaseKeepAliveRequest(ID=lease))
                answer = await call.read()
                return isinstance(answer, etcd_pb2.LeaseKeepAliveResponse) and answer.TTL > 0
            finally:
                call.cancel()

        return await self._at_any(ask)

    async def wait_until_changed(self, key: bytes, revision: int) -> None:
        """Return when the key changes after a revision, or when the watch ends, for whatever reason: then look again.

        Raises EtcdUnavailable when no watch can be begun.
        """
        created = etcd_pb2.WatchCreateRequest(key=key, start_revision=revision + 1)
        async with self._channel() as channel:
            call = etcd_pb2_grpc.WatchStub(channel).Watch(None, metadata=_NEEDS_LEADER)
            try:
                await call.write(etcd_pb2.WatchRequest(create_request=created))
                while True:
                    answer = await call.read()
                    if not isinstance(answer, etcd_pb2.WatchResponse) or answer.canceled or answer.events:
                        return
            except aio.AioRpcError as error:
                text = self._error_text(error)
                self._turn()
                raise EtcdUnavailable(text) from error
            finally:
                call.cancel()

    # ---- endpoints ----------------------------------------------------------------------------------------------

    async def _at_any(self, ask: Callable[[aio.Channel], Awaitable[T]]) -> T:
        text = ""
        for _ in self._endpoints:
            try:
                async with self._channel() as channel:
                    return await ask(channel)
            except aio.AioRpcError as error:
                text = self._error_text(error)
                self._turn()
        raise EtcdUnavailable(text)

    @asynccontextmanager
    async def _channel(self) -> AsyncIterator[aio.Channel]:
        """Lend the channel of the current endpoint, one with the certificate that is in force now."""
        if self._tls is not None and self._tls.current() is not self._dialled.pair:
            await self._renew()
        lent = self._dialled
        lent.calls += 1
        try:
            yield lent.channels[self._current]
        finally:
            lent.calls -= 1
            if not lent.calls and lent in self._leaving:
                self._leaving.remove(lent)
                await lent.close()

    async def _renew(self) -> None:
        """Dial again; the old channels stay while calls use them: closing one cancels its calls."""
        old, self._dialled = self._dialled, self._dial()
        if old.calls:
            self._leaving.append(old)
        else:
            await old.close()

    def _dial(self) -> _Dialled:
        if self._tls is None:
            plain = (aio.insecure_channel(endpoint, options=_CHANNEL_OPTIONS) for endpoint in self._endpoints)
            return _Dialled(None, tuple(plain))
        pair = self._tls.current()
        credentials = channel_credentials(pair, self._tls.authority)
        secure = (aio.secure_channel(endpoint, credentials, options=_CHANNEL_OPTIONS) for endpoint in self._endpoints)
        return _Dialled(pair, tuple(secure))

    def _turn(self) -> None:
        self._current = (self._current + 1) % len(self._endpoints)

    def _error_text(self, error: aio.AioRpcError) -> str:
        details = error.details() or "no details"
        # A server with TLS closes a plain-text connection like this.
        hint = "; it may ask for TLS" if self._tls is None and details.endswith("Socket closed") else ""
        return f"etcd at {self._endpoints[self._current]}: {error.code().name}: {details}{hint}"


def key_is_absent(key: bytes) -> etcd_pb2.Compare:
    """Return the condition that there is no such key."""
    return modified_at(key, 0)


def modified_at(key: bytes, revision: int) -> etcd_pb2.Compare:
    """Return the condition that a key was last written at a revision; 0 for a key that is not there."""
    return etcd_pb2.Compare(result=etcd_pb2.Compare.EQUAL, target=etcd_pb2.Compare.MOD, key=key, mod_revision=revision)


def created_at(key: bytes, revision: int) -> etcd_pb2.Compare:
    """Return the condition that a key exists since a revision."""
    return etcd_pb2.Compare(
        result=etcd_pb2.Compare.EQUAL, target=etcd_pb2.Compare.CREATE, key=key, create_revision=revision
    )


def put(key: bytes, value: bytes, lease: int = 0) -> etcd_pb2.RequestOp:
    """Return the operation that writes a key."""
    return etcd_pb2.RequestOp(request_put=etcd_pb2.PutRequest(key=key, value=value, lease=lease))


def delete(key: bytes) -> etcd_pb2.RequestOp:
    """Return the operation that deletes a key."""
    return etcd_pb2.RequestOp(request_delete_range=etcd_pb2.DeleteRangeRequest(key=key))


def read(key: bytes) -> etcd_pb2.RequestOp:
    """Return the operation that reads a key."""
    return etcd_pb2.RequestOp(request_range=etcd_pb2.RangeRequest(key=key))


def end_of_prefix(prefix: bytes) -> bytes:
    """Return the end of the range of all keys that begin with a prefix that is not empty; its last byte is not 255."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
