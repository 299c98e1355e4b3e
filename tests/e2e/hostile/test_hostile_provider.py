"""A provider attacks a real shard process with every List and answer, and its sound machines are served."""

import re
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from bigfleet.rpc.wire.gen import provider_pb2, provider_pb2_grpc
from tests.e2e.fault_world import LiveOperator, live_shard, until
from tests.processes import free_port

SOUND = tuple(f"m{number}" for number in range(4))
LABELS_BYTES = 4_000_000
LISTS = 25
#: What the shard may grow by meanwhile. Each List has 4 MB, and caches of all of them would hold 100.
GROWTH_MIB_MAX = 60


def sound(machine_id: str, **changes: Any) -> provider_pb2.Machine:
    """Return an Idle machine, changed as asked."""
    facts: dict[str, Any] = {
        "id": machine_id,
        "state": provider_pb2.MACHINE_STATE_IDLE,
        "host": provider_pb2.HostRef(provider="hostile", ref="r"),
        "instance_type": "t",
        "zone": "z",
        "capacity_type": provider_pb2.CAPACITY_TYPE_ON_DEMAND,
        "price_per_hour": 1.0,
        "resources": provider_pb2.Resources(resources={"cpu": "4"}),
    }
    return provider_pb2.Machine(**(facts | changes))


class HostileProvider(provider_pb2_grpc.CapacityProviderServicer):
    """Lists hostile records among sound ones, and binds the sound ones; each answer has a megabyte of operation id."""

    def __init__(self) -> None:
        self.machines = {machine_id: sound(machine_id) for machine_id in SOUND}
        self.lists = 0

    def List(self, _request: provider_pb2.ListFilter, _context: Any) -> provider_pb2.MachineList:
        self.lists += 1
        hostile = [
            sound("a\nb"),
            sound("\x1b[2J"),
            sound("x" * 1_000_000),
            sound("free", price_per_hour=float("nan")),
            sound("dear", price_per_hour=float("inf")),
            sound("labels", labels={f"k{self.lists}": "v" * LABELS_BYTES}),
            sound("huge", price_per_hour=9.0, resources=provider_pb2.Resources(resources={"cpu": "1e400"})),
            sound("odd", price_per_hour=9.0, resources=provider_pb2.Resources(resources={"cpu": "1m"})),
            sound("broken", state=provider_pb2.MACHINE_STATE_FAILED, last_error="\x1b[2J\n" * 200_000),
        ]
        return provider_pb2.MachineList(machines=[*hostile, *self.machines.values()], revision=b"r" * 5_000_000)

    def Configure(self, request: provider_pb2.ConfigureRequest, context: Any) -> provider_pb2.TransitionAck:
        if request.machine_id not in self.machines:
            context.abort(grpc.StatusCode.INTERNAL, "\x1b[2J\n" + "q" * 1_000_000)
        self.machines[request.machine_id] = sound(
            request.machine_id,
            state=provider_pb2.MACHINE_STATE_CONFIGURED,
            cluster=request.cluster_id,
            shard_metadata=request.shard_metadata,
        )
        return provider_pb2.TransitionAck(operation_id="o" * 1_000_000, machine=self.machines[request.machine_id])

    def Create(self, _request: provider_pb2.CreateRequest, context: Any) -> provider_pb2.TransitionAck:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "no Create")
        raise AssertionError

    def Drain(self, _request: provider_pb2.DrainRequest, context: Any) -> provider_pb2.TransitionAck:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "no Drain")
        raise AssertionError

    def Delete(self, _request: provider_pb2.DeleteRequest, context: Any) -> provider_pb2.TransitionAck:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "no Delete")
        raise AssertionError

    def Get(self, request: provider_pb2.MachineRef, context: Any) -> provider_pb2.Machine:
        if request.id not in self.machines:
            context.abort(grpc.StatusCode.NOT_FOUND, "\x1b[2J\n" + "q" * 1_000_000)
        return self.machines[request.id]


@pytest.fixture
def hostile() -> Iterator[tuple[HostileProvider, str]]:
    """A hostile provider that serves, and its address."""
    provider, address = HostileProvider(), f"127.0.0.1:{free_port()}"
    server = grpc.server(futures.ThreadPoolExecutor(4), options=[("grpc.max_send_message_length", -1)])
    provider_pb2_grpc.add_CapacityProviderServicer_to_server(provider, server)
    server.add_insecure_port(address)
    server.start()
    yield provider, address
    server.stop(0).wait()


def peak_mib(pid: int) -> int:
    """Return the most memory that a process had."""
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) // 1024


@pytest.mark.slow
def test_a_hostile_provider_costs_its_own_records_only(tmp_path: Path, hostile: tuple[HostileProvider, str]) -> None:
    """Sound machines are bound, memory is bounded, nothing raw is logged, and metrics name the reason."""
    provider, address = hostile
    with live_shard(tmp_path / "shard", address, "--incremental-reconcile") as shard:
        operator = LiveOperator(shard.address, "c1")
        assert shard.process is not None
        first = peak_mib(shard.process.pid)
        operator.report("16")
        until(lambda: shard.bound("c1"), lambda bound: set(bound) >= set(SOUND), "the sound machines were never bound")
        listed = provider.lists
        until(lambda: provider.lists, lambda lists: lists >= listed + LISTS, "the shard stopped listing")

        assert set(shard.machines()) - set(SOUND) == {"huge", "odd", "broken"} & set(shard.machines())
        assert shard.metric('machines_rejected_total{reason="limits"}') >= 2 * LISTS
        assert shard.metric("cycle_failures_total") == 0
        assert peak_mib(shard.process.pid) - first < GROWTH_MIB_MAX
        operator.close()
    log = shard.log.read_text()
    assert ("Traceback" in log, '"exception"' in log, "\x1b" in log) == (False, False, False)
    assert max(map(len, log.splitlines())) <= 8 * 1024
