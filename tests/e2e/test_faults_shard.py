"""Real shard processes that collide, are stopped under way, or find no room on their disk (docs/spec/shard.md §15)."""

import signal
import subprocess
import time
from pathlib import Path

import pytest

from bigfleet.rpc.wire.gen import provider_pb2
from tests.commands import run_here
from tests.e2e.fault_world import LiveOperator, LiveShard, live_provider, live_shard, until
from tests.patience import PATIENCE_SECONDS
from tests.processes import bigfleet, run_bigfleet, serving

CONFIGURED = "MACHINE_STATE_CONFIGURED"


@pytest.mark.rule("shard 2/10", "shard 15/4")
@pytest.mark.slow
def test_of_two_shards_with_one_id_the_older_is_fenced_and_says_so(tmp_path: Path) -> None:
    """On two disks: the later start wins machine by machine, and the older one fails it in its own memory alone."""
    with live_provider(tmp_path) as provider, live_shard(tmp_path / "older", provider.address) as older:
        started_seconds = int(time.time())
        until(lambda: int(time.time()), lambda now: now > started_seconds, "the clock stands still")
        with live_shard(tmp_path / "newer", provider.address) as newer:
            operator = LiveOperator(newer.address, "c1")
            operator.report("7")
            (bound,) = until(lambda: newer.bound("c1"), lambda each: list(each.values()) == [CONFIGURED], "never bound")
            operator.close()
            until(lambda: older.bound("c1"), lambda each: list(each.values()) == [CONFIGURED], "never seen")
            # The older one is told to take the machine away.
            astray = LiveOperator(older.address, "c1")
            astray.report("")
            until(lambda: older.metric("fenced_total"), bool, "the older one was never fenced")
            astray.close()

            (event,) = older.said("shard.fenced")
            assert (event["machine"], event["level"]) == (bound, "error")
            assert "stop one of the two processes with this shard id" in event["advice"]
            view = older.machines()[bound]
            assert (view.held, view.machine.state) == (True, provider_pb2.MACHINE_STATE_FAILED)
            assert older.audited()[-1]["outcome"] == "fenced"
            assert (newer.bound("c1"), newer.metric("fenced_total")) == ({bound: CONFIGURED}, 0)
            assert provider.backend.clusters == {bound: "c1"}


@pytest.mark.rule("shard 2/7", "shard 15/4")
@pytest.mark.slow
def test_a_second_process_on_one_disk_is_told_who_holds_it(tmp_path: Path) -> None:
    """It exits with one line, and the first goes on."""
    with live_provider(tmp_path) as provider, live_shard(tmp_path / "shard", provider.address) as shard:
        arguments = ("--provider-addr", provider.address, "--data-dir", str(tmp_path / "shard"))
        said = run_bigfleet("shard", *arguments, "--listen", "127.0.0.1:0", "--metrics-addr", "off")

        assert (said.returncode, len(said.stderr.splitlines())) == (1, 1)
        assert "held by process" in said.stderr
        assert len(shard.machines()) == 4


@pytest.mark.rule("shard 1/17", "shard 1/18")
@pytest.mark.slow
def test_a_shard_that_is_stopped_under_way_leaves_the_machine_to_the_next(tmp_path: Path) -> None:
    """SIGTERM while a call hangs: the call is not waited for, told as cancelled, read back and not bound again."""
    with live_provider(tmp_path) as provider:
        provider.faults.late_seconds = {"configure": 2 * PATIENCE_SECONDS}
        with live_shard(tmp_path / "shard", provider.address) as first:
            operator = LiveOperator(first.address, "c1")
            operator.report("7")
            until(lambda: provider.backend.clusters, bool, "the provider was never called")
            until(lambda: first.outcomes(), lambda told: ("Bootstrap", "") in told, "the call never hung")
        operator.close()
        # It ended by itself: `serving` kills what runs on when patience ends, which the call outlasts.
        assert first.process is not None
        assert first.process.returncode == 0
        assert first.said("shard.stopped") != []
        assert first.audited()[-1]["kind"] == "Bootstrap"
        assert first.audited()[-1]["outcome"] == "ctx_canceled"

        provider.faults.late_seconds = {}
        with live_shard(tmp_path / "shard", provider.address) as second:
            again = LiveOperator(second.address, "c1")
            again.report("7")
            bound = until(lambda: second.bound("c1"), lambda each: list(each.values()) == [CONFIGURED], "never bound")
            cycle = second.said("shard.became_ready")[-1]["cycle"]
            until(lambda: second.metric("cycle_duration_seconds_count"), lambda n: n > cycle + 5, "no more cycles")
            again.close()
            assert (second.bound("c1"), provider.backend.clusters) == (bound, dict.fromkeys(bound, "c1"))
            assert second.audited()[-1]["outcome"] == "ctx_canceled"  # the second one had nothing to do
        said = run_here("audit", "verify", str(second.audit_log))
        assert (said.returncode, said.stdout.startswith("OK: ")) == (0, True)


