"""Checks a release without installing it: checksums, signature, and that its sources build its wheel."""

import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tools.image.commands import run
from tools.release.checksums import SIGNATURE, verify_checksums, verify_signature
from tools.release.faults import ReleaseFault
from tools.unpacking import filtered


def check_release(folder: Path, public_key: Path | None, environment: Mapping[str, str]) -> list[str]:
    """Return what was found, a line for each check.

    Raises ReleaseFault for a release that is not sound, and ImageFault when its sources cannot be built.
    """
    found = []
    if public_key is not None:
        verify_signature(folder, public_key)
        found.append(f"signed by {public_key}")
    elif (folder / SIGNATURE).exists():
        found.append("signature not verified: no --public-key")
    names = verify_checksums(folder)
    found.append(f"{len(names)} files are as they were written")
    found.append(check_sources(folder, environment))
    return found


def check_sources(folder: Path, environment: Mapping[str, str]) -> str:
    """Build the source distribution of a release, in an empty place; raise ReleaseFault unless its wheel comes out."""
    (sources,) = folder.glob("bigfleet-*.tar.gz")
    (wheel,) = folder.glob("bigfleet-*.whl")
    with tempfile.TemporaryDirectory(prefix="bigfleet-release-") as scratch:
        with tarfile.open(sources) as archive:
            filtered(archive, "data").extractall(scratch)  # noqa: S202 - its checksum was compared
            timestamp = max(entry.mtime for entry in archive)
        built = Path(scratch) / "built"
        run(
            [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", built],
            folder=Path(scratch) / sources.name.removesuffix(".tar.gz"),
            environment={**environment, "SOURCE_DATE_EPOCH": str(int(timestamp))},
        )
        (again,) = built.iterdir()
        if (again.name, again.read_bytes()) != (wheel.name, wheel.read_bytes()):
            raise ReleaseFault(f"{sources.name} builds another wheel than {wheel.name}")
    return f"{sources.name} builds {wheel.name}"
