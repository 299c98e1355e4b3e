"""A provider whose disk is full: its shard waits for it, asks operators for nothing, and goes on when there is room."""

import os
import resource
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from queue import Queue
from typing import Any

import grpc
import pytest

from bigfleet.rpc.wire.gen import capacity_pb2, provider_pb2, shard_pb2, shard_pb2_grpc
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.processes import bigfleet, free_port, serving, wait_until_serving

pytestmark = pytest.mark.slow

MACHINES = 6
#: What a process may write of one file when its disk is called full.
FULL_BYTES = 4096
#: Cycles of the shard while the disk is full, so many more than back-offs that asking in each would show.
CYCLES = 40


class CountingOperator:
    """A cluster's session that answers every bootstrap request and counts them."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.requests = 0
        self._outgoing: Queue[shard_pb2.OperatorMessage | None] = Queue()
        self._outgoing.put(shard_pb2.OperatorMessage(hello=shard_pb2.Hello(cluster_id="c1")))
        self._replies: Any = shard_pb2_grpc.ShardStub(channel).Session(iter(self._outgoing.get, None))
        threading.Thread(target=self._serve, daemon=True).start()

    def report(self) -> None:
        """Ask for every machine that there is."""
        needs = [capacity_pb2.CapacityNeed(aggregate_resources={"cpu": "10k"}, min_unit={"cpu": "1"}, priority=1)]
        rollup = capacity_pb2.ClusterCapacityNeeds(cluster_id="c1", timestamp_unix_nanos=time.time_ns(), needs=needs)
        self._outgoing.put(shard_pb2.OperatorMessage(rollup=rollup))

    def _serve(self) -> None:
        try:
            for message in self._replies:
                if message.WhichOneof("payload") == "bootstrap_request":
                    self.requests += 1
                    request_id = message.bootstrap_request.request_id
                    answer = shard_pb2.BootstrapBlobResponse(request_id=request_id, user_data=b"#!" * 4096)
                    self._outgoing.put(shard_pb2.OperatorMessage(bootstrap_response=answer))
        except grpc.RpcError:
            pass  # the shard is being stopped


def figures(http: str) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{http}/metrics", timeout=PATIENCE_SECONDS) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def outcomes(http: str, outcome: str) -> float:
    name = "bigfleet_shard_action_execute_outcomes_total"
    return sum(v for k, v in figures(http).items() if k.startswith(name) and f'outcome="{outcome}"' in k)


def readiness(http: str) -> int:
    try:
        with urllib.request.urlopen(f"http://{http}/readyz", timeout=PATIENCE_SECONDS) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def limit_files(process: subprocess.Popen[bytes], size_bytes: int) -> None:
    _soft, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size_bytes, hard))


def test_a_full_disk_is_refused_calls_and_no_blob_is_asked_for(tmp_path: Path) -> None:
    address, shard = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    provider_http, shard_http = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    command = bigfleet(
        *(
            "provider",
            "simulated",
            "--calm",
            "--time-scale",
            "0.001",
            "--addr",
            address,
            "--state",
            str(tmp_path / "p.db"),
            "--metrics-addr",
            provider_http,
        ),
        *("--seed-count", str(MACHINES)),
    )
    shard_flags = ("--provider-addr", address, "--data-dir", str(tmp_path / "s"), "--metrics-addr", shard_http)
    provider = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (tmp_path / "provider.log").touch()
    try:
        wait_until_serving(address, provider, tmp_path / "provider.log")
        _create_machines(address)
        with (
            serving(
                shard, tmp_path / "shard.log", "shard", "--listen", shard, *shard_flags, "--cycle-interval", "200ms"
            ),
            grpc.insecure_channel(shard) as channel,
        ):
            operator = CountingOperator(channel)
            wait_until(lambda: figures(shard_http).get("bigfleet_shard_active_sessions", 0) == 1, "a session")
            _attack(provider, operator, provider_http, shard_http)
    finally:
        provider.terminate()
        provider.wait(PATIENCE_SECONDS)


def _create_machines(address: str) -> None:
    """Have machines that need nothing but a Configure."""
    with grpc.insecure_channel(address) as channel:
        list_machines = channel.unary_unary(
            "/bigfleet.v1alpha1.CapacityProvider/List",
            provider_pb2.ListFilter.SerializeToString,
            provider_pb2.MachineList.FromString,
        )
        create = channel.unary_unary(
            "/bigfleet.v1alpha1.CapacityProvider/Create",
            provider_pb2.CreateRequest.SerializeToString,
            provider_pb2.TransitionAck.FromString,
        )
        machines = list_machines(provider_pb2.ListFilter()).machines
        for number, machine in enumerate(machines):
            create(
                provider_pb2.CreateRequest(
                    machine_id=machine.id, shard_id="setup", shard_epoch=1, sequence_number=number + 1
                )
            )
        wait_until(
            lambda: all(
                each.state == provider_pb2.MACHINE_STATE_IDLE
                for each in list_machines(provider_pb2.ListFilter()).machines
            ),
            "idle machines",
        )


def _attack(provider: subprocess.Popen[bytes], operator: CountingOperator, provider_http: str, shard_http: str) -> None:
    limit_files(provider, FULL_BYTES)
    operator.report()
    wait_until(lambda: outcomes(shard_http, "refused") > 0, "a refused action")
    cycles = "bigfleet_shard_cycle_duration_seconds_count"
    until = figures(shard_http)[cycles] + CYCLES
    seen = []
    while figures(shard_http)[cycles] < until:
        seen.append(readiness(provider_http))
    assert set(seen) == {503}, "the provider says so all the time"
    assert operator.requests <= MACHINES, "asked once for each machine, before the first refusal"
    assert outcomes(shard_http, "unknown_outcome") == 0

    limit_files(provider, resource.RLIM_INFINITY)
    wait_until(lambda: readiness(provider_http) == 200, "a ready provider")
    wait_until(lambda: outcomes(shard_http, "success") > 0, "a machine")
    assert os.path.exists(f"/proc/{provider.pid}")
