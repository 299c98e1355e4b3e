"""Sessions of clusters, as operators hold them, for faults of demand and of sessions."""

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from queue import Queue
from typing import Any

import grpc

from bigfleet.rpc.wire.gen import capacity_pb2, provider_pb2, shard_pb2, shard_pb2_grpc
from tests.patience import PATIENCE_SECONDS

CONFIGURED = provider_pb2.MACHINE_STATE_CONFIGURED


class Cluster:
    """One cluster's operator: it reports rows of demand, answers bootstrap requests, and says that nodes are ready."""

    def __init__(self, shard: str, name: str, *, answers: bool = True, joins: bool = True) -> None:
        """Without `answers` it leaves bootstrap requests unanswered, without `joins` no node becomes ready."""
        self.name = name
        self.joins = joins
        self._answers = answers
        self._shard = shard
        #: Machines that the shard has shown as Configured.
        self.bound: set[str] = set()
        self._outgoing: Queue[shard_pb2.OperatorMessage | None] = Queue()
        self._channel: grpc.Channel | None = None
        self.open()

    def open(self) -> None:
        """Open a session, and return once the shard has greeted."""
        self._outgoing = Queue()
        self._channel = grpc.insecure_channel(self._shard)
        capabilities = ["drain-result", "node-status"]
        self._say(hello=shard_pb2.Hello(cluster_id=self.name, capabilities=capabilities))
        is_greeted = threading.Event()
        replies: Any = shard_pb2_grpc.ShardStub(self._channel).Session(
            iter(self._outgoing.get, None), wait_for_ready=True
        )
        threading.Thread(target=self._listen, args=(replies, is_greeted), daemon=True).start()
        assert is_greeted.wait(PATIENCE_SECONDS)

    def close(self) -> None:
        """End the session."""
        self._outgoing.put(None)
        if self._channel is not None:
            self._channel.close()
        self._channel = None

    def reopen(self) -> None:
        """End the session and open another."""
        self.close()
        self.open()

    def report(self, *rows: Mapping[str, int]) -> None:
        """Report rows of `cpu` at `priority`; each asks for machines of any type, or of one that is not on offer."""
        needs = [
            capacity_pb2.CapacityNeed(
                aggregate_resources={"cpu": str(row["cpu"])},
                min_unit={"cpu": "1"},
                priority=row.get("priority", 100),
                requirements=[_NOT_OFFERED] if row.get("impossible") else [],
            )
            for row in rows
        ]
        now = time.time_ns()
        self._say(rollup=capacity_pb2.ClusterCapacityNeeds(cluster_id=self.name, timestamp_unix_nanos=now, needs=needs))

    def report_nonsense(self) -> None:
        """Report a row that asks for what is no quantity."""
        row = capacity_pb2.CapacityNeed(aggregate_resources={"cpu": "much"}, min_unit={"cpu": "1"}, priority=100)
        now = time.time_ns()
        self._say(rollup=capacity_pb2.ClusterCapacityNeeds(cluster_id=self.name, timestamp_unix_nanos=now, needs=[row]))

    def join(self) -> None:
        """Say that the nodes of all machines are ready, now and from now on."""
        self.joins = True
        for machine_id in self.bound:
            self._say_ready(machine_id)

    def _say_ready(self, machine_id: str) -> None:
        status = shard_pb2.NodeStatus(
            machine_id=machine_id, node_name=machine_id, ready=True, observed_unix_nanos=time.time_ns()
        )
        self._say(node_status=status)

    def _say(self, **payload: Any) -> None:
        self._outgoing.put(shard_pb2.OperatorMessage(**payload))

    def _listen(self, replies: Any, is_greeted: threading.Event) -> None:
        with suppress(grpc.RpcError, ValueError):  # the shard or this side has ended the session
            for message in replies:
                if message.WhichOneof("payload") == "ack":
                    is_greeted.set()
                else:
                    self._answer(message)

    def _answer(self, message: shard_pb2.ShardMessage) -> None:
        match message.WhichOneof("payload"):
            case "bootstrap_request" if self._answers:
                request_id = message.bootstrap_request.request_id
                self._say(
                    bootstrap_response=shard_pb2.BootstrapBlobResponse(
                        request_id=request_id, user_data=b"#cloud-config"
                    )
                )
            case "node_state_update" if message.node_state_update.state == CONFIGURED:
                self.bound.add(message.node_state_update.machine_id)
                if self.joins:
                    self._say_ready(message.node_state_update.machine_id)
            case "reclaim_instruction":
                instruction = message.reclaim_instruction
                drained = shard_pb2.DrainResult.OUTCOME_DRAINED
                for machine_id in instruction.machine_ids:
                    result = shard_pb2.DrainResult(
                        instruction_id=instruction.instruction_id, machine_id=machine_id, outcome=drained
                    )
                    self._say(drain_result=result)


_NOT_OFFERED = capacity_pb2.NodeSelectorRequirement(
    key="node.kubernetes.io/instance-type",
    operator=capacity_pb2.NodeSelectorRequirement.OPERATOR_IN,
    values=["no-such-type"],
)
