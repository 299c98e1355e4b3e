"""A shard whose disk has no room for its recording: it goes on, and so does the recording once there is room."""

import json
import resource
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_SECONDS, wait_until
from tests.processes import bigfleet, free_port, run_bigfleet


@contextmanager
def shard(data: Path, http: int, record: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a shard that records quick cycles; its log goes nowhere, so that the recording alone meets a limit."""
    flags = ["--listen", f"127.0.0.1:{free_port()}", "--metrics-addr", f"127.0.0.1:{http}", "--fake-provider", "40"]
    flags += ["--cycle-interval", "100ms", "--data-dir", str(data), "--record", str(record)]
    process = subprocess.Popen([*bigfleet("shard"), *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE_SECONDS)


def metric(http: int, name: str) -> float:
    """Return a metric of the shard, -1 while there is none."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{http}/metrics", timeout=PATIENCE_SECONDS) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return -1
    return next((float(line.split()[1]) for line in lines if line.startswith(f"bigfleet_shard_{name} ")), -1)


def replayed(record: Path) -> list[dict[str, Any]]:
    """Return the cycles of a recording, all of which are decided as they were."""
    done = run_bigfleet("replay", str(record), "--output", "json")
    assert done.returncode == 0, done.stderr
    cycles: list[dict[str, Any]] = json.loads(done.stdout)["cycles"]
    return cycles


@pytest.mark.slow
def test_a_recording_resumes_when_there_is_room_again(tmp_path: Path) -> None:
    """The kernel refuses every write beyond a size to the running process, then no more; both files replay."""
    record, http = tmp_path / "recording", free_port()
    with shard(tmp_path / "data", http, record) as process:
        wait_until(lambda: metric(http, "recorded_cycles_total") > 3, "never recorded")
        former = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1, former[1]))
        wait_until(lambda: metric(http, "recording_on") == 0, "the limit is not met")
        wait_until(lambda: metric(http, "recording_missed_cycles_total") > 3, "no cycle is missed")
        recorded = metric(http, "recorded_cycles_total")
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, former)
        wait_until(lambda: metric(http, "recording_on") == 1, "the recording never resumes")
        wait_until(lambda: metric(http, "recorded_cycles_total") > recorded + 3, "nothing more is recorded")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0

    older, newer = replayed(record.with_name("recording.1")), replayed(record)
    assert len(older) == recorded
    assert newer[0]["not_recorded_before"] == newer[0]["cycle"] - older[-1]["cycle"] - 1
    assert [cycle["not_recorded_before"] for cycle in newer[1:]] == [0] * (len(newer) - 1)
