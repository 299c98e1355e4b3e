"""A provider opens its port once it has an inventory to serve (docs/spec/provider.md §9, §12)."""

import json
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bigfleet.rpc.wire.gen import provider_pb2, provider_pb2_grpc
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.processes import free_port

#: A backend whose first inventory lasts until somebody makes a file.
SLOW = """
import time
from pathlib import Path
from bigfleet.provider.run import run
from bigfleet.model.states import CapacityType
from bigfleet.provider.backend import CONFIGURE_WAITS, Host, Limits, Slot
from bigfleet.provider.records.kinds import Kind

class Slow:
    provider = "slow"
    limits = Limits(resumable=frozenset({Kind.CONFIGURE}))

    def inventory(self):
        while not Path("go").exists():
            time.sleep(0.01)
        yield Slot(id="s-0", instance_type="t", zone="z", capacity_type=CapacityType.RESERVED, price_usd_per_hour=1.0)

    def create(self, machine, op):
        return Host(ref="host-" + machine.id)

    def configure(self, machine, cluster, blob, op):
        return None

    def drain(self, machine, grace_seconds, op):
        return None

run(Slow(), readiness=CONFIGURE_WAITS)
"""


@contextmanager
def slow_provider(cwd: Path, port: int, metrics_port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a provider whose first inventory takes until the file `go` is there."""
    (cwd / "slow.py").write_text(SLOW)
    flags = ("--addr", f"127.0.0.1:{port}", "--metrics-addr", f"127.0.0.1:{metrics_port}", "--state", "slow.db")
    with (cwd / "log").open("ab") as log:
        process = subprocess.Popen([sys.executable, "slow.py", *flags], cwd=cwd, stdout=log, stderr=log)
    try:
        yield process
    finally:
        (cwd / "go").touch()
        process.terminate()
        process.wait(PATIENCE_SECONDS)


def readiness(port: int, process: subprocess.Popen[bytes]) -> int:
    """Return the status of /readyz, 0 while nothing listens."""
    assert process.poll() is None, "the provider ended"
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=PATIENCE_SECONDS) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def is_open(port: int) -> bool:
    """Return whether a connection is accepted."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS).close()
    except OSError:
        return False
    return True


def first_answers(port: int) -> tuple[str, int, int]:
    """Wait for the port, and return what the first calls through it get: List, its machines, the health."""
    wait_until(lambda: is_open(port), "the port never opened", poll_seconds=0.001)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            stub = provider_pb2_grpc.CapacityProviderStub(channel)
            machines = len(stub.List(provider_pb2.ListFilter(), timeout=PATIENCE_SECONDS).machines)
            code = "OK"
        except grpc.RpcError as error:
            machines, code = 0, error.code().name
        health = health_pb2_grpc.HealthStub(channel)
        status = health.Check(health_pb2.HealthCheckRequest(service=""), timeout=PATIENCE_SECONDS).status
    return code, machines, status


def test_the_first_call_through_an_open_port_is_answered(tmp_path: Path) -> None:
    """The port was open during the first inventory, and each read was UNAVAILABLE."""
    port, metrics_port = free_port(), free_port()
    found: list[tuple[str, int, int]] = []
    with slow_provider(tmp_path, port, metrics_port) as process:
        attacker = threading.Thread(target=lambda: found.append(first_answers(port)), daemon=True)
        attacker.start()
        wait_until(lambda: readiness(metrics_port, process) == 503, "no /readyz during the first inventory")
        # Long enough for what opened the port at once.
        for _ in range(20):
            assert not is_open(port)
            time.sleep(0.02)
        (tmp_path / "go").touch()
        attacker.join(PATIENCE_SECONDS)
        wait_until(lambda: readiness(metrics_port, process) == 200, "the provider never became ready")
    assert found == [("OK", 1, health_pb2.HealthCheckResponse.SERVING)]
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines() if line.startswith("{")]
    events = [line["event"] for line in lines if line["event"] in ("inventory.awaited", "provider.started")]
    assert events == ["inventory.awaited", "provider.started"]


def test_a_provider_that_waits_for_its_inventory_stops_in_order(tmp_path: Path) -> None:
    """With exit code 0, although the port was never opened."""
    port, metrics_port = free_port(), free_port()
    with slow_provider(tmp_path, port, metrics_port) as process:
        wait_until(lambda: readiness(metrics_port, process) == 503, "no /readyz during the first inventory")
        process.terminate()
        (tmp_path / "go").touch()
        assert process.wait(PATIENCE_SECONDS) == 0


def test_an_address_in_use_ends_the_start_before_the_inventory(tmp_path: Path) -> None:
    """It is not first noticed when the inventory is there, minutes later."""
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        with slow_provider(tmp_path, occupied.getsockname()[1], free_port()) as process:
            assert process.wait(PATIENCE_SECONDS) == 1
    assert "cannot listen on 127.0.0.1" in (tmp_path / "log").read_text()
