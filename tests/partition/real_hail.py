"""Asks Ganeti's own `hail`, and our program in this process; where the package is missing, says so loudly and skips.

Debian's package is `ganeti-htools`; it does not put the program on PATH.
"""

import io
import os
import subprocess
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from bigfleet.cli.hail.program import run

HAIL = Path("/usr/lib/ganeti/iallocators/hail")
MISSING = f"NOT COMPARED with Ganeti's hail: {HAIL} is missing; on Debian or Ubuntu: apt-get install -y ganeti-htools"
#: hail never ends where nothing limits an interval; nothing else takes it a second.
SECONDS_MAX = 60.0


class Said(NamedTuple):
    """What a program left behind."""

    code: int
    output: str
    errors: str


def need_hail() -> None:
    """Skip the test, and put a warning into the run's summary, where hail is not installed."""
    if not HAIL.exists():
        warnings.warn(MISSING, stacklevel=2)
        pytest.skip(MISSING)


class Asked:
    """A question that hail works on meanwhile."""

    def __init__(self, message: bytes, arguments: Sequence[str]) -> None:
        # In another locale it cannot print names beyond ASCII.
        environment = {**os.environ, "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}
        self._process = subprocess.Popen(
            [str(HAIL), "-", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(message)
        self._process.stdin.flush()

    def said(self, seconds_max: float = SECONDS_MAX) -> Said:
        """Return what it said. Raises subprocess.TimeoutExpired when it does not end."""
        try:
            output, errors = self._process.communicate(timeout=seconds_max)
        finally:
            self._process.kill()
            self._process.wait()
        return Said(self._process.returncode, output.decode(), errors.decode())


def we_say(message: bytes, arguments: Sequence[str] = ()) -> Said:
    """Run our program in this process on standard input."""
    output, errors = io.BytesIO(), io.StringIO()
    try:
        code = run("hail-dedicated", ["-", *arguments], stdin=io.BytesIO(message), stdout=output, stderr=errors)
    except SystemExit as end:
        code = int(end.code or 0)
    return Said(code, output.getvalue().decode(), errors.getvalue())