@pytest.mark.rule("shard 2/8")
def test_a_shard_without_room_for_its_state_file_does_not_start(tmp_path: Path) -> None:
    """Exit 1 and one line that names the file; no byte can be written beyond the first page."""
    # Files of at most 8 blocks of 512 bytes.
    no_room = ("sh", "-c", 'ulimit -f 8 && exec "$@"', "sh")
    arguments = ("--provider-addr", "127.0.0.1:1", "--data-dir", str(tmp_path), "--metrics-addr", "off")
    said = subprocess.run(
        [*no_room, *bigfleet("shard", *arguments, "--listen", "127.0.0.1:0")],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )

    assert (said.returncode, said.stderr.count("\n")) == (1, 1), said.stderr
    assert said.stderr.startswith(f"bigfleet: {tmp_path / 'shard.db'}: ")


@pytest.mark.rule("shard 13/5", "shard 15/26")
def test_a_full_disk_under_the_audit_log_stops_nothing(tmp_path: Path) -> None:
    """Each lost record is counted, the first is told, and machines are bound as ever."""
    with live_provider(tmp_path) as provider:
        shard = LiveShard(tmp_path, provider.address, "--audit-log", "/dev/full")
        with serving(shard.address, shard.log, *shard.flags):
            operator = LiveOperator(shard.address, "c1")
            operator.report("7")
            until(lambda: shard.bound("c1"), lambda each: list(each.values()) == [CONFIGURED], "never bound")
            operator.close()

            assert shard.metric("audit_write_errors_total") == 2
            assert [event["error"] for event in shard.said("audit.write_failed")] == ["No space left on device"]


@pytest.mark.slow
def test_an_audit_log_that_was_moved_away_is_begun_anew_at_a_sighup(tmp_path: Path) -> None:
    """What a rotation from outside does: both files are one whole log, and the process goes on."""
    with live_provider(tmp_path) as provider, live_shard(tmp_path / "shard", provider.address) as shard:
        operator = LiveOperator(shard.address, "c1")
        operator.report("7")
        until(lambda: shard.bound("c1"), lambda each: list(each.values()) == [CONFIGURED], "never bound")
        moved = shard.audit_log.with_name("audit-of-yesterday.log")
        shard.audit_log.rename(moved)
        assert shard.process is not None
        shard.process.send_signal(signal.SIGHUP)
        until(lambda: shard.said("audit.file_reopened"), bool, "the log was never opened anew")
        operator.report("14")
        until(lambda: shard.bound("c1"), lambda each: list(each.values()) == [CONFIGURED] * 2, "never bound")
        operator.close()
        said = run_here("audit", "verify", str(shard.audit_log), str(moved))

        assert said.stdout.splitlines()[0] == "OK: 4 records in 2 files, number 1 to 4"
        assert [len(path.read_bytes().splitlines()) for path in (moved, shard.audit_log)] == [2, 2]


def test_an_audit_log_that_cannot_be_opened_ends_the_start_in_one_line(tmp_path: Path) -> None:
    """Before anything is served."""
    arguments = ("--provider-addr", "127.0.0.1:1", "--data-dir", str(tmp_path), "--metrics-addr", "off")
    said = run_here("shard", *arguments, "--listen", "127.0.0.1:0", "--audit-log", str(tmp_path))

    expected = f"bigfleet: --audit-log {tmp_path}: Is a directory; choose a file that can be written\n"
    assert (said.returncode, said.stderr) == (1, expected)
