"""`bigfleet get` with certificates: who may read, and what is said of a connection that fails."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from tests.commands import run_here
from tests.processes import free_port, serving


@dataclass(frozen=True)
class SecureShard:
    """A shard with TLS that waits for its provider."""

    address: str
    certs: Path

    def flags(self, holder: str, authority: Path | None = None) -> tuple[str, ...]:
        """Return a holder's flags."""
        pair = ("--tls-cert", str(self.certs / f"{holder}.crt"), "--tls-key", str(self.certs / f"{holder}.key"))
        return (*pair, "--tls-ca", str((authority or self.certs) / "ca.crt"))


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureShard]:
    place = tmp_path_factory.mktemp("get-tls")
    shard = SecureShard(f"127.0.0.1:{free_port()}", place / "certs")
    assert run_here("certs", "dev", str(shard.certs), "--shard", "s1", "--cluster", "c1").returncode == 0
    certificate, key, authority = (
        (shard.certs / name).read_bytes() for name in ("readonly.crt", "readonly.key", "ca.crt")
    )
    command = (
        *("shard", "--id", "s1", "--listen", shard.address, "--provider-addr", f"127.0.0.1:{free_port()}"),
        *("--data-dir", str(place), "--metrics-addr", "off", *shard.flags("shard-s1")),
    )
    probe = grpc.ssl_channel_credentials(authority, key, certificate)
    with serving(shard.address, place / "shard.log", *command, credentials=probe):
        yield shard


@pytest.mark.parametrize("holder", ["readonly", "admin"])
def test_a_reader_is_answered(shard: SecureShard, holder: str) -> None:
    """The shard itself says that it is not ready, so the question got through."""
    finished = run_here("get", "needs", "--addr", shard.address, *shard.flags(holder))

    assert (finished.returncode, finished.stdout) == (1, "")
    assert "is not ready yet" in finished.stderr


def test_a_cluster_may_not_read(shard: SecureShard) -> None:
    finished = run_here("get", "needs", "--addr", shard.address, *shard.flags("cluster-c1"))

    assert finished.returncode == 1
    assert "rejects this identity" in finished.stderr
    assert "must be readonly or admin" in finished.stderr
    assert finished.stderr.count("\n") == 1


def test_plain_text_to_a_shard_with_certificates_is_told(shard: SecureShard) -> None:
    finished = run_here("get", "needs", "--addr", shard.address)

    assert finished.returncode == 1
    assert "the server likely serves TLS: set --tls-cert, --tls-key and --tls-ca here" in finished.stderr


def test_another_authority_is_named(shard: SecureShard, tmp_path: Path) -> None:
    assert run_here("certs", "dev", str(tmp_path), "--shard", "s1").returncode == 0

    finished = run_here("get", "needs", "--addr", shard.address, *shard.flags("readonly", authority=tmp_path))

    assert finished.returncode == 1
    assert "the TLS handshake failed: another authority" in finished.stderr
