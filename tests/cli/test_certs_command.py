"""`bigfleet certs dev`: what it makes, keeps and refuses, and that what it prints is true (docs/tls.md)."""

import shlex
from datetime import UTC, datetime, timedelta
from pathlib import Path
from stat import S_IMODE

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from typer.testing import CliRunner

from bigfleet.cli.certs.command import app
from bigfleet.cli.certs.issuing import Authority, Bearer
from bigfleet.cli.runtime.failures import RunFault, UsageFault
from bigfleet.rpc.security.identity import identity_in
from bigfleet.rpc.security.tls import TlsFiles, TlsPaths

CLIENT, SERVER = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH


def make(folder: Path, *arguments: str) -> str:
    """Run the command and return what it printed."""
    result = CliRunner().invoke(app, ["dev", str(folder), *arguments], catch_exceptions=True)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def certificate(path: Path) -> x509.Certificate:
    """Return a parsed certificate."""
    return x509.load_pem_x509_certificate(path.read_bytes())


def names(parsed: x509.Certificate) -> x509.SubjectAlternativeName:
    """Return its alternative names."""
    return parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("name", "uri", "uses"),
    [
        ("shard-s1", "bigfleet://shard/s1", {CLIENT, SERVER}),
        ("cluster-c1", "bigfleet://cluster/c1", {CLIENT}),
        ("cluster-c2", "bigfleet://cluster/c2", {CLIENT}),
        ("coordinator", "bigfleet://admin", {CLIENT, SERVER}),
        ("admin", "bigfleet://admin", {CLIENT}),
        ("readonly", "bigfleet://readonly", {CLIENT}),
        ("provider-metal", None, {SERVER}),
    ],
)
def test_each_role_gets_a_certificate_that_can_do_no_more(
    tmp_path: Path, name: str, uri: str | None, uses: set[x509.ObjectIdentifier]
) -> None:
    """One identity or none, a host name for those that serve, and the uses that go with it."""
    make(tmp_path, "--shard", "s1", "--cluster", "c1", "--cluster", "c2", "--provider", "metal")
    parsed = certificate(tmp_path / f"{name}.crt")
    hosts = names(parsed).get_values_for_type(x509.DNSName)
    uris = names(parsed).get_values_for_type(x509.UniformResourceIdentifier)

    assert uris == ([uri] if uri else [])
    assert uri is None or identity_in(uris).uri == uri
    assert set(parsed.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == uses
    assert ("localhost" in hosts) == (SERVER in uses)
    assert not parsed.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    parsed.verify_directly_issued_by(certificate(tmp_path / "ca.crt"))


def test_keys_are_for_their_owner_alone(tmp_path: Path) -> None:
    """Whatever the umask, and the directory too when it is made here."""
    folder = tmp_path / "new" / "certs"
    make(folder)

    assert S_IMODE(folder.stat().st_mode) == 0o700
    assert {S_IMODE(path.stat().st_mode) for path in folder.glob("*.key")} == {0o600}
    assert {path.suffix for path in folder.iterdir()} == {".crt", ".key"}


def test_without_names_the_defaults_of_the_other_commands_are_served(tmp_path: Path) -> None:
    """`bigfleet shard` is shard-0, `bigfleet provider simulated` is simulated."""
    make(tmp_path)

    holders = {"ca", "shard-shard-0", "cluster-cluster-0", "provider-simulated", "coordinator", "admin", "readonly"}
    assert {path.stem for path in tmp_path.iterdir()} == holders


def test_every_line_of_flags_that_is_printed_works(tmp_path: Path) -> None:
    """Each names three files that make credentials, quoted for a shell."""
    folder = tmp_path / "a folder"
    printed = make(folder)
    lines = [shlex.split(line) for line in printed.splitlines() if "--tls-cert" in line]

    assert len(lines) == 6
    for words in lines:
        flags = dict(zip(words[::2], words[1::2], strict=True))
        paths = [Path(flags[flag]) for flag in ("--tls-cert", "--tls-key", "--tls-ca")]
        TlsFiles(TlsPaths(certificate=paths[0], key=paths[1], authority=paths[2]))


def test_what_is_there_is_kept_and_what_is_missing_is_made(tmp_path: Path) -> None:
    """Another cluster can be added to a running fleet, under the same authority."""
    make(tmp_path, "--cluster", "c1")
    before = contents(tmp_path)
    printed = make(tmp_path, "--cluster", "c1", "--cluster", "c2")
    after = contents(tmp_path)

    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"cluster-c2.crt", "cluster-c2.key"}
    assert printed.count("; kept") == 6
    assert printed.count("; new") == 1


def test_force_makes_everything_anew(tmp_path: Path) -> None:
    """The authority too, so that nothing from before is trusted."""
    make(tmp_path)
    before = contents(tmp_path)
    make(tmp_path, "--force")
    after = contents(tmp_path)

    assert set(after) == set(before)
    assert not set(after.values()) & set(before.values())
    certificate(tmp_path / "admin.crt").verify_directly_issued_by(certificate(tmp_path / "ca.crt"))


def test_days_and_hosts_are_what_was_asked_for(tmp_path: Path) -> None:
    """Names and addresses of both families."""
    make(tmp_path, "--days", "3", "--host", "fleet.example", "--host", "10.1.2.3", "--host", "fd00::1")
    parsed = certificate(tmp_path / "shard-shard-0.crt")
    left = parsed.not_valid_after_utc - datetime.now(UTC)

    assert timedelta(days=2) < left <= timedelta(days=3)
    assert "fleet.example" in names(parsed).get_values_for_type(x509.DNSName)
    addresses = {str(address) for address in names(parsed).get_values_for_type(x509.IPAddress)}
    assert {"127.0.0.1", "::1", "10.1.2.3", "fd00::1"} <= addresses


