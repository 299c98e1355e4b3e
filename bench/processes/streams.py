"""The processes that W11 and W12 run: a shard that watches itself, many operators, and a provider that answers at once.

`bench.workloads.streams` starts them, says on standard input when to begin and to end what is measured, one word a
line, and reads one JSON object a line from their standard output. A process ends when its standard input does, so that
none outlives a run. Nothing here may be imported by BigFleet.
"""

import asyncio
import gc
import json
import os
import resource
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from grpc import aio
from prometheus_client import CollectorRegistry

from bench.engine_fleets import TYPES, one_type
from bench.harness import resident_mib
from bench.workloads.shard import ListedProvider, cluster_id
from bigfleet.cli.provider.process import serve_provider
from bigfleet.cli.provider.process_settings import ProviderProcessSettings
from bigfleet.cli.runtime import interpreter
from bigfleet.cli.runtime.system import SystemClock, SystemIds, configure_logging, run_loop, system_rng
from bigfleet.cli.shard.process import compute_in_thread
from bigfleet.model.frames import (
    Acknowledgement,
    AvailableCapacity,
    BootstrapRequest,
    BootstrapResponse,
    DrainForecastRequest,
    Hello,
    NeedStatusUpdate,
    NodeStateUpdate,
    NodeStatus,
    RollUp,
)
from bigfleet.model.ids import ClusterId, MachineId, ShardId
from bigfleet.model.machine import HostRef, Machine
from bigfleet.model.metadata import encode_metadata
from bigfleet.model.need import Need
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.model.vector import families, parse_vector, scale
from bigfleet.operator.drains import DrainRecord
from bigfleet.operator.ports import SessionEnded
from bigfleet.operator.session import SessionClient
from bigfleet.provider.backend import ConfigureWaits
from bigfleet.provider.backends.fake import INSTANCE_TYPE, FakeBackend, fake_slot
from bigfleet.provider.kit.options import CoreOptions
from bigfleet.provider.storage.sqlite import SqliteProviderStore
from bigfleet.rpc.clients.session import GrpcSessionDialer
from bigfleet.rpc.grpc_server import KEEPALIVE_OPTIONS, GrpcServer
from bigfleet.rpc.servers import session as session_server
from bigfleet.rpc.servers import shardread as shardread_server
from bigfleet.rpc.wire.convert_machine import machine_from_wire, machine_to_wire
from bigfleet.rpc.wire.convert_need import ReceivedRollUp, rollup_to_wire
from bigfleet.rpc.wire.convert_session import operator_frame_to_wire
from bigfleet.shard.cycle.controller import Shard
from bigfleet.shard.cycle.engine_runner import fleet_engine
from bigfleet.shard.ports import ListedMachine, Listing, ShardSettings
from bigfleet.shard.sessions.demand import RollUpOutcome
from bigfleet.shard.sessions.registry import RollUpOffer

ROWS = 10
#: One machine per row of each cluster, all of them bound: 5 % more or less is what a changed roll-up asks for.
MACHINES_PER_CLUSTER = ROWS
INTERVAL_SECONDS = 10.0
CHANGED_PERCENT = 5
#: How often the loop is asked whether it is late.
LAG_SAMPLE_SECONDS = 0.005
#: Streams that are opened at the same time; a real fleet's operators come back with jitter.
DIALS_AT_ONCE_MAX = 64
_SESSION_METHOD = "/bigfleet.v1alpha1.Shard/Session"


def say(**what: object) -> None:
    """Write one JSON object to the process that started this one."""
    print(json.dumps(what), flush=True)


async def next_command() -> str:
    """Return the next word from the process that started this one; "" when that has ended."""
    line: str = await asyncio.to_thread(sys.stdin.readline)
    return line.strip()


async def until(holds: Callable[[], bool]) -> None:
    """Return once something holds, asked every few milliseconds."""
    while True:
        if holds():
            return
        await asyncio.sleep(LAG_SAMPLE_SECONDS)


