"""Builds the artefacts of a release from one commit.

The container image and the bill of materials are made before, by `make image` and `make sbom`. The kernels of the wheel
are those of the image, so that they are compiled once, with the Python that deploy/image/debian.lock pins.
"""

import json
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any, Final

import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tools.image.build import PREFIX
from tools.image.commands import run
from tools.image.layout import read_blob
from tools.image.wheels import ROOT, make_wheel
from tools.release.archives import files_below, write_tar
from tools.release.checksums import CHECKSUMS, sign, write_checksums
from tools.release.commit import Commit, release_notes
from tools.release.faults import ReleaseFault
from tools.release.kernel_wheel import make_kernel_wheel

CHARTS: Final = "charts"
NOTES: Final = "RELEASE-NOTES.md"
SBOM: Final = "bigfleet.cdx.json"
_REVISION: Final = "org.opencontainers.image.revision"


def build_release(
    target: Path,
    commit: Commit,
    *,
    image: Path,
    sbom: Path,
    key: Ed25519PrivateKey | None,
    environment: Mapping[str, str],
) -> list[str]:
    """Write a release of this checkout, which is `commit`, in place of what `target` is; return the names of its files.

    Raises ReleaseFault, and ImageFault when a program that builds a part fails; `target` is as before then.
    """
    if target.exists() and not (target / CHECKSUMS).is_file():
        raise ReleaseFault(f"{target} is there and is no release; remove it or name another place")
    notes = release_notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), commit)
    check_image(image, commit)
    with tempfile.TemporaryDirectory(prefix="bigfleet-release-") as scratch:
        folder = Path(scratch) / "release"
        folder.mkdir()
        make_distributions(folder, commit, environment)
        _add_kernel_wheel(folder, image, commit)
        package_charts(folder / CHARTS, commit)
        write_tar(folder / image_name(commit.version), files_below(image), commit.timestamp, is_compressed=False)
        _copy_sbom(sbom, folder / SBOM)
        (folder / NOTES).write_text(notes, encoding="utf-8")
        write_checksums(folder)
        if key is not None:
            sign(folder, key)
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(folder, target)
    return sorted(files_below(target))


def image_name(version: str) -> str:
    """Return the name of the archive of the image."""
    return f"bigfleet-{version}-image-amd64.tar"


def make_distributions(folder: Path, commit: Commit, environment: Mapping[str, str]) -> None:
    """Write the wheel and the source distribution of this checkout. Raises ImageFault."""
    dated = {**environment, "SOURCE_DATE_EPOCH": str(commit.timestamp)}
    make_wheel(folder, dated)
    run(
        [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", folder],
        folder=ROOT,
        environment=dated,
    )


def package_charts(folder: Path, commit: Commit) -> None:
    """Write each chart as `helm package` does, but with one time; Raises ReleaseFault for one of another version."""
    folder.mkdir()
    for chart in sorted((ROOT / "deploy" / "charts").iterdir()):
        described = yaml.safe_load((chart / "Chart.yaml").read_text(encoding="utf-8"))
        if {described["version"], described["appVersion"]} != {commit.version}:
            raise ReleaseFault(f"{chart / 'Chart.yaml'}: version and appVersion must be {commit.version}")
        files = files_below(chart, f"{chart.name}/")
        write_tar(folder / f"{chart.name}-{commit.version}.tgz", files, commit.timestamp, is_compressed=True)


# ---- what was made before --------------------------------------------------------------------------------------------


def check_image(image: Path, commit: Commit) -> None:
    """Raise ReleaseFault unless an OCI layout is the image of the commit."""
    try:
        revision = _config_of(image)["config"]["Labels"][_REVISION]
    except (OSError, ValueError, KeyError) as error:
        raise ReleaseFault(f"{image} is no image of ours ({error}); run: make image") from None
    if revision != commit.digest:
        raise ReleaseFault(f"{image} is of {revision}, and the commit is {commit.digest}; run: make image")


def _manifest_of(image: Path) -> dict[str, Any]:
    (listed,) = json.loads((image / "index.json").read_bytes())["manifests"]
    manifest: dict[str, Any] = json.loads(read_blob(image, listed["digest"]))
    return manifest


def _config_of(image: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(read_blob(image, _manifest_of(image)["config"]["digest"]))
    return config


def _add_kernel_wheel(folder: Path, image: Path, commit: Commit) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        kernels = Path(scratch) / "kernels"
        unpack_kernels(image, kernels)
        licence = (ROOT / "LICENSE").read_bytes()
        make_kernel_wheel(kernels, folder, version=commit.version, licence=licence, timestamp=commit.timestamp)


def unpack_kernels(image: Path, folder: Path) -> None:
    """Unpack the kernels of an image into a folder. Raises ReleaseFault when it has none."""
    place = PurePosixPath(PREFIX[1:]) / "kernels"
    for layer in reversed(_manifest_of(image)["layers"]):
        with tarfile.open(fileobj=BytesIO(read_blob(image, layer["digest"])), mode="r:gz") as archive:
            for entry in archive:
                path = PurePosixPath(entry.name)
                if not (entry.isreg() and path.is_relative_to(place)):
                    continue
                content = archive.extractfile(entry)
                target = folder / path.relative_to(place)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content.read() if content else b"")
        # All kernels are in one layer, the last.
        if folder.exists():
            return
    raise ReleaseFault(f"{image} has no kernels; run: make image")


def _copy_sbom(sbom: Path, target: Path) -> None:
    try:
        shutil.copyfile(sbom, target)
    except OSError as error:
        raise ReleaseFault(f"{sbom} cannot be read: {error.strerror}; run: make sbom") from None
