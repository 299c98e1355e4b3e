"""A child that takes long to start is waited for while it makes progress, and given up when it hangs."""

import os
import sys
from pathlib import Path

import pytest

from bigfleet.cli.runtime.failures import RunFault
from bigfleet.cli.runtime.process_progress import ProcessProgress
from bigfleet.cli.runtime.system import SystemClock
from bigfleet.cli.up import supervisor as supervisor_module
from bigfleet.cli.up.supervisor import ChildSpec, Supervisor
from tests.processes import free_port

#: Each goes on for several times as long as a child may stand still.
WRITES = "for n in range(24): print(n, flush=True); time.sleep(0.5)"
COMPUTES = "end = time.process_time() + 6\nwhile time.process_time() < end: pass"
HANGS = "time.sleep(3600)"


def supervisor_of(tmp_path: Path, work: str) -> tuple[Supervisor, ChildSpec]:
    """Return a supervisor of a program that works, and then listens."""
    program = tmp_path / "program.py"
    program.write_text(
        f"import socket, sys, time\nprint('begun', flush=True)\n{work}\n"
        "with socket.create_server(('127.0.0.1', int(sys.argv[1]))) as server:\n    time.sleep(3600)\n"
    )
    port = free_port()
    spec = ChildSpec(
        name="shard",
        program=sys.executable,
        arguments=(str(program), str(port)),
        port=port,
        log=tmp_path / "shard.log",
        pid_file=tmp_path / "shard.pid",
    )
    return Supervisor([spec], SystemClock()), spec


@pytest.fixture(autouse=True)
def _short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "STALL_SECONDS_MAX", 3.0)
    monkeypatch.setattr(supervisor_module, "QUIET_SECONDS", 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("work", [WRITES, COMPUTES], ids=["writes", "computes"])
async def test_a_child_that_makes_progress_is_waited_for(tmp_path: Path, work: str) -> None:
    """Longer than a child may stand still, and once it is reported what is waited for."""
    supervisor, spec = supervisor_of(tmp_path, work)
    said: list[str] = []
    try:
        await supervisor.start(on_wait=said.append)
        assert [status.up for status in supervisor.statuses] == [True]
    finally:
        await supervisor.stop()
    assert said == [f"waiting until the shard listens on port {spec.port} (log: {spec.log}) …"]


@pytest.mark.slow
async def test_a_child_that_hangs_is_given_up(tmp_path: Path) -> None:
    """With its last word; the process is stopped afterwards."""
    supervisor, spec = supervisor_of(tmp_path, HANGS)
    try:
        with pytest.raises(RunFault, match=rf"does not listen on port {spec.port} and has made no progress.*begun"):
            await supervisor.start()
    finally:
        await supervisor.stop()
    assert not spec.pid_file.exists()


def test_progress_is_a_line_of_the_log_or_time_that_was_computed(tmp_path: Path) -> None:
    log, mine = tmp_path / "log", os.getpid()
    progress = ProcessProgress(log)
    assert progress.has_moved(mine)
    assert not progress.has_moved(mine)
    log.write_text("one\n")
    assert progress.has_moved(mine)
    assert not progress.has_moved(mine)
    # Another process: the former one was started again.
    assert progress.has_moved(os.getppid())
