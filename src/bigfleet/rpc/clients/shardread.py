"""Reads a shard over gRPC: every row, machine and action that `ShardRead` shows, one at a time, as messages.

docs/spec/wire.md §9. Machines are read page by page and a stream as fast as its reader takes it, so no answer is ever
in memory as a whole. Errors are worded for people here. This module does not retry or change a shard.
"""

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Timer
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bigfleet.rpc.grpc_server import COMMAND_OPTIONS
from bigfleet.rpc.security.tls import TlsFiles, channel_credentials
from bigfleet.rpc.security.tls_mismatch import tls_advice
from bigfleet.rpc.wire.gen import shardread_pb2, shardread_pb2_grpc

#: How long connecting may take before the address counts as unreachable.
CONNECT_SECONDS_MAX: Final = 10.0
#: What the text of a call has that got no answer in time.
_UNANSWERED: Final = "Deadline Exceeded"
#: How long a shard may take to its first frame; after that a stream may last as long as somebody reads it.
FIRST_FRAME_SECONDS_MAX: Final = 60.0
#: An explanation takes seconds at full size and eight others may wait; one that cannot be replayed takes minutes.
EXPLAIN_SECONDS_MAX: Final = 300.0

T = TypeVar("T")


class ShardReadFault(Exception):
    """A call that a shard did not answer; the text gives the reason."""


class UnreachableShard(ShardReadFault):
    """No gRPC server listens at the address, or the connection broke and could not be made again."""


