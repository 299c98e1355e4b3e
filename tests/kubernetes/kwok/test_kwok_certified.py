"""The example program `kwok.sh` is certified as a provider on a real control plane (docs/spec/exec-provider.md §7)."""

import shlex
from pathlib import Path

import pytest

from bigfleet.demo.kubernetes.control_plane import ControlPlane
from tests.cli.provider.exec_examples import PLACES, certify
from tests.conformance.certifications import certification_of
from tests.guides import executable
from tests.kubernetes.kwok.kwok_program import KwokProgram
from tests.processes import bigfleet

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow]

CERTIFY_SECONDS_MAX = 3600.0
#: The suite starts providers at the same time, all on one control plane: each state file has a prefix of its own.
LAUNCH = """#!/bin/sh
KWOK_PROVIDER=k$(printf %s "$1" | cksum | cut -d' ' -f1) KWOK_SLOTS=$2
export KWOK_PROVIDER KWOK_SLOTS
shift 2
exec {served} "$@"
"""


# Minutes, and more beside other tests.
@pytest.mark.timeout(CERTIFY_SECONDS_MAX)
def test_the_kwok_example_is_certified(
    control_plane: ControlPlane,
    control_plane_program: Path,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = KwokProgram(control_plane, control_plane_program, tmp_path)
    for name, value in program.variables.items():
        monkeypatch.setenv(name, value)
    # As it is shipped: a pass of `feed` each fifth of a second takes a whole core.
    monkeypatch.delenv("KWOK_HEARTBEAT_SECONDS")
    served = shlex.join(bigfleet("provider", "exec", "--program", str(program.path)))
    launch = executable(tmp_path / "launch", LAUNCH.format(served=served))
    command = f"{shlex.quote(str(launch))} {{state}} {{seeds}} {PLACES}"
    # Each call runs kubectl several times, beside a control plane on the same processors.
    certification = certification_of(request)
    certify(certification, tmp_path / "out", command, patience="180s", seconds_max=CERTIFY_SECONDS_MAX)
