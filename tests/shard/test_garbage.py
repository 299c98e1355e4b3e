"""What a cycle leaves behind is freed at once: nothing of it hangs in a circle until a collection finds it."""

import gc

import pytest

from bigfleet.model.states import MachineState
from tests.shard.world import World, machine, need

pytestmark = pytest.mark.virtual_time


@pytest.mark.slow
async def test_cycles_leave_no_circles_of_references() -> None:
    """An answer of the engine is large; in a circle each would stay until the next collection, minutes later."""
    world = World()
    for number in range(6):
        seeded = machine(f"m-{number}", MachineState.IDLE)
        world.provider.records[seeded.id] = seeded
    operator = world.connect("c1", "need-status", "drain-result")
    found = []
    was_enabled = gc.isenabled()
    try:
        for turn in range(6):
            operator.report(need("c1", str(4 + 4 * (turn % 3))), need("c1", "400", priority=50))
            await world.cycle(is_timer=turn % 2 == 0)
            world.provider.settle()
            gc.collect()
            gc.disable()
            gc.set_debug(gc.DEBUG_SAVEALL)
            await world.step(is_timer=False)
            gc.collect()
            found += [type(thing) for thing in gc.garbage]
            gc.set_debug(0)
            gc.garbage.clear()
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        if was_enabled:
            gc.enable()

    assert [kind for kind in found if kind.__module__.startswith("bigfleet.")] == []
