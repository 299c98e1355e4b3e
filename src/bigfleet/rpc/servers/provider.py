"""Serves a provider over gRPC: the six RPCs of CapacityProvider, each a translation and nothing else.

docs/spec/provider.md §1, §3, §10; docs/spec/wire.md §6. List's answer is joined from the bytes that each record keeps,
so that a large fleet is never serialized again. This module does not decide anything.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import chain
from typing import Any, Protocol, TypeVar

import grpc
import structlog
from grpc import aio

from bigfleet.model.clock import Clock
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.states import MachineState
from bigfleet.provider.kit.core import AcceptedCall
from bigfleet.provider.metrics import ProviderMetrics
from bigfleet.provider.records.fence import NO_TOKEN, Token
from bigfleet.provider.records.record import Record
from bigfleet.provider.records.refusal import Code, NotReady, Refused
from bigfleet.provider.storage.view import ListAnswer
from bigfleet.rpc.grpc_server import MEBIBYTE
from bigfleet.rpc.security.identity import Denied, Gate
from bigfleet.rpc.wire.convert_machine import machine_to_wire, state_from_wire, state_to_wire
from bigfleet.rpc.wire.gen import provider_pb2
from bigfleet.rpc.wire.trailers import NOT_READY_TRAILER

_log = structlog.get_logger("bigfleet.rpc.servers.provider")

SERVICE = "bigfleet.v1alpha1.CapacityProvider"
#: What a provider's server takes in; what it sends has no bound.
RECEIVE_BYTES_MAX = 4 * MEBIBYTE
SEND_BYTES_MAX = -1
#: Records joined at a time, so that other threads get their turn in between.
_JOIN_CHUNK = 2048
#: Above this number the answer is joined off the loop.
_JOIN_INLINE_MAX = 5_000

Request = TypeVar("Request")
Response = TypeVar("Response")
Context = aio.ServicerContext[Any, Any]


class CapacityService(Protocol):
    """What is served; `bigfleet.provider.kit.core.CapacityCore` is one."""

    metrics: ProviderMetrics

    async def create(self, machine_id: str, *, token: Token = NO_TOKEN) -> AcceptedCall: ...

    async def configure(
        self, machine_id: str, cluster: str, blob: bytes, metadata: Mapping[str, str], *, token: Token = NO_TOKEN
    ) -> AcceptedCall: ...

    async def drain(self, machine_id: str, grace_seconds: int, *, token: Token = NO_TOKEN) -> AcceptedCall: ...

    async def delete(self, machine_id: str, *, token: Token = NO_TOKEN) -> AcceptedCall: ...

    async def get(self, machine_id: str) -> Record: ...

    async def list(
        self, states: Iterable[MachineState] = (), results_max: int = 0, since: bytes = b""
    ) -> ListAnswer: ...


def encode_list_entry(machine: Machine, metadata: Mapping[str, str]) -> tuple[bytes, bytes]:
    """Return the bytes of a MachineList that holds this machine alone, in two pieces; such pieces may be joined.

    The second piece is shared by all machines of a kind: the pieces of one message add up on the wire.
    """
    host = machine.host
    own = provider_pb2.Machine(
        id=machine.id,
        state=state_to_wire(machine.state),
        host=provider_pb2.HostRef(provider=host.provider, ref=host.ref) if host.is_present else None,
        price_per_hour=machine.price_usd_per_hour,
        interruption_probability=machine.interruption_probability,
        last_error=machine.last_error,
        cluster=machine.cluster,
        # A plain dictionary: protobuf looks at any other mapping key by key.
        shard_metadata=dict(metadata),
        node_name=machine.node_name,
    ).SerializeToString()
    kind = _kind_piece(machine)
    return _ENTRY_TAG + _varint(len(own) + len(kind)) + own, kind


#: Field `machines` of MachineList, of a length that follows.
_ENTRY_TAG = bytes([provider_pb2.MachineList.DESCRIPTOR.fields_by_name["machines"].number << 3 | 2])
#: More kinds than this are not shared at the same time; it only costs memory.
_KINDS_MAX = 65_536
_KindKey = tuple[str, str, int, int, int, int]
#: The piece of a kind, with the maps that its key names by their address: they live as long as the entry.
_KINDS: dict[_KindKey, tuple[bytes, tuple[object, ...]]] = {}


def _kind_piece(machine: Machine) -> bytes:
    """Return the bytes of what all machines of a kind have in common."""
    maps = resources, allocatable, labels = machine.resources, machine.allocatable, machine.labels
    key = (
        machine.instance_type,
        machine.zone,
        machine.capacity_type.value,
        id(resources),
        id(allocatable),
        id(labels),
    )
    known = _KINDS.get(key)
    if known is not None:
        return known[0]
    piece = machine_to_wire(
        Machine(
            id=MachineId(""),
            state=MachineState.UNSPECIFIED,
            instance_type=machine.instance_type,
            zone=machine.zone,
            capacity_type=machine.capacity_type,
            resources=machine.resources,
            allocatable=machine.allocatable,
            labels=machine.labels,
        ),
        {},
    ).SerializeToString()
    if len(_KINDS) >= _KINDS_MAX:
        _KINDS.clear()
    _KINDS[key] = (piece, maps)
    return piece


def _varint(number: int) -> bytes:
    """Return a length as protobuf writes it."""
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)


def join_list(listing: ListAnswer) -> bytes:
    """Return the bytes of the whole answer."""
    tail = provider_pb2.MachineList(
        revision=listing.revision, removed_ids=listing.removed_ids, tombstones=listing.tombstones
    ).SerializeToString()
    chunks = []
    for start in range(0, len(listing.records), _JOIN_CHUNK):
        chunk = listing.records[start : start + _JOIN_CHUNK]
        chunks.append(b"".join(chain.from_iterable([record.wire for record in chunk])))
    # Once, at the end: a buffer that grows would copy the front again and again.
    return b"".join((*chunks, tail))


class ProviderServicer:
    """The handlers of one service."""

    def __init__(self, service: CapacityService, clock: Clock, gate: Gate | None = None) -> None:
        self._service = service
        self._clock = clock
        self._gate = gate or Gate()
        self._gate.on_role_refused.append(self._count_role_refused)

    def register(self, server: aio.Server) -> None:
        """Add the service to a server."""
        messages = provider_pb2
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Create": self._handler("Create", self._create, messages.CreateRequest.FromString, _serialize),
            "Configure": self._handler("Configure", self._configure, messages.ConfigureRequest.FromString, _serialize),
            "Drain": self._handler("Drain", self._drain, messages.DrainRequest.FromString, _serialize),
            "Delete": self._handler("Delete", self._delete, messages.DeleteRequest.FromString, _serialize),
            "Get": self._handler("Get", self._get, messages.MachineRef.FromString, _serialize),
            "List": self._handler("List", self._list, messages.ListFilter.FromString, bytes),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    def _handler(
        self,
        method: str,
        answer: Callable[[Request], Awaitable[Response]],
        parse: Callable[[bytes], Request],
        serialize: Callable[[Response], bytes],
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        metrics = self._service.metrics

        async def handle(request: Request, context: Context) -> Response:
            started_seconds = self._clock.monotonic_seconds()
            code, message = "OK", ""
            try:
                self._admit(context, method, request)
                return await answer(request)
            except Refused as refused:
                code, message = refused.code.value, refused.message
                if isinstance(refused, NotReady):
                    context.set_trailing_metadata((NOT_READY_TRAILER,))
            except Exception as error:  # a bug here is the log's business; the caller gets no stack
                code, message = "INTERNAL", "internal error; the provider's log has it"
                _log.error("rpc.call_failed", method=method, exc_info=error)
            finally:
                metrics.rpc_requests.labels(method, code).inc()
                metrics.rpc_seconds.labels(method).observe(self._clock.monotonic_seconds() - started_seconds)
            await context.abort(grpc.StatusCode[code], message)
            raise AssertionError("abort always raises")

        return grpc.unary_unary_rpc_method_handler(handle, parse, serialize)

    def _count_role_refused(self, rpc: str) -> None:
        _, service, method = rpc.split("/")
        if service == SERVICE:
            self._service.metrics.rpc_requests.labels(method, Code.PERMISSION_DENIED.value).inc()

    def _admit(self, context: Context, method: str, request: object) -> None:
        """Return when the caller's certificate allows the call; it comes before everything else (§3)."""
        try:
            # None for a read, which carries no token.
            self._gate.check_token(context, method, getattr(request, "shard_id", None))
        except Denied as denied:
            self._gate.log_token_refusal(context, method, denied)
            raise Refused(Code.PERMISSION_DENIED, str(denied)) from denied

    async def _create(self, request: provider_pb2.CreateRequest) -> provider_pb2.TransitionAck:
        return _ack(await self._service.create(request.machine_id, token=_token(request)))

    async def _configure(self, request: provider_pb2.ConfigureRequest) -> provider_pb2.TransitionAck:
        ack = await self._service.configure(
            request.machine_id,
            request.cluster_id,
            request.bootstrap_blob,
            dict(request.shard_metadata),
            token=_token(request),
        )
        return _ack(ack)

    async def _drain(self, request: provider_pb2.DrainRequest) -> provider_pb2.TransitionAck:
        ack = await self._service.drain(request.machine_id, request.grace_period_seconds, token=_token(request))
        return _ack(ack)

    async def _delete(self, request: provider_pb2.DeleteRequest) -> provider_pb2.TransitionAck:
        return _ack(await self._service.delete(request.machine_id, token=_token(request)))

    async def _get(self, request: provider_pb2.MachineRef) -> provider_pb2.Machine:
        record = await self._service.get(request.id)
        return machine_to_wire(record.machine, record.metadata)

    async def _list(self, request: provider_pb2.ListFilter) -> bytes:
        # UNSPECIFIED, which an unknown number reads as, matches nothing; the filter still counts as set.
        states = {state_from_wire(number) for number in request.states}
        listing = await self._service.list(states, request.max_results, request.since_revision)
        if len(listing.records) <= _JOIN_INLINE_MAX:
            answer = join_list(listing)
        else:
            answer = await asyncio.to_thread(join_list, listing)
        self._service.metrics.list_bytes.labels(listing.kind.value).observe(len(answer))
        return answer


def _token(
    request: provider_pb2.CreateRequest
    | provider_pb2.ConfigureRequest
    | provider_pb2.DrainRequest
    | provider_pb2.DeleteRequest,
) -> Token:
    return Token(request.shard_id, request.shard_epoch, request.sequence_number)


def _ack(ack: AcceptedCall) -> provider_pb2.TransitionAck:
    return provider_pb2.TransitionAck(
        operation_id=ack.operation_id, machine=machine_to_wire(ack.record.machine, ack.record.metadata)
    )


def _serialize(message: Any) -> bytes:
    serialized: bytes = message.SerializeToString()
    return serialized
