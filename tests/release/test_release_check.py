"""The target `release-check` of the Makefile: what it runs, and that a missing libvirt fails it."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.guides import executable
from tests.patience import PATIENCE_SECONDS
from tools.image.wheels import ROOT

#: Runs the tests of the installed wheel on a host that lacks a program.
WITHOUT_PROGRAM = """
import sys

import pytest

from tests.libvirt import daemon

daemon.PROGRAMS = ("no-such-daemon",)
sys.exit(pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", "tests/libvirt/test_installed_wheel.py"]))
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with a release, whose Python writes what it is asked to run to `calls`."""
    (tmp_path / "build" / "release" / "charts").mkdir(parents=True)
    (tmp_path / "member").touch()
    for name in ("bigfleet-1.2.3.tar.gz", "charts/bigfleet-1.2.3.tgz"):
        with tarfile.open(tmp_path / "build" / "release" / name, "w:gz") as archive:
            archive.add(tmp_path / "member", "bigfleet-1.2.3/member")
    calls = '#!/bin/sh\necho "libvirt=$BIGFLEET_REQUIRE_LIBVIRT release=$BIGFLEET_RELEASE_DIR $*" >> calls\n'
    executable(tmp_path / ".venv" / "bin" / "python", calls)
    (tmp_path / "requirements-libvirt.lock").touch()
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    return tmp_path


def release_check(checkout: Path, *, has_libvirt: bool, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run the target in a checkout on a host with or without libvirt-dev."""
    executable(checkout / "bin" / "pkg-config", f"#!/bin/sh\nexit {0 if has_libvirt else 1}\n")
    # The Makefile takes uv, if it is there, to install what the check needs.
    executable(checkout / "bin" / "uv", '#!/bin/sh\necho "uv $*" >> calls\n')
    environment = {"PATH": f"{checkout / 'bin'}{os.pathsep}{os.defpath}", **variables}
    words = ["make", "--file", str(ROOT / "Makefile"), "--assume-old=.venv/.synced", "release-check"]
    return subprocess.run(
        words,
        cwd=checkout,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


def test_a_release_is_checked_with_virtual_machines_first(checkout: Path) -> None:
    done = release_check(checkout, has_libvirt=True)
    assert done.returncode == 0, done.stdout

    binding, verified, tested = (checkout / "calls").read_text().splitlines()
    assert binding.startswith("uv pip install")
    assert binding.endswith("requirements-libvirt.lock")
    assert verified.endswith("-m tools.release check build/release")
    required, release, *words = tested.split()
    assert (required, release) == ("libvirt=1", f"release={checkout / 'build' / 'release'}")
    tests = [word for word in words if word.startswith("tests/")]
    assert tests[0] == "tests/libvirt/test_installed_wheel.py"
    assert [name for name in tests if not (ROOT / name).exists()] == []


def test_a_host_without_the_library_fails_the_check_before_anything_is_run(checkout: Path) -> None:
    done = release_check(checkout, has_libvirt=False)

    assert done.returncode != 0
    assert "libvirt-dev and pkg-config are missing: apt-get install libvirt-dev" in done.stdout
    assert not (checkout / "calls").exists()


def test_virtual_machines_are_left_out_only_by_a_variable(checkout: Path) -> None:
    done = release_check(checkout, has_libvirt=False, BIGFLEET_REQUIRE_LIBVIRT="0")

    assert done.returncode == 0, done.stdout
    assert (checkout / "calls").read_text().splitlines()[-1].startswith("libvirt=0 ")


@pytest.mark.slow
@pytest.mark.parametrize(("required", "code", "outcome"), [("1", 1, "error"), ("0", 0, "skipped")])
def test_a_host_without_the_daemon_fails_the_tests_by_name(
    required: str, code: int, outcome: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PROGRAM],
        cwd=ROOT,
        env={**os.environ, "BIGFLEET_RELEASE_DIR": str(tmp_path), "BIGFLEET_REQUIRE_LIBVIRT": required},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )

    assert done.returncode == code, done.stdout + done.stderr
    assert "not installed: no-such-daemon" in done.stdout
    assert f"3 {outcome}" in done.stdout.splitlines()[-1]
