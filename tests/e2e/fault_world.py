"""A provider that can be told to misbehave, an operator, and a real shard process between them, over loopback.

The provider is the kit with a backend in memory, on a thread of its own, so that it answers while a test waits.
"""

import asyncio
import json
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any, TypeVar

import grpc

from bigfleet.model.states import MachineState
from bigfleet.provider.backend import Limits
from bigfleet.provider.backends.fake import FakeBackend
from bigfleet.provider.kit.core import AcceptedCall, CapacityCore
from bigfleet.provider.records.fence import NO_TOKEN, Token
from bigfleet.provider.records.record import Record
from bigfleet.provider.storage.sqlite import SqliteProviderStore
from bigfleet.provider.storage.view import ListAnswer
from bigfleet.rpc.grpc_server import GrpcServer
from bigfleet.rpc.servers.provider import SERVICE, ProviderServicer, encode_list_entry
from bigfleet.rpc.wire.gen import (
    capacity_pb2,
    provider_pb2,
    shard_pb2,
    shard_pb2_grpc,
    shardread_pb2,
    shardread_pb2_grpc,
)
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.processes import free_port, serving
from tests.provider.harness import make_core, started

CONFIGURED = provider_pb2.MACHINE_STATE_CONFIGURED

T = TypeVar("T")


def until(get: Callable[[], T], is_so: Callable[[T], Any], what: str) -> T:
    """Return what `get` gives as soon as it is so. Raises AssertionError when it never is."""
    found = get()

    def look() -> Any:
        nonlocal found
        found = get()
        return is_so(found)

    wait_until(look, lambda: f"{what}; at last it was {found}")
    return found


# ---- the provider -----------------------------------------------------------------------------------------------


class Faults:
    """What goes wrong at the moment; any of it may be set while the provider serves."""

    def __init__(self) -> None:
        #: Seconds that the answer to a call comes late, after its effect, by method.
        self.late_seconds: dict[str, float] = {}
        #: Methods whose effect happens, and whose answer is an error.
        self.fails_after: set[str] = set()
        #: Every List is answered in full, whatever cursor it comes with.
        self.forgets_cursors = False
        #: Machines whose records are shown with these facts.
        self.garbage: dict[str, dict[str, Any]] = {}
        #: List is answered with bytes that are no message.
        self.answers_noise = False
        #: Cursors of the Lists that came, and how often any was empty.
        self.cursors: list[bytes] = []


class FaultyService:
    """Implements `bigfleet.rpc.servers.provider.CapacityService`: the core, and what goes wrong around it."""

    def __init__(self, core: CapacityCore, faults: Faults) -> None:
        self.metrics = core.metrics
        self._core = core
        self._faults = faults

    async def create(self, machine_id: str, *, token: Token = NO_TOKEN) -> AcceptedCall:
        return await self._after("create", await self._core.create(machine_id, token=token))

    async def configure(
        self, machine_id: str, cluster: str, blob: bytes, metadata: Mapping[str, str], *, token: Token = NO_TOKEN
    ) -> AcceptedCall:
        return await self._after(
            "configure", await self._core.configure(machine_id, cluster, blob, metadata, token=token)
        )

    async def drain(self, machine_id: str, grace_seconds: int, *, token: Token = NO_TOKEN) -> AcceptedCall:
        return await self._after("drain", await self._core.drain(machine_id, grace_seconds, token=token))

    async def delete(self, machine_id: str, *, token: Token = NO_TOKEN) -> AcceptedCall:
        return await self._after("delete", await self._core.delete(machine_id, token=token))

    async def get(self, machine_id: str) -> Record:
        return self._shown(await self._core.get(machine_id))

    async def list(self, states: Iterable[MachineState] = (), results_max: int = 0, since: bytes = b"") -> ListAnswer:
        self._faults.cursors.append(since)
        listing = await self._core.list(states, results_max, b"" if self._faults.forgets_cursors else since)
        if self._faults.answers_noise:
            noise: Any = SimpleNamespace(wire=b"\xff" * 64)
            return replace(listing, records=(noise,))
        return replace(listing, records=tuple(self._shown(record) for record in listing.records))

    async def _after(self, method: str, ack: AcceptedCall) -> AcceptedCall:
        await asyncio.sleep(self._faults.late_seconds.get(method, 0.0))
        if method in self._faults.fails_after:
            raise RuntimeError("as told by the test")
        return ack

    def _shown(self, record: Record) -> Record:
        facts = self._faults.garbage.get(record.machine.id)
        if facts is None:
            return record
        machine = replace(record.machine, **facts)
        return replace(record, machine=machine, wire=encode_list_entry(machine, record.metadata))


