"""The real commands over mutual TLS, with the certificates of `bigfleet certs dev` (docs/tls.md)."""

import json
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from socket import create_connection
from typing import Any

import grpc
import pytest
from cryptography import x509

from bigfleet.cli.certs.issuing import Authority, Bearer
from bigfleet.rpc.wire.gen import shardread_pb2, shardread_pb2_grpc
from tests.commands import run_here
from tests.patience import PATIENCE_SECONDS
from tests.processes import free_port, open_channel, run_bigfleet, serving

OPERATOR = Path(__file__).parent / "tls_operator.py"
ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Fleet:
    """A provider and a shard that are running, and where their certificates lie."""

    certs: Path
    provider: str
    shard: str
    provider_http: str
    shard_http: str

    @property
    def logs(self) -> Path:
        """Where the processes log."""
        return self.certs.parent

    def flags(self, name: str) -> tuple[str, ...]:
        """Return a holder's three flags."""
        certificate, key, authority = self.files(name)
        return "--tls-cert", certificate, "--tls-key", key, "--tls-ca", authority

    def files(self, name: str) -> tuple[str, str, str]:
        """Return a holder's three files."""
        return str(self.certs / f"{name}.crt"), str(self.certs / f"{name}.key"), str(self.certs / "ca.crt")

    def credentials(self, name: str) -> grpc.ChannelCredentials:
        """Return a holder's credentials."""
        certificate, key, authority = (Path(file).read_bytes() for file in self.files(name))
        return grpc.ssl_channel_credentials(authority, key, certificate)

    def operator(self, holder: str, cluster: str) -> "subprocess.Popen[str]":
        """Start an operator with a holder's certificate that speaks for a cluster."""
        words = [sys.executable, "-m", "tests.e2e.tls_operator", self.shard, *self.files(holder), cluster]
        return subprocess.Popen(
            words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def handshake(self, address: str, version: ssl.TLSVersion) -> tuple[str | None, int]:
        """Connect as the admin with one version of TLS; return it and the serial number that the server shows."""
        certificate, key, authority = self.files("admin")
        context = ssl.create_default_context(cafile=authority)
        context.load_cert_chain(certificate, key)
        context.minimum_version = context.maximum_version = version
        context.set_alpn_protocols(["h2"])
        host, _, port = address.rpartition(":")
        with (
            create_connection((host, int(port)), PATIENCE_SECONDS) as raw,
            context.wrap_socket(raw, server_hostname=host) as connection,
        ):
            shown = connection.getpeercert(binary_form=True)
            assert shown is not None
            return connection.version(), x509.load_der_x509_certificate(shown).serial_number


def metrics(address: str) -> dict[str, float]:
    """Return every series of a process by name and labels."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=PATIENCE_SECONDS) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A provider and a shard with certificates made by the command."""
    place = tmp_path_factory.mktemp("tls")
    fleet = Fleet(place / "certs", *(f"127.0.0.1:{free_port()}" for _ in range(4)))
    made = run_here("certs", "dev", str(fleet.certs), "--shard", "s1", "--cluster", "c1", "--cluster", "c2")
    assert made.returncode == 0, made.stderr
    simulated = ("provider", "simulated", "--addr", fleet.provider, "--state", str(place / "provider.db"))
    calm = ("--metrics-addr", fleet.provider_http, "--calm", "--time-scale", "0.001")
    shard = ("shard", "--id", "s1", "--listen", fleet.shard, "--provider-addr", fleet.provider)
    place_flags = ("--data-dir", str(place), "--metrics-addr", fleet.shard_http, "--cycle-interval", "1s")
    probe = fleet.credentials("readonly")
    provider_command = (*simulated, *calm, *fleet.flags("provider-simulated"))
    shard_command = (*shard, *place_flags, *fleet.flags("shard-s1"))
    with (
        serving(fleet.provider, place / "provider.log", *provider_command, credentials=probe),
        serving(fleet.shard, place / "shard.log", *shard_command, credentials=probe),
    ):
        yield fleet


@pytest.fixture(scope="module")
def operator(fleet: Fleet) -> "Iterator[subprocess.Popen[str]]":
    """The operator of c1, once a machine serves its cluster."""
    process = fleet.operator("cluster-c1", "c1")
    assert process.stdout is not None
    try:
        first = process.stdout.readline()
        assert json.loads(first) == {"step": "configured", "cluster": "c1"}, first + process.stdout.read()
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE_SECONDS)


