"""Writes the example programs of `bigfleet provider new --kind exec`, and certifies a provider that runs one."""

import json
import os
import shlex
import subprocess
from pathlib import Path

from tests.commands import run_here
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


def certify(out: Path, launch: str, *, patience: str = "60s", seconds_max: float = CERTIFY_SECONDS_MAX) -> None:
    """Assert that each behaviour of four profiles passes."""
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
            "core,cloud,delta,durable",
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
    verdicts = json.loads((out / "report.json").read_text())["verdicts"]
    assert verdicts == dict.fromkeys(("core", "cloud", "delta", "durable"), "CERTIFIED")
