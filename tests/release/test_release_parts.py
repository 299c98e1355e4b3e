"""tools/release: the commit, the notes, the charts and the checksums of a release."""

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from tests.deploy.charts import CASES, CHARTS, NAMES, needs_helm, run_program
from tools.image.wheels import ROOT
from tools.release import build
from tools.release.build import package_charts
from tools.release.checksums import (
    CHECKSUMS,
    SIGNATURE,
    read_private_key,
    sign,
    verify_checksums,
    verify_signature,
    write_checksums,
)
from tools.release.commit import Commit, current_commit, release_notes
from tools.release.faults import ReleaseFault

# ---- the commit ------------------------------------------------------------------------------------------------------

WHO = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", "PATH": os.environ["PATH"]}
ME = ("-c", "user.name=me", "-c", "user.email=me@example.com")


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *ME, *words], cwd=folder, env=WHO, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with one commit."""
    folder = tmp_path / "checkout"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "module.py").write_text("")
    (folder / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message=first", "--date=2001-09-09T01:46:40Z")
    return folder


def test_a_clean_checkout_is_its_commit(checkout: Path) -> None:
    (checkout / "notes.txt").write_text("no part of a release")
    found = current_commit(checkout, WHO)

    assert (found.digest, found.version) == (git(checkout, "rev-parse", "HEAD"), "1.2.3")
    assert found.timestamp == int(git(checkout, "log", "-1", "--format=%ct"))
    assert not found.is_tagged


@pytest.mark.parametrize("name", ["src/module.py", "src/new.py", "pyproject.toml"])
def test_a_checkout_with_changes_is_no_release(checkout: Path, name: str) -> None:
    with (checkout / name).open("a") as file:
        file.write("# changed\n")

    with pytest.raises(ReleaseFault, match=f"^{name} differs from the commit; commit it"):
        current_commit(checkout, WHO)


def test_a_tag_must_be_that_of_the_version(checkout: Path) -> None:
    git(checkout, "tag", "v1.2.4")
    with pytest.raises(ReleaseFault, match=r"has the tag v1\.2\.4, and pyproject\.toml has version 1\.2\.3"):
        current_commit(checkout, WHO)

    git(checkout, "tag", "v1.2.3")
    assert current_commit(checkout, WHO).is_tagged


# ---- notes -----------------------------------------------------------------------------------------------------------

CHANGELOG = """# Changelog

Words.

## Unreleased

### Added

- Something new.

## 1.1.0 (2026-01-02)

