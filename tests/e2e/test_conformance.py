"""The providers that are shipped, certified as their authors' are: real processes over gRPC, started and killed by the
suite itself (docs/spec/provider.md §23).
"""

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from bigfleet.conformance.catalogue import behaviours_of
from bigfleet.conformance.profiles import ConformanceProfile
from tests.commands import run_here
from tests.processes import bigfleet

pytestmark = pytest.mark.slow

PLACES = "--metrics-addr off --seed-count {seeds} --addr {addr} --state {state}"
SIMULATED = f"{shlex.join(bigfleet('provider', 'simulated', '--calm', '--time-scale', '0.001'))} {PLACES}"
FAULT = f"{shlex.join(bigfleet('provider', 'fault'))} {PLACES}"
BOTH = frozenset(
    {
        ConformanceProfile.CORE,
        ConformanceProfile.CLOUD,
        ConformanceProfile.DELTA,
        ConformanceProfile.SPOT,
        ConformanceProfile.DURABLE,
    }
)
#: More than one page of 500, and no more than that asks for.
SCALE = ("--scale-count", "600", "--soak", "3s")
#: Beyond what a busy machine needs; nothing asserts how long a run took.
SECONDS_MAX = 900


def expect_certified(profiles: frozenset[ConformanceProfile], out: Path, *arguments: str) -> None:
    """Run the suite and assert that each behaviour of the profiles passed; none may be skipped."""
    asked = ",".join(sorted(profile.value for profile in profiles))
    done = subprocess.run(
        bigfleet("conformance", "--profile", asked, "--out", str(out), *arguments),
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
    report = json.loads((out / "report.json").read_text())
    assert report["verdicts"] == {profile.value: "CERTIFIED" for profile in profiles}
    assert {b["id"]: b["outcome"] for b in report["behaviours"]} == {b.id: "passed" for b in behaviours}


def test_the_simulated_provider_is_certified(tmp_path: Path) -> None:
    arguments = ("--launch", SIMULATED, "--launch-fault", FAULT, *SCALE)
    expect_certified(BOTH | {ConformanceProfile.SCALE}, tmp_path / "out", *arguments)


def test_the_fault_provider_is_certified(tmp_path: Path) -> None:
    arguments = ("--launch", FAULT, "--launch-fault", FAULT)
    expect_certified(BOTH | {ConformanceProfile.FAULT}, tmp_path / "out", *arguments)


@pytest.mark.parametrize(
    "profiles",
    [
        pytest.param(frozenset({ConformanceProfile.CORE}), id="core"),
        pytest.param(BOTH | {ConformanceProfile.SCALE}, id="all", marks=pytest.mark.long),
    ],
)
def test_the_simulated_provider_is_certified_over_tls_by_an_admin(
    profiles: frozenset[ConformanceProfile], tmp_path: Path
) -> None:
    """A provider with certificates lets an admin send any token with --certify alone."""
    certs = tmp_path / "certs"
    assert run_here("certs", "dev", str(certs), "--shard", "s1").returncode == 0

    def tls(holder: str) -> tuple[str, ...]:
        names = {"--tls-cert": f"{holder}.crt", "--tls-key": f"{holder}.key", "--tls-ca": "ca.crt"}
        return tuple(argument for flag, name in names.items() for argument in (flag, str(certs / name)))

    served = shlex.join(("--certify", *tls("provider-simulated")))
    commands = ("--launch", f"{SIMULATED} {served}", "--launch-fault", f"{FAULT} {served}")
    scale = SCALE if ConformanceProfile.SCALE in profiles else ()
    expect_certified(profiles, tmp_path / "out", *commands, *scale, *tls("admin"))
