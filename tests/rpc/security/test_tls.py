"""TLS from files, on real gRPC over loopback: who gets a connection at all, and what a new certificate changes.

docs/spec/wire.md §3. What a peer may call once it is in is the business of test_identity.py.
"""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from bigfleet.cli.certs.issuing import Bearer, Issued
from bigfleet.model.frames import Hello
from bigfleet.model.ids import MachineId
from bigfleet.operator.ports import EndKind, SessionEnded
from bigfleet.rpc.clients.provider import GrpcProvider
from bigfleet.rpc.clients.session import GrpcSessionDialer
from bigfleet.rpc.grpc_server import GrpcServer
from bigfleet.rpc.security import identity
from bigfleet.rpc.security.identity import PeerIdentity, PeerRole
from bigfleet.rpc.security.tls import TlsFault, TlsFiles, TlsPaths, is_loopback, monitor_files, server_credentials
from bigfleet.rpc.wire.gen import provider_pb2, shard_pb2
from bigfleet.shard.ports import ListedMachine, ProviderRefusal
from tests.patience import PATIENCE_SECONDS
from tests.rpc.security.tls_world import (
    ADMIN,
    CLUSTER,
    HOSTS,
    PROVIDER,
    READONLY,
    SHARD,
    Certificates,
    SecureShard,
    renamed,
    secure_channel,
    secure_shard,
)

Code = grpc.StatusCode


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    """Certificates of this test's own."""
    return Certificates.make(tmp_path)


@pytest.fixture
async def shard(certificates: Certificates) -> AsyncIterator[SecureShard]:
    """A shard s1 with nothing."""
    async with secure_shard(certificates.files(SHARD)) as served:
        yield served


def serial(issued: Issued) -> int:
    """Return the serial number of a certificate."""
    return x509.load_pem_x509_certificate(issued.certificate).serial_number


async def health(channel: aio.Channel) -> tuple[grpc.StatusCode, str]:
    """Return the status and text of a health check."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    try:
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_SECONDS)
    except aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return Code.OK, ""


def client_context(paths: TlsPaths) -> ssl.SSLContext:
    """Return what a client of TLS connects with, without gRPC."""
    context = ssl.create_default_context(cafile=str(paths.authority))
    context.load_cert_chain(paths.certificate, paths.key)
    context.set_alpn_protocols(["h2"])
    return context


async def presented_by(port: int, paths: TlsPaths) -> int:
    """Connect again and return the serial number of the certificate that the server shows."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client_context(paths))
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    return x509.load_der_x509_certificate(shown).serial_number


# ---- who gets a connection --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bearer", [CLUSTER, SHARD, ADMIN, READONLY], ids=lambda bearer: bearer.name)
async def test_every_certificate_of_the_authority_gets_a_connection(
    certificates: Certificates, shard: SecureShard, bearer: Bearer
) -> None:
    """And with an identity, health."""
    async with secure_channel(shard.port, certificates.files(bearer)) as channel:
        assert await health(channel) == (Code.OK, "")


async def test_a_certificate_that_is_over_gets_none(certificates: Certificates, shard: SecureShard) -> None:
    """The handshake fails; nothing was called, nothing is counted."""
    files = certificates.files(ADMIN, age=timedelta(days=2))
    async with secure_channel(shard.port, files) as channel:
        assert (await health(channel))[0] is Code.UNAVAILABLE
    assert shard.rejected("Check") == 0


async def test_a_peer_without_certificate_gets_none(certificates: Certificates, shard: SecureShard) -> None:
    """TLS both ways or not at all; plain text is no TLS."""
    authority = certificates.paths("x").authority.read_bytes()
    target = f"127.0.0.1:{shard.port}"
    async with aio.secure_channel(target, grpc.ssl_channel_credentials(authority)) as channel:
        assert (await health(channel))[0] is Code.UNAVAILABLE
    async with aio.insecure_channel(target) as channel:
        assert (await health(channel))[0] is Code.UNAVAILABLE


