"""The providers that are shipped, certified as their authors' are: real processes over gRPC, started and killed by the
suite itself (docs/spec/provider.md §23).
"""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from bigfleet.conformance.catalogue import behaviours_of
from bigfleet.conformance.profiles import ConformanceProfile
from tests.commands import run_here
from tests.conformance.certifications import Certification, certification_of, flag_of
from tests.processes import bigfleet

pytestmark = pytest.mark.slow

PLACES = "--metrics-addr off --seed-count {seeds} --addr {addr} --state {state}"
SIMULATED = f"{shlex.join(bigfleet('provider', 'simulated', '--calm', '--time-scale', '0.001'))} {PLACES}"
FAULT = f"{shlex.join(bigfleet('provider', 'fault'))} {PLACES}"
#: More than one page of 500, and no more than that asks for.
SCALE = ("--scale-count", "600", "--soak", "3s")
#: Beyond what a busy machine needs; nothing asserts how long a run took.
SECONDS_MAX = 900


def expect_certified(
    certification: Certification, profiles: frozenset[ConformanceProfile], out: Path, *arguments: str
) -> None:
    """Run the suite and assert that each behaviour of the profiles passed; none may be skipped."""
    done = subprocess.run(
        bigfleet("conformance", "--profile", flag_of(profiles), "--out", str(out), *arguments),
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    behaviours = behaviours_of(profiles)

    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert done.stdout.splitlines()[-2] == f"CERTIFIED: {len(behaviours)} passed"
    assert done.stdout.splitlines()[-1].count(": CERTIFIED") == len(profiles)
    certification.expect_report(out, profiles)


def test_the_simulated_provider_is_certified(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    certification = certification_of(request)
    arguments = ("--launch", SIMULATED, "--launch-fault", FAULT, *SCALE)
    expect_certified(certification, certification.profiles, tmp_path / "out", *arguments)


def test_the_fault_provider_is_certified(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    certification = certification_of(request)
    arguments = ("--launch", FAULT, "--launch-fault", FAULT)
    expect_certified(certification, certification.profiles, tmp_path / "out", *arguments)


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(frozenset({ConformanceProfile.CORE}), id="core"),
        pytest.param(None, id="all", marks=pytest.mark.long),
    ],
)
def test_the_simulated_provider_is_certified_over_tls_by_an_admin(
    asked: frozenset[ConformanceProfile] | None, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """A provider with certificates lets an admin send any token with --certify alone."""
    certification = certification_of(request)
    profiles = asked or certification.profiles
    certs = tmp_path / "certs"
    assert run_here("certs", "dev", str(certs), "--shard", "s1").returncode == 0

    def tls(holder: str) -> tuple[str, ...]:
        names = {"--tls-cert": f"{holder}.crt", "--tls-key": f"{holder}.key", "--tls-ca": "ca.crt"}
        return tuple(argument for flag, name in names.items() for argument in (flag, str(certs / name)))

    served = shlex.join(("--certify", *tls("provider-simulated")))
    commands = ("--launch", f"{SIMULATED} {served}", "--launch-fault", f"{FAULT} {served}")
    scale = SCALE if ConformanceProfile.SCALE in profiles else ()
    expect_certified(certification, profiles, tmp_path / "out", *commands, *scale, *tls("admin"))
