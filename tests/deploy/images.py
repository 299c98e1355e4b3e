"""Builds and runs the image for its tests."""

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from tests.patience import PATIENCE_SECONDS
from tools.image.build import USER
from tools.image.faults import ImageFault
from tools.image.sandbox import sandboxed

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
