"""An authority, certificates of every kind, sound and odd, and a real shard and provider that ask for them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from grpc import aio
from prometheus_client import CollectorRegistry

from bigfleet.cli.certs.issuing import Authority, Bearer, Issued
from bigfleet.provider.backends.fake import FakeBackend
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.rpc.grpc_server import GrpcServer
from bigfleet.rpc.security.identity import Gate
from bigfleet.rpc.security.tls import TlsFiles, TlsPaths, channel_credentials
from bigfleet.rpc.servers import session as session_server
from bigfleet.rpc.servers import shardadmin as shardadmin_server
from bigfleet.rpc.servers import shardread as shardread_server
from bigfleet.rpc.servers.provider import RECEIVE_BYTES_MAX, SEND_BYTES_MAX, SERVICE, ProviderServicer
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.provider.harness import make_core, started
from tests.rpc.live_shard import LiveShard
from tests.shard.world import World

HOSTS = ("localhost", "127.0.0.1")
SHARD = Bearer(name="shard", uris=("bigfleet://shard/s1",), hosts=HOSTS)
PROVIDER = Bearer(name="provider", hosts=HOSTS)
CLUSTER = Bearer(name="cluster", uris=("bigfleet://cluster/c1",))
ADMIN = Bearer(name="admin", uris=("bigfleet://admin",))
READONLY = Bearer(name="readonly", uris=("bigfleet://readonly",))


@dataclass
class Certificates:
    """Files of one authority."""

    folder: Path
    authority: Authority

    @classmethod
    def make(cls, folder: Path, authority: Authority | None = None) -> "Certificates":
        """Return files in a folder, signed by an authority of their own."""
        folder.mkdir(exist_ok=True)
        authority = authority or Authority.create(datetime.now(UTC))
        (folder / "ca").write_bytes(authority.pems.certificate)
        return cls(folder, authority)

    def issue(self, bearer: Bearer, *, age: timedelta = timedelta()) -> Issued:
        """Return a certificate that is good for a day, or was."""
        return self.authority.issue(bearer, datetime.now(UTC) - age, 1)

    def paths(self, name: str) -> TlsPaths:
        """Return where a holder's files are."""
        key, certificate = self.folder / f"{name}.key", self.folder / f"{name}.crt"
        return TlsPaths(certificate=certificate, key=key, authority=self.folder / "ca")

    def write(self, name: str, issued: Issued) -> TlsPaths:
        """Put a pair where a process reads it."""
        paths = self.paths(name)
        paths.key.write_bytes(issued.key)
        paths.certificate.write_bytes(issued.certificate)
        return paths

    def files(self, bearer: Bearer, *, age: timedelta = timedelta()) -> TlsFiles:
        """Return the files of a new certificate, under the bearer's name."""
        return TlsFiles(self.write(bearer.name, self.issue(bearer, age=age)))

    def rewrite(self, bearer: Bearer) -> Issued:
        """Replace the bearer's pair by a new one."""
        issued = self.issue(bearer)
        self.write(bearer.name, issued)
        return issued


def secure_channel(port: int, files: TlsFiles) -> aio.Channel:
    """Return a channel of its own that presents the files' certificate."""
    credentials = channel_credentials(files.current(), files.authority)
    options = (("grpc.use_local_subchannel_pool", 1),)
    return aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options)


@dataclass
class SecureShard:
    """A real shard that listens with TLS."""

    world: World
    server: GrpcServer
    port: int
    #: The gate's counter.
    registry: CollectorRegistry
    sessions: session_server.SessionServicer

    @asynccontextmanager
    async def dial(self, files: TlsFiles) -> AsyncIterator[LiveShard]:
        """Open a channel as the bearer of the files."""
        async with secure_channel(self.port, files) as channel:
            yield LiveShard(self.world, self.server, channel, self.port, self.sessions)

    def rejected(self, rpc: str) -> float:
        """Return how many calls of an RPC were refused."""
        return self.registry.get_sample_value("bigfleet_shard_identity_rejected_total", {"rpc": rpc}) or 0.0


@asynccontextmanager
async def secure_shard(files: TlsFiles, world: World | None = None) -> AsyncIterator[SecureShard]:
    """Serve a world's shard with TLS while the context lasts."""
    world = world or World()
    registry = CollectorRegistry()
    gate = Gate(registry, "bigfleet_shard", services=(shardread_server.SERVICE_NAME, shardadmin_server.SERVICE_NAME))
    sessions = session_server.SessionServicer(world.shard, gate)

    def register(server: aio.Server) -> None:
        session_server.add_to_server(sessions, server)
        shardread_server.add_to_server(shardread_server.ShardReadServicer(world.shard, LoopClock()), server)
        shardadmin_server.add_to_server(shardadmin_server.ShardAdminServicer(world.shard), server)

    services = (session_server.SERVICE_NAME, shardread_server.SERVICE_NAME, shardadmin_server.SERVICE_NAME)
    server = GrpcServer(services=services, register=register, tls=files, gate=gate)
    port = await server.start("127.0.0.1", 0)
    try:
        yield SecureShard(world, server, port, registry, sessions)
    finally:
        world.shard.stop_sessions()
        await server.stop(0)


@dataclass
class SecureProvider:
    """A real provider that listens with TLS."""

    core: CapacityCore
    port: int
    registry: CollectorRegistry

    def rejected(self, rpc: str) -> float:
        """Return how many calls of an RPC were refused."""
        return self.registry.get_sample_value("bigfleet_provider_identity_rejected_total", {"rpc": rpc}) or 0.0


@asynccontextmanager
async def secure_provider(files: TlsFiles, *, certify: bool = False) -> AsyncIterator[SecureProvider]:
    """Serve a provider of a few machines with TLS while the context lasts."""
    core = await started(make_core(FakeBackend(9)))
    registry = CollectorRegistry()
    gate = Gate(registry, "bigfleet_provider", services=(SERVICE,), certify=certify)
    server = GrpcServer(
        services=(SERVICE,),
        register=ProviderServicer(core, LoopClock(), gate).register,
        receive_bytes_max=RECEIVE_BYTES_MAX,
        send_bytes_max=SEND_BYTES_MAX,
        keep_alive=False,
        tls=files,
        gate=gate,
    )
    port = await server.start("127.0.0.1", 0)
    try:
        yield SecureProvider(core, port, registry)
    finally:
        await server.stop(0)
        await core.stop()


def renamed(bearer: Bearer, *uris: str) -> Bearer:
    """Return a bearer with other URIs."""
    return replace(bearer, name="odd", uris=uris)