def raise_file_limit() -> None:
    """Let this process have as many open files as it may: a stream of its own connection takes one at each end."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def share_of(ordered: Sequence[float], percent: int) -> float:
    """Return the value below which that share of ascending values lies."""
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


# ---- W11: the shard -------------------------------------------------------------------------------------------------


def bound_fleet(clusters: int) -> list[Machine]:
    """Return W11's machines: of each cluster, one Configured machine for each of its rows."""
    return [
        Machine(
            id=MachineId(f"seed-{cluster * MACHINES_PER_CLUSTER + i}"),
            state=MachineState.CONFIGURED,
            host=HostRef("bench", f"host-{cluster}-{i}"),
            cluster=cluster_id(cluster),
            instance_type=TYPES[i % 5][0],
            zone="abc"[i % 3],
            capacity_type=CapacityType.BARE_METAL,
            allocatable=TYPES[i % 5][1],
            assigned_priority=1000 + i * 100,
        )
        for cluster in range(clusters)
        for i in range(MACHINES_PER_CLUSTER)
    ]


def received(machines: Iterable[Machine]) -> list[ListedMachine]:
    """Return the machines as records that came over the wire."""
    return [
        ListedMachine(*machine_from_wire(machine_to_wire(machine, encode_metadata(machine)))) for machine in machines
    ]


def rows_of(cluster: int, turn: int) -> tuple[Need, ...]:
    """Return a cluster's rows: one machine each, and of one row two when it has changed an odd number of times."""
    rows = []
    for i in range(ROWS):
        instance_type, shape = TYPES[i % 5]
        unit = parse_vector(shape)
        times = 2 if i == cluster % ROWS and turn % 2 else 1
        rows.append(
            Need(
                cluster=cluster_id(cluster),
                profile=one_type(instance_type, priority=1000 + i * 100, bucket=0),
                aggregate=scale(unit, times),
                min_unit=unit,
                families=families(shape),
            )
        )
    return tuple(rows)


class Watch:
    """What a shard's process sees of itself while it is measured."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget everything that was seen."""
        self._latencies_ms: list[float] = []
        self._lags_ms: list[float] = []
        self._own_lags_ms: list[float] = []
        self._outcomes: Counter[str] = Counter()
        self._began_seconds = time.monotonic()
        self._began_cpu_seconds = time.process_time()

    def taken(self, offer: RollUpOffer, outcome: RollUpOutcome) -> None:
        """Note a roll-up that the shard is through with."""
        self._latencies_ms.append((time.time_ns() - offer.timestamp_unix_nanos) / 1e6)
        self._outcomes[outcome.value] += 1

    async def sample_lag(self) -> None:
        """Ask the loop for a moment again and again, and note how late it comes."""
        while True:
            asked_seconds, cpu_seconds = time.monotonic(), time.process_time()
            await asyncio.sleep(LAG_SAMPLE_SECONDS)
            lag_ms = (time.monotonic() - asked_seconds - LAG_SAMPLE_SECONDS) * 1000
            self._lags_ms.append(lag_ms)
            # The rest is time in which other processes had the cores.
            self._own_lags_ms.append(min(lag_ms, (time.process_time() - cpu_seconds) * 1000))

    def figures(self) -> dict[str, object]:
        """Return what was seen since `begin`."""
        seconds = time.monotonic() - self._began_seconds
        latencies, lags = sorted(self._latencies_ms), sorted(self._lags_ms)
        return {
            "seconds": seconds,
            "roll_ups": len(latencies),
            "outcomes": dict(self._outcomes),
            "latency_p50_ms": statistics.median(latencies),
            "latency_p99_ms": share_of(latencies, 99),
            "latency_max_ms": latencies[-1],
            "lag_p99_ms": share_of(lags, 99),
            "lag_max_ms": lags[-1],
            "own_lag_max_ms": max(self._own_lags_ms),
            "cores": (time.process_time() - self._began_cpu_seconds) / seconds,
            "rss_mib": resident_mib(),
            "rss_peak_mib": resident_mib("VmHWM"),
        }