async def test_a_certificate_of_another_authority_gets_none(
    certificates: Certificates, shard: SecureShard, tmp_path: Path
) -> None:
    """Whatever it says that it is."""
    other = Certificates.make(tmp_path / "other").issue(ADMIN)
    forged = TlsFiles(certificates.write("forged", other))
    async with secure_channel(shard.port, forged) as channel:
        assert (await health(channel))[0] is Code.UNAVAILABLE


async def test_two_authorities_in_one_file_are_both_trusted(certificates: Certificates, tmp_path: Path) -> None:
    """That is how an authority is changed without an outage."""
    other = Certificates.make(tmp_path / "other")
    both = certificates.authority.pems.certificate + other.authority.pems.certificate
    for folder in (certificates.folder, other.folder):
        (folder / "ca").write_bytes(both)
    async with secure_shard(certificates.files(SHARD)) as shard:
        for holder in (certificates, other):
            async with secure_channel(shard.port, holder.files(ADMIN)) as channel:
                assert await health(channel) == (Code.OK, "")


async def test_a_certificate_made_for_servers_does_not_call(certificates: Certificates, shard: SecureShard) -> None:
    """A provider's, as `bigfleet certs dev` makes it."""
    async with secure_channel(shard.port, certificates.files(PROVIDER)) as channel:
        assert (await health(channel))[0] is Code.UNAVAILABLE


@pytest.mark.parametrize(
    "bearer",
    [
        pytest.param(Bearer(name="s", uris=SHARD.uris, hosts=("elsewhere.example",)), id="another host"),
        pytest.param(CLUSTER, id="a cluster's, which may not serve"),
    ],
)
async def test_a_server_must_be_the_host_that_was_dialled(certificates: Certificates, bearer: Bearer) -> None:
    """A client knows its server by the host name, signed by the authority, and by nothing else."""
    async with (
        secure_shard(certificates.files(bearer)) as shard,
        secure_channel(shard.port, certificates.files(ADMIN)) as channel,
    ):
        assert (await health(channel))[0] is Code.UNAVAILABLE


class TwoDaysLater(datetime):
    """A clock that is ahead."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> "TwoDaysLater":
        """Return a time after the end of every certificate here."""
        return cls.fromtimestamp(datetime.now(tz).timestamp() + timedelta(days=2).total_seconds(), tz)


async def test_a_certificate_that_ends_makes_no_call_afterwards(
    certificates: Certificates, shard: SecureShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every new call is looked at: also on an open connection, and in a session of TLS that is resumed."""
    async with secure_channel(shard.port, certificates.files(ADMIN)) as channel:
        assert (await health(channel))[0] is Code.OK
        monkeypatch.setattr(identity, "datetime", TwoDaysLater)
        code, text = await health(channel)
    assert code is Code.PERMISSION_DENIED
    assert text.startswith("the certificate expired at ")


# ---- a new certificate ------------------------------------------------------------------------------------------


async def test_a_new_certificate_is_shown_to_new_connections_and_old_streams_live(
    certificates: Certificates, shard: SecureShard
) -> None:
    """Neither side of the stream that stands notices."""
    certificates.files(ADMIN)
    cluster = certificates.files(CLUSTER)
    async with shard.dial(cluster) as live:
        peer = await live.connect("c1")
        before = await presented_by(shard.port, certificates.paths(ADMIN.name))
        fresh = certificates.rewrite(SHARD)
        after = await presented_by(shard.port, certificates.paths(ADMIN.name))
        await peer.say(hello=shard_pb2.Hello(cluster_id="c1"))
        await peer.hear_ack("hello")

    assert before != after == serial(fresh)
    assert shard.world.metric("session_lifecycle_total", event="installed") == 1


