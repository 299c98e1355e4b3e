"""A provider whose answers are an attack costs no decision about the other machines."""

from dataclasses import replace

import pytest
import structlog

from bigfleet.model.limits.record_limits import RECORD_BYTES_MAX
from bigfleet.model.states import MachineState
from bigfleet.rpc.wire.gen import provider_pb2
from bigfleet.rpc.wire.list_response import read_listing
from bigfleet.shard.ports import Listing, ShardSettings
from bigfleet.shard.reconcile.reconciler import CURSOR_BYTES_MAX
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.shard.world import RevisionedProvider, ScriptedProvider, World, machine, need

pytestmark = pytest.mark.virtual_time

S = MachineState


@pytest.mark.parametrize("quantity", ["1e400", "9223372036854775807E", "9" * 64])
async def test_a_quantity_that_no_column_holds_costs_no_later_decision(quantity: str) -> None:
    """It comes with a resource that no machine had before; each cycle afterwards decides."""
    provider = ScriptedProvider(synchronous=True)
    provider.add(*(machine(f"m{number}", S.IDLE) for number in range(3)))
    world = World(provider)
    operator = world.connect("c1")
    await world.cycle()
    for number, text in enumerate((quantity, "1m")):
        provider.add(machine(f"hostile-{number}", S.IDLE, allocatable={"cpu": "4", "hostile": text}))
    for cpu in ("4", "8", "12"):
        operator.report(need("c1", cpu))
        await world.cycle()
        await world.cycle()
    assert world.metric("cycle_failures_total") == 0
    assert len([each for each in world.shard.inventory if each.state is S.CONFIGURED]) == 3


async def test_a_cursor_that_is_too_long_is_not_sent_back() -> None:
    """The provider's server would refuse the request, and each one after it."""
    provider = RevisionedProvider()
    provider.add(machine("m0", S.IDLE))
    world = World(provider, settings=ShardSettings(incremental_reconcile=True))
    sound = Listing(records=(await provider.list(b"")).records, revision=b"r" * CURSOR_BYTES_MAX)
    provider.listings += [replace(sound, revision=sound.revision + b"r"), sound]
    provider.cursors.clear()
    for _ in range(3):
        await world.cycle()
    assert provider.cursors == [b"", b"", sound.revision]


async def test_of_a_record_of_megabytes_the_id_is_read_and_its_machine_stays() -> None:
    """To read its labels would take a good part of a second each time; the last good record stays in force."""
    provider = ScriptedProvider()
    provider.add(machine("m0", S.IDLE, zone="z1"))
    world = World(provider)
    await world.cycle()
    huge = provider_pb2.Machine(id="m0", zone="z2", labels={f"k{number}": "v" for number in range(100_000)})
    assert huge.ByteSize() > RECORD_BYTES_MAX
    content = provider_pb2.MachineList(machines=[huge]).SerializeToString()
    provider.listings.append(await read_listing(content, LoopClock()))
    with structlog.testing.capture_logs() as logs:
        await world.cycle()
    assert world.machine("m0").zone == "z1"
    assert world.metric("machines_rejected_total", reason="limits") == 1
    (rejection,) = [each for each in logs if each["event"] == "inventory.record_rejected"]
    assert rejection["error"] == f"the record has {huge.ByteSize():,} bytes, at most 131,072 are allowed"
