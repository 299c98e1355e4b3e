"""How much work it is to show every row of demand (docs/spec/shard.md §12: 20,000 rows in under five seconds).

Counted in calls of Python and of C, which no busy machine changes: a fixed number for each row, however many there are.
Five seconds are 250 µs a row, and a call takes less than one.
"""

import gc
import sys
from typing import Any

import pytest

from bigfleet.model.frames import Hello
from bigfleet.model.states import MachineState
from bigfleet.rpc.servers.shardread import ShardReadServicer
from bigfleet.rpc.wire.gen import shardread_pb2
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.shard.world import Offer, ScriptedProvider, World, machine, need

pytestmark = pytest.mark.virtual_time
CALLS_PER_ROW_MAX = 250


async def calls_to_show(rows: int) -> float:
    """Return how many calls it takes per row to make and encode all rows of ten clusters, most of them unmet."""
    world = World(ScriptedProvider())
    world.provider.add(*(machine(f"m{number:04}", MachineState.IDLE) for number in range(rows // 10)))
    for cluster in (f"c{number}" for number in range(10)):
        wanted = tuple(need(cluster, "4", priority=number + 1) for number in range(rows // 10))
        world.shard.take_rollup(world.shard.sessions.open(Hello(cluster_id=cluster)), Offer(cluster, wanted))
    await world.step()
    servicer = ShardReadServicer(world.shard, LoopClock())
    context: Any = None
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    # What others left behind is not to be collected, and counted, here.
    gc.collect()
    gc.disable()
    sys.setprofile(count)
    try:
        frames = [
            frame.SerializeToString()
            async for frame in servicer.InspectNeeds(shardread_pb2.InspectNeedsRequest(), context)
        ]
    finally:
        sys.setprofile(None)
        gc.enable()
    assert len(frames) == 1 + rows
    return calls / rows


@pytest.mark.rule("shard 12/15")
async def test_showing_a_row_is_the_same_work_however_many_there_are() -> None:
    few, many = await calls_to_show(50), await calls_to_show(300)

    assert many <= 1.1 * few
    assert many < CALLS_PER_ROW_MAX
