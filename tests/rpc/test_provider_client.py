"""A shard's calls to a provider, over a real gRPC server on loopback: what arrives, and what each failure means."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from grpc import aio

from bigfleet.model.ids import ClusterId, MachineId, ShardId
from bigfleet.model.states import MachineState
from bigfleet.rpc.clients.provider import GrpcProvider, ProviderDeadlines
from bigfleet.rpc.wire.gen import provider_pb2, provider_pb2_grpc
from bigfleet.shard.ports import (
    FenceToken,
    ListedMachine,
    Listing,
    Provider,
    ProviderRefusal,
    RefusalKind,
    TransitionAck,
)
from tests.patience import PATIENCE_SECONDS

M1 = MachineId("m-1")
TOKEN = FenceToken(ShardId("shard-0"), 3, 41)
TOKEN_FIELDS = {"shard_id": "shard-0", "shard_epoch": 3, "sequence_number": 41}
#: Only ends a test that would hang; nothing waits for it.

Call = Callable[[Provider], Awaitable[object]]
CALLS: dict[str, Call] = {
    "Create": lambda provider: provider.create(M1, TOKEN),
    "Configure": lambda provider: provider.configure(M1, ClusterId("blue"), b"blob", {"k": "v"}, TOKEN),
    "Drain": lambda provider: provider.drain(M1, 30, TOKEN),
    "Delete": lambda provider: provider.delete(M1, TOKEN),
    "Get": lambda provider: provider.get(M1),
    "List": lambda provider: provider.list(b"cursor"),
}


class CountingClock:
    """A clock that gains a second whenever it is read; a sleep of nothing lets other tasks run."""

    def __init__(self) -> None:
        self.now_seconds = 0.0
        self.turns = 0

    def monotonic_seconds(self) -> float:
        self.now_seconds += 1.0
        return self.now_seconds

    def unix_nanos(self) -> int:
        return 0

    async def sleep(self, seconds: float) -> None:
        assert seconds == 0
        self.turns += 1
        await asyncio.sleep(0)


class ScriptedProvider(provider_pb2_grpc.CapacityProviderServicer):
    """Keeps what it is asked, and answers every call as it was told to."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.status: tuple[grpc.StatusCode, str] | None = None
        self.hangs = False
        self.arrived = asyncio.Event()
        self.machine = provider_pb2.Machine(id=M1, state=provider_pb2.MACHINE_STATE_CREATING)
        self.listing = provider_pb2.MachineList()

    async def _answer(self, request: Any, context: Any, answer: Any) -> Any:
        self.asked.append(request)
        self.arrived.set()
        if self.hangs:
            await asyncio.Event().wait()
        if self.status is not None:
            await context.abort(*self.status)
        return answer

    async def _ack(self, request: Any, context: Any) -> Any:
        return await self._answer(
            request, context, provider_pb2.TransitionAck(operation_id="op-1", machine=self.machine)
        )

    async def Create(self, request: Any, context: Any) -> Any:
        return await self._ack(request, context)

    async def Configure(self, request: Any, context: Any) -> Any:
        return await self._ack(request, context)

    async def Drain(self, request: Any, context: Any) -> Any:
        return await self._ack(request, context)

    async def Delete(self, request: Any, context: Any) -> Any:
        return await self._ack(request, context)

    async def Get(self, request: Any, context: Any) -> Any:
        return await self._answer(request, context, self.machine)

    async def List(self, request: Any, context: Any) -> Any:
        return await self._answer(request, context, self.listing)


