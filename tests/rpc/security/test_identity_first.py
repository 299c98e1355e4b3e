"""Attacks on the identity check: names that a C string cuts, frames before the check, arguments that hide a refusal."""

import asyncio
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from grpc import aio
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.cli.certs.issuing import Authority, Bearer
from bigfleet.rpc.security.identity import MAY_CALL, SESSION, Denied, PeerRole, identity_of_certificate
from bigfleet.rpc.servers import session as session_server
from bigfleet.rpc.wire.gen import shard_pb2
from tests.coordinator.replica_world import serving, sqlite_store
from tests.patience import PATIENCE_SECONDS
from tests.rpc.live_shard import CROSSED, dial, live_shard
from tests.rpc.security.tls_world import (
    ADMIN,
    CLUSTER,
    HOSTS,
    READONLY,
    SHARD,
    Certificates,
    renamed,
    secure_channel,
    secure_provider,
    secure_shard,
)

Code = grpc.StatusCode

AUTHORITY = Authority.create(datetime.now(UTC))
#: No protobuf message of any kind.
GARBAGE = b"\xff" * 64
#: Names that a parser of C strings, or one that trims, reads as an identity.
CUT_NAMES = [
    "bigfleet://admin\0.evil",
    "bigfleet://admin\0",
    "bigfleet://cluster/c1\0.evil",
    "bigfleet://admin\n",
    "\0bigfleet://admin",
    "bigfleet://cluster/c1\x7f",
]


def certificate_of(*uris: str) -> bytes:
    """Return the PEM of a client certificate with these URIs."""
    return AUTHORITY.issue(Bearer(name="odd", uris=uris), datetime.now(UTC), 1).certificate


SOUND = x509.load_pem_x509_certificate(certificate_of("bigfleet://cluster/c1")).public_bytes(Encoding.DER)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates for this module's peers."""
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


# ---- the name in the certificate --------------------------------------------------------------------------------


@pytest.mark.parametrize("uri", CUT_NAMES)
def test_a_control_character_in_a_name_makes_it_no_identity(uri: str) -> None:
    """Also beside a sound one: such a certificate was made to deceive."""
    with pytest.raises(Denied):
        identity_of_certificate(certificate_of(uri))
    with pytest.raises(Denied):
        identity_of_certificate(certificate_of("bigfleet://readonly", uri))


async def test_a_name_with_a_nul_byte_calls_nothing(certificates: Certificates) -> None:
    """`bigfleet://admin<NUL>.evil` was admin: gRPC reports the name as a C string, which ends at the NUL byte."""
    files = certificates.files(renamed(ADMIN, "bigfleet://admin\0.evil"))
    async with (
        secure_shard(certificates.files(SHARD)) as shard,
        secure_channel(shard.port, files) as channel,
    ):
        for rpc in MAY_CALL:
            if rpc.startswith("/bigfleet.v1alpha1.Shard"):
                assert await status_of(channel, rpc, b"") is Code.PERMISSION_DENIED, rpc


@given(st.binary(max_size=2_000))
def test_bytes_that_are_no_certificate_are_denied(content: bytes) -> None:
    """And raise nothing else."""
    with pytest.raises(Denied):
        identity_of_certificate(content)


# Damaged serial numbers may be zero or negative: a later release refuses them, and then they are denied like the rest.
@pytest.mark.filterwarnings("ignore:Parsed a serial number which wasn't positive")
@given(st.data())
def test_a_damaged_certificate_never_becomes_another_identity(data: st.DataObject) -> None:
    """Each changed byte leaves the identity, or makes it one of the same shape, or denies; nothing else is raised."""
    der = bytearray(SOUND)
    for _ in range(data.draw(st.integers(1, 4))):
        # Modulo: the length of a signature differs from run to run.
        der[data.draw(st.integers(0, 1_023)) % len(der)] = data.draw(st.integers(0, 255))
    try:
        identity = identity_of_certificate(pem_of(bytes(der)))
    except Denied:
        return
    assert identity.role is PeerRole.CLUSTER
    assert identity.id.isprintable()


