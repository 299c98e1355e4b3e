"""Many handshakes at a time do not end a server, and a new certificate is handed to gRPC once."""

import asyncio
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from bigfleet.rpc.security.tls import FILE_BYTES_MAX, TlsFault, TlsFiles, server_credentials
from tests.patience import PATIENCE_SECONDS
from tests.rpc.security.tls_world import SHARD, Certificates, secure_channel
from tests.rpc.test_connection_limits import Code, status_of

#: Serves health with TLS until its input ends; a handshake may take half a second.
SERVER = """
import asyncio, pathlib, sys
from bigfleet.rpc import connection_limits
from bigfleet.rpc.security.tls import TlsFiles, TlsPaths
from tests.rpc.test_connection_limits import serving

connection_limits.HANDSHAKE_SECONDS = 0.5


async def serve():
    certificate, key, authority = map(pathlib.Path, sys.argv[1:])
    async with serving(tls=TlsFiles(TlsPaths(certificate=certificate, key=key, authority=authority))) as port:
        print(port, flush=True)
        await asyncio.to_thread(sys.stdin.read)


asyncio.run(serve())
"""
SILENT, ROUNDS = 80, 12


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What gRPC is given to ask for a new certificate."""
    found: list[Any] = []

    def note(_first: object, ask: Any, **_settings: object) -> object:
        found.append(ask)
        return object()

    monkeypatch.setattr(grpc, "dynamic_ssl_server_credentials", note)
    return found


def test_an_unchanged_certificate_is_not_handed_over_again(tmp_path: Path, asked: list[Any]) -> None:
    """gRPC replaces what handshakes on other threads use when it gets an answer: one for each new certificate."""
    certificates = Certificates.make(tmp_path)
    server_credentials(certificates.files(SHARD))
    (ask,) = asked
    assert [ask() for _ in range(3)] == [None] * 3
    certificates.write(SHARD.name, certificates.issue(SHARD))
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _number: ask(), range(200)))
    assert len([answer for answer in answers if answer is not None]) == 1
    assert ask() is None


async def stay_silent(port: int) -> None:
    """Connect, send nothing, and come back each time that the server has closed the connection."""
    for _ in range(ROUNDS):
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            while await reader.read(1_024):
                pass
            writer.close()


@pytest.mark.slow
async def test_a_server_outlives_handshakes_that_never_end(tmp_path: Path) -> None:
    """Eighty peers without a certificate connect at a time, again and again; an identity is served afterwards."""
    certificates = Certificates.make(tmp_path)
    paths = certificates.write(SHARD.name, certificates.issue(SHARD))
    files = (paths.certificate, paths.key, paths.authority)
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SERVER, *map(str, files)), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            port = int(await server.stdout.readline())
            await asyncio.gather(*(stay_silent(port) for _ in range(SILENT)))
        assert server.returncode is None, "the server has ended"
        async with secure_channel(port, certificates.files(SHARD)) as channel:
            assert await status_of(channel) is Code.OK
        server.stdin.close()
        assert await server.wait() == 0
    finally:
        if server.returncode is None:
            server.kill()
            await server.wait()


@pytest.mark.parametrize("which", ["certificate", "key", "authority"])
@pytest.mark.timeout(60)
def test_a_pipe_in_place_of_a_file_holds_nothing_up(which: str, tmp_path: Path) -> None:
    """Neither at the start nor later, when the last good pair stays in force; the same for a device and a huge file."""
    certificates = Certificates.make(tmp_path)
    paths = certificates.write("s", certificates.issue(SHARD))
    files = TlsFiles(paths)
    pair = files.current()
    path: Path = getattr(paths, which)
    path.unlink()
    os.mkfifo(path)
    assert files.current() == pair
    with pytest.raises(TlsFault, match="is not a file"):
        TlsFiles(paths)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(TlsFault, match="is not a file"):
        TlsFiles(paths)
    path.unlink()
    path.write_bytes(bytes(FILE_BYTES_MAX + 1))
    with pytest.raises(TlsFault, match="has more than"):
        TlsFiles(paths)
