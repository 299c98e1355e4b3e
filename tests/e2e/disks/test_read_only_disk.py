"""A disk that the kernel sets read-only below the audit log and the recording of a running shard.

The file system is a real ext4 on a loop device; its option `abort` does what an error of the disk does.
"""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.commands import run_here
from tests.e2e.fault_world import LiveOperator, LiveShard, live_provider, live_shard, until
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.processes import run_bigfleet

IMAGE_BYTES = 32 * 1024 * 1024
CONFIGURED = "MACHINE_STATE_CONFIGURED"
READ_ONLY = "Read-only file system"
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/loop-control").exists() or shutil.which("mkfs.ext4") is None,
    reason="only root mounts file systems, with a loop device and mkfs.ext4",
)
pytestmark = [pytest.mark.slow, needs_root]


def run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_SECONDS)


class Disk:
    """A small disk with a file system."""

    def __init__(self, image: Path, mounted: Path) -> None:
        self._image = image
        self.mounted = mounted

    def make(self) -> None:
        """Write an empty file system."""
        with self._image.open("wb") as file:
            file.truncate(IMAGE_BYTES)
        run("mkfs.ext4", "-q", "-F", self._image)
        self.mounted.mkdir()

    def mount(self) -> None:
        """Mount it, to be set read-only at an error."""
        run("mount", "-o", "loop,errors=remount-ro", self._image, self.mounted)

    def fail(self) -> None:
        """Set it read-only as an error of the disk does, with files open on it; what was written before is on it."""
        run("sync", "--file-system", self.mounted)
        run("mount", "-o", "remount,abort", self.mounted)
        with pytest.raises(OSError, match=READ_ONLY):
            (self.mounted / "probe").touch()

    def repair(self) -> None:
        """Unmount it, which needs that no process has files open on it, and check it."""
        run("umount", self.mounted)
        # A mount namespace that another test began has the mount, too: mounted again, it would be the old one.
        wait_until(lambda: not self._is_attached(), "the disk keeps its loop device")
        done = subprocess.run(["e2fsck", "-p", self._image], capture_output=True, text=True, check=False)
        assert done.returncode in (0, 1), done.stdout + done.stderr

    def _is_attached(self) -> bool:
        command = ("losetup", "--associated", self._image)
        return bool(subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_SECONDS).stdout)


@contextmanager
def mounted_disk(place: Path) -> Iterator[Disk]:
    """Provide a disk while the context lasts."""
    disk = Disk(place / "disk.img", place / "disk")
    disk.make()
    disk.mount()
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk.mounted], capture_output=True, check=False)


def bind(shard: LiveShard, operator: LiveOperator, cpu: str, machines: int) -> None:
    """Report demand, and wait until the machines of it serve the cluster."""
    operator.report(cpu)
    until(lambda: shard.bound("c1"), lambda each: list(each.values()) == [CONFIGURED] * machines, "never bound")


def test_a_shard_goes_on_and_says_what_is_lost(tmp_path: Path) -> None:
    """Machines are bound, sessions live, each lost record and cycle is counted, and the stop is in order."""
    with mounted_disk(tmp_path) as disk, live_provider(tmp_path) as provider:
        audit_log, record = disk.mounted / "audit.log", disk.mounted / "recording"
        flags = ("--audit-log", str(audit_log), "--record", str(record))
        with live_shard(tmp_path / "shard", provider.address, *flags) as shard:
            operator = LiveOperator(shard.address, "c1")
            bind(shard, operator, "7", 1)
            until(lambda: shard.metric("recorded_cycles_total"), lambda count: count > 3, "never recorded")
            recorded = shard.metric("recorded_cycles_total")
            disk.fail()
            bind(shard, operator, "14", 2)
            assert shard.metric("audit_write_errors_total") >= 2
            until(lambda: shard.metric("recording_on"), lambda value: value == 0, "the recording has not paused")
            until(lambda: shard.metric("recording_missed_cycles_total"), lambda count: count > 3, "no cycle is missed")
            recorded_max = shard.metric("recorded_cycles_total")
            operator.close()
        assert shard.process is not None
        assert shard.process.returncode == 0
        assert {event["error"] for event in shard.said("audit.write_failed")} == {READ_ONLY}
        assert {event["error"] for event in shard.said("recording.paused")} == {READ_ONLY}

        disk.repair()
        disk.mount()
        said = run_here("audit", "verify", str(audit_log))
        assert (said.returncode, said.stdout.startswith("OK: 2 records")) == (0, True), said.stdout
        replayed = run_bigfleet("replay", str(record), "--output", "json")
        assert replayed.returncode == 0, replayed.stderr
        assert recorded <= len(json.loads(replayed.stdout)["cycles"]) <= recorded_max

        with live_shard(tmp_path / "shard", provider.address, *flags) as again:
            operator = LiveOperator(again.address, "c1")
            bind(again, operator, "21", 3)
            operator.close()
            assert again.metric("audit_write_errors_total") == 0
        said = run_here("audit", "verify", str(audit_log))
        assert said.returncode == 0, said.stdout


def test_files_on_another_disk_are_taken_without_a_restart(tmp_path: Path) -> None:
    """Where a disk is mounted over the failed one, the recording resumes by itself and the audit log at a SIGHUP."""
    with (
        mounted_disk(tmp_path) as disk,
        live_provider(tmp_path) as provider,
        live_shard(
            *(tmp_path / "shard", provider.address),
            *("--audit-log", str(disk.mounted / "audit.log"), "--record", str(disk.mounted / "recording")),
        ) as shard,
    ):
        operator = LiveOperator(shard.address, "c1")
        bind(shard, operator, "7", 1)
        disk.fail()
        until(lambda: shard.metric("recording_on"), lambda value: value == 0, "the recording has not paused")
        bind(shard, operator, "14", 2)
        assert shard.metric("audit_write_errors_total") >= 2
        run("mount", "-t", "tmpfs", "-o", "size=16m", "bigfleet-test", disk.mounted)
        try:
            until(lambda: shard.metric("recording_on"), lambda value: value == 1, "the recording never resumes")
            assert shard.process is not None
            shard.process.send_signal(signal.SIGHUP)
            until(lambda: shard.said("audit.file_reopened"), bool, "the log was never opened again")
            bind(shard, operator, "21", 3)
            operator.close()
            (recovered,) = until(lambda: shard.said("audit.write_recovered"), bool, "no record is written")
            assert recovered["lost"] == 2
            numbers = [json.loads(line)["sequence"] for line in (disk.mounted / "audit.log").read_text().splitlines()]
            # The gap shows how many are missing.
            assert numbers[0] == 2 + 2 + 1
            resumed = run_bigfleet("replay", str(disk.mounted / "recording"), "--output", "json")
            assert resumed.returncode == 0, resumed.stderr
            assert json.loads(resumed.stdout)["cycles"][0]["not_recorded_before"] > 0
        finally:
            run("umount", "--lazy", disk.mounted)
