"""`bigfleet cluster retire` against real processes: refused, shown, carried out over a kill -9, undone."""

import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path
from queue import Queue
from typing import Any

import grpc
import pytest

from bigfleet.engine.columnar.engine import warm_up
from bigfleet.rpc.wire.gen import capacity_pb2, shard_pb2, shard_pb2_grpc
from tests.cli.live_fleet import LiveFleet
from tests.patience import wait_until
from tests.processes import free_port, serving

pytestmark = pytest.mark.slow


class ReportingOperator:
    """A cluster's session that asks for one machine, again and again, and notes why it is refused."""

    def __init__(self, address: str) -> None:
        self.refusals: list[str] = []
        self._outgoing: Queue[shard_pb2.OperatorMessage | None] = Queue()
        hello = shard_pb2.Hello(cluster_id="c1", capabilities=["need-status"])
        self._outgoing.put(shard_pb2.OperatorMessage(hello=hello))
        self._channel = grpc.insecure_channel(address)
        self._replies: Any = shard_pb2_grpc.ShardStub(self._channel).Session(iter(self._outgoing.get, None))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self.report()

    def report(self) -> None:
        """Ask for one cpu."""
        needs = [capacity_pb2.CapacityNeed(aggregate_resources={"cpu": "1"}, min_unit={"cpu": "1"}, priority=1)]
        rollup = capacity_pb2.ClusterCapacityNeeds(cluster_id="c1", timestamp_unix_nanos=time.time_ns(), needs=needs)
        self._outgoing.put(shard_pb2.OperatorMessage(rollup=rollup))

    def _serve(self) -> None:
        try:
            for message in self._replies:
                kind = message.WhichOneof("payload")
                if kind == "bootstrap_request":
                    request_id = message.bootstrap_request.request_id
                    answer = shard_pb2.BootstrapBlobResponse(request_id=request_id, user_data=b"#!", ttl_seconds=600)
                    self._outgoing.put(shard_pb2.OperatorMessage(bootstrap_response=answer))
                elif kind == "ack" and message.ack.echo == "rollup_rejected":
                    self.refusals.append(message.ack.error)
        except grpc.RpcError:
            pass  # the shard was killed, or this operator left

    def leave(self) -> None:
        """End the session."""
        self._outgoing.put(None)
        self._replies.cancel()
        self._thread.join()
        self._channel.close()


def bound(fleet: LiveFleet) -> int:
    """Return how many machines the cluster has."""
    finished = fleet.run("get", "machines", "--cluster", "c1", "-o", "json")
    return finished.stdout.count('"id"') if not finished.returncode else 0


def test_a_cluster_is_retired_over_a_kill_and_admitted_again(tmp_path: Path) -> None:
    """The machines of a cluster that is gone stayed bound for ever: no command ended its demand."""
    warm_up()
    fleet = LiveFleet(*(f"127.0.0.1:{free_port()}" for _ in range(3)))
    provider = (
        *("provider", "simulated", "--addr", fleet.provider, "--state", str(tmp_path / "provider.db")),
        *("--metrics-addr", "off", "--calm", "--time-scale", "0.001"),
    )
    flags = (
        *("shard", "--listen", fleet.shard, "--provider-addr", fleet.provider, "--data-dir", str(tmp_path / "shard")),
        *("--metrics-addr", fleet.metrics, "--cycle-interval", "500ms", "--reclaim-after", "0s"),
        *("--cluster-silence-alert", "1s", "--audit-log", str(tmp_path / "audit.jsonl")),
    )

    def shard() -> AbstractContextManager[Any]:
        return serving(fleet.shard, tmp_path / "shard.log", *flags)

    with serving(fleet.provider, tmp_path / "provider.log", *provider):
        with shard() as process:
            operator = ReportingOperator(fleet.shard)
            wait_until(lambda: bound(fleet) == 1, "no machine was bound", poll_seconds=0.2)
            refused = fleet.run("cluster", "retire", "c1", "--confirm")
            assert (refused.returncode, refused.stdout) == (1, "")
            assert "the operator of cluster c1 is connected" in refused.stderr
            operator.leave()
            unknown = fleet.run("cluster", "retire", "c9", "--confirm")
            assert unknown.returncode == 1
            assert "cluster 'c9' is unknown" in unknown.stderr
            assert fleet.run("cluster", "retire", "c 1").returncode == 2
            shown = fleet.run("cluster", "retire", "c1")
            assert (shown.returncode, shown.stderr) == (0, "")
            assert "c1 has 1 machines" in shown.stdout
            assert "nothing was changed" in shown.stdout
            assert bound(fleet) == 1
            done = fleet.run("cluster", "retire", "c1", "--confirm", "--reason", "moved to c2")
            assert done.returncode == 0
            assert "is retired since" in done.stdout
            process.kill()
            process.wait()
        with shard():
            wait_until(lambda: bound(fleet) == 0, "the machine was not reclaimed", poll_seconds=0.2)
            operator = ReportingOperator(fleet.shard)
            wait_until(lambda: operator.refusals, "the roll-up was not refused")
            assert "cluster c1 is retired" in operator.refusals[0]
            assert bound(fleet) == 0
            readmitted = fleet.run("cluster", "readmit", "c1")
            assert (readmitted.returncode, readmitted.stderr) == (0, "")
            operator.report()
            wait_until(lambda: bound(fleet) == 1, "no machine was bound again", poll_seconds=0.2)
            operator.leave()
    audit = (tmp_path / "audit.jsonl").read_text()
    assert '"kind":"ClusterRetire"' in audit
    assert '"reason":"moved to c2"' in audit
    assert '"kind":"ClusterReadmit"' in audit