def inspect(fleet: Fleet, holder: str) -> tuple[str, set[str]]:
    """Read a shard's needs as a holder; return the status and the clusters with demand."""
    with open_channel(fleet.shard, fleet.credentials(holder)) as channel:
        stub = shardread_pb2_grpc.ShardReadStub(channel)
        try:
            frames = list(stub.InspectNeeds(shardread_pb2.InspectNeedsRequest(), timeout=PATIENCE_SECONDS))
        except grpc.RpcError as error:
            status: Any = error
            return status.code().name, set()
    return "OK", {frame.need.cluster_id for frame in frames if frame.WhichOneof("frame") == "need"}


@pytest.mark.usefixtures("operator")
def test_an_operator_gets_a_machine_over_mutual_tls(fleet: Fleet) -> None:
    """Operator, shard and provider know each other: a machine was bought, booted and bound."""
    assert inspect(fleet, "readonly") == ("OK", {"c1"})
    assert inspect(fleet, "admin") == ("OK", {"c1"})
    assert inspect(fleet, "cluster-c1") == ("PERMISSION_DENIED", set())
    rejected = {
        name: value
        for name, value in metrics(fleet.provider_http).items()
        if name.startswith("bigfleet_provider_identity_rejected_total{")
    }
    assert len(rejected) == 6
    assert set(rejected.values()) == {0}


@pytest.mark.rule("shard 10.1/2", "shard 15/19")
@pytest.mark.usefixtures("operator")
def test_a_forged_cluster_is_refused_logged_and_counted(fleet: Fleet) -> None:
    """The certificate of c2 and the name of c1: the session of c1 is not replaced."""
    counter = "bigfleet_shard_session_identity_rejected_total"
    before = metrics(fleet.shard_http)
    forger = fleet.operator("cluster-c2", "c1")
    said, _ = forger.communicate(timeout=PATIENCE_SECONDS)
    after = metrics(fleet.shard_http)

    text = "PERMISSION_DENIED: bigfleet://cluster/c2 may not speak for cluster 'c1'"
    assert json.loads(said) == {"step": "ended", "kind": "denied", "text": text}
    assert after[counter] - before[counter] == 1
    assert after['bigfleet_shard_session_lifecycle_total{event="replaced"}'] == 0
    lines = [json.loads(line) for line in (fleet.logs / "shard.log").read_text().splitlines()]
    refused = [line for line in lines if line["event"] == "tls.identity_rejected" and "Session" in line["rpc"]]
    assert refused[-1]["presented"] == "bigfleet://cluster/c2"


@pytest.mark.parametrize("which", ["shard", "provider"])
def test_nothing_older_than_tls_1_3_is_negotiated(fleet: Fleet, which: str) -> None:
    """Measured with a client that knows one version at a time (docs/adr/0113-identity-is-the-certificate.md)."""
    address = getattr(fleet, which)
    assert fleet.handshake(address, ssl.TLSVersion.TLSv1_3)[0] == "TLSv1.3"
    with pytest.raises((ssl.SSLError, ConnectionError)):
        fleet.handshake(address, ssl.TLSVersion.TLSv1_2)


