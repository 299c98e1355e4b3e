"""Runs a gRPC server as all BigFleet processes do: limits, keepalive, TLS, health, reflection.

docs/spec/wire.md §2 and §3. The caller adds the services. With TLS, `bigfleet.rpc.security.identity` checks every RPC.
This module does not decide anything.
"""

import socket
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import structlog
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from bigfleet.rpc.connection_limits import CONNECTIONS_MAX, ConnectionsInUse, connection_options, connections_allowed
from bigfleet.rpc.security.identity import Gate
from bigfleet.rpc.security.interceptor import IdentityInterceptor
from bigfleet.rpc.security.tls import TlsFiles, is_loopback, server_credentials

MEBIBYTE = 1024 * 1024
#: Send and receive, on shard, coordinator, operator and command line.
MESSAGE_BYTES_MAX = 256 * MEBIBYTE
#: Session and Coordinator channels, both ends.
KEEPALIVE_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
)
#: Of a channel that a command makes for its own calls.
COMMAND_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    *KEEPALIVE_OPTIONS,
    ("grpc.enable_retries", 0),
    # A proxy for the web of this machine's user is not the way to a shard or a coordinator.
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)

_CANNOT_LISTEN = "cannot listen on {}: it is in use or not an address of this machine"

_log = structlog.get_logger("bigfleet.rpc.grpc_server")


class ListenFault(Exception):
    """The address cannot be listened on."""


def check_can_listen(host: str, port: int) -> None:
    """Return when a server could listen at an address now, without opening it to callers. Raises ListenFault."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        for family, kind, protocol, _name, place in socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
    except OSError as error:
        raise ListenFault(_CANNOT_LISTEN.format(address)) from error


class GrpcServer:
    """One listening server with health and, unless switched off, reflection."""

    def __init__(
        self,
        *,
        services: Sequence[str],
        register: Callable[[aio.Server], None],
        receive_bytes_max: int = MESSAGE_BYTES_MAX,
        send_bytes_max: int = MESSAGE_BYTES_MAX,
        reflect: bool = True,
        keep_alive: bool = True,
        tls: TlsFiles | None = None,
        gate: Gate | None = None,
        connections_max: int = CONNECTIONS_MAX,
        connections: ConnectionsInUse | None = None,
    ) -> None:
        """Serve plain text without `tls`; with it, what `gate` lets through.

        At most `connections_max` connections are open, or as many as there are file descriptors for.
        """
        options: list[tuple[str, Any]] = [
            *(KEEPALIVE_OPTIONS if keep_alive else ()),
            # A provider's shard calls over one connection, which is idle while nothing changes.
            *connection_options(connections_allowed(connections_max), close_idle=keep_alive),
            ("grpc.max_receive_message_length", receive_bytes_max),
            ("grpc.max_send_message_length", send_bytes_max),
            # Without this a second process would share the port silently and get half of the calls.
            ("grpc.so_reuseport", 0),
        ]
        self._tls = tls
        self._server = aio.server(interceptors=[IdentityInterceptor(gate or Gate(), connections)], options=options)
        self._services = tuple(services)
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        register(self._server)
        if reflect:
            reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)

    async def start(self, host: str, port: int, *, serving: bool = True) -> int:
        """Listen and serve; return the port, which differs from the one asked for when that was 0.

        `serving` is the health from the first moment on.

        Raises ListenFault when the address cannot be bound. Warns of plain text that other machines can reach.
        """
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._tls is None:
                bound = self._server.add_insecure_port(address)
            else:
                bound = self._server.add_secure_port(address, server_credentials(self._tls))
        except RuntimeError as error:
            raise ListenFault(_CANNOT_LISTEN.format(address)) from error
        if self.is_insecure_at(host):
            advice = "any peer that reaches the port may make every call; set --tls-cert, --tls-key and --tls-ca"
            _log.warning("rpc.plain_text_enabled", address=address, advice=advice)
        await self.set_serving(serving=serving)
        await self._server.start()
        return bound

    def is_insecure_at(self, host: str) -> bool:
        """Return whether other hosts can reach the server at an address and call it in plain text."""
        return self._tls is None and not is_loopback(host)

    async def set_serving(self, *, serving: bool) -> None:
        """Set the health of the process and of each of its services."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", *self._services):
            await self._health.set(service, status)

    async def set_service(self, service: str, *, serving: bool) -> None:
        """Set the health of one service alone."""
        serving_status, other = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set(service, serving_status if serving else other)

    async def stop(self, grace_seconds: float) -> None:
        """Refuse new calls, give running ones that long, then end them."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_seconds)


async def abort(context: "aio.ServicerContext[Any, Any]", code: grpc.StatusCode, message: str) -> None:
    """End the call with a status. Always raises."""
    await context.abort(code, message)