def shard_parts(provider: ListedProvider) -> dict[str, Any]:
    """Return what a shard over a provider is made of that carries out nothing."""
    return {
        "shard_id": ShardId("bench"),
        "epoch": 1,
        "settings": ShardSettings(incremental_reconcile=True, actuation_paused=True),
        "provider": provider,
        "clock": SystemClock(),
        "ids": SystemIds(),
        "compute": compute_in_thread,
        "registry": CollectorRegistry(),
        "make_engine": fleet_engine,
    }


async def serve_sessions(clusters: int) -> int:
    """Run W11's shard: sessions over gRPC, its machines listed in memory, deciding and carrying out nothing."""
    raise_file_limit()
    # As the real command does; the watch would otherwise see what no shard does.
    interpreter.settle()
    provider = ListedProvider()
    provider.listing = Listing(records=received(bound_fleet(clusters)), revision=b"1", tombstones=True)
    watch, is_listed = Watch(), asyncio.Event()

    def listed() -> None:
        # From now on nothing changes, as a delta says; the whole is read once in a while all the same.
        provider.delta = Listing(records=(), revision=b"2", tombstones=True)
        gc.freeze()
        is_listed.set()

    shard = Shard(**shard_parts(provider), on_inventory=listed, on_rollup=lambda _, *taken: watch.taken(*taken))
    servicer = session_server.SessionServicer(shard)
    server = GrpcServer(
        services=(session_server.SERVICE_NAME,),
        register=lambda server: session_server.add_to_server(servicer, server),
    )
    port = await server.start("127.0.0.1", 0)
    # Before it runs: then it is ready when its machines are listed.
    await shard.make_ready()
    tasks = [
        asyncio.create_task(shard.run()),
        asyncio.create_task(interpreter.collect_when_due(SystemClock())),
        asyncio.create_task(watch.sample_lag()),
    ]
    await is_listed.wait()
    say(port=port)
    begun_cycle = 0
    while word := await next_command():
        if word == "begin":
            begun_cycle = shard.cycle
            watch.begin()
        elif word == "end":
            figures = watch.figures()
            table = shard.intake.table
            say(
                **figures,
                cycles=shard.cycle - begun_cycle,
                sessions=len(shard.sessions),
                rows=len(table.in_list_order()),
                clusters=len(table.clusters),
                machines=len(shard.inventory),
            )
    shard.stop_sessions()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await server.stop(1.0)
    return 0


# ---- a reader's shard ---------------------------------------------------------------------------------------------


async def serve_reader(clusters: int) -> int:
    """Serve ShardRead of a shard that has decided once: ten rows a cluster, and of every other cluster one is short."""
    interpreter.settle()
    provider = ListedProvider()
    provider.listing = Listing(records=received(bound_fleet(clusters)), revision=b"1", tombstones=True)
    shard = Shard(**shard_parts(provider))
    await shard.make_ready()
    for cluster in range(clusters):
        name = cluster_id(cluster)
        rollup = RollUp(cluster_id=name, timestamp_unix_nanos=1, needs=rows_of(cluster, cluster % 2))
        offer = ReceivedRollUp(rollup_to_wire(rollup))
        shard.take_rollup(shard.sessions.open(Hello(cluster_id=name)), offer)
    report = await shard.step()
    assert report.decision is not None
    servicer = shardread_server.ShardReadServicer(shard, SystemClock())
    server = GrpcServer(
        services=(shardread_server.SERVICE_NAME,),
        register=lambda server: shardread_server.add_to_server(servicer, server),
    )
    say(port=await server.start("127.0.0.1", 0), short=sum(not row.satisfied for row in report.decision.rows))
    while await next_command():
        say(rss_mib=resident_mib(), **_cpu())
    await server.stop(1.0)
    return 0


# ---- W11: the operators ---------------------------------------------------------------------------------------------


