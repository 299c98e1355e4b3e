"""A new pair of certificate and key replaces the one in force only if peers accept it (docs/spec/wire.md §3)."""

from datetime import datetime, timedelta, tzinfo
from pathlib import Path

import pytest
from cryptography import x509
from structlog.testing import capture_logs

from bigfleet.cli.certs.issuing import Issued
from bigfleet.rpc.security import tls
from bigfleet.rpc.security.identity import PeerIdentity, PeerRole
from bigfleet.rpc.security.tls import TlsFiles
from tests.rpc.security.tls_world import SHARD, Certificates


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    """Certificates of this test's own."""
    return Certificates.make(tmp_path)


def serial(issued: Issued) -> int:
    """Return the serial number of a certificate."""
    return x509.load_pem_x509_certificate(issued.certificate).serial_number


class Later(datetime):
    """The wall clock of half a day and an hour later."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> "Later":
        """Return that time."""
        moment = datetime.now(tz) + timedelta(hours=13)
        return cls.fromtimestamp(moment.timestamp(), tz)


@pytest.mark.parametrize("wrong", ["expired", "not yet valid", "another authority"])
def test_a_pair_that_peers_reject_keeps_the_last_good_one(
    certificates: Certificates, tmp_path: Path, wrong: str
) -> None:
    """A wrong file must not end the connections of a process whose certificate is good for weeks."""
    certificates.files(SHARD)
    paths = certificates.paths(SHARD.name)
    files = TlsFiles(paths, bearer=PeerIdentity(PeerRole.SHARD, "s1"))
    good = files.current().serial
    other = Certificates.make(tmp_path / "other")
    issued = {
        "expired": certificates.issue(SHARD, age=timedelta(days=3)),
        "not yet valid": certificates.issue(SHARD, age=timedelta(days=-3)),
        "another authority": other.issue(SHARD),
    }[wrong]
    with capture_logs() as logs:
        certificates.write(SHARD.name, issued)
        shown = [files.current().serial for _ in range(3)]
    fresh = certificates.rewrite(SHARD)

    assert files.current().serial == serial(fresh)
    assert shown == [good] * 3
    (line,) = [line for line in logs if line["event"] == "tls.certificate_rejected"]
    assert str(paths.certificate) in line["error"]
    expected = {
        "expired": "expired at",
        "not yet valid": "is not valid before",
        "another authority": f"is not signed by an authority of {paths.authority}",
    }
    assert expected[wrong] in line["error"]


def test_an_expired_pair_is_refused_also_when_the_one_in_force_has_expired(certificates: Certificates) -> None:
    """It is no better, and the reason is logged."""
    files = certificates.files(SHARD, age=timedelta(days=3))
    before = files.current().serial
    with capture_logs() as logs:
        certificates.write(SHARD.name, certificates.issue(SHARD, age=timedelta(days=2)))
        after = files.current().serial

    assert before == after
    assert [line["event"] for line in logs] == ["tls.certificate_rejected"]
    assert files.current().serial != serial(certificates.rewrite(SHARD)) == files.current().serial


def test_a_pair_that_is_not_valid_yet_is_used_from_then_on(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the files do not change again: a clock that is behind its authority's must not cost the new pair."""
    files = certificates.files(SHARD)
    before = files.current().serial
    later = certificates.issue(SHARD, age=timedelta(hours=-12))
    certificates.write(SHARD.name, later)
    assert files.current().serial == before

    monkeypatch.setattr(tls, "datetime", Later)

    assert files.current().serial == serial(later)


def test_the_authority_of_a_pair_is_compared_only_if_the_one_in_force_is_of_it(
    certificates: Certificates, tmp_path: Path
) -> None:
    """The clients of an etcd may have an authority of their own, which is not the one of its servers."""
    other = Certificates.make(tmp_path / "other")
    files = TlsFiles(certificates.write(SHARD.name, other.issue(SHARD)))
    fresh = other.issue(SHARD)

    certificates.write(SHARD.name, fresh)

    assert files.current().serial == serial(fresh)
