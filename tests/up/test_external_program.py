"""A program that is not ours, run by `bigfleet up`: it has the id that was started, and ends with who started it."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bigfleet.cli.runtime.failures import RunFault
from bigfleet.cli.up.settings import StoreChoice, UpSettings, settings_from_flags
from tests.patience import PATIENCE_SECONDS, wait_until

SLEEP = shutil.which("sleep") or "/bin/sleep"


def start() -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "bigfleet.cli.up.external_program", SLEEP, "600"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)


def has_become(process: "subprocess.Popen[bytes]") -> bool:
    return Path(f"/proc/{process.pid}/comm").read_text().strip() == "sleep"


@pytest.fixture
def program() -> "subprocess.Popen[bytes]":
    if not Path("/proc/self/comm").exists():
        pytest.skip("this system does not tell what a process runs")
    process = start()
    wait_until(lambda: has_become(process), "it never became the program", poll_seconds=0.01)
    return process


def is_held(pipe: int) -> bool:
    """Return whether anybody could read what is written to a pipe."""
    try:
        return os.write(pipe, b"x") == 1
    except BrokenPipeError:
        return False


def test_it_ends_when_its_parent_lets_go_of_it(program: "subprocess.Popen[bytes]") -> None:
    assert program.stdin is not None
    program.stdin.close()

    assert program.wait(PATIENCE_SECONDS) == -signal.SIGTERM


def test_nothing_is_left_of_it_when_it_is_killed(program: "subprocess.Popen[bytes]") -> None:
    assert program.stdin is not None
    program.kill()
    program.wait(PATIENCE_SECONDS)
    pipe = program.stdin.fileno()
    # The guard is the last to hold the other end.
    wait_until(lambda: not is_held(pipe), "the guard still holds the pipe")


def test_a_ctrl_c_on_the_terminal_does_not_reach_it(program: "subprocess.Popen[bytes]") -> None:
    assert os.getpgid(program.pid) == program.pid
    assert os.getsid(program.pid) == program.pid
    program.kill()
    program.wait(PATIENCE_SECONDS)


def chosen(store: str | None, shards: int = 3) -> UpSettings:
    return settings_from_flags(
        for_duration=None,
        speed=None,
        clusters=None,
        machines=None,
        seed=1,
        state_dir=Path("unused"),
        fresh=False,
        report=None,
        nodes=None,
        pods=None,
        shards=shards,
        store=store,
    )


def test_an_etcd_that_is_not_installed_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(RunFault, match=r"--store etcd: no etcd is on the PATH; install .*etcd-server.*--store sqlite"):
        chosen("etcd")

    assert chosen(None).store is StoreChoice.SQLITE
    assert chosen(None, shards=1).store is StoreChoice.NONE
