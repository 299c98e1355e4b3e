"""The six RPCs over real gRPC on loopback, with their status codes (docs/spec/provider.md §1, §3)."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bigfleet.provider.backends.fake import FakeBackend
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.records.kinds import Kind
from bigfleet.rpc.grpc_server import GrpcServer, ListenFault
from bigfleet.rpc.servers.provider import RECEIVE_BYTES_MAX, SEND_BYTES_MAX, SERVICE, ProviderServicer
from bigfleet.rpc.wire.gen import provider_pb2 as pb
from bigfleet.rpc.wire.gen import provider_pb2_grpc
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.provider.harness import make_core, started

#: A call on the asynchronous stub, whose type exists for type checkers only.
Call = Callable[[Any], Awaitable[object]]


class Served:
    """A core behind a server, and a stub in front of it."""

    def __init__(self, core: CapacityCore, backend: FakeBackend, channel: aio.Channel, port: int) -> None:
        self.core, self.backend, self.channel, self.port = core, backend, channel, port
        self.stub: Any = provider_pb2_grpc.CapacityProviderStub(channel)

    async def until(self, machine_id: str, state: "pb.MachineState.ValueType") -> pb.Machine:
        for _ in range(1000):
            machine: pb.Machine = await self.stub.Get(pb.MachineRef(id=machine_id))
            if machine.state == state:
                return machine
            await asyncio.sleep(0)
        raise AssertionError(f"{machine_id} is {machine.state}")


def server_of(core: CapacityCore) -> GrpcServer:
    return GrpcServer(
        services=(SERVICE,),
        register=ProviderServicer(core, LoopClock()).register,
        receive_bytes_max=RECEIVE_BYTES_MAX,
        send_bytes_max=SEND_BYTES_MAX,
    )


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    backend = FakeBackend(9)
    core = await started(make_core(backend))
    server = server_of(core)
    port = await server.start("127.0.0.1", 0)
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Served(core, backend, channel, port)
    await server.stop(0)
    await core.stop()


async def code_of(call: Awaitable[object]) -> grpc.StatusCode:
    try:
        await call
    except aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_a_whole_life_over_the_wire(served: Served) -> None:
    stub = served.stub
    listing = await stub.List(pb.ListFilter())
    assert len(listing.machines) == 9
    assert not listing.tombstones
    created = await stub.Create(pb.CreateRequest(machine_id="fake-0", shard_id="s", shard_epoch=1, sequence_number=1))
    assert created.operation_id.startswith("op-")
    assert created.machine.state == pb.MACHINE_STATE_CREATING
    machine = await served.until("fake-0", pb.MACHINE_STATE_IDLE)
    assert (machine.host.provider, machine.host.ref) == ("fake", "host-fake-0")
    metadata = {"k": "v", "ü\x00": "", "": "x"}
    ack = await stub.Configure(
        pb.ConfigureRequest(machine_id="fake-0", cluster_id="c", bootstrap_blob=b"b", shard_metadata=metadata)
    )
    assert dict(ack.machine.shard_metadata) == metadata
    machine = await served.until("fake-0", pb.MACHINE_STATE_CONFIGURED)
    assert (machine.cluster, machine.node_name, dict(machine.shard_metadata)) == ("c", "node-fake-0", metadata)
    delta = await stub.List(pb.ListFilter(since_revision=listing.revision))
    assert [m.id for m in delta.machines] == ["fake-0"]
    assert delta.machines[0] == machine
    assert delta.tombstones
    await stub.Drain(pb.DrainRequest(machine_id="fake-0", grace_period_seconds=0))
    machine = await served.until("fake-0", pb.MACHINE_STATE_IDLE)
    assert (machine.cluster, len(machine.shard_metadata)) == ("", 0)
    await stub.Delete(pb.DeleteRequest(machine_id="fake-0"))
    machine = await served.until("fake-0", pb.MACHINE_STATE_SPECULATIVE)
    assert not machine.HasField("host")


CODES: list[tuple[str, Call, grpc.StatusCode]] = [
    ("empty id", lambda s: s.Get(pb.MachineRef()), grpc.StatusCode.INVALID_ARGUMENT),
    ("unknown id", lambda s: s.Get(pb.MachineRef(id="x")), grpc.StatusCode.NOT_FOUND),
    ("create unknown", lambda s: s.Create(pb.CreateRequest(machine_id="x")), grpc.StatusCode.NOT_FOUND),
    ("out of position", lambda s: s.Drain(pb.DrainRequest(machine_id="fake-0")), grpc.StatusCode.ABORTED),
    (
        "negative grace",
        lambda s: s.Drain(pb.DrainRequest(machine_id="fake-0", grace_period_seconds=-1)),
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
    (
        "blob of 3 MiB",
        lambda s: s.Configure(pb.ConfigureRequest(machine_id="fake-0", cluster_id="c", bootstrap_blob=bytes(3 << 20))),
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
    (
        "message of 5 MiB",
        lambda s: s.Configure(pb.ConfigureRequest(machine_id="fake-0", cluster_id="c", bootstrap_blob=bytes(5 << 20))),
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    ),
]


@pytest.mark.parametrize(("call", "code"), [case[1:] for case in CODES], ids=[case[0] for case in CODES])
async def test_refusals_have_their_codes(
    served: Served,
    call: Call,
    code: grpc.StatusCode,
) -> None:
    assert await code_of(call(served.stub)) is code


async def test_the_fence_and_a_conflict_have_their_codes(served: Served) -> None:
    stub = served.stub
    request = pb.CreateRequest(machine_id="fake-1", shard_id="s", shard_epoch=1, sequence_number=1)
    assert await code_of(stub.Create(request)) is grpc.StatusCode.OK
    assert await code_of(stub.Create(request)) is grpc.StatusCode.FAILED_PRECONDITION
    await served.until("fake-1", pb.MACHINE_STATE_IDLE)
    bind = pb.ConfigureRequest(machine_id="fake-1", cluster_id="c")
    assert await code_of(stub.Configure(bind)) is grpc.StatusCode.OK
    bind.cluster_id = "other"
    assert await code_of(stub.Configure(bind)) is grpc.StatusCode.ALREADY_EXISTS


async def test_filters_caps_picks_and_garbage_cursors(served: Served) -> None:
    stub = served.stub
    unknown = await stub.List(pb.ListFilter(states=[99]))  # type: ignore[list-item]
    assert len(unknown.machines) == 0
    pick = await stub.List(pb.ListFilter(states=[pb.MACHINE_STATE_SPECULATIVE], max_results=2))
    assert (len(pick.machines), pick.revision) == (2, b"")
    full = await stub.List(pb.ListFilter(since_revision=b"garbage", max_results=-3))
    assert len(full.machines) == 9


async def test_a_bug_answers_internal_without_a_stack(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(machine_id: str) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(served.core, "get", broken)
    with pytest.raises(aio.AioRpcError) as caught:
        await served.stub.Get(pb.MachineRef(id="x"))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (caught.value.details() or "")


async def test_a_caller_that_hangs_up_does_not_undo_what_was_accepted(served: Served) -> None:
    served.backend.hold(Kind.CREATE)
    call = served.stub.Create(pb.CreateRequest(machine_id="fake-2"))
    await served.until("fake-2", pb.MACHINE_STATE_CREATING)
    call.cancel()
    served.backend.release("fake-2")
    await served.until("fake-2", pb.MACHINE_STATE_IDLE)


async def test_health_is_served_under_both_names(served: Served) -> None:
    health = health_pb2_grpc.HealthStub(served.channel)
    for service in ("", SERVICE):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_port_in_use_is_an_error(served: Served) -> None:
    with pytest.raises(ListenFault, match=f"127.0.0.1:{served.port}"):
        await server_of(served.core).start("127.0.0.1", served.port)
