"""Real replicas of the coordinator on loopback, over gRPC, on a SQLite file or on etcd, and what shards send them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc import aio
from prometheus_client import CollectorRegistry

from bigfleet.cli.runtime.system import SystemClock
from bigfleet.coordinator.leader_term import CoordinatorSettings
from bigfleet.coordinator.metrics import CoordinatorMetrics, Figures
from bigfleet.coordinator.replica import Export, Replica
from bigfleet.coordinator.stores.metered import MeteredStore
from bigfleet.coordinator.stores.protocol import LeaderInfo, RevisedStore
from bigfleet.coordinator.stores.sqlite import SqliteStateStore
from bigfleet.model.clock import Clock
from bigfleet.rpc.etcd.client import EtcdClient
from bigfleet.rpc.etcd.store import EtcdStore
from bigfleet.rpc.grpc_server import GrpcServer
from bigfleet.rpc.security.identity import Gate
from bigfleet.rpc.security.tls import TlsFiles
from bigfleet.rpc.servers import coordinator as coordinator_server
from bigfleet.rpc.wire.gen import coordinator_pb2 as pb
from bigfleet.rpc.wire.gen import coordinator_pb2_grpc
from tests.coordinator.stores.etcd_process import Cluster, until
from tests.patience import PATIENCE_SECONDS
from tests.rpc.security.tls_world import secure_channel

PROVIDER = "provider:9100"
ZONE = "topology.kubernetes.io/zone"


@dataclass
class Served:
    """One replica that listens."""

    replica: Replica
    store: RevisedStore
    server: GrpcServer
    port: int
    registry: CollectorRegistry
    stub: Any
    running: "asyncio.Task[None]"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def led(self) -> "Served":
        """Return once it leads."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            await until(lambda: self.replica.is_leading)
        return self

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"bigfleet_coordinator_{name}", labels)

    async def die(self) -> None:
        """Stop answering and give leadership up, as a clean stop does."""
        await self.server.stop(0)
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.store.close()


@asynccontextmanager
async def serving(
    store: RevisedStore,
    *,
    settings: CoordinatorSettings | None = None,
    clock: Clock | None = None,
    tls: TlsFiles | None = None,
    dial_as: TlsFiles | None = None,
    export_to: Export | None = None,
    port: int = 0,
) -> AsyncIterator[Served]:
    """Serve one replica, closing the store at the end; it campaigns at once."""
    clock = clock or SystemClock()
    registry = CollectorRegistry()
    replica: Replica | None = None

    def figures() -> Figures:
        return Figures() if replica is None else replica.figures()

    metrics = CoordinatorMetrics(registry, figures)
    metered = MeteredStore(store, metrics, clock)
    replica = Replica(
        metered, clock=clock, settings=settings or CoordinatorSettings(), metrics=metrics, export_to=export_to
    )
    gate = Gate(registry, "bigfleet_coordinator", services=(coordinator_server.SERVICE_NAME,))
    servicer = coordinator_server.CoordinatorServicer(replica, clock, gate, lambda: metrics.report("refused"))
    server = GrpcServer(
        services=(coordinator_server.SERVICE_NAME,),
        register=lambda server: coordinator_server.add_to_server(servicer, server),
        tls=tls,
        gate=gate,
    )
    bound = await server.start("127.0.0.1", port)
    channel = aio.insecure_channel(f"127.0.0.1:{bound}") if dial_as is None else secure_channel(bound, dial_as)
    running = asyncio.create_task(replica.run())
    stub = coordinator_pb2_grpc.CoordinatorStub(channel)
    try:
        yield Served(replica, metered, server, bound, registry, stub, running)
    finally:
        await channel.close(None)
        await server.stop(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await metered.close()


def sqlite_store(path: Path, name: str = "r0", address: str = "r0:7790") -> SqliteStateStore:
    return SqliteStateStore(path, leader=LeaderInfo(name, address))


def etcd_store(cluster: Cluster, name: str = "r0", address: str = "r0:7790", ttl_seconds: int = 5) -> EtcdStore:
    client = EtcdClient(cluster.endpoints)
    me = LeaderInfo(name, address)
    return EtcdStore(client, prefix="/bigfleet", me=me, lease_ttl_seconds=ttl_seconds, clock=SystemClock())


def report(shard_id: str = "east-0", cycle: int = 1, **fields: Any) -> pb.ShardReport:
    """Return a report of a shard that has nothing to say."""
    given: dict[str, Any] = {"shard_epoch": 1, "shard_address": f"{shard_id}:7780"} | fields
    return pb.ShardReport(shard_id=shard_id, cycle=cycle, **given)


def owning(*zones: str, base: int = pb.Ownership.BASE_DOMAINS, **fields: Any) -> pb.Ownership:
    """Return a view of a shard that holds some zones."""
    domains = [pb.TopologyDomain(topology_key=ZONE, topology_value=zone) for zone in zones]
    return pb.Ownership(base=pb.Ownership.Base.ValueType(base), domains=domains, **fields)


def in_plain_text(port: int) -> aio.Channel:
    return aio.insecure_channel(f"127.0.0.1:{port}")


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    """Return the status of a call that must fail."""
    try:
        await call
    except aio.AioRpcError as error:
        return error.code(), error.details() or ""
    raise AssertionError("the call was answered")
