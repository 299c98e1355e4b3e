"""The processes of a run: one run per directory, an orderly stop, and no child that outlives its parent."""

import os
import signal
from pathlib import Path

import pytest

from bigfleet.cli.runtime.failures import RunFault
from bigfleet.cli.runtime.system import SystemClock
from bigfleet.cli.up.supervisor import ChildSpec, Supervisor
from tests.patience import wait_until
from tests.up.up_process import UpProcess, run_command

SMALL = ("--clusters", "1", "--machines", "10")


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie that nobody has waited for yet is dead, too.
    return "(zombie)" not in Path(f"/proc/{pid}/status").read_text() if Path("/proc").is_dir() else True


def wait_for_the_end_of(*pids: int) -> None:
    wait_until(
        lambda: not any(is_alive(pid) for pid in pids),
        lambda: f"still alive: {[pid for pid in pids if is_alive(pid)]}",
    )


def started_children(up: UpProcess) -> tuple[int, int]:
    """Wait until a run has decided something, and return its provider and shard."""
    up.wait_until(lambda: "machines;" in up.output, "a first line of the view")
    provider, shard = up.child("provider"), up.child("shard")
    assert provider is not None
    assert shard is not None
    return provider, shard


def test_a_second_run_in_the_same_directory_is_refused_in_one_line(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with UpProcess(state, *SMALL) as up:
        up.wait_until(lambda: (state / "lock").exists() and (state / "lock").read_text() != "", "the lock")
        second = run_command("up", "--state-dir", str(state), *SMALL)
        up.wait_until(lambda: up.child("shard") is not None, "the shard")
        up.interrupt()
        up.finish()

    assert second.returncode == 1
    assert second.stderr == (
        f"bigfleet: another bigfleet up (process {up.pid}) uses {state}; stop it, or name another --state-dir\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "to_group"),
    [(signal.SIGINT, True), (signal.SIGTERM, False), pytest.param(signal.SIGTERM, True, marks=pytest.mark.long)],
)
def test_a_signal_stops_shard_then_provider_and_tells_the_summary(
    tmp_path: Path, name: signal.Signals, to_group: bool
) -> None:
    with UpProcess(tmp_path / "state", *SMALL) as up:
        children = started_children(up)
        # As a terminal does it, and timeout(1): the whole group at once.
        os.killpg(up.pid, name) if to_group else os.kill(up.pid, name)
        report = up.finish()
        stopped = {
            child: next(line["time"] for line in reversed(up.log(child)) if line["event"].endswith("stopped"))
            for child in ("shard", "provider")
        }

    assert not any(is_alive(pid) for pid in children)
    assert stopped["shard"] < stopped["provider"]
    assert "machines serve 1 clusters" in up.output
    assert "; pods: " in up.output
    assert "\npods and cost" in up.output
    assert "\nwithout a place " in up.output
    assert report["pods_and_cost"]["clusters"].keys() == {"cluster-0"}
    assert report["clusters"]["cluster-0"]["demand"]
    assert report["restarts"] == 0
    assert "Traceback" not in up.output


@pytest.mark.slow
def test_children_follow_a_parent_that_was_killed_and_the_next_run_resumes(tmp_path: Path) -> None:
    with UpProcess(tmp_path / "state", *SMALL) as up:
        children = started_children(up)
        up.wait_until(lambda: up.progress() != {}, "progress that is kept")
        stood_at = up.progress()["position_seconds"]
        os.kill(up.pid, signal.SIGKILL)
        wait_for_the_end_of(*children)
    with UpProcess(tmp_path / "state", "--for", "5s", *SMALL) as up:
        report = up.finish()

    assert up.progress()["position_seconds"] > stood_at
    assert sum(report["machines"].values()) == 10


@pytest.mark.slow
def test_a_demonstration_outlives_both_its_processes_and_ends_fully_bound(tmp_path: Path) -> None:
    with UpProcess(tmp_path / "state", "--for", "40s", "--clusters", "2", "--machines", "40") as up:
        started_children(up)
        up.kill_child("shard")
        up.kill_child("provider")
        report = up.finish()

    assert report["restarts"] == 2
    checked = report["pods_and_cost"]
    assert checked["pods"] > 0
    assert (checked["without_place"], checked["packer"]["unhosted"]) == (0, 0)
    cost = sum(cluster["cost_usd_per_hour"] for cluster in report["clusters"].values())
    assert checked["usd_per_hour"] >= cost - 0.01, "idle machines are paid for, too"
    for cluster in report["clusters"].values():
        assert cluster["shortfall"] == {}
        assert all(cluster["bound"].get(name, 0) >= amount for name, amount in cluster["demand"].items())


@pytest.mark.slow
async def test_a_child_that_cannot_run_is_given_up_with_its_last_word(tmp_path: Path) -> None:
    spec = ChildSpec(
        name="shard",
        arguments=("shard", "--provider-addr", "nowhere"),
        port=1,
        log=tmp_path / "logs" / "shard.log",
        pid_file=tmp_path / "shard.pid",
    )
    supervisor = Supervisor([spec], SystemClock())
    with pytest.raises(RunFault, match=r"the shard does not start \(exit 2\): .*--provider-addr: 'nowhere'"):
        await supervisor.start()
    await supervisor.stop()

    assert supervisor.restarts_total == 3
    assert not spec.pid_file.exists()
