"""Installs the wheels of a release into a new environment, from an index on this disk."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_SECONDS
from tools.image.wheels import PYTHON, ROOT, fetch_wheels, pip_command

#: The environment of what is installed: nothing of this user or of the tests.
EMPTY = {"PATH": os.defpath, "HOME": "/nonexistent", "COLUMNS": "200", "NO_COLOR": "1", "LANG": "C.UTF-8"}
BINDING_LOCK = ROOT / "requirements-libvirt.lock"
#: The folder of a release; `make release-check` sets it.
RELEASE_VARIABLE = "BIGFLEET_RELEASE_DIR"

needs_release = pytest.mark.skipif(
    not os.environ.get(RELEASE_VARIABLE), reason=f"{RELEASE_VARIABLE} names no release: make release release-check"
)


def release_folder() -> Path:
    """Return the release that is tested."""
    return Path(os.environ[RELEASE_VARIABLE])


def build_binding(folder: Path) -> Path:
    """Build the wheel of libvirt's Python binding from the sources that are pinned; it has no other."""
    subprocess.run(
        [
            *(*pip_command(), "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"),
            *("--require-hashes", "--requirement", str(BINDING_LOCK), "--wheel-dir", str(folder)),
        ],
        timeout=PATIENCE_SECONDS * 2,
        check=True,
    )
    (wheel,) = folder.glob("libvirt_python-*.whl")
    return wheel


def make_index(folder: Path, *more: Path) -> str:
    """Make an index of the release's wheels, of those that the image's lock file pins, and of more; return its URL."""
    assert ".".join(map(str, sys.version_info[:2])) == PYTHON, f"a release is checked with Python {PYTHON}"
    wheels = folder / "wheels"
    wheels.mkdir()
    found = [*fetch_wheels(wheels, os.environ), *release_folder().glob("*.whl"), *more]
    for wheel in found:
        project = folder / "simple" / wheel.name.partition("-")[0].lower().replace("_", "-").replace(".", "-")
        project.mkdir(parents=True, exist_ok=True)
        (project / "index.html").write_text(f'<a href="{wheel.as_uri()}">{wheel.name}</a>\n')
    return (folder / "simple").as_uri()


def install(place: Path, index: str, requirement: str) -> Path:
    """Make an environment with what a requirement needs, from the index and nowhere else; return its `bin`."""
    succeed(sys.executable, "-m", "venv", str(place))
    pip = (str(place / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--isolated")
    succeed(*pip, "install", "--quiet", "--no-cache-dir", "--no-compile", "--index-url", index, requirement)
    succeed(*pip, "check")
    return place / "bin"


def succeed(*words: str, folder: Path | None = None) -> str:
    """Return what a command prints in the environment `EMPTY`; it must end with 0."""
    done = subprocess.run(
        words,
        cwd=folder,
        env=EMPTY,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS * 2,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
