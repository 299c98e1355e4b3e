"""Sends a shard's reports: `bigfleet.v1alpha1.Coordinator/ReportShard` (docs/spec/wire.md §2, §4, §10).

What a status means to the link is said here and nowhere else, distinguished by code and never by text. A channel lasts
for one call, so that a certificate is read again and an address that has moved is found. With TLS each address of a
name is dialled as that name, which is what the server's certificate must have. This module must not retry.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Iterable
from typing import Any

import grpc
from grpc import aio

from bigfleet.coordinator.ephemeral_state import ReportAnswer
from bigfleet.link.client import CALL_SECONDS, NotAnswered
from bigfleet.model.shard_report import ShardReport
from bigfleet.rpc.clients.coordinator import LEADER_HINT
from bigfleet.rpc.grpc_server import MESSAGE_BYTES_MAX
from bigfleet.rpc.security.tls import TlsFiles, channel_credentials
from bigfleet.rpc.security.tls_mismatch import with_tls_advice
from bigfleet.rpc.wire.convert_coordinator import answer_from_wire, report_to_wire
from bigfleet.rpc.wire.gen import coordinator_pb2, coordinator_pb2_grpc

#: Bytes retained of a coordinator's text; it reaches logs.
_DETAILS_CHARACTERS_MAX = 1024
_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.enable_retries", 0),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.use_local_subchannel_pool", 1),
)
#: Between a name and one of its addresses, where the certificate is compared with the name; neither can have it.
_DIALLED_AT = "@"


class GrpcCoordinator:
    """The coordinators of an install, by address; see `bigfleet.link.client.Coordinators`."""

    def __init__(self, *, tls: TlsFiles | None = None) -> None:
        """Dial in plain text without `tls`."""
        self._tls = tls

    async def addresses(self, name: str) -> tuple[str, ...]:
        """Return the addresses behind HOST:PORT, each once, in the resolver's order; the name itself if it has none.

        With TLS the address of a host name is HOST:PORT@ADDRESS:PORT: `report` dials ADDRESS and expects HOST in the
        certificate.
        """
        host, _colon, port = name.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CALL_SECONDS):
                found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except (OSError, TimeoutError, ValueError):
            return (name,)
        numbers = (str(place[0]) for _family, _type, _protocol, _name, place in found)
        places = dict.fromkeys(f"[{each}]:{port}" if ":" in each else f"{each}:{port}" for each in numbers)
        if self._tls is None or _is_number(host.strip("[]")):
            return tuple(places)
        return tuple(f"{name}{_DIALLED_AT}{place}" for place in places)

    async def report(self, address: str, report: ShardReport) -> ReportAnswer:
        """Return a coordinator's answer to a report. Raises NotAnswered."""
        async with self._channel(address) as channel:
            stub = coordinator_pb2_grpc.CoordinatorStub(channel)
            try:
                answer = await stub.ReportShard(report_to_wire(report), timeout=CALL_SECONDS)
            except aio.AioRpcError as error:
                raise _not_answered(error, is_secure=self._tls is not None) from error
        assert isinstance(answer, coordinator_pb2.ReportAck), "the stub knows what a method answers"
        return answer_from_wire(answer)

    def _channel(self, address: str) -> aio.Channel:
        if self._tls is None:
            return aio.insecure_channel(address, options=_OPTIONS)
        credentials = channel_credentials(self._tls.current(), self._tls.authority)
        name, is_named, place = address.rpartition(_DIALLED_AT)
        if not is_named:
            return aio.secure_channel(address, credentials, options=_OPTIONS)
        # Without these gRPC would look for the number in the certificate, which has names only.
        host, _colon, _port = name.rpartition(":")
        as_named = (("grpc.ssl_target_name_override", host), ("grpc.default_authority", name))
        return aio.secure_channel(place, credentials, options=(*_OPTIONS, *as_named))


def _is_number(host: str) -> bool:
    """Return whether a host is an address already, which a certificate has as an address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _not_answered(error: aio.AioRpcError, *, is_secure: bool) -> NotAnswered:
    details = with_tls_advice(error.details() or "", is_secure=is_secure)[:_DETAILS_CHARACTERS_MAX]
    text = f"{error.code().name}: {details}" if details else error.code().name
    if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
        return NotAnswered(text)
    hint = dict(_pairs(error.trailing_metadata())).get(LEADER_HINT, "")
    return NotAnswered(text, leader=hint if isinstance(hint, str) else hint.decode("utf-8", "replace"))


def _pairs(metadata: Any) -> Iterable[tuple[str, str | bytes]]:
    # gRPC types it as more than it is.
    return metadata or ()
