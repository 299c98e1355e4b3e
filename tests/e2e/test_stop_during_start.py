"""SIGTERM while a process reads a large state: it ends at once, without having served anything, and nothing is lost."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from bigfleet.cli.runtime.system import SystemClock
from bigfleet.coordinator.stores.codec import encode_row
from bigfleet.coordinator.stores.protocol import LeaderInfo
from bigfleet.coordinator.stores.sqlite import SqliteStateStore
from bigfleet.coordinator.tables import ShardRow, Table
from bigfleet.provider.storage.sqlite import SqliteProviderStore
from bigfleet.shard.ownership.state_file import FILE_NAME, LOCK_NAME, StateFile
from tests.files.editing import editing
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.processes import bigfleet, free_port

pytestmark = pytest.mark.slow

#: Reading so many rows takes a shard far longer than the test takes to see that it has begun.
ROWS = 400_000


@contextmanager
def started(log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command, and kill it when the context ends."""
    with log.open("ab") as output:
        process = subprocess.Popen(bigfleet(*arguments), stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE_SECONDS)


def wait_for_holder(lock: Path, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Return once a process has locked its state, which is when it begins to read it."""

    def is_held() -> bool:
        assert process.poll() is None, log.read_text()
        return lock.exists() and str(process.pid) in lock.read_text().split()

    wait_until(is_held, lambda: f"it never locks its state:\n{log.read_text()}", poll_seconds=0.005)


def large_shard_state(directory: Path) -> None:
    """Make the state of a shard that has given many machines away."""
    StateFile.open(directory, shard_id="shard-0", clock=SystemClock()).close()
    with editing(directory / FILE_NAME) as connection:
        connection.execute(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?) "
            "INSERT INTO rows SELECT 'machine-' || i, 'disowned', 1, i, 'shard-1', 5, NULL FROM n",
            (ROWS,),
        )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_shard_that_reads_its_state_ends(tmp_path: Path, number: signal.Signals) -> None:
    log = tmp_path / "log"
    large_shard_state(tmp_path / "data")
    flags = ("--listen", f"127.0.0.1:{free_port()}", "--metrics-addr", "off", "--fake-provider", "4")
    with started(log, "shard", *flags, "--data-dir", str(tmp_path / "data")) as process:
        wait_for_holder(tmp_path / "data" / LOCK_NAME, process, log)
        process.send_signal(number)

        assert process.wait(PATIENCE_SECONDS) == 0
    text = log.read_text()
    assert ("shard.started" in text, '"event":"shard.stopped"' in text) == (False, True), text
    with StateFile.open(tmp_path / "data", shard_id="shard-0", clock=SystemClock()) as state_file:
        assert len(state_file.ownership.owned.rows) == ROWS


def blocked(state: Path) -> sqlite3.Connection:
    """Keep every other process from reading a state file until the connection is closed."""
    connection = sqlite3.connect(state, isolation_level=None)
    connection.execute("PRAGMA journal_mode=DELETE")
    connection.execute("BEGIN EXCLUSIVE")
    return connection


def test_a_provider_that_reads_its_state_ends(tmp_path: Path) -> None:
    """Although a thread of it is inside SQLite, which no signal interrupts."""
    state, log = tmp_path / "provider.db", tmp_path / "log"
    store = SqliteProviderStore(state)
    store.load(os.urandom(8))
    store.close()
    flags = ("--addr", f"127.0.0.1:{free_port()}", "--metrics-addr", "off", "--state", str(state))
    with closing(blocked(state)), started(log, "provider", "fault", *flags) as process:
        wait_for_holder(state.with_name("provider.db.lock"), process, log)
        process.send_signal(signal.SIGTERM)

        assert process.wait(PATIENCE_SECONDS) == 0, log.read_text()
    assert '"event":"provider.stopped"' in log.read_text()


def test_a_coordinator_that_reads_its_state_ends(tmp_path: Path) -> None:
    path, log = tmp_path / "coordinator.db", tmp_path / "log"
    asyncio.run(SqliteStateStore(path, leader=LeaderInfo("replica-0", "here:7790")).close())
    with editing(path) as connection:
        connection.execute(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?) "
            "INSERT INTO rows SELECT ?, 'shard-' || i, ? FROM n",
            (ROWS, Table.SHARDS.value, encode_row(ShardRow("here:7780", 10, 3))),
        )
    flags = ("--listen", f"127.0.0.1:{free_port()}", "--metrics-addr", "off", "--store", f"sqlite://{path}")
    with started(log, "coordinator", *flags) as process:
        wait_for_holder(path.with_name("coordinator.db.holder"), process, log)
        process.send_signal(signal.SIGTERM)

        assert process.wait(PATIENCE_SECONDS) == 0, log.read_text()
    text = log.read_text()
    assert ("coordinator.started" in text, '"event":"coordinator.stopped"' in text) == (False, True), text


def test_a_process_whose_threads_still_compute_ends() -> None:
    """As a shard does that is stopped while a thread loads kernels, which nothing can interrupt."""
    program = """
import asyncio, threading
from bigfleet.cli.runtime.system import run_loop
async def main():
    began = threading.Event()
    asyncio.get_running_loop().run_in_executor(None, lambda: (began.set(), threading.Event().wait()))
    await asyncio.to_thread(began.wait)
    print("stopped")
    return 3
raise SystemExit(run_loop(main, threads_seconds_max=0.1))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )

    assert (done.returncode, done.stdout, done.stderr) == (3, "stopped\n", "")
