"""Plays the operator of one cluster in a thread.

It answers every bootstrap, refuses no drain, and opens its session again when it ends, as operators do.
"""

import threading
import time
from queue import Queue
from typing import Any

import grpc

from bigfleet.rpc.wire.gen import capacity_pb2, shard_pb2, shard_pb2_grpc
from tests.patience import PATIENCE_SECONDS
from tests.processes import open_channel

#: Between the end of a session and the next one.
_PAUSE_SECONDS = 0.2


class Cluster:
    """One cluster's operator."""

    def __init__(self, name: str, shard: str, cpus: int) -> None:
        self.name = name
        #: Processors that it asks for.
        self.cpus = cpus
        self._shard = shard
        self._is_over = threading.Event()
        self._outgoing: Queue[shard_pb2.OperatorMessage | None] = Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def ask_for(self, cpus: int) -> None:
        """Report another demand."""
        self.cpus = cpus
        self._outgoing.put(self._rollup())

    def close(self) -> None:
        """End the session."""
        self._is_over.set()
        self._outgoing.put(None)
        self._thread.join(PATIENCE_SECONDS)

    def _rollup(self) -> shard_pb2.OperatorMessage:
        cpus = {"cpu": str(self.cpus)}
        need = capacity_pb2.CapacityNeed(aggregate_resources=cpus, min_unit={"cpu": "1"}, priority=100)
        rollup = capacity_pb2.ClusterCapacityNeeds(
            cluster_id=self.name, timestamp_unix_nanos=time.time_ns(), needs=[need]
        )
        return shard_pb2.OperatorMessage(rollup=rollup)

    def _run(self) -> None:
        while not self._is_over.is_set():
            self._outgoing = Queue()
            self._outgoing.put(shard_pb2.OperatorMessage(hello=shard_pb2.Hello(cluster_id=self.name)))
            self._outgoing.put(self._rollup())
            with open_channel(self._shard) as channel:
                try:
                    self._answer(shard_pb2_grpc.ShardStub(channel).Session(iter(self._outgoing.get, None)))
                except grpc.RpcError:
                    self._outgoing.put(None)  # The shard is being replaced.
            self._is_over.wait(_PAUSE_SECONDS)  # expires

    def _answer(self, messages: Any) -> None:
        for message in messages:
            if message.WhichOneof("payload") == "bootstrap_request":
                request_id = message.bootstrap_request.request_id
                answer = shard_pb2.BootstrapBlobResponse(request_id=request_id, user_data=b"#!", ttl_seconds=600)
                self._outgoing.put(shard_pb2.OperatorMessage(bootstrap_response=answer))
