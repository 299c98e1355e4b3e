"""Starts the real commands as processes of their own, waits until they serve, and ends them."""

import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.patience import PATIENCE_SECONDS, wait_until

#: A process that is being started is asked again soon; gRPC would let a second pass, then more and more.
_RECONNECT = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 200),
]


#: A process listens seconds after its port was chosen. Linux gives ports from 32768 to connections that are opened
#: meanwhile, and control planes of tests take those from 20000: each worker of pytest has 500 others to itself.
_PORTS_FIRST, _PORTS_PER_WORKER, _WORKERS_MAX = 10_000, 500, 20
_first = _PORTS_FIRST + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % _WORKERS_MAX * _PORTS_PER_WORKER
#: From another place in each process: another run of the tests on this machine has the same shares.
_ports = itertools.cycle(_first + (os.getpid() * 97 + place) % _PORTS_PER_WORKER for place in range(_PORTS_PER_WORKER))


def free_port() -> int:
    """Return a loopback port that is free, and that this process has not returned lately."""
    for port in itertools.islice(_ports, _PORTS_PER_WORKER):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")


def bigfleet(*arguments: str) -> list[str]:
    """Return the argument vector of a bigfleet command in this interpreter."""
    return [sys.executable, "-m", "bigfleet.cli.main", *arguments]


def run_bigfleet(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, without a terminal, and return what it said."""
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    return subprocess.run(
        bigfleet(*arguments),
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


def is_running(process_id: int) -> bool:
    """Say whether a process is there that has not ended."""
    try:
        status = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def open_channel(address: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.Channel:
    """Return a channel, in plain text without credentials."""
    if credentials is None:
        return grpc.insecure_channel(address, _RECONNECT)
    return grpc.secure_channel(address, credentials, _RECONNECT)


def wait_until_serving(
    address: str, process: subprocess.Popen[bytes], log: Path, credentials: grpc.ChannelCredentials | None = None
) -> None:
    """Return once the gRPC health of an address is SERVING. Raises AssertionError with the log when it never is."""
    with open_channel(address, credentials) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        def is_serving() -> bool:
            assert process.poll() is None, f"the process ended with {process.returncode}:\n{log.read_text()}"
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=PATIENCE_SECONDS)
            except grpc.RpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

        wait_until(is_serving, lambda: f"{address} does not serve:\n{log.read_text()}")


@contextmanager
def serving(
    address: str, log: Path, *arguments: str, credentials: grpc.ChannelCredentials | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command of bigfleet while the context lasts, as `serving_command` does."""
    with serving_command(address, log, bigfleet(*arguments), credentials=credentials) as process:
        yield process


@contextmanager
def serving_command(
    address: str, log: Path, command: list[str], *, credentials: grpc.ChannelCredentials | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program while the context lasts, from the moment its gRPC address serves; then stop it in order."""
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        wait_until_serving(address, process, log, credentials)
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(PATIENCE_SECONDS)
