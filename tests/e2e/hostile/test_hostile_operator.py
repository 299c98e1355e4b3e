"""An operator that breaks the protocol before a real shard process costs another cluster nothing."""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from bigfleet.rpc.wire.gen import capacity_pb2, shard_pb2, shard_pb2_grpc
from tests.e2e.fault_world import LiveOperator, LiveShard, live_provider, live_shard, until
from tests.patience import PATIENCE_SECONDS

CONFIGURED = "MACHINE_STATE_CONFIGURED"
Frame = shard_pb2.OperatorMessage
FAR_FUTURE, FAR_PAST = 2**63 - 1, -(2**63)
#: Like c1 to a reader, and another cluster or none at all.
LOOKALIKES = ("C1", "c1.", "\u0441" + "1", "\uff43" + "1", "c\u03011", "../c1", "c1/")
REFUSED = ("c1 ", " c1", "c1\u200b", "c1\0", "c1\n", "", "a" * 254)


def hello(cluster: str) -> Frame:
    """Return the first frame of a session."""
    return Frame(hello=shard_pb2.Hello(cluster_id=cluster, protocol_version="v1alpha1", capabilities=["drain-result"]))


def rollup(cluster: str, stamp: int, cpu: str = "1") -> Frame:
    """Return a roll-up of one row."""
    row = capacity_pb2.CapacityNeed(aggregate_resources={"cpu": cpu}, min_unit={"cpu": "1"}, priority=1)
    return Frame(rollup=capacity_pb2.ClusterCapacityNeeds(cluster_id=cluster, timestamp_unix_nanos=stamp, needs=[row]))


def attack(machine_id: str) -> list[Frame]:
    """Return frames about a machine of another cluster and about requests that do not exist."""
    blob = shard_pb2.BootstrapBlobResponse(request_id="none", user_data=b"z" * 500_000)
    drained = shard_pb2.DrainResult(
        instruction_id="none", machine_id=machine_id, outcome=shard_pb2.DrainResult.OUTCOME_DRAINED
    )
    status = shard_pb2.NodeStatus(
        machine_id=machine_id, node_name="evil", ready=True, observed_unix_nanos=FAR_FUTURE, pods=2**31 - 1
    )
    ack = shard_pb2.ReclaimAck(instruction_id="\x1b[2J\n", nodes_started=2**31 - 1)
    return [
        *[Frame(bootstrap_response=blob)] * 20,
        *[Frame(drain_result=drained)] * 100,
        *[Frame(node_status=status)] * 100,
        Frame(reclaim_ack=ack),
    ]


def code_of(shard: LiveShard, *frames: Frame) -> grpc.StatusCode:
    """Send frames on a session of its own, end it, and return its status."""

    def outgoing() -> Iterator[Frame]:
        yield from frames
        time.sleep(0.3)

    with grpc.insecure_channel(shard.address) as channel:
        replies: Any = shard_pb2_grpc.ShardStub(channel).Session(outgoing(), timeout=PATIENCE_SECONDS)
        with suppress(grpc.RpcError):
            list(replies)
        code: grpc.StatusCode = replies.code()
        return code


@pytest.mark.slow
def test_a_hostile_operator_costs_another_cluster_nothing(tmp_path: Path) -> None:
    """Its frames end its own session or change nothing, and c1 holds what it had."""
    with live_provider(tmp_path, 2) as provider, live_shard(tmp_path / "shard", provider.address) as shard:
        operator = LiveOperator(shard.address, "c1")
        operator.report("2")
        before = until(lambda: shard.bound("c1"), lambda bound: list(bound.values()) == [CONFIGURED], "never bound")
        (machine_id,) = before

        wrong_order = ([rollup("c9", 1)], [Frame()], [hello("c9"), hello("c8")])
        assert [code_of(shard, *frames) for frames in wrong_order] == [grpc.StatusCode.INVALID_ARGUMENT] * 3
        too_large = shard_pb2.BootstrapBlobResponse(request_id="none", user_data=b"z" * (64 << 20))
        assert code_of(shard, hello("c9"), Frame(bootstrap_response=too_large)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert code_of(shard, hello("c9"), *attack(machine_id)) is grpc.StatusCode.CANCELLED
        for stamp in (FAR_FUTURE, 0, FAR_PAST, time.time_ns()):
            code_of(shard, hello("c9"), rollup("c9", stamp), rollup("c1", FAR_FUTURE, "0"))
        assert {code_of(shard, hello(name)) for name in LOOKALIKES} == {grpc.StatusCode.CANCELLED}
        assert {code_of(shard, hello(name)) for name in REFUSED} == {grpc.StatusCode.INVALID_ARGUMENT}

        assert before.items() <= shard.bound("c1").items()
        assert shard.machines()[machine_id].machine.node_name != "evil"
        assert shard.metric("cycle_failures_total") == 0
        operator.close()
    log = shard.log.read_text()
    assert ("Traceback" in log, '"exception"' in log, "\x1b" in log) == (False, False, False)