def test_an_id_that_is_no_file_name_still_gets_a_file(tmp_path: Path) -> None:
    """The file's name is quoted, the identity is not."""
    make(tmp_path, "--cluster", "../eu/west")
    parsed = certificate(tmp_path / "cluster-..%2Feu%2Fwest.crt")

    assert names(parsed).get_values_for_type(x509.UniformResourceIdentifier) == ["bigfleet://cluster/../eu/west"]


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--cluster", ""], "--cluster"),
        (["--shard", "two words"], "--shard"),
        (["--cluster", "münchen"], "ASCII"),
        (["--cluster", "c1", "--cluster", "c1"], "given twice"),
        (["--host", "no host"], "--host: 'no host'"),
        (["--host", "-x"], "--host"),
    ],
)
def test_a_wrong_name_is_refused_before_anything_is_written(tmp_path: Path, arguments: list[str], fault: str) -> None:
    """The flag and what it must be."""
    with pytest.raises(UsageFault, match=fault):
        make(tmp_path, *arguments)
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("days", ["0", "3651", "x"])
def test_days_have_bounds(tmp_path: Path, days: str) -> None:
    """Exit 2 from the parser."""
    assert CliRunner().invoke(app, ["dev", str(tmp_path), "--days", days]).exit_code == 2


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        pytest.param(lambda d: (d / "admin.key").unlink(), r"admin\.crt exists and", id="half a pair"),
        pytest.param(lambda d: (d / "admin.crt").write_bytes(b"x"), r"admin\.crt: holds no PEM", id="no certificate"),
        pytest.param(lambda d: (d / "ca.key").unlink(), r"ca\.crt exists and", id="half an authority"),
        pytest.param(lambda d: (d / "ca.crt").write_bytes(b"x"), r"make no authority", id="no authority"),
        pytest.param(
            lambda d: (d / "ca.key").write_bytes((d / "admin.key").read_bytes()), r"make no authority", id="another key"
        ),
    ],
)
def test_a_directory_that_does_not_hold_together_is_refused_and_left_alone(
    tmp_path: Path, spoil: object, fault: str
) -> None:
    """The file, what is wrong with it, and the way out; which then works."""
    make(tmp_path)
    spoil(tmp_path)  # type: ignore[operator]
    before = contents(tmp_path)
    with pytest.raises(UsageFault, match=fault):
        make(tmp_path)
    assert contents(tmp_path) == before

    make(tmp_path, "--force")
    make(tmp_path)


def test_a_certificate_of_another_authority_or_time_is_not_kept(tmp_path: Path) -> None:
    """It would be refused by every peer."""
    make(tmp_path)
    now = datetime.now(UTC)
    authority = Authority.load((tmp_path / "ca.crt").read_bytes(), (tmp_path / "ca.key").read_bytes())
    old = authority.issue(Bearer(name="a", uris=("bigfleet://admin",)), now - timedelta(days=9), 1)
    foreign = Authority.create(now).issue(Bearer(name="a", uris=("bigfleet://admin",)), now, 1)
    for issued, fault in ((old, "has expired"), (foreign, "did not sign it")):
        (tmp_path / "admin.crt").write_bytes(issued.certificate)
        with pytest.raises(UsageFault, match=fault):
            make(tmp_path)


def test_a_host_that_a_kept_certificate_lacks_is_said(tmp_path: Path) -> None:
    """Else --host would do nothing."""
    make(tmp_path)
    with pytest.raises(UsageFault, match=r"does not name the host fleet\.example"):
        make(tmp_path, "--host", "fleet.example")


def test_a_directory_that_cannot_be_made_or_written_is_named(tmp_path: Path) -> None:
    """No traceback."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageFault, match="file"):
        make(tmp_path / "file")
    (tmp_path / "there" / "ca.crt").mkdir(parents=True)
    (tmp_path / "there" / "ca.key").mkdir()
    with pytest.raises((UsageFault, RunFault), match="ca"):
        make(tmp_path / "there")


UNREADABLE_ADVICE = "put a readable file in its place, or remove it and use --force, which creates all files again"


@pytest.mark.parametrize("name", ["ca.crt", "ca.key", "admin.crt"])
def test_a_file_without_an_end_is_refused(name: str, tmp_path: Path) -> None:
    """A device in place of a certificate would take all memory."""
    make(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")

    with pytest.raises(UsageFault, match=f"{name}: Is a device; {UNREADABLE_ADVICE}$"):
        make(tmp_path)


def test_a_directory_in_place_of_a_certificate_is_refused_with_an_advice_that_helps(tmp_path: Path) -> None:
    """--force does not remove a directory."""
    make(tmp_path)
    (tmp_path / "ca.crt").unlink()
    (tmp_path / "ca.crt").mkdir()
    with pytest.raises(UsageFault, match=rf"ca\.crt: Is a directory; {UNREADABLE_ADVICE}$"):
        make(tmp_path)

    (tmp_path / "ca.crt").rmdir()
    make(tmp_path, "--force")
    make(tmp_path)


def test_nothing_outlives_its_authority(tmp_path: Path) -> None:
    """A long time for a certificate ends with the authority."""
    make(tmp_path, "--days", "3650")
    authority, admin = certificate(tmp_path / "ca.crt"), certificate(tmp_path / "admin.crt")

    assert admin.not_valid_after_utc <= authority.not_valid_after_utc
