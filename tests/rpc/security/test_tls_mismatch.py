"""A connection of which one side uses TLS and the other does not says so, in every client, with the flags to set."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc import aio

from bigfleet.cli.runtime.system import SystemClock
from bigfleet.link.client import NotAnswered
from bigfleet.model.ids import ShardId
from bigfleet.model.shard_report import ShardReport
from bigfleet.operator.ports import SessionEnded
from bigfleet.rpc.clients.coordinator import CoordinatorCaller, CoordinatorFault
from bigfleet.rpc.clients.provider import GrpcProvider
from bigfleet.rpc.clients.session import GrpcSessionDialer
from bigfleet.rpc.clients.shard_reports import GrpcCoordinator
from bigfleet.rpc.clients.shardread import ShardReader, UnreachableShard
from bigfleet.rpc.security.tls import TlsFiles, TlsPaths, server_credentials
from bigfleet.rpc.security.tls_mismatch import tls_advice
from bigfleet.rpc.wire.gen import coordinator_pb2
from bigfleet.shard.ports import ProviderRefusal
from tests.commands import run_here

PLAIN_SERVER = "the server likely serves plain text: set --tls-cert, --tls-key and --tls-ca there, or leave them out"
SECURE_SERVER = "the server likely serves TLS: set --tls-cert, --tls-key and --tls-ca here"
OTHER_AUTHORITY = "another authority than that of --tls-ca signed the server's certificate"
REJECTED = "the server likely rejects this certificate: the --tls-ca there must have signed --tls-cert"
REPORT = ShardReport(shard_id=ShardId("s1"), epoch=1, cycle=1)


async def provider_text(address: str, tls: TlsFiles | None) -> str:
    provider = GrpcProvider(address, clock=SystemClock(), tls=tls)
    try:
        with pytest.raises(ProviderRefusal) as found:
            await provider.list(b"")
    finally:
        await provider.close()
    return str(found.value)


async def session_text(address: str, tls: TlsFiles | None) -> str:
    async with GrpcSessionDialer(address, tls).dial() as stream:
        with pytest.raises(SessionEnded) as found:
            await stream.receive()
    return str(found.value)


async def report_text(address: str, tls: TlsFiles | None) -> str:
    with pytest.raises(NotAnswered) as found:
        await GrpcCoordinator(tls=tls).report(address, REPORT)
    return str(found.value)


async def admin_text(address: str, tls: TlsFiles | None) -> str:
    caller = CoordinatorCaller(address, tls=tls)
    request = coordinator_pb2.ListShardsRequest()
    with pytest.raises(CoordinatorFault) as found:
        await asyncio.to_thread(caller.call, "ListShards", request, coordinator_pb2.ListShardsResponse)
    return str(found.value)


async def reader_text(address: str, tls: TlsFiles | None) -> str:
    with ShardReader(address, tls=tls) as reader, pytest.raises(UnreachableShard) as found:
        await asyncio.to_thread(reader.connect)
    return str(found.value)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return made(tmp_path_factory.mktemp("certs"))


def made(folder: Path, authority: Path | None = None) -> TlsFiles:
    """Return files of a new authority, with another one's authority if it is given."""
    assert run_here("certs", "dev", str(folder)).returncode == 0
    name = "shard-shard-0"
    return TlsFiles(
        TlsPaths(
            certificate=folder / f"{name}.crt", key=folder / f"{name}.key", authority=(authority or folder) / "ca.crt"
        )
    )


@asynccontextmanager
async def listening(tls: TlsFiles | None) -> AsyncIterator[str]:
    server = aio.server()
    credentials = None if tls is None else server_credentials(tls)
    host = "127.0.0.1:0"
    port = server.add_insecure_port(host) if credentials is None else server.add_secure_port(host, credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@pytest.mark.parametrize("text_of", [provider_text, session_text, report_text, admin_text, reader_text])
async def test_a_client_says_which_side_uses_tls(
    files: TlsFiles, text_of: Callable[[str, TlsFiles | None], Awaitable[str]]
) -> None:
    async with listening(None) as address:
        assert PLAIN_SERVER in await text_of(address, files)
    async with listening(files) as address:
        assert SECURE_SERVER in await text_of(address, None)


async def test_a_certificate_that_does_not_fit_is_named(files: TlsFiles, tmp_path: Path) -> None:
    other = made(tmp_path / "other")
    async with listening(files) as address:
        assert OTHER_AUTHORITY in await session_text(address, other)
    mixed = made(tmp_path / "mixed", authority=files._paths.authority.parent)
    async with listening(files) as address:
        assert REJECTED in await session_text(address, mixed)


@pytest.mark.parametrize("is_secure", [False, True])
async def test_other_failures_get_no_advice(is_secure: bool) -> None:
    """A server that is down, and a stream that breaks."""
    async with aio.insecure_channel("127.0.0.1:1") as channel:
        with pytest.raises(aio.AioRpcError) as found:
            await channel.unary_unary("/x/Y", None, None)(b"")
    assert found.value.code() is grpc.StatusCode.UNAVAILABLE
    for details in (found.value.details() or "", "Socket closed", "the shard is shutting down", ""):
        assert tls_advice(details, is_secure=is_secure) == ""
