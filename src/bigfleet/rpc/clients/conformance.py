"""Calls a provider for the suite: one channel per connection; returns every status and trailing detail.

docs/spec/wire.md §2, §6; docs/spec/provider.md §23. It shares no code with the shard's client, so that an error of one
is not repeated in the other. This module must not judge, retry, or leave out a field.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bigfleet.conformance.ports import (
    Answer,
    Configure,
    Create,
    Delete,
    Drain,
    Get,
    HostSeen,
    List,
    ListSeen,
    MachineSeen,
    Request,
    SiteFault,
    Status,
)
from bigfleet.model.clock import Clock
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.rpc.security.tls import TlsFiles, channel_credentials
from bigfleet.rpc.wire.gen import provider_pb2 as pb

#: Beyond the suite's own deadlines, which end first and say so.
_CALL_SECONDS_MAX = 35.0
_LIST_SECONDS_MAX = 125.0
_DETAILS_CHARACTERS_MAX = 1024
_RECEIVE_BYTES_MAX = 1024 * 1024 * 1024
_SERVICE = pb.DESCRIPTOR.services_by_name["CapacityProvider"].full_name
_HEALTH_SECONDS_MAX = 1.0
_PROBE_SECONDS = 0.05
_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", _RECEIVE_BYTES_MAX),
    # The provider says what is too large for it.
    ("grpc.max_send_message_length", -1),
    # A call is one attempt: a retried one would look like a repeat that the suite never made.
    ("grpc.enable_retries", 0),
    ("grpc.service_config_disable_resolution", 1),
    # Two connections must be two connections.
    ("grpc.use_local_subchannel_pool", 1),
    # A provider that was started again is found at once.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.min_reconnect_backoff_ms", 5_000),
)
_STATES = {state.value: state for state in MachineState}
_CAPACITY_TYPES = {kind.value: kind for kind in CapacityType}
_ANSWERS: Mapping[type[Request], type[Message]] = {
    Create: pb.TransitionAck,
    Configure: pb.TransitionAck,
    Drain: pb.TransitionAck,
    Delete: pb.TransitionAck,
    Get: pb.Machine,
    List: pb.MachineList,
}


def open_channel(address: str, tls: TlsFiles | None) -> aio.Channel:
    """Return a channel of its own connection, in plain text without `tls`. Made on a running event loop."""
    if tls is None:
        return aio.insecure_channel(address, options=_OPTIONS)
    return aio.secure_channel(address, channel_credentials(tls.current(), tls.authority), options=_OPTIONS)


class GrpcConnection:
    """One connection to a provider, which dials when it is first used. Made on a running event loop."""

    def __init__(self, address: str, tls: TlsFiles | None = None) -> None:
        self._address = address
        self._tls = tls
        self._channel, self._methods = self._dialled()

    def _dialled(self) -> "tuple[aio.Channel, dict[type[Request], aio.UnaryUnaryMultiCallable[bytes, bytes]]]":
        channel = open_channel(self._address, self._tls)
        # Bytes in and out: gRPC would log what it cannot parse, and hand on nothing.
        return channel, {kind: channel.unary_unary(f"/{_SERVICE}/{kind.__name__}", None, None) for kind in _ANSWERS}

    async def redial(self) -> None:
        """Leave the connection of a peer that died; a channel that waits to dial again would refuse calls meanwhile."""
        old = self._channel
        self._channel, self._methods = self._dialled()
        await old.close(grace=None)

    async def call(self, request: Request) -> Answer:
        """Carry a request and return how it ended; what cannot be read is UNKNOWN."""
        kind = type(request)
        deadline_seconds = _LIST_SECONDS_MAX if kind is List else _CALL_SECONDS_MAX
        call = self._methods[kind](message_of(request).SerializeToString(), timeout=deadline_seconds)
        try:
            content: bytes = await call
        except aio.AioRpcError as error:
            return Answer(
                status=Status[error.code().name],
                details=(error.details() or "")[:_DETAILS_CHARACTERS_MAX],
                trailing=_texts(error.trailing_metadata()),
            )
        trailing = _texts(await call.trailing_metadata())
        answer = _ANSWERS[kind]
        try:
            return _answered(answer.FromString(content), trailing)
        except DecodeError:
            return Answer(status=Status.UNKNOWN, details=f"the answer is no {answer.DESCRIPTOR.name}")

    async def close(self) -> None:
        """Close the channel; calls that are under way end CANCELLED."""
        await self._channel.close(grace=None)


def message_of(request: Request) -> Message:
    """Return the message of a request."""
    match request:
        case Get():
            return pb.MachineRef(id=request.machine_id)
        case List():
            states = [pb.MachineState.ValueType(state.value) for state in request.states]
            return pb.ListFilter(states=states, max_results=request.results_max, since_revision=request.since)
        case _:
            pass
    shard_id, epoch, sequence = request.token
    match request:
        case Create():
            return pb.CreateRequest(
                machine_id=request.machine_id, shard_id=shard_id, shard_epoch=epoch, sequence_number=sequence
            )
        case Configure():
            return pb.ConfigureRequest(
                machine_id=request.machine_id,
                cluster_id=request.cluster,
                bootstrap_blob=request.blob,
                shard_metadata=request.metadata,
                shard_id=shard_id,
                shard_epoch=epoch,
                sequence_number=sequence,
            )
        case Drain():
            return pb.DrainRequest(
                machine_id=request.machine_id,
                grace_period_seconds=request.grace_seconds,
                shard_id=shard_id,
                shard_epoch=epoch,
                sequence_number=sequence,
            )
        case Delete():
            return pb.DeleteRequest(
                machine_id=request.machine_id, shard_id=shard_id, shard_epoch=epoch, sequence_number=sequence
            )


def _answered(message: Message, trailing: tuple[tuple[str, str], ...]) -> Answer:
    if isinstance(message, pb.TransitionAck):
        machine = machine_seen(message.machine) if message.HasField("machine") else None
        return Answer(status=Status.OK, operation_id=message.operation_id, machine=machine, trailing=trailing)
    if isinstance(message, pb.Machine):
        return Answer(status=Status.OK, machine=machine_seen(message), trailing=trailing)
    assert isinstance(message, pb.MachineList), "there are three kinds of answers"
    listing = ListSeen(
        machines=tuple(machine_seen(machine) for machine in message.machines),
        revision=message.revision,
        removed_ids=tuple(message.removed_ids),
        tombstones=message.tombstones,
    )
    return Answer(status=Status.OK, listing=listing, trailing=trailing)


def machine_seen(message: pb.Machine) -> MachineSeen:
    """Return a machine field by field."""
    return MachineSeen(
        id=message.id,
        state=_STATES.get(message.state, MachineState.UNSPECIFIED),
        host=HostSeen(message.host.provider, message.host.ref) if message.HasField("host") else None,
        instance_type=message.instance_type,
        zone=message.zone,
        capacity_type=_CAPACITY_TYPES.get(message.capacity_type, CapacityType.UNSPECIFIED),
        price_usd_per_hour=message.price_per_hour,
        interruption_probability=message.interruption_probability,
        resources=dict(message.resources.resources),
        allocatable=dict(message.allocatable.resources),
        labels=dict(message.labels),
        last_error=message.last_error,
        cluster=message.cluster,
        metadata=dict(message.shard_metadata),
        node_name=message.node_name,
    )


def _texts(metadata: Iterable[Any] | None) -> tuple[tuple[str, str], ...]:
    return tuple((str(key), value if isinstance(value, str) else value.hex()) for key, value in metadata or ())


async def until_serving(address: str, tls: TlsFiles | None, clock: Clock, *, seconds_max: float) -> None:
    """Return once the health service says SERVING, or that it does not exist, which only a server can say.

    Raises SiteFault when that takes longer than `seconds_max`.
    """
    until_seconds = clock.monotonic_seconds() + seconds_max
    channel = open_channel(address, tls)
    try:
        while True:
            text = await _health_fault(channel)
            if not text:
                return
            if clock.monotonic_seconds() >= until_seconds:
                raise SiteFault(f"{address} did not serve within {seconds_max:g} s: {text}")
            await clock.sleep(_PROBE_SECONDS)
    finally:
        await channel.close(grace=None)


async def _health_fault(channel: aio.Channel) -> str:
    """Return why the peer does not serve yet, empty when it does."""
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=_HEALTH_SECONDS_MAX)
    except aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return ""
        return f"{error.code().name}: {(error.details() or '')[:_DETAILS_CHARACTERS_MAX]}"
    serving = health_pb2.HealthCheckResponse.SERVING
    return "" if answer.status == serving else "its health service says that it is not SERVING"