- Something older.
"""


def commit_of(version: str, *, is_tagged: bool) -> Commit:
    return Commit("c" * 40, 1_000_000_000, version, is_tagged)


def test_notes_are_the_section_of_the_version() -> None:
    notes = release_notes(CHANGELOG, commit_of("1.1.0", is_tagged=True))

    assert notes == f"# BigFleet 1.1.0\n\nCommit {'c' * 40}.\n\n- Something older.\n"


def test_a_commit_without_a_tag_has_what_is_unreleased_and_says_so() -> None:
    notes = release_notes(CHANGELOG, commit_of("1.2.0", is_tagged=False))

    assert notes.splitlines()[0] == "# BigFleet 1.2.0 (preview)"
    assert notes.endswith("\n\n### Added\n\n- Something new.\n")


def test_a_tag_without_a_section_is_refused() -> None:
    with pytest.raises(ReleaseFault, match=r"CHANGELOG\.md has no section '## 1\.2\.0', and the commit has the tag"):
        release_notes(CHANGELOG, commit_of("1.2.0", is_tagged=True))


def test_notes_that_are_empty_are_refused() -> None:
    with pytest.raises(ReleaseFault, match=r"CHANGELOG\.md has nothing in '## 2\.0' or '## Unreleased'"):
        release_notes("# Changelog\n\n## Unreleased\n", commit_of("2.0", is_tagged=False))


def test_this_changelog_has_notes() -> None:
    notes = release_notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), commit_of("0.1.0", is_tagged=False))

    assert len(notes.splitlines()) > 10


# ---- charts ----------------------------------------------------------------------------------------------------------


def test_charts_are_packaged_with_the_files_that_their_links_lead_to(tmp_path: Path) -> None:
    package_charts(tmp_path / "charts", commit_of("0.1.0", is_tagged=False))

    assert sorted(path.name for path in (tmp_path / "charts").iterdir()) == [f"{name}-0.1.0.tgz" for name in NAMES]
    with tarfile.open(tmp_path / "charts" / "bigfleet-operator-0.1.0.tgz") as archive:
        packed = archive.extractfile("bigfleet-operator/files/crds/capacityrequests.yaml")
        assert packed is not None
        assert packed.read() == (ROOT / "deploy" / "crds" / "capacityrequests.yaml").read_bytes()
        assert {(entry.mtime, entry.uid, entry.mode) for entry in archive} == {(1_000_000_000, 0, 0o644)}


def test_equal_charts_make_equal_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package_charts(tmp_path / "first", commit_of("0.1.0", is_tagged=False))
    copied = shutil.copytree(ROOT / "deploy", tmp_path / "copied" / "deploy")
    for path in Path(copied).rglob("*"):
        os.utime(path, (1, 1))
    monkeypatch.setattr(build, "ROOT", tmp_path / "copied")
    package_charts(tmp_path / "second", commit_of("0.1.0", is_tagged=False))

    for name in NAMES:
        package = f"{name}-0.1.0.tgz"
        assert (tmp_path / "first" / package).read_bytes() == (tmp_path / "second" / package).read_bytes()


def test_a_chart_of_another_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReleaseFault, match=r"Chart\.yaml: version and appVersion must be 0\.2\.0"):
        package_charts(tmp_path / "charts", commit_of("0.2.0", is_tagged=False))


@needs_helm
@pytest.mark.parametrize("name", NAMES)
def test_helm_renders_a_package_as_the_folder_that_it_was_made_of(tmp_path: Path, name: str) -> None:
    package_charts(tmp_path / "charts", commit_of("0.1.0", is_tagged=False))
    (case, *_more) = sorted((CASES / name).iterdir())
    words = ("--values", str(case / "values.yaml"), "--namespace", "bigfleet-system")

    packed = run_program("helm", "template", "fleet", str(tmp_path / "charts" / f"{name}-0.1.0.tgz"), *words)
    plain = run_program("helm", "template", "fleet", str(CHARTS / name), *words)

    assert (packed.returncode, packed.stdout) == (0, plain.stdout), packed.stderr
    assert packed.stdout


# ---- checksums -------------------------------------------------------------------------------------------------------


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """A folder with two files and their checksums."""
    folder = tmp_path / "release"
    (folder / "charts").mkdir(parents=True)
    (folder / "wheel").write_text("a wheel")
    (folder / "charts" / "chart").write_text("a chart")
    write_checksums(folder)
    return folder


def test_checksums_are_those_of_all_files(release: Path) -> None:
    assert verify_checksums(release) == ["charts/chart", "wheel"]
    done = subprocess.run(["sha256sum", "--check", "--strict", CHECKSUMS], cwd=release, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "charts/chart: OK\nwheel: OK\n")


def test_a_release_that_is_not_sound_is_named(release: Path) -> None:
    with pytest.raises(ReleaseFault, match="charts is no release: SHA256SUMS: No such file"):
        verify_checksums(release / "charts")
    (release / "added").write_text("")
    with pytest.raises(ReleaseFault, match="added is not listed in SHA256SUMS"):
        verify_checksums(release)
    (release / "added").unlink()
    (release / "wheel").write_text("another wheel")
    with pytest.raises(ReleaseFault, match="wheel is damaged; copy the release again"):
        verify_checksums(release)
    (release / "wheel").unlink()
    with pytest.raises(ReleaseFault, match="wheel is missing; copy the release again"):
        verify_checksums(release)
    (release / CHECKSUMS).write_text("wheel\n")
    with pytest.raises(ReleaseFault, match=r"SHA256SUMS:1: 'wheel' is not DIGEST  NAME"):
        verify_checksums(release)


# ---- signatures ------------------------------------------------------------------------------------------------------


def openssl(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["openssl", *map(str, words)], capture_output=True, text=True, check=False)


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """A private and a public key, made as docs/installing.md says."""
    private, public = tmp_path / "release.key", tmp_path / "release.pub"
    assert openssl("genpkey", "-algorithm", "ed25519", "-out", private).returncode == 0
    assert openssl("pkey", "-in", private, "-pubout", "-out", public).returncode == 0
    return private, public


def test_a_signature_is_verified_by_openssl_and_by_the_check(release: Path, keys: tuple[Path, Path]) -> None:
    private, public = keys
    sign(release, read_private_key(private))
    words = ("pkeyutl", "-verify", "-pubin", "-inkey", public, "-rawin")
    done = openssl(*words, "-in", release / CHECKSUMS, "-sigfile", release / SIGNATURE)

    assert (done.returncode, done.stdout.strip()) == (0, "Signature Verified Successfully")
    verify_signature(release, public)
    assert verify_checksums(release) == ["charts/chart", "wheel"]


def test_other_checksums_are_not_signed(release: Path, keys: tuple[Path, Path]) -> None:
    private, public = keys
    sign(release, read_private_key(private))
    (release / "wheel").write_text("another wheel")
    write_checksums(release)

    with pytest.raises(ReleaseFault, match=r"is not signed by .*release\.pub: do not use the release"):
        verify_signature(release, public)


def test_a_release_without_a_signature_is_refused_where_a_key_is_given(release: Path, keys: tuple[Path, Path]) -> None:
    with pytest.raises(ReleaseFault, match=r"SHA256SUMS\.sig cannot be read: No such file"):
        verify_signature(release, keys[1])


def test_keys_that_cannot_sign_are_refused_with_the_remedy(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    private, public = keys
    other = rsa.generate_private_key(65537, 2048).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )  # fmt: skip
    encrypted = load_pem_private_key(private.read_bytes(), None).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
    )
    for name, content, fault in (
        ("rsa", other, "is no key of Ed25519; make one: openssl genpkey -algorithm ed25519"),
        ("encrypted", encrypted, "is encrypted; decrypt it: openssl pkey"),
        ("public", public.read_bytes(), "is no private key; make one"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ReleaseFault, match=fault):
            read_private_key(tmp_path / name)
    with pytest.raises(ReleaseFault, match="missing cannot be read: No such file"):
        read_private_key(tmp_path / "missing")
