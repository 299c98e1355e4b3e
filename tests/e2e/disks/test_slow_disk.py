"""A disk that takes its time: answers wait for it, nothing is lost or misreported, and what needs no disk goes on.

A small library that is loaded into the process holds every sync back for as long as a file exists. No test measures
time: what has to wait is awaited only after the disk goes on, and what has to go on is counted while it stands still.
"""

import json
import os
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from bigfleet.cli.runtime.system import SystemClock
from bigfleet.rpc.wire.gen import coordinator_pb2_grpc, provider_pb2
from bigfleet.shard.audit.verification import check
from bigfleet.shard.ownership.state_file import StateFile
from tests.coordinator.replica_world import report
from tests.e2e.disks.test_provider_disk_full import CountingOperator
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.processes import bigfleet, free_port, run_bigfleet, wait_until_serving
from tests.recording.recorded import cycles_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="the library is compiled here"),
]

SERVICE = "/bigfleet.v1alpha1.CapacityProvider"
#: Cycles or answers that show that a process goes on.
SOME = 10
#: After so long without an answer a process counts as silent.
_SILENT_SECONDS = 1.0


@dataclass
class Disk:
    """The disk of the processes of one test."""

    library: Path
    stop: Path

    @contextmanager
    def stands_still(self) -> Iterator[None]:
        """Hold every sync back while the context lasts."""
        self.stop.touch()
        try:
            yield
        finally:
            self.stop.unlink()

    @contextmanager
    def process(self, address: str, log: Path, *arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
        """Run a command on this disk, from the moment its gRPC address serves; kill it at the end."""
        environment = {**os.environ, "LD_PRELOAD": str(self.library), "SLOW_DISK": str(self.stop)}
        with log.open("ab") as output:
            process = subprocess.Popen(bigfleet(*arguments), stdout=output, stderr=output, env=environment)
        try:
            wait_until_serving(address, process, log)
            yield process
        finally:
            process.kill()
            process.wait(PATIENCE_SECONDS)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    """Compile the library."""
    library = tmp_path / "slow_disk.so"
    source = Path(__file__).with_name("slow_disk.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return Disk(library, tmp_path / "stop")


def figure(http: str, name: str) -> float:
    """Return a metric of a process."""
    with urllib.request.urlopen(f"http://{http}/metrics", timeout=PATIENCE_SECONDS) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


# ---- a provider --------------------------------------------------------------------------------------------------


def states(channel: grpc.Channel) -> dict[str, int]:
    stub = channel.unary_unary(
        f"{SERVICE}/List", provider_pb2.ListFilter.SerializeToString, provider_pb2.MachineList.FromString
    )
    listed = stub(provider_pb2.ListFilter(), timeout=PATIENCE_SECONDS)
    return {machine.id: machine.state for machine in listed.machines}


def test_a_provider_answers_when_its_disk_has_it_and_lists_meanwhile(tmp_path: Path, disk: Disk) -> None:
    """A machine is listed as it was until its transition is on the disk; what was answered survives a kill."""
    address, log = f"127.0.0.1:{free_port()}", tmp_path / "log"
    flags = ("--state", str(tmp_path / "p.db"), "--metrics-addr", "off", "--seed-count", "1", "--calm")
    command = ("provider", "simulated", "--addr", address, *flags)
    with (
        disk.process(address, log, *command),
        grpc.insecure_channel(address) as channel,
        ThreadPoolExecutor(1) as pool,
    ):
        machine_id = next(iter(states(channel)))
        create = channel.unary_unary(
            f"{SERVICE}/Create",
            provider_pb2.CreateRequest.SerializeToString,
            provider_pb2.TransitionAck.FromString,
        )
        request = provider_pb2.CreateRequest(machine_id=machine_id, shard_id="s", shard_epoch=1, sequence_number=1)
        with disk.stands_still():
            answer = pool.submit(create, request, timeout=PATIENCE_SECONDS)
            seen = [states(channel)[machine_id] for _ in range(SOME)]
            assert set(seen) == {provider_pb2.MACHINE_STATE_SPECULATIVE}
            assert not answer.done()
        answer.result()

    with disk.process(address, log, *command), grpc.insecure_channel(address) as channel:
        assert states(channel)[machine_id] != provider_pb2.MACHINE_STATE_SPECULATIVE


# ---- a shard -----------------------------------------------------------------------------------------------------


def test_a_shard_goes_on_while_its_logs_wait_for_the_disk(tmp_path: Path, disk: Disk) -> None:
    """Audit log and recording are written off the loop: cycles and sessions go on, and every record is there then."""
    address, http = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    audit, record = tmp_path / "audit.log", tmp_path / "recording"
    flags = ("--metrics-addr", http, "--data-dir", str(tmp_path / "data"), "--fake-provider", "10")
    logs = ("--audit-log", str(audit), "--record", str(record), "--cycle-interval", "100ms")
    cycles = "bigfleet_shard_cycle_duration_seconds_count"
    with (
        disk.process(address, tmp_path / "log", "shard", "--listen", address, *flags, *logs) as process,
        grpc.insecure_channel(address) as channel,
    ):
        operator = CountingOperator(channel)
        with disk.stands_still():
            operator.report()
            wait_until(lambda: operator.requests >= SOME, "no machine is bootstrapped while the disk stands still")
            until = figure(http, cycles) + SOME
            wait_until(lambda: figure(http, cycles) > until, "no cycle while the disk stands still")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0

    recorded = cycles_of(record)
    assert len(recorded) > SOME
    assert [cycle.missed for cycle in recorded] == [0] * len(recorded)
    with audit.open("rb") as lines:
        checked = check([(audit.name, lines)])
    assert (checked.findings, checked.records >= SOME) == ((), True)


def test_a_change_of_a_shards_state_is_answered_when_the_disk_has_it(tmp_path: Path, disk: Disk) -> None:
    """The shard waits with everything else, as docs/operating.md says; then it goes on, and the change is there."""
    address, http = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    flags = ("--metrics-addr", http, "--data-dir", str(tmp_path / "data"), "--fake-provider", "4")
    cycles = "bigfleet_shard_cycle_duration_seconds_count"
    retire = ("cluster", "retire", "c1", "--addr", address, "--confirm", "--force")
    command = ("shard", "--listen", address, "--cycle-interval", "100ms", *flags)
    with disk.process(address, tmp_path / "log", *command), grpc.insecure_channel(address) as channel:
        operator = CountingOperator(channel)
        operator.report()
        wait_until(lambda: operator.requests, "the cluster never has a session")
        with ThreadPoolExecutor(1) as pool:
            with disk.stands_still():
                asked = pool.submit(run_bigfleet, *retire)
                wait_until(lambda: asked.done() or is_silent(http), "the change never reaches the disk")
                assert not asked.done()
            assert asked.result().returncode == 0, asked.result().stderr
        until = figure(http, cycles) + SOME
        wait_until(lambda: figure(http, cycles) > until, "no cycle after the disk stood still")

    with StateFile.open(tmp_path / "data", shard_id="shard-0", clock=SystemClock()) as file:
        assert list(file.retirements.records) == ["c1"]


def is_silent(http: str) -> bool:
    """Return whether a process does not answer."""
    try:
        with urllib.request.urlopen(f"http://{http}/healthz", timeout=_SILENT_SECONDS):  # expires
            return False
    except OSError:
        return True


# ---- a coordinator -----------------------------------------------------------------------------------------------


def test_a_coordinator_acknowledges_a_report_when_its_disk_has_it(tmp_path: Path, disk: Disk) -> None:
    """What it acknowledged is there after a kill, and its term stays: no other process can lead meanwhile."""
    address, log = f"127.0.0.1:{free_port()}", tmp_path / "log"
    store = ("--store", f"sqlite://{tmp_path / 'c.db'}", "--metrics-addr", "off", "--advertise-addr", address)
    command = ("coordinator", "--listen", address, *store)
    with (
        disk.process(address, log, *command),
        grpc.insecure_channel(address) as channel,
        ThreadPoolExecutor(1) as pool,
    ):
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        with disk.stands_still():
            first = report("east-0", 1, clusters=["blue"])
            answer = pool.submit(stub.ReportShard, first, timeout=PATIENCE_SECONDS)
            second = run_bigfleet("coordinator", *store, "--listen", f"127.0.0.1:{free_port()}")
            assert (second.returncode, "held by process" in second.stderr) == (1, True)
            assert not answer.done()
        assert answer.result().acknowledged

    with disk.process(address, log, *command):
        bound = run_bigfleet("get", "bindings", "--addr", address, "-o", "json")
        assert bound.returncode == 0, bound.stderr
        assert [row["cluster"] for row in json.loads(bound.stdout)] == ["blue"]
