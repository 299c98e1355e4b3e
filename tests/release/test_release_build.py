"""A whole release, on an image that has nothing but kernels: two builds are equal, and its sources build its wheel."""

import json
import os
import shutil
import tarfile
import zipfile
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from bigfleet.cli.runtime.kernel_build import build_kernels
from bigfleet.cli.runtime.kernel_cache import user_directory
from bigfleet.cli.runtime.kernel_set import MANIFEST, Manifest, current_target, read_manifest
from tools.image.faults import ImageFault
from tools.image.layout import Appearance, write_layout
from tools.release.build import build_release, check_image, unpack_kernels
from tools.release.check import check_release, check_sources
from tools.release.checksums import CHECKSUMS, SIGNATURE
from tools.release.commit import Commit
from tools.release.faults import ReleaseFault

pytestmark = pytest.mark.slow

COMMIT = Commit("c" * 40, 1_000_000_000, "0.1.0", is_tagged=False)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layout with the kernels of this host, which says that they are for x86-64-v3."""
    folder = tmp_path_factory.mktemp("image")
    build_kernels(user_directory(current_target()))
    kernels = folder / "root" / "opt" / "bigfleet" / "kernels"
    shutil.copytree(user_directory(current_target()), kernels, ignore=shutil.ignore_patterns(".lock"))
    found = read_manifest(kernels)
    assert isinstance(found, Manifest)
    level = msgspec.structs.replace(found.target, cpu="x86-64-v3", features="")
    (kernels / MANIFEST).write_bytes(msgspec.json.encode(msgspec.structs.replace(found, target=level)))
    config = {"Labels": {"org.opencontainers.image.revision": COMMIT.digest}}
    appearance = Appearance(timestamp=COMMIT.timestamp, owners={}, config=config)
    write_layout(folder / "root", folder / "layout", appearance, [lambda _path: True], COMMIT.version)
    return folder / "layout"


def built(target: Path, image: Path, key: Ed25519PrivateKey | None = None) -> list[str]:
    sbom = target.parent / "sbom.json"
    sbom.write_text("{}")
    return build_release(target, COMMIT, image=image, sbom=sbom, key=key, environment=os.environ)


@pytest.fixture(scope="module")
def key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory, image: Path, key: Ed25519PrivateKey) -> Path:
    """A release."""
    target = tmp_path_factory.mktemp("made") / "release"
    built(target, image, key)
    return target


@pytest.fixture
def copied(release: Path, tmp_path: Path) -> Path:
    """A release that a test may change."""
    return Path(shutil.copytree(release, tmp_path / "copied"))


def test_two_builds_of_a_commit_are_equal_byte_by_byte(
    release: Path, tmp_path: Path, image: Path, key: Ed25519PrivateKey
) -> None:
    """Checksums and signature among them."""
    names = built(tmp_path / "again", image, key)

    assert [name for name in names if "charts" not in name and "kernels" not in name] == [
        "RELEASE-NOTES.md",
        CHECKSUMS,
        SIGNATURE,
        "bigfleet-0.1.0-image-amd64.tar",
        "bigfleet-0.1.0-py3-none-any.whl",
        "bigfleet-0.1.0.tar.gz",
        "bigfleet.cdx.json",
    ]
    assert [name for name in names if (tmp_path / "again" / name).read_bytes() != (release / name).read_bytes()] == []
    assert sorted(str(path.relative_to(release)) for path in release.rglob("*") if path.is_file()) == names


def test_it_is_checked(release: Path, tmp_path: Path, key: Ed25519PrivateKey) -> None:
    public = tmp_path / "release.pub"
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))

    assert check_release(release, public, os.environ) == [
        f"signed by {public}",
        "9 files are as they were written",
        "bigfleet-0.1.0.tar.gz builds bigfleet-0.1.0-py3-none-any.whl",
    ]
    assert check_release(release, None, os.environ)[0] == "signature not verified: no --public-key"


def test_sources_that_build_another_wheel_are_found(copied: Path) -> None:
    wheel = copied / "bigfleet-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("bigfleet/added.py", "")

    with pytest.raises(ReleaseFault, match=r"bigfleet-0\.1\.0\.tar\.gz builds another wheel than bigfleet-0\.1\.0-py3"):
        check_sources(copied, os.environ)


def test_sources_hold_what_is_installed_and_nothing_of_development(release: Path) -> None:
    with tarfile.open(release / "bigfleet-0.1.0.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    assert {"deploy/systemd/bigfleet-shard@.service", "requirements.lock", "CHANGELOG.md", "PKG-INFO"} <= names
    assert {name.partition("/")[0] for name in names} <= {
        *("src", "proto", "deploy", "requirements.lock", "requirements-libvirt.lock"),
        *("README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "PKG-INFO", ".gitignore"),
    }


def test_the_archive_of_the_image_is_its_layout(release: Path, image: Path) -> None:
    with tarfile.open(release / "bigfleet-0.1.0-image-amd64.tar") as archive:
        found = {entry.name: archive.extractfile(entry) for entry in archive}
        contents = {name: file.read() for name, file in found.items() if file}

    assert contents["index.json"] == (image / "index.json").read_bytes()
    assert set(contents) == {str(path.relative_to(image)) for path in image.rglob("*") if path.is_file()}


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_an_image_of_another_commit_is_refused(image: Path) -> None:
    other = Commit("d" * 40, 1_000_000_000, "0.1.0", is_tagged=False)
    with pytest.raises(ReleaseFault, match=f"is of {'c' * 40}, and the commit is {'d' * 40}; run: make image"):
        check_image(image, other)


def test_what_is_no_image_is_refused(tmp_path: Path, image: Path) -> None:
    with pytest.raises(ReleaseFault, match="is no image of ours"):
        check_image(tmp_path, COMMIT)
    damaged = shutil.copytree(image, tmp_path / "damaged")
    (listed,) = json.loads((damaged / "index.json").read_bytes())["manifests"]
    (damaged / "blobs" / "sha256" / listed["digest"].partition(":")[2]).write_bytes(b"{}")
    with pytest.raises(ReleaseFault, match=r"is no image of ours .*is damaged"):
        check_image(damaged, COMMIT)


def test_an_image_without_kernels_is_refused(tmp_path: Path) -> None:
    (tmp_path / "root" / "etc").mkdir(parents=True)
    (tmp_path / "root" / "etc" / "passwd").write_text("")
    appearance = Appearance(timestamp=1, owners={}, config={})
    write_layout(tmp_path / "root", tmp_path / "layout", appearance, [lambda _path: True], "1")

    with pytest.raises(ReleaseFault, match="has no kernels; run: make image"):
        unpack_kernels(tmp_path / "layout", tmp_path / "kernels")


def test_a_folder_of_other_files_is_not_replaced(tmp_path: Path, image: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.txt").write_text("")
    with pytest.raises(ReleaseFault, match="thesis is there and is no release; remove it or name another place"):
        built(tmp_path / "thesis", image)

    assert (tmp_path / "thesis" / "thesis.txt").exists()


def test_a_build_that_fails_leaves_the_release_that_was_there(copied: Path, image: Path) -> None:
    before = (copied / CHECKSUMS).read_bytes()
    with pytest.raises(ImageFault, match="ended with 1"):
        build_release(
            copied,
            COMMIT,
            image=image,
            sbom=copied / "x",
            key=None,
            environment={**os.environ, "PYTHONPATH": "/x", "PYTHONHOME": "/x"},
        )

    assert (copied / CHECKSUMS).read_bytes() == before


def test_a_missing_bill_of_materials_is_named(tmp_path: Path, image: Path) -> None:
    with pytest.raises(ReleaseFault, match=r"missing\.json cannot be read: No such file.*; run: make sbom"):
        build_release(
            tmp_path / "release", COMMIT, image=image, sbom=tmp_path / "missing.json", key=None, environment=os.environ
        )
    assert not (tmp_path / "release").exists()