class LiveProvider:
    """A provider on loopback with slots in memory; it can be stopped and started again on the same address."""

    def __init__(self, place: Path, count: int) -> None:
        self.faults = Faults()
        self.backend = FakeBackend(count, limits=Limits())
        self.address = f"127.0.0.1:{free_port()}"
        self._store_path = place / "provider.db"
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    def start(self) -> None:
        """Serve; returns once it does."""
        is_up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(is_up)), name="provider", daemon=True)
        self._thread.start()
        assert is_up.wait(PATIENCE_SECONDS)

    def stop(self) -> None:
        """Cut every connection and end; what was accepted is on disk."""
        if self._thread is None or self._loop is None or self._stop is None:
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()
        self._thread = None

    async def _serve(self, is_up: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        core = await started(make_core(self.backend, store=SqliteProviderStore(self._store_path, is_power_safe=False)))
        servicer = ProviderServicer(FaultyService(core, self.faults), LoopClock())
        server = GrpcServer(services=(SERVICE,), register=servicer.register)
        host, _colon, port = self.address.rpartition(":")
        await server.start(host, int(port))
        is_up.set()
        await self._stop.wait()
        await server.stop(0)
        await core.stop()


@contextmanager
def live_provider(place: Path, count: int = 4) -> Iterator[LiveProvider]:
    """Serve a provider while the context lasts."""
    provider = LiveProvider(place, count)
    provider.start()
    try:
        yield provider
    finally:
        provider.stop()


# ---- the operator -----------------------------------------------------------------------------------------------


class LiveOperator:
    """One cluster's operator, on a thread that answers whatever the shard asks."""

    def __init__(self, shard: str, cluster: str) -> None:
        self.cluster = cluster
        self._outgoing: Queue[shard_pb2.OperatorMessage | None] = Queue()
        self._channel = grpc.insecure_channel(shard)
        self._say(hello=shard_pb2.Hello(cluster_id=cluster, protocol_version="v1alpha1", capabilities=["drain-result"]))
        self._is_greeted = threading.Event()
        replies: Any = shard_pb2_grpc.ShardStub(self._channel).Session(iter(self._outgoing.get, None))
        self._thread = threading.Thread(target=self._listen, args=(replies,), daemon=True)
        self._thread.start()
        assert self._is_greeted.wait(PATIENCE_SECONDS)

    def report(self, cpu: str) -> None:
        """Report one row that wants that much cpu, or no row for the empty text."""
        row = capacity_pb2.CapacityNeed(aggregate_resources={"cpu": cpu}, min_unit={"cpu": "1"}, priority=100)
        rollup = capacity_pb2.ClusterCapacityNeeds(
            cluster_id=self.cluster, timestamp_unix_nanos=time.time_ns(), needs=[row] if cpu else []
        )
        self._say(rollup=rollup)

    def close(self) -> None:
        """End the session."""
        self._outgoing.put(None)
        self._channel.close()
        self._thread.join(PATIENCE_SECONDS)

    def _say(self, **payload: Any) -> None:
        self._outgoing.put(shard_pb2.OperatorMessage(**payload))

    def _listen(self, replies: Iterable[shard_pb2.ShardMessage]) -> None:
        try:
            for message in replies:
                self._answer(message)
        except (grpc.RpcError, ValueError):
            return  # the shard or this side has ended the session

    def _answer(self, message: shard_pb2.ShardMessage) -> None:
        match message.WhichOneof("payload"):
            case "ack":
                self._is_greeted.set()
            case "bootstrap_request":
                asked = message.bootstrap_request
                self._say(
                    bootstrap_response=shard_pb2.BootstrapBlobResponse(
                        request_id=asked.request_id, user_data=b"#cloud-config", ttl_seconds=600
                    )
                )
            case "reclaim_instruction":
                told = message.reclaim_instruction
                for machine_id in told.machine_ids:
                    self._say(
                        drain_result=shard_pb2.DrainResult(
                            instruction_id=told.instruction_id,
                            machine_id=machine_id,
                            outcome=shard_pb2.DrainResult.OUTCOME_DRAINED,
                        )
                    )


# ---- the shard --------------------------------------------------------------------------------------------------


class LiveShard:
    """A shard process that is running, and what it says of itself."""

    def __init__(self, place: Path, provider: str, *flags: str) -> None:
        self.address, http = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        self.log = place / "shard.log"
        self.audit_log = place / "audit.log"
        self.flags = (
            *("shard", "--listen", self.address, "--metrics-addr", http, "--provider-addr", provider),
            *("--data-dir", str(place), "--cycle-interval", "200ms", "--wake-min-gap", "50ms"),
            *("--reclaim-after", "0s"),
            *("--audit-log", str(self.audit_log), *flags),
        )
        self._http = http
        #: Set while it runs.
        self.process: subprocess.Popen[bytes] | None = None

    def machines(self, **wanted: Any) -> dict[str, shardread_pb2.MachineView]:
        """Return the machines that the shard shows, by id."""
        frames = self._read(lambda read: read.ListMachines(shardread_pb2.ListMachinesRequest(**wanted)))
        return {frame.machine.machine.id: frame.machine for frame in frames if frame.HasField("machine")}

    def bound(self, cluster: str) -> dict[str, str]:
        """Return the states of a cluster's machines by id."""
        return {
            machine_id: provider_pb2.MachineState.Name(view.machine.state)
            for machine_id, view in self.machines(cluster_id=cluster).items()
        }

    def outcomes(self) -> list[tuple[str, str]]:
        """Return (kind, outcome) of every action, oldest first; "" is running."""
        frames = self._read(lambda read: read.ListActions(shardread_pb2.ListActionsRequest()))
        return [(frame.action.kind, frame.action.outcome) for frame in reversed(frames)]

    def _read(self, ask: Callable[[Any], Iterable[Any]]) -> list[Any]:
        with grpc.insecure_channel(self.address) as channel:
            return list(ask(shardread_pb2_grpc.ShardReadStub(channel)))

    def metric(self, name: str) -> float:
        """Return the value of a sample, such as `fenced_total`; 0 when there is none."""
        return next(
            (float(line.split()[-1]) for line in self.series() if line.startswith(f"bigfleet_shard_{name} ")), 0.0
        )

    def series(self) -> list[str]:
        """Return the samples of one scrape, a line each."""
        with urllib.request.urlopen(f"http://{self._http}/metrics", timeout=PATIENCE_SECONDS) as answer:
            return [line for line in answer.read().decode().splitlines() if not line.startswith("#")]

    def said(self, event: str) -> list[dict[str, Any]]:
        """Return the log's events of a name."""
        events = (json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{"))
        return [each for each in events if each.get("event") == event]

    def audited(self) -> list[dict[str, Any]]:
        """Return the records of the audit log."""
        return [json.loads(line) for line in self.audit_log.read_text().splitlines()]


@contextmanager
def live_shard(place: Path, provider: str, *flags: str) -> Iterator[LiveShard]:
    """Run a shard process while the context lasts, from when it has read its machines; `place` is its own directory."""
    place.mkdir(exist_ok=True)
    shard = LiveShard(place, provider, *flags)
    with serving(shard.address, shard.log, *shard.flags) as shard.process:
        until(lambda: shard.said("shard.became_ready"), bool, f"the shard was never ready: {shard.log.read_text()}")
        yield shard