@pytest.mark.parametrize("broken", ["key of another", "half written", "no certificate", "gone", "another's name"])
async def test_a_pair_that_does_not_fit_keeps_the_last_good_one(certificates: Certificates, broken: str) -> None:
    """It is told once, however often somebody connects, and what comes after it is taken."""
    certificates.files(SHARD)
    paths = certificates.paths(SHARD.name)
    files = TlsFiles(paths, bearer=PeerIdentity(PeerRole.SHARD, "s1"))
    certificates.files(ADMIN)
    admin = certificates.paths(ADMIN.name)
    good = files.current().serial
    async with secure_shard(files) as shard:
        with capture_logs() as logs:
            match broken:
                case "key of another":
                    paths.key.write_bytes(certificates.issue(SHARD).key)
                case "half written":
                    paths.key.write_bytes(paths.key.read_bytes()[:100])
                case "no certificate":
                    paths.certificate.write_bytes(b"")
                case "gone":
                    paths.certificate.unlink()
                case "another's name":
                    certificates.write(SHARD.name, certificates.issue(renamed(SHARD, "bigfleet://shard/s2")))
            shown = [await presented_by(shard.port, admin) for _ in range(3)]
        fresh = certificates.rewrite(SHARD)
        assert await presented_by(shard.port, admin) == serial(fresh)

    assert shown == [good] * 3
    (line,) = [line for line in logs if line["event"] == "tls.certificate_rejected"]
    assert str(paths.key) in line["error"] or str(paths.certificate) in line["error"]
    assert not any(certificates.issue(SHARD).key.decode()[30:60] in str(value) for value in line.values())


async def test_a_pair_of_which_the_key_comes_later_is_taken_when_it_fits(certificates: Certificates) -> None:
    """Two files cannot change at once."""
    files = certificates.files(SHARD)
    old, fresh = files.current().serial, certificates.issue(SHARD)
    paths = certificates.paths(SHARD.name)
    paths.certificate.write_bytes(fresh.certificate)
    between = files.current().serial
    paths.key.write_bytes(fresh.key)

    assert (between, files.current().serial) == (old, serial(fresh))


@dataclass
class Seen:
    """Serial numbers of the certificates that callers showed, one per call."""

    serials: list[int] = field(default_factory=list)
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self, context: "aio.ServicerContext[Any, Any]") -> None:
        """Remember who called."""
        (pem,) = context.auth_context()["x509_pem_cert"]
        self.serials.append(x509.load_pem_x509_certificate(pem).serial_number)


@asynccontextmanager
async def noting_provider(files: TlsFiles, seen: Seen) -> AsyncIterator[int]:
    """Serve Get with TLS and remember the callers, Get of `slow` until it is released; yield the port."""

    async def get(request: provider_pb2.MachineRef, context: "aio.ServicerContext[Any, Any]") -> provider_pb2.Machine:
        seen.note(context)
        if request.id == "slow":
            seen.entered.set()
            await seen.release.wait()
        return provider_pb2.Machine(id=request.id, state=provider_pb2.MACHINE_STATE_IDLE)

    handler = grpc.unary_unary_rpc_method_handler(
        get, provider_pb2.MachineRef.FromString, provider_pb2.Machine.SerializeToString
    )
    server = aio.server()
    service = "bigfleet.v1alpha1.CapacityProvider"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Get": handler}),))
    port = server.add_secure_port("127.0.0.1:0", server_credentials(files))
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


class SetClock:
    """A clock that stands until it is set."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def monotonic_seconds(self) -> float:
        """Return what it was set to."""
        return self.seconds

    def unix_nanos(self) -> int:
        """Return as much in nanoseconds."""
        return int(self.seconds * 1e9)

    async def sleep(self, seconds: float) -> None:
        """Wait until it is set that far ahead."""
        until = self.seconds + seconds
        while self.seconds < until:  # noqa: ASYNC110 - it stands until a test sets it
            await asyncio.sleep(0.001)


@dataclass
class Calling:
    """A shard's client of a provider that remembers its callers."""

    client: GrpcProvider
    clock: SetClock
    seen: Seen

    async def call_slowly(self) -> "asyncio.Task[ListedMachine]":
        """Begin a call and return once the provider has it; it is answered when `seen.release` is set."""
        call = asyncio.create_task(self.client.get(MachineId("slow")))
        async with asyncio.timeout(PATIENCE_SECONDS):
            await self.seen.entered.wait()
        return call


