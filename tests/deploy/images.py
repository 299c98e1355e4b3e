"""Builds and runs the image for its tests."""

import os
import re
import signal
import subprocess
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from tests.patience import PATIENCE_SECONDS, wait_until
from tests.release.installed import release_folder
from tools.image.build import USER
from tools.image.faults import ImageFault
from tools.image.sandbox import sandboxed
from tools.unpacking import filtered

T = TypeVar("T")

#: Turns a skip into a failure.
REQUIRE_VARIABLE = "BIGFLEET_REQUIRE_IMAGE"
COMMANDS = {"PATH": "/opt/bigfleet/bin:/usr/bin:/bin", "HOME": "/tmp", "COLUMNS": "200", "NO_COLOR": "1"}

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a program as the user of the image")


def built(build: Callable[[], T]) -> T:
    """Return what `build` makes; skip the test where packages cannot be had."""
    try:
        return build()
    except ImageFault as fault:
        reason = f"NO IMAGE, SO IT IS NOT TESTED: {fault}"
        if os.environ.get(REQUIRE_VARIABLE) == "1":
            pytest.fail(reason)
        pytest.skip(reason)


def unpack_release(folder: Path) -> Path:
    """Unpack the archive of the image of the release that is checked; return its layout."""
    (archive,) = release_folder().glob("bigfleet-*-image-*.tar")
    with tarfile.open(archive) as opened:
        filtered(opened, "data").extractall(folder)
    return folder


def run_inside(root: Path, *command: str, state: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command of the image to its end, as its user, on a file system that is read-only but for `state`."""
    if state is not None:
        os.chown(state, USER, USER)
    return subprocess.run(
        sandboxed(root, command, COMMANDS, user=USER, state=state),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS * 2,
        check=False,
    )


def printed_inside(root: Path, *command: Sequence[str] | str, state: Path | None = None) -> str:
    """Return what a command of the image prints; it must end with 0."""
    done = run_inside(root, *(str(word) for word in command), state=state)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class ProcessInside:
    """The first process of a running image."""

    def __init__(self, outer: "subprocess.Popen[bytes]", log: Path) -> None:
        """Take the process of this host that has made its namespaces."""
        self.log = log
        self._outer = outer
        self._children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")

    @property
    def processor_seconds(self) -> float:
        """Processor time of it and of what it waited for."""
        fields = Path(f"/proc/{self._pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    @property
    def memory_bytes_max(self) -> int:
        """The most memory that it has had."""
        status = Path(f"/proc/{self._pid}/status").read_text(encoding="ascii")
        (found,) = re.findall(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
        return int(found) * 1024

    def metric(self, address: str, name: str) -> float:
        """Return the value of a metric, 0 while the address does not serve it. Raises AssertionError after its end."""
        assert self._outer.poll() is None, f"it ended with {self._outer.returncode}:\n{self.log.read_text()}"
        try:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=PATIENCE_SECONDS) as answer:
                lines = answer.read().decode().splitlines()
        except (urllib.error.URLError, OSError):
            return 0.0
        return sum(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))

    def wait_for_metric(self, address: str, name: str, value: float) -> None:
        """Return once a metric has at least a value."""
        wait_until(lambda: self.metric(address, name) >= value, lambda: f"{name} is too low:\n{self.log.read_text()}")

    def stop(self) -> int:
        """Send SIGTERM, as engines do, and return the exit code."""
        os.kill(self._pid, signal.SIGTERM)
        return self._outer.wait(PATIENCE_SECONDS)

    @property
    def _pid(self) -> int:
        (child,) = self._children.read_text(encoding="ascii").split()
        return int(child)


@contextmanager
def process_inside(root: Path, state: Path, *command: str) -> Iterator[ProcessInside]:
    """Run a command of the image, as its user, while the context lasts; `state` is where it may write."""
    os.chown(state, USER, USER)
    log = state.with_name(f"{state.name}.log")
    with log.open("wb") as output:
        outer = subprocess.Popen(
            sandboxed(root, command, COMMANDS, user=USER, state=state), stdout=output, stderr=output
        )
    try:
        yield ProcessInside(outer, log)
    finally:
        # Its namespaces end with it, and all processes in them.
        outer.kill()
        outer.wait(PATIENCE_SECONDS)
