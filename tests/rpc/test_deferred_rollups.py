"""Roll-ups that come while their cluster has to wait, over real gRPC (docs/spec/shard.md §4.4).

The shard reads only the head of such a roll-up when it comes, and the rest when it is its turn.
"""

import pytest

from bigfleet.model.clock import NANOS_PER_SECOND
from bigfleet.rpc.wire.convert_need import needs_to_wire
from bigfleet.rpc.wire.gen import capacity_pb2
from tests.rpc.live_shard import live_shard
from tests.shard.world import World, need


def frame_naming(first: str, last: str) -> bytes:
    """Return the frame of a roll-up of one row that names a cluster in front of the row and one behind it."""
    front = capacity_pb2.ClusterCapacityNeeds(
        cluster_id=first, timestamp_unix_nanos=NANOS_PER_SECOND, needs=needs_to_wire([need(first, "4")])
    )
    behind = capacity_pb2.ClusterCapacityNeeds(cluster_id=last)
    inner = front.SerializeToString(deterministic=True) + behind.SerializeToString(deterministic=True)
    return b"\x12" + bytes([len(inner) & 0x7F | 0x80, len(inner) >> 7]) + inner


@pytest.mark.rule("shard 4/1", "shard 15/20")
async def test_a_roll_up_that_waits_cannot_report_for_another_cluster() -> None:
    """The second name wins in a parser: red would have written blue's demand, with its priorities and its limits."""
    async with live_shard(World()) as live:
        peer = await live.connect("red", "need-status")
        session = live.shard.sessions.of("red")
        assert session is not None
        session.is_deferred = True
        await peer.say_bytes(frame_naming("red", "blue"))
        refused = await peer.hear_ack("rollup_rejected")

        assert refused.error == "cluster_id: is given twice with different values; give it once"
        assert live.shard.intake.table.clusters == set()

        await peer.say_bytes(frame_naming("red", "red"))
        await peer.hear_ack("rollup")
        assert [row.cluster for row in live.shard.intake.table.rows_of("red")] == ["red"]
