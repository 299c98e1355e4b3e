"""Limits the connections of a gRPC server: in all, for each identity, without a call, and before the handshake.

docs/spec/wire.md §2. The server refuses new connections at its limit, so connections that are in use stay. A connection
without a call is closed, which makes room for others.
"""

import resource
from collections import Counter
from dataclasses import dataclass, field

import structlog

#: In all. Each takes a file descriptor.
CONNECTIONS_MAX = 10_000
#: With calls in progress, under one identity.
CONNECTIONS_PER_IDENTITY_MAX = 64
#: A connection without a call is closed after this, a connection without a handshake after the other.
IDLE_SECONDS = 60.0
HANDSHAKE_SECONDS = 20.0
#: Calls on one connection; further ones wait at the client.
STREAMS_PER_CONNECTION_MAX = 1_000
#: File descriptors for everything else that a process opens.
DESCRIPTORS_RESERVED = 128

_log = structlog.get_logger("bigfleet.rpc.connection_limits")


def connections_allowed(wanted: int = CONNECTIONS_MAX) -> int:
    """Return how many connections the file descriptors of this process suffice for, at most as many as wanted.

    Raises the soft limit of descriptors as far as the hard limit allows. Warns if that is not enough.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + DESCRIPTORS_RESERVED
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        if raised > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    allowed = max(1, soft - DESCRIPTORS_RESERVED, soft // 2)
    _log.warning(
        "rpc.connections_limited",
        connections=allowed,
        descriptors=soft,
        advice=f"raise the limit of open files (ulimit -n) to {needed} for {wanted} connections",
    )
    return allowed


def connection_options(connections_max: int, *, close_idle: bool) -> tuple[tuple[str, int], ...]:
    """Return the options of a gRPC server with these limits."""
    limits = (
        ("grpc.max_allowed_incoming_connections", connections_max),
        ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_SECONDS * 1_000)),
        ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION_MAX),
    )
    return (*limits, ("grpc.max_connection_idle_ms", round(IDLE_SECONDS * 1_000))) if close_idle else limits


class TooManyConnections(Exception):
    """A call on one connection more than its identity may use at a time."""


@dataclass(slots=True)
class ConnectionsInUse:
    """The connections that have calls in progress, by identity."""

    per_identity_max: int = CONNECTIONS_PER_IDENTITY_MAX
    _calls: dict[str, Counter[str]] = field(default_factory=dict)

    def begin(self, identity: str, peer: str) -> None:
        """Count a call of a peer's connection. Raises TooManyConnections, and then counts nothing."""
        calls = self._calls.get(identity)
        if calls is not None and peer not in calls and len(calls) >= self.per_identity_max:
            raise TooManyConnections(f"{identity} uses {self.per_identity_max} connections, the most allowed")
        self._calls.setdefault(identity, Counter())[peer] += 1

    def end(self, identity: str, peer: str) -> None:
        """Forget a call; the last one of a connection frees its place."""
        calls = self._calls[identity]
        calls[peer] -= 1
        if not calls[peer]:
            del calls[peer]
        if not calls:
            del self._calls[identity]

    def __len__(self) -> int:
        return sum(map(len, self._calls.values()))
