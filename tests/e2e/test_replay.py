"""A real shard process that records what it decides, and `bigfleet replay` on what it left."""

import json
import signal
from pathlib import Path

import pytest

from tests.commands import run_here
from tests.e2e.fault_world import LiveOperator, live_provider, live_shard, until
from tests.patience import PATIENCE_SECONDS

CONFIGURED = "MACHINE_STATE_CONFIGURED"


def replayed(path: Path, *more: str) -> dict[str, object]:
    """Return the document of a replay that is all the same."""
    done = run_here("replay", str(path), "--output", "json", *more)
    assert done.returncode == 0, done.stderr
    document: dict[str, object] = json.loads(done.stdout)
    return document


@pytest.mark.slow
def test_what_a_shard_process_decided_is_decided_again(tmp_path: Path) -> None:
    """Over a kill without warning, a next process in the same file, and a clean stop; on both engines."""
    record = tmp_path / "recording"
    flags = ("--record", str(record))
    with live_provider(tmp_path) as provider:
        with live_shard(tmp_path / "shard", provider.address, *flags) as first:
            operator = LiveOperator(first.address, "c1")
            operator.report("7")
            until(lambda: first.bound("c1"), lambda each: list(each.values()) == [CONFIGURED], "never bound")
            until(lambda: first.metric("recorded_cycles_total"), lambda count: count > 10, "never recorded")
            assert first.metric("recording_on") == 1
            assert first.process is not None
            first.process.send_signal(signal.SIGKILL)
            first.process.wait(PATIENCE_SECONDS)
            operator.close()
        with live_shard(tmp_path / "shard", provider.address, *flags) as second:
            again = LiveOperator(second.address, "c1")
            again.report("15")
            until(lambda: len(second.bound("c1")), lambda count: count > 1, "never bound more")
            again.close()
    document = replayed(record)
    assert replayed(record, "--engine", "reference") == document
    cycles = document["cycles"]
    assert isinstance(cycles, list)
    epochs = sorted({cycle["epoch"] for cycle in cycles})
    assert len(epochs) == 2
    bound = [cycle for cycle in cycles if cycle["actions"]["bootstrap"] or cycle["actions"]["provision"]]
    assert sorted({cycle["epoch"] for cycle in bound}) == epochs
    asked = ("--epoch", str(epochs[0]), "--cycle", str(bound[0]["cycle"]), "--explain", "c1/")
    told = run_here("replay", str(record), *asked)
    assert (told.returncode, told.stderr) == (0, "")
    assert "same decision" in told.stdout
    assert "Why c1/" in told.stdout


@pytest.mark.slow
def test_a_file_that_is_no_recording_is_refused_at_the_start(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("my notes\n")
    arguments = ("--provider-addr", "127.0.0.1:1", "--data-dir", str(tmp_path), "--record", str(notes))
    done = run_here("shard", *arguments, "--listen", "127.0.0.1:0", "--metrics-addr", "off")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert f"--record {notes}: no recording of a shard" in done.stderr
    assert notes.read_text() == "my notes\n"