class ReportingStream:
    """One operator on a connection of its own: a roll-up every ten seconds, most of them the same bytes."""

    def __init__(self, port: int, cluster: int) -> None:
        options = [*KEEPALIVE_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        self._channel = aio.insecure_channel(f"127.0.0.1:{port}", options=options)
        self._cluster = cluster
        self._turn = 0
        self._message = operator_frame_to_wire(self._rollup())
        self.received = 0

    def _rollup(self) -> RollUp:
        return RollUp(
            cluster_id=cluster_id(self._cluster),
            timestamp_unix_nanos=0,
            needs=rows_of(self._cluster, self._turn),
        )

    async def open(self, gate: asyncio.Semaphore) -> None:
        """Say Hello and wait for its acknowledgement."""
        async with gate:
            self._call = self._channel.stream_stream(_SESSION_METHOD, None, None)(None)
            hello = operator_frame_to_wire(Hello(cluster_id=cluster_id(self._cluster)))
            await self._call.write(hello.SerializeToString())
            await self._call.read()

    async def report(self, first_seconds: float) -> None:
        """Send a roll-up after `first_seconds`, and one every interval from then on, each changed once in twenty."""
        due_seconds = time.monotonic() + first_seconds
        number = self._cluster
        while True:
            await asyncio.sleep(max(0.0, due_seconds - time.monotonic()))
            due_seconds += INTERVAL_SECONDS
            number += 1
            if number % (100 // CHANGED_PERCENT) == 0:
                self._turn += 1
                self._message = operator_frame_to_wire(self._rollup())
            self._message.rollup.timestamp_unix_nanos = time.time_ns()
            await self._call.write(self._message.SerializeToString(deterministic=True))

    async def listen(self) -> None:
        """Take what the shard says, until the stream ends."""
        # What ends a stream is no bytes.
        while isinstance(await self._call.read(), bytes):
            self.received += 1


async def run_streams(port: int, first: int, clusters: int) -> int:
    """Open the streams of some clusters and report over them until standard input ends."""
    raise_file_limit()
    streams = [ReportingStream(port, cluster) for cluster in range(first, first + clusters)]
    gate = asyncio.Semaphore(DIALS_AT_ONCE_MAX)
    await asyncio.gather(*(stream.open(gate) for stream in streams))
    gc.collect()
    gc.freeze()
    tasks = []
    for index, stream in enumerate(streams):
        tasks.append(asyncio.create_task(stream.listen()))
        tasks.append(asyncio.create_task(stream.report(index * INTERVAL_SECONDS / clusters)))
    say(streams=len(streams))
    began_cpu_seconds = 0.0
    while word := await next_command():
        if word == "begin":
            began_cpu_seconds = time.process_time()
        elif word == "end":
            say(
                received=sum(stream.received for stream in streams),
                cpu_seconds=time.process_time() - began_cpu_seconds,
                ended=sum(task.done() for task in tasks),
            )
    # 5,000 channels take long to close in order; the process ends instead, and with it every connection.
    os._exit(0)


# ---- W12: the provider ----------------------------------------------------------------------------------------------


async def run_provider(port: int, machines: int) -> int:
    """Serve a backend whose every call succeeds at once, all its machines Idle at the start."""
    backend = FakeBackend(0)
    backend.slots = [fake_slot(number, id=f"fake-{number:05}") for number in range(machines)]
    backend.hosts = {slot.id: f"host-{slot.id}" for slot in backend.slots}
    with TemporaryDirectory() as folder:
        state_path = Path(folder) / "state.db"
        process = ProviderProcessSettings(
            address=("127.0.0.1", port),
            metrics_address=None,
            state_path=state_path,
            is_power_safe=False,
            provider="fake",
            reflect=False,
        )
        store = SqliteProviderStore(state_path, is_power_safe=False)
        store.lock()
        serving = asyncio.create_task(serve_provider(process, CoreOptions(), backend, ConfigureWaits(), store))
        while word := await next_command():
            if word == "count":
                say(bound=len(backend.clusters), clusters=len(set(backend.clusters.values())), **_cpu())
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    return 0


def _cpu() -> dict[str, float]:
    return {"cpu_seconds": time.process_time()}


# ---- W12: the operators ---------------------------------------------------------------------------------------------


class WantingCluster:
    """A cluster that wants machines and boots each at once; see `bigfleet.operator.ports.ClusterAgent`."""

    def __init__(self, cluster: ClusterId, machines: int) -> None:
        self._cluster = cluster
        self._machines = machines
        self.wants = False
        #: When each machine was reported as Configured, monotonic seconds.
        self.configured_seconds: dict[str, float] = {}
        self.asked = 0
        self.connected = asyncio.Event()

    def roll_up(self) -> RollUp | None:
        """Return one row, or nothing before the machines are wanted."""
        return RollUp(
            cluster_id=self._cluster,
            timestamp_unix_nanos=time.time_ns(),
            needs=(self._row(),) if self.wants else (),
        )

    def _row(self) -> Need:
        shape = dict(fake_slot(0, id="any").allocatable)
        unit = parse_vector(shape)
        return Need(
            cluster=self._cluster,
            profile=one_type(INSTANCE_TYPE, priority=1000, bucket=0),
            aggregate=scale(unit, self._machines),
            min_unit=unit,
            families=families(shape),
        )

    async def bootstrap(self, request: BootstrapRequest) -> BootstrapResponse:
        """Answer at once."""
        self.asked += 1
        return BootstrapResponse(request_id=request.request_id, user_data=b"#cloud-config\n" * 32)

    def node_state(self, update: NodeStateUpdate) -> None:
        """Note when a machine of this cluster is Configured."""
        if update.state is MachineState.CONFIGURED:
            self.configured_seconds.setdefault(update.machine_id, time.monotonic())

    def session_opened(self, shard_capabilities: frozenset[str]) -> None:
        """Note it."""
        self.connected.set()

    def session_closed(self, ended: SessionEnded) -> None:
        """Note it."""
        self.connected.clear()

    def acknowledged(self, ack: Acknowledgement) -> None:
        """Nothing follows from it here."""

    def resynced(self, machine_ids: frozenset[str]) -> None:
        """Nothing follows from it here."""

    def node_statuses(self) -> Iterable[NodeStatus]:
        """No node exists."""
        return ()

    def available(self, hint: AvailableCapacity) -> None:
        """Nothing follows from it here."""

    def need_status(self, update: NeedStatusUpdate) -> None:
        """Nothing follows from it here."""

    def drain_forecast(self, request: DrainForecastRequest) -> None:
        """No node exists."""

    def drain_started(self, drain: DrainRecord) -> None:
        """Nothing is ever drained here."""

    def drain_ended(self, drain: DrainRecord, *, withdrawn: bool) -> None:
        """Nothing is ever drained here."""


async def run_operators(port: int, clusters: int, machines: int) -> int:
    """Hold the sessions of some clusters that together want `machines`, from the word "begin" on."""
    agents = [WantingCluster(cluster_id(c), machines // clusters) for c in range(clusters)]
    clients = [
        SessionClient(
            cluster=cluster_id(c),
            agent=agent,
            dialer=GrpcSessionDialer(f"127.0.0.1:{port}"),
            clock=SystemClock(),
            rng=system_rng(),
        )
        for c, agent in enumerate(agents)
    ]
    tasks = [asyncio.create_task(client.run()) for client in clients]
    for agent in agents:
        await agent.connected.wait()
    say(sessions=len(agents))
    began_seconds = 0.0
    while word := await next_command():
        if word == "begin":
            began_seconds = time.monotonic()
            for agent, client in zip(agents, clients, strict=True):
                agent.wants = True
                client.demand_changed()
        elif word == "count":
            moments = sorted(moment for agent in agents for moment in agent.configured_seconds.values())
            say(
                configured=len(moments),
                asked=sum(agent.asked for agent in agents),
                last_seconds=moments[-1] - began_seconds if moments else 0.0,
                **_cpu(),
            )
    for task in tasks:
        task.cancel()
    with suppress(Exception):
        await asyncio.gather(*tasks, return_exceptions=True)
    return 0


def main() -> None:
    """Run the process that the first argument names, with numbers for the rest."""
    role, *numbers = sys.argv[1:]
    flows: dict[str, Callable[..., Coroutine[Any, Any, int]]] = {
        "shard": serve_sessions,
        "streams": run_streams,
        "reader": serve_reader,
        "provider": run_provider,
        "operators": run_operators,
    }
    configure_logging(f"bench-{role}", "error")
    sys.exit(run_loop(lambda: flows[role](*(int(number) for number in numbers))))


if __name__ == "__main__":
    main()
