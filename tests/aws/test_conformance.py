"""The conformance suite against `bigfleet provider aws` before the strict shim."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.aws.client import BUCKET, ShimClient
from tests.aws.command import flags
from tests.aws.over_http import PREFIX
from tests.conformance.certifications import certification_of
from tests.processes import bigfleet

CERTIFY_SECONDS_MAX = 1100.0
FAULT = shlex.join(bigfleet("provider", "fault", "--metrics-addr", "off"))


@pytest.mark.long
def test_the_provider_is_certified(shim: ShimClient, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    certification = certification_of(request)
    shim.bucket()
    shim.control("agent", bucket=BUCKET, prefix=PREFIX)
    offerings = [shim.offering(count=160), shim.offering(count=96, capacity_type="spot", zone="us-east-1b")]
    served = shlex.join(bigfleet("provider", "aws", *flags(shim, tmp_path, *offerings)))
    # A provider with a new state file must not find the instances of the one before.
    name = "$(printf %s {state} | cksum | cut -d' ' -f1)"
    script = f'exec {served} --addr {{addr}} --state {{state}} --poll-interval 50ms --provider "aws-{name}"'
    done = subprocess.run(
        bigfleet(
            *("conformance", "--profile", certification.flag, "--patience=60s", "--out", str(tmp_path / "out")),
            *("--launch", shlex.join(["sh", "-c", script])),
            *("--launch-fault", f"{FAULT} --seed-count {{seeds}} --addr {{addr}} --state {{state}}"),
        ),
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=CERTIFY_SECONDS_MAX,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    certification.expect_report(tmp_path / "out")
