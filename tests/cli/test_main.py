"""Tests for the ways to start the command."""

import subprocess
import sys

import bigfleet
from tests.patience import PATIENCE_SECONDS


def test_the_package_runs_as_a_module() -> None:
    """`python -m bigfleet` is the command `bigfleet`."""
    command = [sys.executable, "-m", "bigfleet", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (0, f"bigfleet {bigfleet.installed_version()}\n", "")
