"""Writes the example programs of `bigfleet provider new --kind exec`, and certifies a provider that runs one."""

import os
import shlex
import subprocess
from pathlib import Path

from tests.commands import run_here
from tests.conformance.certifications import Certification
from tests.processes import bigfleet

CERTIFY_SECONDS_MAX = 900.0
FAULT = shlex.join(bigfleet("provider", "fault", "--metrics-addr", "off"))
PLACES = "--metrics-addr off --addr {addr} --state {state}"


def example(name: str, folder: Path) -> Path:
    """Write one of the examples."""
    done = run_here("provider", "new", "--kind", "exec", str(folder), "--example", name)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == str(folder / name)
    return folder / name


def certify(
    certification: Certification,
    out: Path,
    launch: str,
    *,
    patience: str = "60s",
    seconds_max: float = CERTIFY_SECONDS_MAX,
) -> None:
    """Assert that the suite says of a provider what is expected."""
    launches = (
        "--launch",
        launch,
        "--launch-fault",
        f"{FAULT} --seed-count {{seeds}} --addr {{addr}} --state {{state}}",
    )
    done = subprocess.run(
        bigfleet(
            "conformance",
            "--profile",
            certification.flag,
            f"--patience={patience}",
            "--out",
            str(out),
            *launches,
        ),
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=seconds_max,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    certification.expect_report(out)