class World:
    """One provider on a port of loopback that can be killed and brought back, and its client."""

    def __init__(self) -> None:
        self.servicer = ScriptedProvider()
        self.clock = CountingClock()
        self.calls: list[tuple[str, str, float]] = []
        self.port = 0
        self.server: aio.Server | None = None

    async def start(self) -> None:
        self.server = aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", 4 * 1024 * 1024),
                ("grpc.max_send_message_length", -1),
            ]
        )
        provider_pb2_grpc.add_CapacityProviderServicer_to_server(self.servicer, self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self.server.start()

    async def kill(self) -> None:
        if self.server is not None:
            await self.server.stop(None)
            self.server = None

    def client(self, deadlines: ProviderDeadlines | None = None) -> GrpcProvider:
        return GrpcProvider(
            f"127.0.0.1:{self.port}",
            deadlines=deadlines,
            clock=self.clock,
            on_call=lambda method, code, seconds: self.calls.append((method, code, seconds)),
        )


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    await world.start()
    yield world
    await world.kill()


@pytest.fixture
async def provider(world: World) -> AsyncIterator[GrpcProvider]:
    client = world.client()
    yield client
    await client.close()


async def refusal(call: Awaitable[object]) -> ProviderRefusal:
    """Return the refusal that the call ends in."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        with pytest.raises(ProviderRefusal) as caught:
            await call
    return caught.value


class TestAnswers:
    """What is asked and what comes back."""

    async def test_each_call_carries_its_fields_and_its_token(self, world: World, provider: Provider) -> None:
        """All six requests, spelled out; Get and List carry no token."""
        for call in CALLS.values():
            await call(provider)

        assert world.servicer.asked == [
            provider_pb2.CreateRequest(machine_id=M1, **TOKEN_FIELDS),  # type: ignore[arg-type]
            provider_pb2.ConfigureRequest(
                machine_id=M1,
                cluster_id="blue",
                bootstrap_blob=b"blob",
                shard_metadata={"k": "v"},
                **TOKEN_FIELDS,  # type: ignore[arg-type]
            ),
            provider_pb2.DrainRequest(machine_id=M1, grace_period_seconds=30, **TOKEN_FIELDS),  # type: ignore[arg-type]
            provider_pb2.DeleteRequest(machine_id=M1, **TOKEN_FIELDS),  # type: ignore[arg-type]
            provider_pb2.MachineRef(id=M1),
            provider_pb2.ListFilter(since_revision=b"cursor"),
        ]

    async def test_an_ack_has_the_operation_and_the_record(self, world: World, provider: Provider) -> None:
        """The record is that of acceptance, its metadata beside it."""
        world.servicer.machine.shard_metadata["k"] = "v"
        ack = await provider.create(M1, TOKEN)

        assert isinstance(ack, TransitionAck)
        assert ack.operation_id == "op-1"
        assert (ack.record.machine.id, ack.record.machine.state) == (M1, MachineState.CREATING)
        assert ack.record.metadata == {"k": "v"}

    async def test_an_ack_without_a_machine_has_no_state(self, world: World, provider: Provider) -> None:
        """It is for the inventory to refuse: nothing is made up."""
        world.servicer.machine.Clear()
        ack = await provider.create(M1, TOKEN)

        assert (ack.record.machine.id, ack.record.machine.state) == ("", MachineState.UNSPECIFIED)

    async def test_get_returns_a_record(self, provider: Provider) -> None:
        """Machine and metadata."""
        record = await provider.get(M1)

        assert isinstance(record, ListedMachine)
        assert record.machine.id == M1

    async def test_list_returns_records_cursor_and_removals(self, world: World, provider: Provider) -> None:
        """In the provider's order."""
        world.servicer.listing = provider_pb2.MachineList(
            machines=[provider_pb2.Machine(id="b"), provider_pb2.Machine(id="a")],
            revision=b"\x00\xff",
            removed_ids=["gone"],
            tombstones=True,
        )
        listing = await provider.list(b"")

        assert isinstance(listing, Listing)
        assert [record.machine.id for record in listing.records] == ["b", "a"]
        assert (listing.revision, listing.removed_ids, listing.tombstones) == (b"\x00\xff", ("gone",), True)

    async def test_a_long_list_lets_other_tasks_run(self, world: World, provider: Provider) -> None:
        """Reading a large fleet never holds sessions up for its whole length."""
        world.servicer.listing = provider_pb2.MachineList(machines=[provider_pb2.Machine(id="m")] * 5_600)
        listing = await provider.list(b"")

        assert len(listing.records) == 5_600
        assert world.clock.turns == 3

    async def test_a_list_may_be_larger_than_grpcs_own_limit(self, world: World, provider: Provider) -> None:
        """By default gRPC refuses messages over 4 MiB."""
        notes = {"notes": "x" * 100_000}
        machines = [provider_pb2.Machine(id=f"m{number}", labels=notes) for number in range(50)]
        world.servicer.listing = provider_pb2.MachineList(machines=machines)
        listing = await provider.list(b"")

        assert {len(each.machine.labels["notes"]) for each in listing.records} == {100_000}
        assert len(listing.records) == 50


class TestRefusals:
    """What a status means, by its code alone."""

    @pytest.mark.rule("shard 9.6/2", "shard 9.7/2")
    @pytest.mark.parametrize(
        ("code", "kind"),
        [
            (grpc.StatusCode.FAILED_PRECONDITION, RefusalKind.FENCED),
            (grpc.StatusCode.NOT_FOUND, RefusalKind.NOT_FOUND),
            (grpc.StatusCode.UNIMPLEMENTED, RefusalKind.NOT_SUPPORTED),
            (grpc.StatusCode.UNAVAILABLE, RefusalKind.UNKNOWN_OUTCOME),
            (grpc.StatusCode.DEADLINE_EXCEEDED, RefusalKind.UNKNOWN_OUTCOME),
            (grpc.StatusCode.CANCELLED, RefusalKind.UNKNOWN_OUTCOME),
            (grpc.StatusCode.RESOURCE_EXHAUSTED, RefusalKind.EXHAUSTED),
            (grpc.StatusCode.ALREADY_EXISTS, RefusalKind.REFUSED),
            (grpc.StatusCode.ABORTED, RefusalKind.REFUSED),
            (grpc.StatusCode.INTERNAL, RefusalKind.REFUSED),
            (grpc.StatusCode.UNKNOWN, RefusalKind.REFUSED),
            (grpc.StatusCode.INVALID_ARGUMENT, RefusalKind.REFUSED),
            (grpc.StatusCode.PERMISSION_DENIED, RefusalKind.REFUSED),
            (grpc.StatusCode.UNAUTHENTICATED, RefusalKind.REFUSED),
            (grpc.StatusCode.OUT_OF_RANGE, RefusalKind.REFUSED),
            (grpc.StatusCode.DATA_LOSS, RefusalKind.REFUSED),
        ],
    )
    async def test_each_status_is_one_kind(
        self, world: World, provider: Provider, code: grpc.StatusCode, kind: RefusalKind
    ) -> None:
        """Code and text reach the message; each call is made exactly once, whatever the status."""
        world.servicer.status = (code, "no such luck")
        refused = await refusal(provider.create(M1, TOKEN))

        assert (kind, f"{code.name}: no such luck") == (refused.kind, str(refused))
        assert len(world.servicer.asked) == 1

    @pytest.mark.rule("shard 9.6/2")
    async def test_every_code_of_grpc_is_tried(self) -> None:
        """The table above leaves none out but OK."""
        (mark,) = (
            mark
            for mark in TestRefusals.test_each_status_is_one_kind.pytestmark  # type: ignore[attr-defined]
            if mark.name == "parametrize"
        )

        assert {code for code, _kind in mark.args[1]} == set(grpc.StatusCode) - {grpc.StatusCode.OK}

    @pytest.mark.parametrize("method", CALLS)
    async def test_every_method_refuses_alike(self, world: World, provider: Provider, method: str) -> None:
        """Reads as well as mutations."""
        world.servicer.status = (grpc.StatusCode.NOT_FOUND, "")

        assert (await refusal(CALLS[method](provider))).kind is RefusalKind.NOT_FOUND

    async def test_a_long_text_is_cut(self, world: World, provider: Provider) -> None:
        """A provider's text reaches logs and records within a bound."""
        world.servicer.status = (grpc.StatusCode.ABORTED, "x" * 4_000)

        assert str(await refusal(provider.create(M1, TOKEN))) == "ABORTED: " + "x" * 1_024

    async def test_a_request_that_is_too_large_is_exhausted(self, provider: Provider) -> None:
        """A provider's server takes 4 MiB and says so itself."""
        call = provider.configure(M1, ClusterId("blue"), bytes(5_000_000), {}, TOKEN)

        assert (await refusal(call)).kind is RefusalKind.EXHAUSTED

    async def test_a_call_over_its_deadline_has_an_unknown_outcome(self, world: World) -> None:
        """It arrived, so it may have been applied; List has a deadline of its own."""
        world.servicer.hangs = True
        client = world.client(ProviderDeadlines(call_seconds=0.05, list_seconds=0.05))
        kinds = {method: (await refusal(call(client))).kind for method, call in CALLS.items()}
        await client.close()

        assert dict.fromkeys(CALLS, RefusalKind.UNKNOWN_OUTCOME) == kinds
        assert {code for _method, code, _seconds in world.calls} == {"DEADLINE_EXCEEDED"}

    async def test_an_answer_that_is_no_message_has_an_unknown_outcome(self, world: World) -> None:
        """The call was taken and nobody can say what it answered."""

        async def babble(_request: bytes, _context: Any) -> bytes:
            return b"\xff\xff\xff"

        handler = grpc.method_handlers_generic_handler(
            "bigfleet.v1alpha1.CapacityProvider", {"Create": grpc.unary_unary_rpc_method_handler(babble)}
        )
        server = aio.server()
        server.add_generic_rpc_handlers((handler,))
        world.port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        client = world.client()
        refused = await refusal(client.create(M1, TOKEN))
        await client.close()
        await server.stop(None)

        assert refused.kind is RefusalKind.UNKNOWN_OUTCOME
        assert "is no TransitionAck" in str(refused)


class TestConnection:
    """Providers that die, hang or come back."""

    @pytest.mark.rule("shard 15/5")
    async def test_nobody_listens(self, world: World, provider: Provider) -> None:
        """A provider that is down: unavailable at once, not after the deadline."""
        await world.kill()

        assert (await refusal(provider.create(M1, TOKEN))).kind is RefusalKind.UNKNOWN_OUTCOME
        assert [(method, code) for method, code, _seconds in world.calls] == [("Create", "UNAVAILABLE")]

    async def test_a_provider_killed_during_a_call_leaves_its_outcome_unknown(
        self, world: World, provider: Provider
    ) -> None:
        """The call arrived, nobody knows what became of it, and nothing is sent again."""
        world.servicer.hangs = True
        calling = asyncio.create_task(refusal(provider.create(M1, TOKEN)))
        await world.servicer.arrived.wait()
        await world.kill()
        await world.start()

        assert (await calling).kind is RefusalKind.UNKNOWN_OUTCOME
        assert len(world.servicer.asked) == 1

    async def test_a_connection_cut_during_a_call_leaves_its_outcome_unknown(self, world: World) -> None:
        """The peer takes the bytes and hangs up without a word."""
        arrived: list[bytes] = []

        async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            # An empty SETTINGS frame makes the client believe that it speaks with an HTTP/2 server.
            writer.write(b"\x00\x00\x00\x04\x00\x00\x00\x00\x00")
            content = b""
            while b"shard-0" not in content:
                piece = await reader.read(65536)
                if not piece:
                    break
                content += piece
            else:
                arrived.append(content)
            writer.transport.abort()

        async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as listener:
            world.port = listener.sockets[0].getsockname()[1]
            client = world.client()
            refused = await refusal(client.create(M1, TOKEN))
            await client.close()

        assert refused.kind is RefusalKind.UNKNOWN_OUTCOME
        assert len(arrived) == 1

    async def test_a_provider_that_comes_back_is_called_again(self, world: World, provider: Provider) -> None:
        """The same client reaches it on the same address, without anybody's help."""
        await provider.create(M1, TOKEN)
        await world.kill()
        await refusal(provider.create(M1, TOKEN))
        await world.start()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                try:
                    record = await provider.get(M1)
                    break
                except ProviderRefusal as refused:
                    assert refused.kind is RefusalKind.UNKNOWN_OUTCOME  # noqa: PT017 - each failure on the way

        assert record.machine.id == M1

    async def test_a_cancelled_task_gets_its_cancellation(self, world: World, provider: Provider) -> None:
        """No refusal takes its place, or a shard would go on after it was stopped."""
        world.servicer.hangs = True
        calling = asyncio.ensure_future(provider.create(M1, TOKEN))
        await world.servicer.arrived.wait()
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling

        assert [(method, code) for method, code, _seconds in world.calls] == [("Create", "CANCELLED")]

    async def test_a_callers_own_timeout_stays_a_timeout(self, world: World, provider: Provider) -> None:
        """What `asyncio.timeout` ends reads as TimeoutError around the call."""
        world.servicer.hangs = True
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):  # expires
                await provider.create(M1, TOKEN)

    async def test_closing_ends_calls_with_an_unknown_outcome(self, world: World) -> None:
        """A task that nobody cancelled gets a refusal; so does a call after the end."""
        client = world.client()
        world.servicer.hangs = True
        calling = asyncio.create_task(refusal(client.create(M1, TOKEN)))
        await world.servicer.arrived.wait()
        await client.close()

        assert (await calling).kind is RefusalKind.UNKNOWN_OUTCOME
        assert (await refusal(client.get(M1))).kind is RefusalKind.UNKNOWN_OUTCOME

    @pytest.mark.rule("shard 14/10")
    async def test_each_call_is_told_with_its_code_and_time(self, world: World, provider: Provider) -> None:
        """One line per call on the injected clock: for metrics."""
        await provider.create(M1, TOKEN)
        world.servicer.status = (grpc.StatusCode.ABORTED, "out of position")
        await refusal(provider.drain(M1, 0, TOKEN))

        assert world.calls == [("Create", "OK", 1.0), ("Drain", "ABORTED", 1.0)]
