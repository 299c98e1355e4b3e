"""The fake backend: its mix of slots, and calls that wait until they are released (docs/spec/provider.md §20)."""

import pytest

from bigfleet.model.states import CapacityType, MachineState
from bigfleet.provider.backends.fake import FakeBackend
from bigfleet.provider.records.kinds import EDGES, Kind
from tests.provider.harness import SLOT, bring_to, fake_core, make_core, settle, started, state_of

S = MachineState
virtual_time = pytest.mark.virtual_time


def test_every_third_slot_is_spot_and_zones_come_in_threes() -> None:
    slots = FakeBackend(20).slots
    assert [slot.id for slot in slots] == [f"fake-{n}" for n in range(20)]
    for number, slot in enumerate(slots):
        is_spot = number % 3 == 2
        assert slot.zone == ("zone-a", "zone-b", "zone-c")[number // 3 % 3]
        assert slot.capacity_type is (CapacityType.SPOT if is_spot else CapacityType.ON_DEMAND)
        assert (slot.price_usd_per_hour, slot.interruption_probability) == ((0.12, 0.00007) if is_spot else (0.40, 0.0))
        assert slot.instance_type == "fake.8x32"
        assert dict(slot.resources) == dict(slot.allocatable) == {"cpu": "7500m", "memory": "28Gi"}


@virtual_time
async def test_all_four_calls_succeed_at_once() -> None:
    core, backend = await fake_core()
    await bring_to(core, S.CONFIGURED)
    assert backend.clusters == {SLOT: "c-1"}
    await core.drain(SLOT, 0)
    await settle()
    assert await state_of(core) is S.IDLE
    await core.delete(SLOT)
    await settle()
    assert await state_of(core) is S.SPECULATIVE
    assert backend.hosts == {}
    assert [kind for kind, _id, _op in backend.calls] == list(Kind)


@virtual_time
@pytest.mark.parametrize("kind", list(Kind))
async def test_a_held_kind_stays_transitional_until_it_is_released(kind: Kind) -> None:
    core, backend = await fake_core()
    if kind is not Kind.CREATE:
        await bring_to(core, S.CONFIGURED if kind is Kind.DRAIN else S.IDLE)
    backend.hold(kind)
    calls = {
        Kind.CREATE: lambda: core.create(SLOT),
        Kind.CONFIGURE: lambda: core.configure(SLOT, "c-2", b"", {}),
        Kind.DRAIN: lambda: core.drain(SLOT, 0),
        Kind.DELETE: lambda: core.delete(SLOT),
    }
    await calls[kind]()
    await settle()
    assert await state_of(core) is EDGES[kind].transitional
    backend.release(SLOT)
    await settle()
    assert await state_of(core) is EDGES[kind].target
    with pytest.raises(KeyError):
        backend.release(SLOT)


@virtual_time
async def test_a_kind_that_is_held_no_more_succeeds_at_once() -> None:
    core, backend = await fake_core()
    backend.hold(Kind.CREATE)
    backend.unhold(Kind.CREATE)
    await bring_to(core, S.IDLE)


@virtual_time
async def test_hosts_outlive_a_core_and_are_found_by_the_next_one() -> None:
    core, backend = await fake_core()
    await bring_to(core, S.CONFIGURED)
    await core.stop()
    core = await started(make_core(backend))
    assert await state_of(core) is S.IDLE
    assert (await core.get(SLOT)).machine.host.ref == f"host-{SLOT}"
