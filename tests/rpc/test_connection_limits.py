"""Idle connections do not keep honest peers out (docs/spec/wire.md §2)."""

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from bigfleet.rpc import connection_limits
from bigfleet.rpc.connection_limits import ConnectionsInUse, TooManyConnections, connection_options, connections_allowed
from bigfleet.rpc.grpc_server import GrpcServer
from tests.patience import PATIENCE_SECONDS, wait_until_async
from tests.rpc.security.tls_world import READONLY, SHARD, Certificates, secure_channel

OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
Code = grpc.StatusCode


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[int]:
    """Serve health alone; return the port."""
    server = GrpcServer(services=(), register=lambda _server: None, **settings)
    port = await server.start("127.0.0.1", 0)
    try:
        yield port
    finally:
        await server.stop(0)


async def status_of(channel: aio.Channel) -> grpc.StatusCode:
    """Ask for health, and return how that ended."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    try:
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_SECONDS)
    except aio.AioRpcError as error:
        return error.code()
    return Code.OK


async def watch(channel: aio.Channel) -> tuple[Any, Any]:
    """Begin a call that does not end; return it and what came first: an answer, or the status."""
    call: Any = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return call, await call.read()
    except aio.AioRpcError as error:
        return call, error.code()


async def test_idle_connections_are_closed_and_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three peers that call once and then nothing fill a server for three; a fourth gets in once they are closed."""
    monkeypatch.setattr(connection_limits, "IDLE_SECONDS", 1.0)
    async with serving(connections_max=3) as port, AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(aio.insecure_channel(f"127.0.0.1:{port}", options=OWN_CONNECTION))
            for _ in range(4)
        ]
        *crowd, honest = channels
        assert [await status_of(channel) for channel in crowd] == [Code.OK] * 3
        assert await status_of(honest) is Code.UNAVAILABLE

        async def is_served() -> bool:
            return await status_of(honest) is Code.OK

        await wait_until_async(is_served, poll_seconds=0.1)


async def test_a_connection_with_a_call_is_not_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An open stream is a call, whether or not anything is sent."""
    monkeypatch.setattr(connection_limits, "IDLE_SECONDS", 0.2)
    async with serving() as port, aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call, _ = await watch(channel)
        await asyncio.sleep(1.0)
        assert not call.done()
        call.cancel()


async def test_one_identity_uses_a_bounded_number_of_connections(tmp_path: Path) -> None:
    """Further ones are refused, other identities are not, and an ended call makes room."""
    certificates = Certificates.make(tmp_path)
    crowd, honest = certificates.files(READONLY), certificates.files(SHARD)
    connections = ConnectionsInUse(2)
    async with serving(tls=honest, connections=connections) as port, AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(secure_channel(port, crowd)) for _ in range(3)]
        first, second, third = [await watch(channel) for channel in channels]
        assert third[1] is Code.RESOURCE_EXHAUSTED
        assert second[1] is not Code.RESOURCE_EXHAUSTED
        other = await stack.enter_async_context(secure_channel(port, honest))
        assert await status_of(other) is Code.OK
        first[0].cancel()

        async def is_served() -> bool:
            return await status_of(channels[2]) is Code.OK

        await wait_until_async(is_served, poll_seconds=0.01)
        second[0].cancel()


def test_calls_on_one_connection_take_one_place() -> None:
    """The last of them frees it."""
    connections = ConnectionsInUse(1)
    for _ in range(3):
        connections.begin("a", "peer1")
    with pytest.raises(TooManyConnections):
        connections.begin("a", "peer2")
    connections.begin("b", "peer2")
    assert len(connections) == 2
    for _ in range(3):
        connections.end("a", "peer1")
    connections.begin("a", "peer2")
    connections.end("a", "peer2")
    connections.end("b", "peer2")
    assert len(connections) == 0


def test_fewer_descriptors_mean_fewer_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """The soft limit is raised to what is needed, or to the hard limit with a warning."""
    limits = [(1_024, 4_096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _which: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _which, limit: limits.append(limit))
    with capture_logs() as logs:
        assert connections_allowed(1_000) == 1_000
    assert (limits[-1], logs) == ((1_128, 4_096), [])
    with capture_logs() as logs:
        assert connections_allowed(10_000) == 4_096 - 128
    assert limits[-1] == (4_096, 4_096)
    assert [line["event"] for line in logs] == ["rpc.connections_limited"]


def test_providers_keep_idle_connections() -> None:
    """Their shard calls over one, and not while nothing changes."""
    assert "grpc.max_connection_idle_ms" not in dict(connection_options(1, close_idle=False))
    assert dict(connection_options(1, close_idle=True))["grpc.max_connection_idle_ms"] == 60_000


async def silent(port: int) -> None:
    """Connect and send nothing, until the server closes the connection; come back a second later."""
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                while await reader.read(1_024):
                    pass
            finally:
                writer.close()
        await asyncio.sleep(1.0)


async def test_an_identity_gets_in_while_peers_without_one_fill_the_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixty silent peers come again and again where twenty have room: a stream stays, and a newcomer gets in."""
    monkeypatch.setattr(connection_limits, "HANDSHAKE_SECONDS", 1.0)
    certificates = Certificates.make(tmp_path)
    ours, theirs = certificates.files(SHARD), certificates.files(READONLY)
    async with serving(tls=ours, connections_max=20) as port, secure_channel(port, theirs) as standing:
        call, first = await watch(standing)
        assert not isinstance(first, Code), first
        crowd = [asyncio.create_task(silent(port)) for _ in range(60)]
        try:

            async def newcomer() -> grpc.StatusCode:
                # A channel of its own each time, as operators dial: one channel waits up to two minutes between tries.
                async with secure_channel(port, ours) as channel:
                    return await status_of(channel)

            async def is_full() -> bool:
                return await newcomer() is Code.UNAVAILABLE

            async def is_served() -> bool:
                return await newcomer() is Code.OK

            await wait_until_async(is_full)
            await wait_until_async(is_served, poll_seconds=0.1)
            assert not call.done()
        finally:
            for peer in crowd:
                peer.cancel()
            await asyncio.gather(*crowd, return_exceptions=True)
        assert not call.done()
        call.cancel()
