"""Authorizes peers: compares the one `bigfleet` URI of a certificate with a table of the calls it may make.

docs/spec/wire.md §3, docs/spec/provider.md §17. On a plain text connection every check is skipped. On a TLS connection
a call that the table does not allow is refused, and so is every name in a message that differs from the certificate's.
The sender is determined by the certificate only, never by a message.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from functools import lru_cache
from typing import Any

import structlog
from grpc import aio
from prometheus_client import CollectorRegistry, Counter

from bigfleet.model.ids import identifier_fault
from bigfleet.rpc.security.certificate_names import UnreadableCertificate, end_of_pem, uris_of_pem

SCHEME = "bigfleet"
SESSION = "/bigfleet.v1alpha1.Shard/Session"
_PROVIDER = "/bigfleet.v1alpha1.CapacityProvider/"
_SHARD_READ = "/bigfleet.v1alpha1.ShardRead/"
_SHARD_ADMIN = "/bigfleet.v1alpha1.ShardAdmin/"
_COORDINATOR = "/bigfleet.v1alpha1.Coordinator/"
REPORT = _COORDINATOR + "ReportShard"
#: What is logged of the names in a foreign certificate.
_PRESENTED_CHARACTERS_MAX = 1024
#: Certificates whose names are remembered, so that a call costs no parse.
_CERTIFICATES_MAX = 4096

_log = structlog.get_logger("bigfleet.rpc.security.identity")

_Context = aio.ServicerContext[Any, Any]


class PeerRole(Enum):
    """What a peer is; the value is the host part of its URI."""

    CLUSTER = "cluster"
    SHARD = "shard"
    ADMIN = "admin"
    READONLY = "readonly"

    @property
    def has_id(self) -> bool:
        """Whether the URI goes on with an id."""
        return self in (PeerRole.CLUSTER, PeerRole.SHARD)


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """A role, with the id of the cluster or shard that has it."""

    role: PeerRole
    #: Empty for a role without one.
    id: str = ""

    def __post_init__(self) -> None:
        if self.role.has_id != bool(self.id):
            raise ValueError(f"the role {self.role.value} and the id {self.id!r} do not go together")

    @property
    def uri(self) -> str:
        """The name in the certificate; the id stands in it as it is."""
        return f"{SCHEME}://{self.role.value}/{self.id}" if self.role.has_id else f"{SCHEME}://{self.role.value}"


class Denied(Exception):
    """The peer may not make this call; the text gives the reason."""


_READERS = frozenset({PeerRole.ADMIN, PeerRole.READONLY})
_COORDINATOR_READS = (
    "ListShards",
    "ListDomainAssignments",
    "ListShardReports",
    "ListQuotas",
    "ListProviders",
    "ListClusters",
    "ListInstructions",
)
_COORDINATOR_CHANGES = (
    "AssignDomain",
    "UnassignDomain",
    "RemoveShard",
    "BindCluster",
    "SetQuota",
    "UpsertProvider",
    "JoinRaftCluster",
    "SnapshotSave",
)
#: Who may call what. A method that is not listed cannot be called over TLS.
MAY_CALL: Mapping[str, frozenset[PeerRole]] = {
    SESSION: frozenset({PeerRole.CLUSTER}),
    **{
        _SHARD_READ + name: _READERS
        for name in (
            "InspectNeeds",
            "ListMachines",
            "ListActions",
            "ListSessions",
            "ListExchanges",
            "ExplainNeed",
            "ExplainMachine",
        )
    },
    **{_SHARD_ADMIN + name: frozenset({PeerRole.ADMIN}) for name in ("RetireCluster", "ReadmitCluster")},
    REPORT: frozenset({PeerRole.SHARD}),
    **{_COORDINATOR + name: _READERS for name in _COORDINATOR_READS},
    **{_COORDINATOR + name: frozenset({PeerRole.ADMIN}) for name in _COORDINATOR_CHANGES},
    **{_PROVIDER + name: _READERS | {PeerRole.SHARD} for name in ("Get", "List")},
    **{_PROVIDER + name: frozenset({PeerRole.SHARD}) for name in ("Create", "Configure", "Drain", "Delete")},
}
#: Services of gRPC itself, beside ours on every server: for everybody with an identity.
_FOR_EVERY_ROLE = ("/grpc.health.v1.Health/", "/grpc.reflection.v1alpha.ServerReflection/")


def identity_of_certificate(pem: bytes) -> PeerIdentity:
    """Return the identity in a certificate, which is read from its own bytes. Raises Denied."""
    try:
        return identity_in(_uris_of_pem(pem))
    except UnreadableCertificate as fault:
        raise Denied(str(fault)) from fault


def check_not_over(pem: bytes, now: datetime) -> None:
    """Return unless a certificate has ended. Raises Denied.

    gRPC looks at it in a full handshake, not in one that resumes an earlier session of TLS.
    """
    try:
        end = _end_of_pem(pem)
    except UnreadableCertificate as fault:
        raise Denied(str(fault)) from fault
    if end < now:
        raise Denied(f"the certificate expired at {end:%Y-%m-%dT%H:%M:%SZ}; connect with a new one")


_uris_of_pem = lru_cache(maxsize=_CERTIFICATES_MAX)(uris_of_pem)
_end_of_pem = lru_cache(maxsize=_CERTIFICATES_MAX)(end_of_pem)


def identity_in(uris: Iterable[str]) -> PeerIdentity:
    """Return the identity among a certificate's URIs; those with other schemes are ignored. Raises Denied.

    A URI with a control character denies the whole certificate: no authority issues one by mistake.
    """
    uris = tuple(uris)
    odd = next((uri for uri in uris if not uri.isprintable()), None)
    if odd is not None:
        raise Denied(f"the certificate names {odd[:_PRESENTED_CHARACTERS_MAX]!r}, which has a control character")
    ours = [uri for uri in uris if uri.partition(":")[0].lower() == SCHEME]
    if len(ours) != 1:
        names = ", ".join(ours)[:_PRESENTED_CHARACTERS_MAX]
        raise Denied(
            f"the certificate must name one {SCHEME}:// URI; it names {f'several: {names}' if ours else 'none'}"
        )
    (uri,) = ours
    host, slash, identifier = uri.removeprefix(f"{SCHEME}://").partition("/")
    role = next((role for role in PeerRole if uri.startswith(f"{SCHEME}://") and role.value == host), None)
    if role is None or role.has_id != bool(slash) or (role.has_id and identifier_fault(identifier)):
        raise Denied(f"{uri[:_PRESENTED_CHARACTERS_MAX]!r} is no identity")
    return PeerIdentity(role, identifier)


def peer_identity(context: _Context) -> PeerIdentity | None:
    """Return who is at the other end of a call, None in plain text.

    Raises Denied when the certificate names no identity, or has ended.
    """
    auth = context.auth_context()
    if _property(auth, "transport_security_type") == ["insecure"]:
        return None
    # The process allows nothing older (bigfleet.rpc.security.tls_floor); where that came too late, the call is denied.
    if _property(auth, "ssl_tls_version") != ["TLSv1.3"]:
        raise Denied("the connection is not TLS 1.3")
    certificate = _certificate_in(auth)
    identity = identity_of_certificate(certificate)
    check_not_over(certificate, datetime.now(UTC))
    return identity


def _certificate_in(auth: Mapping[str, Iterable[bytes]]) -> bytes:
    """Return the PEM of the peer's own certificate, empty without one."""
    return next(iter(auth.get("x509_pem_cert", ())), b"")


