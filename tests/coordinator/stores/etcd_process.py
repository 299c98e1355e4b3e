"""Real etcd members on loopback: started, killed, stopped and cut off by tests."""

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from bigfleet.rpc.etcd.client import EtcdClient, EtcdUnavailable
from bigfleet.rpc.security.tls import TlsFiles, TlsPaths
from tests.patience import PATIENCE_SECONDS
from tests.processes import free_port

MISSING = (
    "NO etcd ON THIS MACHINE: the coordinator's store is NOT PROVEN. Install Debian's etcd-server, or put etcd 3.4 or"
    " newer on the PATH."
)


def etcd_program() -> str | None:
    """Return etcd's path: the one on PATH, else Debian's after an attempt to install it, else None."""
    found = shutil.which("etcd")
    if found is None and shutil.which("apt-get") is not None and os.geteuid() == 0:
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["apt-get", "update", "-q"], ["apt-get", "install", "-q", "-y", "etcd-server"]):
            subprocess.run(command, env=environment, capture_output=True, check=False, timeout=300)
        found = shutil.which("etcd")
    return found


async def until(condition: Callable[[], bool]) -> None:
    """Return once a condition holds; a timeout around it is the caller's."""
    while True:
        if condition():
            return
        await asyncio.sleep(0.01)


class Member:
    """One etcd process with its data directory."""

    def __init__(
        self, program: str, directory: Path, name: str, client_port: int, peer_port: int, tls: TlsPaths | None
    ) -> None:
        self._tls = tls
        self.name = name
        self.client_port = client_port
        self.peer_port = peer_port
        self._program = program
        self._directory = directory / name
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.client_port}"

    def start(self, members: Sequence["Member"]) -> None:
        scheme = "http" if self._tls is None else "https"
        client, peer = f"{scheme}://{self.endpoint}", f"http://127.0.0.1:{self.peer_port}"
        cluster = ",".join(f"{each.name}=http://127.0.0.1:{each.peer_port}" for each in members)
        command = [self._program, "--name", self.name, "--data-dir", str(self._directory)]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        command += ["--initial-cluster", cluster, "--logger", "zap", "--log-level", "error"]
        command += ["--heartbeat-interval", "100", "--election-timeout", "1000"]
        if self._tls is not None:
            # Whoever shows no certificate of this authority is not served.
            command += ["--cert-file", str(self._tls.certificate), "--key-file", str(self._tls.key)]
            command += ["--client-cert-auth", "--trusted-ca-file", str(self._tls.authority)]
        environment = {**os.environ, "ETCD_UNSUPPORTED_ARCH": "arm64"}
        self._process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def wipe(self) -> None:
        """Kill the process and delete what it stored."""
        self.kill()
        shutil.rmtree(self._directory)

    def stop(self) -> None:
        """Freeze the process: it keeps its connections and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    @property
    def is_running(self) -> bool:
        return self._process is not None


class Cluster:
    """Members that know each other."""

    def __init__(self, program: str, directory: Path, number: int, tls: TlsPaths | None = None) -> None:
        """With `tls` members show that certificate, and serve who has one of the same authority."""
        ports = [free_port() for _ in range(2 * number)]
        self.members = [
            Member(program, directory, f"m{index}", ports[2 * index], ports[2 * index + 1], tls)
            for index in range(number)
        ]

    @property
    def endpoints(self) -> list[str]:
        return [member.endpoint for member in self.members]

    def start(self) -> None:
        for member in self.members:
            if not member.is_running:
                member.start(self.members)

    def kill(self) -> None:
        for member in self.members:
            if member.is_running:
                member.go_on()
                member.kill()

    async def ready(self, tls: TlsFiles | None = None) -> None:
        """Return once the cluster answers."""
        client = EtcdClient(self.endpoints, tls)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                with suppress(EtcdUnavailable):
                    await client.range(b"anything")
                    break
                await asyncio.sleep(0.02)
        await client.close()

    async def led_by(self) -> Member:
        """Return the member that leads the cluster now, as each of them tells of itself."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                for member in self.members:
                    if member.is_running and await _leads(member):
                        return member
                await asyncio.sleep(0.02)


async def _leads(member: Member) -> bool:
    """Ask a member over its HTTP interface whether it leads."""
    with suppress(OSError, asyncio.IncompleteReadError):
        reader, writer = await asyncio.open_connection("127.0.0.1", member.client_port)
        writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return b"\netcd_server_is_leader 1\n" in answer
    return False


@asynccontextmanager
async def cluster_of(program: str, directory: Path, number: int) -> AsyncIterator[Cluster]:
    """Run so many members until the context ends."""
    cluster = Cluster(program, directory, number)
    try:
        cluster.start()
        await cluster.ready()
        yield cluster
    finally:
        cluster.kill()


class Proxy:
    """A TCP relay in front of a member; cut, it accepts and answers nothing, as a network does that loses packets."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self._is_open.set()
        for writer in self._writers:
            writer.close()

    def cut(self) -> None:
        self._is_open.clear()

    def mend(self) -> None:
        self._is_open.set()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with suppress(OSError):
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._to)
            self._writers.add(to_writer)
            await asyncio.gather(self._pipe(reader, to_writer), self._pipe(to_reader, writer))

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                await self._is_open.wait()
                writer.write(data)
                await writer.drain()
        writer.close()