@asynccontextmanager
async def calling_provider(certificates: Certificates, files: TlsFiles) -> AsyncIterator[Calling]:
    """Serve a provider and call it as the bearer of the files, by a clock that stands until it is set."""
    seen, clock = Seen(), SetClock()
    async with noting_provider(certificates.files(PROVIDER), seen) as port:
        client = GrpcProvider(f"127.0.0.1:{port}", clock=clock, tls=files)
        yield Calling(client, clock, seen)
        await client.close()


@pytest.mark.rule("shard 1/4")
async def test_a_shard_shows_its_provider_the_new_certificate_and_running_calls_end_in_peace(
    certificates: Certificates,
) -> None:
    """New calls go over a new connection; the call under way is answered on the old one."""
    files = certificates.files(SHARD)
    old = files.current().serial
    async with calling_provider(certificates, files) as calling:
        slow = await calling.call_slowly()
        fresh = serial(certificates.rewrite(SHARD))
        await calling.client.get(MachineId("m1"))  # within the second
        calling.clock.seconds += 1
        await calling.client.get(MachineId("m2"))
        await calling.client.get(MachineId("m3"))
        calling.seen.release.set()
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert (await slow).machine.id == "slow"

    assert calling.seen.serials == [old, old, fresh, fresh]


async def test_a_shard_that_is_given_a_wrong_pair_goes_on_calling_with_the_last_good_one(
    certificates: Certificates,
) -> None:
    """Its provider sees no change."""
    files = certificates.files(SHARD)
    old = files.current().serial
    async with calling_provider(certificates, files) as calling:
        certificates.paths(SHARD.name).key.write_bytes(b"")
        calling.clock.seconds += 1
        await calling.client.get(MachineId("m1"))

    assert calling.seen.serials == [old]


async def test_a_replaced_connection_does_not_stay_for_ever(certificates: Certificates) -> None:
    """It is closed when the deadlines of its calls are over, by the shard's clock, and with it what is left of them."""
    async with calling_provider(certificates, certificates.files(SHARD)) as calling:
        slow = await calling.call_slowly()
        certificates.rewrite(SHARD)
        calling.clock.seconds += 1
        await calling.client.get(MachineId("m1"))
        calling.clock.seconds += 120
        async with asyncio.timeout(PATIENCE_SECONDS):
            with pytest.raises(ProviderRefusal, match="closed"):
                await slow
        await calling.client.get(MachineId("m2"))


async def test_a_client_that_is_closed_while_a_replaced_channel_has_calls_ends_them(certificates: Certificates) -> None:
    """None of its channels outlives it."""
    async with calling_provider(certificates, certificates.files(SHARD)) as calling:
        slow = await calling.call_slowly()
        certificates.rewrite(SHARD)
        calling.clock.seconds += 1
        await calling.client.get(MachineId("m1"))
        async with asyncio.timeout(PATIENCE_SECONDS):
            await calling.client.close()
            with pytest.raises(ProviderRefusal, match="closed"):
                await slow


async def test_an_operator_dials_with_the_certificate_of_the_moment(
    certificates: Certificates, shard: SecureShard
) -> None:
    """A fresh channel each time: what it dials with next is what lies in the files then."""
    files = certificates.files(CLUSTER)
    dialer = GrpcSessionDialer(f"127.0.0.1:{shard.port}", files)
    hello = Hello(cluster_id="c1")
    async with asyncio.timeout(PATIENCE_SECONDS), dialer.dial() as first:
        await first.send(hello)
        await first.receive()
        certificates.write(CLUSTER.name, certificates.issue(renamed(CLUSTER, "bigfleet://cluster/c2")))
        async with dialer.dial() as second:
            await second.send(hello)
            with pytest.raises(SessionEnded) as ended:
                await second.receive()
            assert ended.value.kind is EndKind.DENIED
        await first.send(hello)
        await first.receive()


