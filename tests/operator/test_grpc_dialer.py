"""The session over real gRPC: bytes that are equal for equal demand, and what a status means."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc import aio

from bigfleet.model import frames
from bigfleet.model.frames import Acknowledgement, Hello, RollUp
from bigfleet.model.ids import ClusterId
from bigfleet.model.need import Need
from bigfleet.model.profile import Operator, Profile, Requirement
from bigfleet.operator.ports import EndKind, SessionEnded
from bigfleet.rpc.clients.session import GrpcSessionDialer
from bigfleet.rpc.wire.gen import shard_pb2
from tests.patience import PATIENCE_SECONDS

Serve = Callable[[AsyncIterator[bytes], Any], Awaitable[None]]


@asynccontextmanager
async def shard(serve: Serve) -> AsyncIterator[GrpcSessionDialer]:
    """Serve Session with raw request bytes."""
    server = aio.server()
    handler = grpc.stream_stream_rpc_method_handler(
        serve,
        response_serializer=shard_pb2.ShardMessage.SerializeToString,
    )
    methods = {"Session": handler}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bigfleet.v1alpha1.Shard", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield GrpcSessionDialer(f"127.0.0.1:{port}")
    finally:
        await server.stop(None)


def roll_up(**resources: int) -> RollUp:
    profile = Profile(requirements=(Requirement("k", Operator.IN, ("b", "a")),), priority=3)
    need = Need(cluster=ClusterId("c"), profile=profile, aggregate=resources, min_unit=resources)
    return RollUp(cluster_id="c", timestamp_unix_nanos=1, needs=(need,))


async def test_equal_demand_gives_equal_bytes_whatever_the_order_it_came_in() -> None:
    received: list[bytes] = []

    async def serve(requests: AsyncIterator[bytes], context: Any) -> None:
        async for request in requests:
            received.append(request)
            if len(received) == 2:
                return

    async with shard(serve) as dialer, dialer.dial() as stream:
        await stream.send(roll_up(**dict.fromkeys("abcdefghij", 1000)))
        await stream.send(roll_up(**dict.fromkeys("jihgfedcba", 1000)))
        with pytest.raises(SessionEnded):
            await stream.receive()

    assert received[0] == received[1]


async def test_frames_go_both_ways() -> None:
    async def serve(requests: AsyncIterator[bytes], context: Any) -> None:
        hello = shard_pb2.OperatorMessage.FromString(await anext(aiter(requests)))
        ack = shard_pb2.Acknowledgement(echo=f"hello {hello.hello.cluster_id}", capabilities=["node-status"])
        await context.write(shard_pb2.ShardMessage())
        await context.write(shard_pb2.ShardMessage(ack=ack))

    async with shard(serve) as dialer, dialer.dial() as stream:
        await stream.send(Hello(cluster_id="c"))
        assert await stream.receive() is None
        answer = await stream.receive()

    assert isinstance(answer, Acknowledgement)
    assert (answer.echo, answer.capabilities) == ("hello c", frozenset({frames.CAPABILITY_NODE_STATUS}))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.ABORTED, EndKind.REPLACED),
        (grpc.StatusCode.PERMISSION_DENIED, EndKind.DENIED),
        (grpc.StatusCode.UNAVAILABLE, EndKind.LOST),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, EndKind.LOST),
        (grpc.StatusCode.INVALID_ARGUMENT, EndKind.LOST),
        (None, EndKind.LOST),
    ],
)
async def test_the_status_says_how_a_session_ended(code: grpc.StatusCode | None, kind: EndKind) -> None:
    async def serve(requests: AsyncIterator[bytes], context: Any) -> None:
        await anext(aiter(requests))
        if code is not None:
            await context.abort(code, "for the test")

    async with shard(serve) as dialer, dialer.dial() as stream:
        await stream.send(Hello(cluster_id="c"))
        with pytest.raises(SessionEnded) as received:
            await stream.receive()
        with pytest.raises(SessionEnded) as sent:
            await stream.send(Hello(cluster_id="c"))

    assert received.value.kind is sent.value.kind is kind
    assert (code.name if code else "OK") in str(received.value)


async def test_a_shard_that_is_not_there_ends_the_session_at_once() -> None:
    async with asyncio.timeout(PATIENCE_SECONDS), GrpcSessionDialer("127.0.0.1:1").dial() as stream:
        with pytest.raises(SessionEnded) as caught:
            await stream.receive()

    assert caught.value.kind is EndKind.LOST