def pem_of(der: bytes) -> bytes:
    """Return bytes as the PEM that gRPC hands over."""
    return ssl.DER_cert_to_PEM_cert(der).encode()


# ---- what is read before the check ------------------------------------------------------------------------------


@pytest.mark.rule("shard 10.1/2")
@pytest.mark.parametrize("bearer", [READONLY, ADMIN, SHARD, renamed(CLUSTER)], ids=lambda bearer: bearer.name)
async def test_a_session_of_another_role_ends_before_it_has_said_anything(
    certificates: Certificates, bearer: Bearer
) -> None:
    """A peer that sends no frame is refused for its role, so no frame of it is ever read."""
    async with secure_shard(certificates.files(SHARD)) as shard, shard.dial(certificates.files(bearer)) as live:
        code, _ = await live.dial().end()
        assert code is Code.PERMISSION_DENIED
        assert shard.world.metric("session_identity_rejected_total") == 1


async def test_a_hello_over_its_bound_is_not_parsed() -> None:
    """64 KiB unless configured lower; a Hello of that size names one cluster and 64 capabilities easily."""
    async with live_shard() as live:
        peer = live.dial()
        hello = shard_pb2.Hello(cluster_id="c1", capabilities=["x" * 60] * 2_000)
        await peer.say(hello=hello)
        size_bytes = shard_pb2.OperatorMessage(hello=hello).ByteSize()
        text = f"the first frame has {size_bytes} bytes, at most 65536 are read"
        assert await peer.end() == (Code.RESOURCE_EXHAUSTED, text)
        assert len(live.shard.sessions) == 0


async def test_an_operator_frame_over_its_bound_ends_the_stream() -> None:
    """32 MiB: gRPC refuses the frame from its length, before its bytes are there."""
    async with live_shard() as live:
        peer = await live.connect("c1")
        await peer.say_bytes(b"\0" * (session_server.FRAME_BYTES_MAX + 1))
        assert (await peer.end())[0] in (Code.RESOURCE_EXHAUSTED, Code.CANCELLED, CROSSED[0])
        assert len(live.shard.sessions) == 0
        await live.connect("c1")


# ---- identity before arguments, for every RPC -------------------------------------------------------------------


async def status_of(channel: aio.Channel, rpc: str, content: bytes) -> grpc.StatusCode:
    """Call an RPC with these bytes and return its status; only Session streams towards the server."""
    while rpc == SESSION:
        peer = dial(channel)
        await peer.try_to_say_bytes(content)
        code, details = await peer.end()
        # A refusal may come before the frame and cross it.
        if (code, details) != CROSSED:
            return code
    call: Any = channel.unary_stream(rpc, bytes, bytes)(content)
    async with asyncio.timeout(PATIENCE_SECONDS):
        answered: grpc.StatusCode = await call.code()
    return answered


@pytest.mark.rule("coordinator 4/1")
@pytest.mark.parametrize("bearer", [ADMIN, READONLY, SHARD, CLUSTER, renamed(CLUSTER)], ids=lambda bearer: bearer.name)
async def test_every_rpc_checks_who_calls_before_what_is_asked(
    certificates: Certificates, tmp_path: Path, bearer: Bearer
) -> None:
    """Each RPC gets bytes that are no message: a role that may not call it learns nothing but that."""
    own = certificates.files(SHARD)
    store = sqlite_store(tmp_path / "c.db")
    roles = {role.value: role for role in PeerRole}
    async with (
        secure_shard(own) as shard,
        secure_provider(certificates.files(Bearer(name="p", hosts=HOSTS))) as provider,
        serving(store, tls=own, dial_as=own) as coordinator,
    ):
        ports = {"Coordinator": coordinator.port, "CapacityProvider": provider.port}
        for rpc, callers in MAY_CALL.items():
            port = ports.get(rpc.split("/")[1].rpartition(".")[2], shard.port)
            async with secure_channel(port, certificates.files(bearer)) as channel:
                code = await status_of(channel, rpc, GARBAGE)
            is_allowed = roles.get(bearer.name) in callers
            assert (code is Code.PERMISSION_DENIED) is (not is_allowed), rpc
            assert not is_allowed or code in (Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION), rpc
