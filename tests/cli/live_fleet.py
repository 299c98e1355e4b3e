"""A provider, a shard and two operators that stay: something for `bigfleet get` and `bigfleet explain` to look at.

The provider and the shard are the real processes on loopback. The operators live in threads here and answer every
bootstrap. `blue` asks for machines that there are and for one kind that there is not, `green` for a gang.
"""

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import grpc

from bigfleet.engine.columnar.engine import warm_up
from bigfleet.rpc.wire.gen import capacity_pb2, shard_pb2, shard_pb2_grpc
from tests.commands import run_here
from tests.patience import wait_until
from tests.processes import free_port, serving

ABSENT_TYPE = "no-such-type"

_IN = capacity_pb2.NodeSelectorRequirement.OPERATOR_IN
_SAME = capacity_pb2.NodeSelectorRequirement.OPERATOR_SAME


def _need(cpu: str, priority: int, group: str = "", **requirement: Any) -> capacity_pb2.CapacityNeed:
    requirements = [capacity_pb2.NodeSelectorRequirement(**requirement)] if requirement else []
    return capacity_pb2.CapacityNeed(
        aggregate_resources={"cpu": cpu, "memory": "4Gi"},
        min_unit={"cpu": "1"},
        priority=priority,
        group=group,
        requirements=requirements,
    )


DEMAND = {
    "blue": [
        _need("6", 1000),
        _need("2", 2_000_000, key="node.kubernetes.io/instance-type", operator=_IN, values=[ABSENT_TYPE]),
    ],
    "green": [_need("3", 200, "gang-1", key="topology.kubernetes.io/zone", operator=_SAME)],
}


class LiveFleet:
    """Where the processes are, and how to ask them."""

    def __init__(self, provider: str, shard: str, metrics: str) -> None:
        self.provider = provider
        self.shard = shard
        self.metrics = metrics

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `bigfleet get …` or `bigfleet explain …` against the shard."""
        flag = ("--metrics-addr", self.metrics) if "--totals" in arguments else ("--addr", self.shard)
        return run_here(*arguments, *flag)

    def records(self, *arguments: str) -> Any:
        """Return what a command says with `-o json`."""
        finished = self.run(*arguments, "-o", "json")
        assert (finished.returncode, finished.stderr) == (0, "")
        return json.loads(finished.stdout)


class Operator:
    """One cluster's session, kept open by a thread."""

    def __init__(self, cluster: str, channel: grpc.Channel) -> None:
        self._outgoing: Queue[shard_pb2.OperatorMessage | None] = Queue()
        self._outgoing.put(shard_pb2.OperatorMessage(hello=shard_pb2.Hello(cluster_id=cluster)))
        rollup = capacity_pb2.ClusterCapacityNeeds(
            cluster_id=cluster, timestamp_unix_nanos=time.time_ns(), needs=DEMAND[cluster]
        )
        self._outgoing.put(shard_pb2.OperatorMessage(rollup=rollup))
        self._replies: Any = shard_pb2_grpc.ShardStub(channel).Session(iter(self._outgoing.get, None))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        try:
            for message in self._replies:
                if message.WhichOneof("payload") == "bootstrap_request":
                    request_id = message.bootstrap_request.request_id
                    answer = shard_pb2.BootstrapBlobResponse(request_id=request_id, user_data=b"#!", ttl_seconds=600)
                    self._outgoing.put(shard_pb2.OperatorMessage(bootstrap_response=answer))
        except grpc.RpcError:
            pass  # the fleet is being stopped

    def leave(self) -> None:
        """End the session."""
        self._outgoing.put(None)
        self._replies.cancel()


@contextmanager
def live_fleet(place: Path, *shard_flags: str) -> Iterator[LiveFleet]:
    """Run the fleet while the context lasts, from the moment that every row which can be met holds its machines."""
    # Each process would compile the engine's kernels for itself, for a minute.
    warm_up()
    fleet = LiveFleet(*(f"127.0.0.1:{free_port()}" for _ in range(3)))
    provider = (
        *("provider", "simulated", "--addr", fleet.provider, "--state", str(place / "provider.db")),
        *("--metrics-addr", "off", "--calm", "--time-scale", "0.001"),
    )
    shard = (
        *("shard", "--listen", fleet.shard, "--provider-addr", fleet.provider, "--data-dir", str(place)),
        *("--metrics-addr", fleet.metrics, "--cycle-interval", "500ms", "--reclaim-after", "0s", *shard_flags),
    )
    with (
        serving(fleet.provider, place / "provider.log", *provider),
        serving(fleet.shard, place / "shard.log", *shard),
        grpc.insecure_channel(fleet.shard) as channel,
    ):
        operators = [Operator(cluster, channel) for cluster in DEMAND]
        try:
            _wait_until_settled(fleet)
            yield fleet
        finally:
            for operator in operators:
                operator.leave()


def _wait_until_settled(fleet: LiveFleet) -> None:
    said = ""

    def is_settled() -> bool:
        nonlocal said
        finished = fleet.run("get", "needs", "-o", "json")
        said = finished.stdout + finished.stderr
        rows = json.loads(finished.stdout) if not finished.returncode else []
        if len(rows) != 3 or sum(row["satisfied"] for row in rows) != 2:
            return False
        return not fleet.records("get", "machines", "--state", "Configuring")

    wait_until(is_settled, lambda: f"the fleet did not settle: {said}", poll_seconds=0.2)