class ReadRefused(ShardReadFault):
    """The shard answered with a status other than OK, whose text this is."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadListing(Generic[T]):
    """A listing that has begun: what its header says, and its entries as they arrive. They can be read once."""

    #: 0: nothing has been decided yet.
    cycle: int
    #: Entries that match, before any limit.
    total: int
    entries: Iterator[T]


class ShardReader:
    """One shard, over one channel that connects again by itself.

    Each method raises UnreachableShard or ReadRefused; so does a listing while its entries are read.
    """

    def __init__(self, address: str, *, tls: TlsFiles | None = None) -> None:
        """Dial lazily, in plain text without `tls`; `address` is HOST:PORT."""
        self.address = address
        self._is_secure = tls is not None
        if tls is None:
            self._channel = grpc.insecure_channel(address, options=COMMAND_OPTIONS)
        else:
            credentials = channel_credentials(tls.current(), tls.authority)
            self._channel = grpc.secure_channel(address, credentials, options=COMMAND_OPTIONS)
        self._stub = shardread_pb2_grpc.ShardReadStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def connect(self) -> None:
        """Return once a server answers at the address. Raises UnreachableShard at the first failure, or in ten seconds.

        Health is asked, which every server serves to everybody: to hear of a channel's state otherwise takes a thread
        of gRPC's own, which does not survive that the channel is closed.
        """
        try:
            self._health.Check(health_pb2.HealthCheckRequest(service=""), timeout=CONNECT_SECONDS_MAX)
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise UnreachableShard(self._why(error.details() or "")) from error

    def needs(self, request: shardread_pb2.InspectNeedsRequest) -> ReadListing[shardread_pb2.NeedView]:
        """Return the rows of the last finished cycle: priority descending, arrival, cluster, then list order."""
        frames = self._stream(lambda: self._stub.InspectNeeds(request))
        header = _first(frames).header
        return ReadListing(cycle=header.cycle, total=header.total_needs, entries=(frame.need for frame in frames))

    def machines(self, request: shardread_pb2.ListMachinesRequest) -> ReadListing[shardread_pb2.MachineView]:
        """Return the live inventory, ids ascending, every page of it from the request's page token on.

        A machine that appears or goes between two pages is in or out, never twice.
        """
        frames = self._stream(lambda: self._stub.ListMachines(request))
        header = _first(frames).header
        return ReadListing(cycle=header.cycle, total=header.total_matched, entries=self._pages(request, frames))

    def actions(self, request: shardread_pb2.ListActionsRequest) -> Iterator[shardread_pb2.ActionRecord]:
        """Yield the actions that the shard remembers, newest first, running ones included."""
        for frame in self._stream(lambda: self._stub.ListActions(request)):
            yield frame.action

    def sessions(self, request: shardread_pb2.ListSessionsRequest) -> Iterator[shardread_pb2.SessionView]:
        """Yield how each cluster's operator and the shard stand, cluster ids ascending."""
        for frame in self._stream(lambda: self._stub.ListSessions(request)):
            yield frame.session

    def exchanges(self, request: shardread_pb2.ListExchangesRequest) -> Iterator[shardread_pb2.ClusterExchangesView]:
        """Yield what could be exchanged in each cluster, cluster ids ascending."""
        for frame in self._stream(lambda: self._stub.ListExchanges(request)):
            yield frame.exchanges

    def explain_need(self, request: shardread_pb2.ExplainNeedRequest) -> shardread_pb2.ExplainNeedResponse:
        """Return why a row got what it got in the last finished cycle."""
        try:
            return self._stub.ExplainNeed(request, timeout=EXPLAIN_SECONDS_MAX)
        except grpc.RpcError as error:
            raise self._fault(error) from error

    def explain_machine(self, request: shardread_pb2.ExplainMachineRequest) -> shardread_pb2.ExplainMachineResponse:
        """Return why the last finished cycle decided on a machine as it did, and its actions."""
        try:
            return self._stub.ExplainMachine(request, timeout=EXPLAIN_SECONDS_MAX)
        except grpc.RpcError as error:
            raise self._fault(error) from error

    def _why(self, details: str) -> str:
        """Return why there is no connection, as far as a bare one and the text of gRPC show."""
        host, _colon, port = self.address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS_MAX).close()
        except TimeoutError:
            return f"no answer within {CONNECT_SECONDS_MAX:.0f} s"
        except OSError as error:
            return (error.strerror or str(error)).lower()
        if _UNANSWERED in details:
            return "a process listens there and does not answer in time: it may hang, be stopped or be overloaded"
        advice = tls_advice(details, is_secure=self._is_secure)
        if self._is_secure:
            return f"a process listens there, but the TLS handshake failed: {advice or 'its server may have no TLS'}"
        return f"a process listens there that speaks no gRPC in plain text{': ' if advice else ''}{advice}"

    def _pages(
        self, request: shardread_pb2.ListMachinesRequest, frames: Iterator[shardread_pb2.ListMachinesResponse]
    ) -> Iterator[shardread_pb2.MachineView]:
        asked = shardread_pb2.ListMachinesRequest()
        asked.CopyFrom(request)
        while True:
            token = ""
            for frame in frames:
                match frame.WhichOneof("frame"):
                    case "machine":
                        yield frame.machine
                    case "end":
                        token = frame.end.next_page_token
            if not token:
                return
            asked.page_token = token
            frames = self._stream(lambda: self._stub.ListMachines(asked))

    def _stream(self, call: Callable[[], Any]) -> Iterator[Any]:
        """Yield the frames of a stream; one whose reader leaves is cancelled."""
        stream = call()
        is_late = Timer(FIRST_FRAME_SECONDS_MAX, stream.cancel)
        is_late.daemon = True
        is_late.start()
        try:
            for frame in stream:
                is_late.cancel()
                yield frame
        except grpc.RpcError as error:
            raise self._fault(error) from error
        finally:
            is_late.cancel()
            stream.cancel()

    def _fault(self, error: grpc.RpcError) -> ShardReadFault:
        code, text = error.code(), error.details() or ""
        if code is grpc.StatusCode.UNAVAILABLE:
            try:
                self.connect()
            except UnreachableShard as fault:
                return fault
        if code is grpc.StatusCode.CANCELLED:
            return UnreachableShard(f"it took the question and did not answer within {FIRST_FRAME_SECONDS_MAX:.0f} s")
        return ReadRefused(code, text or code.name)


def _first(frames: Iterator[T]) -> T:
    for frame in frames:
        return frame
    raise ReadRefused(grpc.StatusCode.INTERNAL, "the answer has no header, so it is not a shard's")
