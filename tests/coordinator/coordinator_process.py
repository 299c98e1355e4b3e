"""`bigfleet coordinator` as a process on loopback, and what tests ask it."""

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from bigfleet.rpc.wire.gen import coordinator_pb2 as pb
from bigfleet.rpc.wire.gen import coordinator_pb2_grpc
from tests.commands import run_here
from tests.coordinator.replica_world import report
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.processes import bigfleet, free_port


@dataclass
class Running:
    """A coordinator's process."""

    process: "subprocess.Popen[bytes]"
    port: int
    http: int
    log: Path

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return run_here(*arguments, "--addr", self.address)

    def records(self, *arguments: str) -> list[dict[str, Any]]:
        done = self.run(*arguments, "-o", "json")
        assert done.returncode == 0, done.stderr
        listed: list[dict[str, Any]] = json.loads(done.stdout)
        return listed

    def page(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http}{path}", timeout=PATIENCE_SECONDS) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def report(self, shard_id: str = "east-0", cycle: int = 1, **fields: Any) -> pb.ReportAck:
        with grpc.insecure_channel(self.address) as channel:
            stub = coordinator_pb2_grpc.CoordinatorStub(channel)
            answer: pb.ReportAck = stub.ReportShard(report(shard_id, cycle, **fields))
            return answer


@contextmanager
def coordinator(folder: Path, *flags: str, wait_for: str = "/readyz") -> Iterator[Running]:
    """Run a coordinator until the context ends, once a path answers 200. It names itself by its own address."""
    port, http = free_port(), free_port()
    log = folder / f"coordinator-{port}.log"
    listen = ["--listen", f"127.0.0.1:{port}", "--metrics-addr", f"127.0.0.1:{http}"]
    listen += ["--advertise-addr", f"127.0.0.1:{port}"]
    with log.open("wb") as output:
        process = subprocess.Popen([*bigfleet(), "coordinator", *listen, *flags], stdout=output, stderr=output)
    running = Running(process, port, http, log)
    try:
        wait_until(lambda: process.poll() is not None or running.page(wait_for)[0] == 200, log.read_text)
        assert process.poll() is None, log.read_text()
        yield running
    finally:
        process.terminate()
        process.wait(PATIENCE_SECONDS)
