"""Calls a coordinator for a command: one call at a time, at the leader.

docs/spec/wire.md §4 and §10. A replica that does not lead names the leader, and the call is repeated there, a few times
at most. The shards' link does not use it. A change whose outcome is unknown is not retried.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import Message

from bigfleet.rpc.grpc_server import COMMAND_OPTIONS
from bigfleet.rpc.security.tls import TlsFiles, channel_credentials
from bigfleet.rpc.security.tls_mismatch import with_tls_advice
from bigfleet.rpc.wire.gen import coordinator_pb2, coordinator_pb2_grpc

#: Of every call but SnapshotSave (docs/spec/wire.md §2).
CALL_SECONDS: Final = 5.0
#: How often a call is handed on from a replica to the one that it names.
HOPS_MAX: Final = 3
#: Trailing metadata of FAILED_PRECONDITION: host:port of the leader.
LEADER_HINT: Final = "bigfleet-leader"

T = TypeVar("T")
M = TypeVar("M", bound=Message)


class CoordinatorFault(Exception):
    """A call with another status than OK; `address` is the server's, the text gives the reason."""

    def __init__(self, code: grpc.StatusCode, text: str, address: str) -> None:
        super().__init__(text)
        self.code = code
        self.address = address


class CoordinatorCaller:
    """The coordinator, by the address of any of its replicas. Each method raises CoordinatorFault."""

    def __init__(self, address: str, *, tls: TlsFiles | None = None) -> None:
        """Dial lazily, in plain text without `tls`; `address` is HOST:PORT."""
        self.address = address
        self._tls = tls

    def call(self, method: str, request: Message, answer: type[M]) -> M:
        """Return the leader's answer to one call."""

        def ask(stub: coordinator_pb2_grpc.CoordinatorStub) -> M:
            answered: Any = getattr(stub, method)(request, timeout=CALL_SECONDS)
            assert isinstance(answered, answer), "the stub knows what a method answers"
            return answered

        return self._at_the_leader(ask)

    def snapshot(self, take: Callable[[Iterator[coordinator_pb2.SnapshotSaveChunk]], T]) -> T:
        """Return what `take` makes of the leader's snapshot, frame by frame; it is called again at each replica."""
        return self._at_the_leader(lambda stub: take(iter(stub.SnapshotSave(coordinator_pb2.SnapshotSaveRequest()))))

    def _at_the_leader(self, ask: Callable[[coordinator_pb2_grpc.CoordinatorStub], T]) -> T:
        for hops_left in range(HOPS_MAX, -1, -1):
            with self._channel() as channel:
                try:
                    return ask(coordinator_pb2_grpc.CoordinatorStub(channel))
                except grpc.RpcError as error:
                    hint = _hint(error)
                    if not (hint and hops_left and hint != self.address):
                        raise CoordinatorFault(error.code(), self._error_text(error), self.address) from error
                    self.address = hint
        raise AssertionError("the last hop answers or raises")

    def _error_text(self, error: Any) -> str:
        return with_tls_advice(error.details() or "no details", is_secure=self._tls is not None)

    def _channel(self) -> grpc.Channel:
        if self._tls is None:
            return grpc.insecure_channel(self.address, options=COMMAND_OPTIONS)
        credentials = channel_credentials(self._tls.current(), self._tls.authority)
        return grpc.secure_channel(self.address, credentials, options=COMMAND_OPTIONS)


def _hint(error: Any) -> str:
    """Return the leader's address that a replica names when it does not lead, empty without one."""
    if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
        return ""
    return next((value for key, value in error.trailing_metadata() or () if key == LEADER_HINT), "")
