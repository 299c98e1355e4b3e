"""What the world of faults found in real code, each once more without the world (docs/bug-ledger.md)."""

import math
from dataclasses import replace

import pytest

from bigfleet.model.states import MachineState
from bigfleet.shard.ports import ShardSettings
from bigfleet.shard.reconcile.reconciler import GAPLESS_FULL_FACTOR
from tests.shard.world import RevisionedProvider, World, machine

pytestmark = pytest.mark.virtual_time

S = MachineState


async def test_a_machine_refused_in_the_first_list_is_known_once_its_record_is_sound() -> None:
    """A refused record is in no later delta: the shard lists in full again until it has taken everything (seed 17)."""
    sound = machine("m1", S.IDLE)
    provider = RevisionedProvider()
    provider.add(machine("m0", S.IDLE), replace(sound, price_usd_per_hour=math.nan))
    first = provider.view(b"")
    world = World(provider, settings=ShardSettings(incremental_reconcile=True, full_list_every_cycles=3))
    await world.cycle()
    assert set(world.shard.inventory.ids) == {"m0"}

    # What spoilt the record was the way, not the provider: there it is as it always was.
    provider.records["m1"] = sound
    provider._views = {
        key: {name: record._replace(machine=provider.records[name]) for name, record in view.items()}
        for key, view in provider._views.items()
    }
    assert len(first.records) == 2
    for _ in range(3):
        await world.cycle()

    assert set(world.shard.inventory.ids) == {"m0", "m1"}
    for _ in range(6):
        await world.cycle()
    assert provider.cursors.count(b"") == 2, "once everything was taken, deltas are enough again"


@pytest.mark.rule("shard 5.2/2")
async def test_a_machine_that_a_full_list_left_out_is_known_after_a_while() -> None:
    """No delta tells of a machine that did not change: who tells removals is listed again all the same (seed 55)."""
    left_out = machine("m1", S.IDLE)
    provider = RevisionedProvider()
    provider.add(machine("m0", S.IDLE), left_out)
    world = World(provider, settings=ShardSettings(incremental_reconcile=True, full_list_every_cycles=2))
    del provider.records["m1"]
    await world.cycle()
    assert set(world.shard.inventory.ids) == {"m0"}

    # The answer was cut on its way: the provider had the machine all the time, and its history says so.
    provider.records["m1"] = left_out
    told = provider.view(b"")
    provider._views = {
        key: view | {record.machine.id: record for record in told.records} for key, view in provider._views.items()
    }
    for _ in range(2 * GAPLESS_FULL_FACTOR):
        await world.cycle()

    assert set(world.shard.inventory.ids) == {"m0", "m1"}
    assert provider.cursors.count(b"") == 2