def _presented(context: _Context) -> str:
    """Return the names in the peer's certificate as a log line shows them."""
    try:
        uris = _uris_of_pem(_certificate_in(context.auth_context()))
    except UnreadableCertificate:
        return ""
    shown = ", ".join(uri if uri.isprintable() else repr(uri) for uri in uris)
    return shown[:_PRESENTED_CHARACTERS_MAX]


def _property(auth: Mapping[str, Iterable[bytes]], name: str) -> list[str]:
    return [value.decode("utf-8", "replace") for value in auth.get(name, ())]


class Gate:
    """Holds each call of one server against the table; logs and counts what it refuses."""

    def __init__(
        self,
        registry: CollectorRegistry | None = None,
        prefix: str = "bigfleet",
        *,
        services: Iterable[str] = (),
        certify: bool = False,
    ) -> None:
        """Count under `<prefix>_identity_rejected_total`, the RPCs of `services` from 0; no registry counts nothing.

        `certify` lets an admin change machines of a provider with any token, for a conformance run.
        """
        self._certify = certify
        #: Called with the name of each RPC that was refused before its request was parsed.
        self.on_role_refused: list[Callable[[str], None]] = []
        self._rejected: Counter | None = None
        if registry is not None:
            text = "Calls refused because of the certificate"
            self._rejected = Counter(f"{prefix}_identity_rejected_total", text, ["rpc"], registry=registry)
            for rpc in MAY_CALL:
                _, service, method = rpc.split("/")
                if service in services:
                    self._rejected.labels(method)

    def check(self, context: _Context, rpc: str) -> PeerIdentity | None:
        """Return who calls, None in plain text. Raises Denied when the role may not call it; the caller logs it."""
        identity = peer_identity(context)
        if identity is None or rpc.startswith(_FOR_EVERY_ROLE):
            return identity
        if identity.role in MAY_CALL.get(rpc, frozenset()) or self._certifies(identity, rpc):
            return identity
        raise Denied(f"{identity.uri} may not call {rpc.rpartition('/')[2]}")

    def check_cluster(self, context: _Context, cluster: str) -> None:
        """Return when the peer may act for the cluster. Raises Denied."""
        identity = self.check(context, SESSION)
        if identity is not None and identity.id != cluster:
            raise Denied(f"{identity.uri} may not speak for cluster {cluster!r}")

    def check_report(self, context: _Context, shard: str) -> None:
        """Return when the peer may report for the shard. Raises Denied."""
        identity = self.check(context, REPORT)
        if identity is not None and identity.id != shard:
            raise Denied(f"{identity.uri} may not report for shard {shard!r}")

    def check_token(self, context: _Context, method: str, shard: str | None) -> None:
        """Return when the peer may make this call of CapacityProvider. Raises Denied.

        `shard` is the token's, empty for an absent token, which would step around the fence; None for a read.
        """
        identity = self.check(context, _PROVIDER + method)
        if identity is None or shard is None or self._certifies(identity, _PROVIDER + method):
            return
        if identity.id != shard:
            whose = f"with the token of {shard!r}" if shard else "without a token"
            raise Denied(f"{identity.uri} may not call {method} {whose}")

    def log_refusal(self, context: _Context, rpc: str, denied: Denied, count: Counter | None = None) -> None:
        """Log a refusal with the identity that was presented, and count it, in `count` if that is its own."""
        _log.warning(
            "tls.identity_rejected",
            rpc=rpc,
            presented=_presented(context),
            reason=str(denied),
            peer=context.peer(),
        )
        if count is not None:
            count.inc()
        elif self._rejected is not None:
            self._rejected.labels(rpc.rpartition("/")[2]).inc()

    def log_token_refusal(self, context: _Context, method: str, denied: Denied) -> None:
        """As `log_refusal`, for a method of CapacityProvider."""
        self.log_refusal(context, _PROVIDER + method, denied)

    def _certifies(self, identity: PeerIdentity, rpc: str) -> bool:
        return self._certify and identity.role is PeerRole.ADMIN and rpc.startswith(_PROVIDER)