@pytest.mark.parametrize("which", ["shard", "provider"])
def test_plain_text_gets_no_answer(fleet: Fleet, which: str) -> None:
    """Neither does a client without certificate."""
    authority = (fleet.certs / "ca.crt").read_bytes()
    for credentials in (None, grpc.ssl_channel_credentials(authority)):
        with open_channel(getattr(fleet, which), credentials) as channel:
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary("/grpc.health.v1.Health/Check", None, None)(b"", timeout=PATIENCE_SECONDS)
            status: Any = refused.value
            assert status.code() is grpc.StatusCode.UNAVAILABLE


def test_a_new_certificate_is_taken_while_the_session_lives(fleet: Fleet, operator: "subprocess.Popen[str]") -> None:
    """The shard's files change under it; it shows the new one, and the operator's stream goes on."""
    assert operator.stdin is not None
    assert operator.stdout is not None
    authority = Authority.load((fleet.certs / "ca.crt").read_bytes(), (fleet.certs / "ca.key").read_bytes())
    bearer = Bearer(name="shard", uris=("bigfleet://shard/s1",), hosts=("127.0.0.1",))
    fresh = authority.issue(bearer, datetime.now(UTC), 7)
    _, before = fleet.handshake(fleet.shard, ssl.TLSVersion.TLSv1_3)
    (fleet.certs / "shard-s1.crt").write_bytes(fresh.certificate)
    (fleet.certs / "shard-s1.key").write_bytes(fresh.key)
    _, after = fleet.handshake(fleet.shard, ssl.TLSVersion.TLSv1_3)
    operator.stdin.write("\n")
    operator.stdin.flush()

    assert json.loads(operator.stdout.readline()) == {"step": "still here"}
    parsed = x509.load_pem_x509_certificate(fresh.certificate)
    assert before != after == parsed.serial_number
    exported = metrics(fleet.shard_http)["bigfleet_shard_certificate_expires_timestamp_seconds"]
    assert exported == parsed.not_valid_after_utc.timestamp()


def test_the_series_of_certificates_are_there(fleet: Fleet) -> None:
    """TLS on loopback is not insecure; both processes say when their certificate ends."""
    assert metrics(fleet.provider_http)["bigfleet_provider_insecure"] == 0
    assert "bigfleet_provider_certificate_expires_timestamp_seconds" in metrics(fleet.provider_http)


def test_a_provider_that_certifies_says_that_it_is_insecure(fleet: Fleet, tmp_path: Path) -> None:
    """At the start, and for as long as it runs."""
    address, http = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    words = ("provider", "simulated", "--addr", address, "--metrics-addr", http, "--state", str(tmp_path / "p.db"))
    probe = fleet.credentials("readonly")
    flags = ("--certify", *fleet.flags("provider-simulated"))
    with serving(address, tmp_path / "log", *words, *flags, credentials=probe):
        assert metrics(http)["bigfleet_provider_insecure"] == 1
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["level"] for line in lines if line["event"] == "provider.certification_allowed"] == ["warning"]


@pytest.mark.rule("shard 1/4")
def test_a_shard_with_another_ones_certificate_does_not_start(fleet: Fleet, tmp_path: Path) -> None:
    """Exit 2 and one line."""
    words = ("shard", "--id", "s2", "--provider-addr", fleet.provider, "--data-dir", str(tmp_path))
    answer = run_bigfleet(*words, *fleet.flags("shard-s1"))

    certificate = fleet.certs / "shard-s1.crt"
    told = f"bigfleet: TLS: {certificate}: names bigfleet://shard/s1, not bigfleet://shard/s2\n"
    assert (answer.returncode, answer.stderr) == (2, told)


def test_a_certificate_alone_is_a_wrong_call(fleet: Fleet, tmp_path: Path) -> None:
    """Exit 2 and one line that says what is missing."""
    words = ("shard", "--provider-addr", fleet.provider, "--data-dir", str(tmp_path))
    answer = run_bigfleet(*words, "--tls-cert", str(fleet.certs / "shard-s1.crt"))

    assert answer.returncode == 2
    assert answer.stderr.startswith("bigfleet: --tls-key and --tls-ca missing")
    assert answer.stderr.count("\n") == 1