# ---- files ------------------------------------------------------------------------------------------------------


def ed25519_key() -> bytes:
    """Return a key of a kind that gRPC cannot sign with."""
    return ed25519.Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def locked_key() -> bytes:
    """Return a key with a password."""
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"x")
    )


@pytest.mark.parametrize(
    ("which", "content", "fault"),
    [
        ("certificate", None, "No such file"),
        ("key", None, "No such file"),
        ("authority", None, "No such file"),
        ("certificate", b"hello", "no PEM certificate"),
        ("authority", b"", "no PEM certificate"),
        ("key", b"-----BEGIN PRIVATE KEY-----\n", "no PEM private key"),
        ("key", locked_key(), "without a password"),
        ("key", ed25519_key(), "ECDSA P-256, ECDSA P-384 or RSA"),
        ("key", "another", "not the key of"),
    ],
)
def test_files_that_make_no_credentials_are_named_at_start(
    certificates: Certificates, which: str, content: bytes | str | None, fault: str
) -> None:
    """The file, and what is wrong with it."""
    paths = certificates.write("s", certificates.issue(SHARD))
    path: Path = getattr(paths, which)
    if content is None:
        path.unlink()
    else:
        path.write_bytes(certificates.issue(SHARD).key if isinstance(content, str) else content)
    with pytest.raises(TlsFault, match=fault) as caught:
        TlsFiles(paths)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    "uris", [(), ("bigfleet://shard/s2",), ("bigfleet://admin",), (*SHARD.uris, "bigfleet://admin")]
)
def test_a_process_does_not_take_another_ones_certificate(certificates: Certificates, uris: tuple[str, ...]) -> None:
    """A shard's id and its certificate agree."""
    paths = certificates.write("s", certificates.issue(Bearer(name="s", uris=uris, hosts=HOSTS)))
    with pytest.raises(TlsFault, match=r"s\.crt"):
        TlsFiles(paths, bearer=PeerIdentity(PeerRole.SHARD, "s1"))


async def test_a_certificate_that_runs_out_is_told_once_and_exported(certificates: Certificates) -> None:
    """The series are the end and the beginning of what is in force; reading one reads changed files."""
    files = certificates.files(SHARD, age=timedelta(days=2))
    certificates.paths(SHARD.name).key.chmod(0o600)
    registry = CollectorRegistry()
    monitor_files(files, registry, "x")

    def exported(what: str = "expires") -> float | None:
        return registry.get_sample_value(f"x_certificate_{what}_timestamp_seconds")

    with capture_logs() as logs:
        assert exported() == files.current().expires.timestamp()
        certificates.rewrite(SHARD)
        renewed = exported()

    assert [line["event"] for line in logs] == ["tls.certificate_expired", "tls.certificate_loaded"]
    assert renewed == files.current().expires.timestamp()
    # Good for a day; it begins five minutes before it is issued.
    assert exported("issued") == files.current().expires.timestamp() - timedelta(days=1, minutes=5).total_seconds()


# ---- plain text -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("host", "warnings"), [("127.0.0.1", 0), ("0.0.0.0", 1)])
async def test_plain_text_that_others_can_reach_is_warned_of_once(host: str, warnings: int) -> None:
    """At the start, and not on loopback."""
    server = GrpcServer(services=(), register=lambda _server: None)
    with capture_logs() as logs:
        await server.start(host, 0)
    await server.stop(0)

    assert [line["event"] for line in logs] == ["rpc.plain_text_enabled"] * warnings


async def test_nothing_is_warned_of_with_tls(certificates: Certificates) -> None:
    """Wherever it listens."""
    server = GrpcServer(services=(), register=lambda _server: None, tls=certificates.files(SHARD))
    with capture_logs() as logs:
        await server.start("0.0.0.0", 0)
    await server.stop(0)

    assert logs == []


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("127.example.com", False),
    ],
)
def test_loopback_is_what_only_this_machine_reaches(host: str, is_local: bool) -> None:
    """A name that looks like it is not."""
    assert is_loopback(host) is is_local
