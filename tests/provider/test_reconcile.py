"""Inventory passes, the brake, quarantine and pushes (docs/spec/provider.md §9, §12, §13)."""

import asyncio
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import pytest

from bigfleet.model.states import CapacityType, MachineState
from bigfleet.provider.backend import ExistingHost, PartialFacts, Slot
from bigfleet.provider.backends.fake import FakeBackend, fake_slot
from bigfleet.provider.kit.options import CoreOptions
from bigfleet.provider.records.kinds import Kind
from bigfleet.provider.records.refusal import Code, StartRefused
from bigfleet.provider.records.validate import Reason
from bigfleet.provider.storage.store import MemoryStore
from tests.provider.harness import (
    SLOT,
    bring_to,
    fake_core,
    is_ready,
    make_core,
    metric,
    refusal_of,
    settle,
    started,
    state_of,
    token,
)

pytestmark = pytest.mark.virtual_time

S = MachineState
NO_WAY_OUT = CoreOptions(is_inline=True, failed_hold_seconds=0)
#: Longer than a pass with its jitter, shorter than two.
PASS = 67.0


async def passes(count: int) -> None:
    await asyncio.sleep(PASS * count)


async def test_a_quiet_inventory_changes_nothing() -> None:
    core, _ = await fake_core()
    cursor = (await core.list()).revision
    await passes(5)
    assert (await core.list((), 0, cursor)).records == ()


async def test_new_slots_and_hosts_appear() -> None:
    core, backend = await fake_core(2)
    extra = FakeBackend(4).slots
    backend.slots = extra
    backend.hosts["fake-3"] = "found"
    await passes(1)
    assert await state_of(core, "fake-2") is S.SPECULATIVE
    record = await core.get("fake-3")
    assert (record.state, record.machine.host) == (S.IDLE, ("fake", "found"))


class ServingHosts(FakeBackend):
    """Shows of each host in which cluster it serves."""

    def __init__(self) -> None:
        super().__init__(6)
        self.in_cluster: dict[str, str] = {}

    async def inventory(self) -> Iterable[Slot]:
        return [
            replace(fact, in_cluster=self.in_cluster.get(fact.id, "")) if isinstance(fact, ExistingHost) else fact
            for fact in await super().inventory()
        ]


async def test_a_host_that_serves_a_cluster_unknown_to_the_state_is_never_idle() -> None:
    """After the restore of an older state: a machine that was idle then, a slot then, and one that was not there."""
    backend = ServingHosts()
    core = await started(make_core(backend, options=NO_WAY_OUT))
    await bring_to(core, S.IDLE)
    await bring_to(core, S.CONFIGURED, "fake-1", "red")
    backend.slots = FakeBackend(8).slots
    backend.hosts |= {"fake-2": "orphan", "fake-7": "new"}
    backend.in_cluster = dict.fromkeys([SLOT, "fake-1", "fake-2", "fake-7"], "red")
    await passes(3)
    for machine_id in (SLOT, "fake-2", "fake-7"):
        record = await core.get(machine_id)
        assert (record.state, record.machine.cluster) == (S.FAILED, "red")
        assert "the host serves cluster red" in record.machine.last_error
    assert await state_of(core, "fake-1") is S.CONFIGURED


async def test_a_node_that_stays_ready_for_a_while_after_its_drain_leaves_the_machine_idle() -> None:
    """A Node stays Ready for 40 to 50 s after its kubelet ended; passes may follow each other faster."""
    backend = ServingHosts()
    core = await started(make_core(backend, options=replace(NO_WAY_OUT, reconcile_interval_seconds=10.0)))
    await bring_to(core, S.CONFIGURED, SLOT, "red")
    backend.in_cluster = {SLOT: "red"}
    await core.drain(SLOT, 0)
    await settle()
    for _ in range(50):
        assert await state_of(core) is S.IDLE
        await asyncio.sleep(1)
    backend.in_cluster = {}
    await asyncio.sleep(300)
    assert await state_of(core) is S.IDLE


async def test_a_host_that_is_still_in_service_two_minutes_after_its_drain_is_never_idle_again() -> None:
    backend = ServingHosts()
    core = await started(make_core(backend, options=replace(NO_WAY_OUT, reconcile_interval_seconds=10.0)))
    await bring_to(core, S.CONFIGURED, SLOT, "red")
    backend.in_cluster = {SLOT: "red"}
    await core.drain(SLOT, 0)
    await asyncio.sleep(119)
    assert await state_of(core) is S.IDLE
    await asyncio.sleep(15)
    record = await core.get(SLOT)
    assert (record.state, record.machine.cluster) == (S.FAILED, "red")


async def test_known_machines_are_refreshed() -> None:
    core, backend = await fake_core(2)
    backend.slots[0] = replace(backend.slots[0], price_usd_per_hour=9.0, labels={"new": "label"})
    await passes(1)
    machine = (await core.get(SLOT)).machine
    assert (machine.price_usd_per_hour, dict(machine.labels)) == (9.0, {"new": "label"})


async def test_a_host_of_a_slot_is_an_orphan_after_two_passes() -> None:
    core, backend = await fake_core()
    backend.hosts[SLOT] = "orphan"
    await passes(1)
    assert await state_of(core) is S.SPECULATIVE
    await passes(1)
    assert (await core.get(SLOT)).machine.host.ref == "orphan"
    assert await state_of(core) is S.IDLE


@pytest.mark.parametrize("state", [S.IDLE, S.CONFIGURED])
async def test_a_missing_host_is_lost_after_three_passes(state: MachineState) -> None:
    core, backend = await fake_core(options=NO_WAY_OUT)
    await bring_to(core, state)
    ref = backend.hosts.pop(SLOT)
    await passes(2)
    assert await state_of(core) is state
    await passes(1)
    record = await core.get(SLOT)
    assert record.machine.last_error.startswith("HOST_LOST: ")
    assert record.machine.host.ref == ref
    assert record.machine.cluster == ("c-1" if state is S.CONFIGURED else "")


async def test_a_host_that_comes_back_in_time_was_never_lost() -> None:
    core, backend = await fake_core()
    await bring_to(core, S.IDLE)
    ref = backend.hosts.pop(SLOT)
    await passes(2)
    backend.hosts[SLOT] = ref
    await passes(1)
    backend.hosts.pop(SLOT)
    await passes(2)
    assert await state_of(core) is S.IDLE


async def test_a_slot_that_is_gone_is_removed_with_a_tombstone_and_keeps_its_marks() -> None:
    core, backend = await fake_core()
    await refusal_of(core.drain(SLOT, 0, token=token(5)))
    cursor = (await core.list()).revision
    gone = backend.slots.pop(0)
    await passes(4)
    assert (await refusal_of(core.get(SLOT)))[0] is Code.NOT_FOUND
    assert (await core.list((), 0, cursor)).removed_ids == (SLOT,)
    assert (await refusal_of(core.create(SLOT, token=token(5))))[0] is Code.FAILED_PRECONDITION
    assert metric(core, "fence_marks", scope="unknown") == 1
    backend.slots.append(gone)
    await passes(1)
    assert metric(core, "fence_marks", scope="known") == 1
    await core.create(SLOT, token=token(6))


async def test_machines_in_flight_are_left_alone() -> None:
    core, backend = await fake_core()
    backend.hold(Kind.CREATE)
    await core.create(SLOT)
    backend.slots.pop(0)
    await passes(4)
    assert await state_of(core) is S.CREATING


async def test_an_outage_of_the_inventory_is_braked_until_the_facts_come_back() -> None:
    core, backend = await fake_core(60)
    slots = backend.slots
    backend.slots = slots[:40]
    await passes(6)
    assert len((await core.list()).records) == 60
    assert metric(core, "reconcile_brake_engaged") == 1
    backend.slots = slots
    await passes(1)
    assert metric(core, "reconcile_brake_engaged") == 0
    backend.slots = slots[:55]
    await passes(4)
    assert len((await core.list()).records) == 55


class Broken(FakeBackend):
    """Fails its inventory while told to."""

    is_broken = False

    async def inventory(self) -> Iterable[Slot]:
        if self.is_broken:
            raise ConnectionError("page 2 of 3")
        return await super().inventory()


async def test_a_broken_inventory_discards_the_whole_pass() -> None:
    backend = Broken(4)
    core = await started(make_core(backend))
    backend.is_broken = True
    backend.slots = []
    await passes(10)
    assert len((await core.list()).records) == 4
    assert is_ready(core)


async def test_an_empty_store_serves_only_after_its_first_inventory() -> None:
    backend = Broken(4)
    backend.is_broken = True
    core = make_core(backend)
    await core.start()
    await asyncio.sleep(10)
    assert not is_ready(core)
    assert (await refusal_of(core.list()))[0] is Code.UNAVAILABLE
    assert (await refusal_of(core.get(SLOT)))[0] is Code.UNAVAILABLE
    backend.is_broken = False
    await core.loaded()
    assert is_ready(core)
    assert len((await core.list()).records) == 4


class Odd(FakeBackend):
    """Has an entry in its inventory that names no machine."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.extra: list[Any] = []

    async def inventory(self) -> Iterable[Slot]:
        return [*(await super().inventory()), *self.extra]


@pytest.mark.parametrize("entry", [None, "fake-0", fake_slot(0, id=cast(str, 7))])
async def test_an_entry_without_an_id_discards_the_pass_and_not_the_next_one(entry: object) -> None:
    """It may stand for any machine, so that nothing follows from the absence of the others."""
    backend = Odd(6)
    core = await started(make_core(backend))
    slots = backend.slots
    backend.slots, backend.extra = [], [entry]
    await passes(4)
    assert len((await core.list()).records) == 6
    backend.slots, backend.extra = [replace(slots[0], price_usd_per_hour=9.0), *slots[1:]], []
    await passes(1)
    assert (await core.get(SLOT)).machine.price_usd_per_hour == 9.0


async def test_a_pass_that_breaks_is_followed_by_the_next_one() -> None:
    class Listed(FakeBackend):
        unread: Any = ()

        async def inventory(self) -> PartialFacts:  # type: ignore[override]
            return PartialFacts(facts=tuple(await super().inventory()), unread_prefixes=self.unread)

    backend = Listed(4)
    core = await started(make_core(backend))
    backend.unread = ["fake-"]
    backend.slots[0] = replace(backend.slots[0], price_usd_per_hour=9.0)
    await passes(2)
    assert (await core.get(SLOT)).machine.price_usd_per_hour == 0.4
    backend.unread = ()
    await passes(1)
    assert (await core.get(SLOT)).machine.price_usd_per_hour == 9.0


async def test_a_store_that_fails_during_the_first_inventory_delays_the_start_and_does_not_prevent_it() -> None:
    store = MemoryStore(is_failing=True)
    core = make_core(FakeBackend(4), store=store)
    await core.start()
    await asyncio.sleep(2)
    assert not is_ready(core)
    store.is_failing = False
    async with asyncio.timeout(10):
        await core.loaded()
    await asyncio.sleep(2)
    assert is_ready(core)
    assert len((await core.list()).records) == 4


def bad(slot: Slot, **fields: object) -> Slot:
    return replace(slot, **fields)  # type: ignore[arg-type]


BAD_FACTS = [
    ({"price_usd_per_hour": math.nan}, Reason.PRICE),
    ({"price_usd_per_hour": -1.0}, Reason.PRICE),
    ({"price_usd_per_hour": 0.0}, Reason.PRICE),
    ({"interruption_probability": 1.5}, Reason.PROBABILITY),
    ({"interruption_probability": math.nan}, Reason.PROBABILITY),
    ({"labels": {"zone": "z"}}, Reason.LABEL),
    ({"resources": {"cpu": "four"}}, Reason.QUANTITY),
    ({"allocatable": {"memory": "1Ti"}}, Reason.QUANTITY),
    ({"resources": {"cpu": "0"}}, Reason.QUANTITY),
    ({"instance_type": "other"}, Reason.IMMUTABLE),
    ({"zone": "elsewhere"}, Reason.IMMUTABLE),
    ({"capacity_type": CapacityType.RESERVED}, Reason.IMMUTABLE),
    ({"zone": ""}, Reason.MISSING),
    ({"price_usd_per_hour": None}, Reason.PRICE),
    ({"price_usd_per_hour": True}, Reason.PRICE),
    ({"price_usd_per_hour": 10**400}, Reason.PRICE),
    ({"interruption_probability": "0.1"}, Reason.PROBABILITY),
    ({"resources": {"cpu": 8}}, Reason.TYPE),
    ({"labels": None}, Reason.TYPE),
    ({"labels": {"rack": "\udc80"}}, Reason.TYPE),
    ({"zone": 7}, Reason.TYPE),
    ({"capacity_type": 3}, Reason.TYPE),
    ({"fixed": None}, Reason.TYPE),
]


@pytest.mark.parametrize(("fields", "reason"), BAD_FACTS, ids=lambda value: str(value)[:40])
async def test_a_bad_fact_is_quarantined_and_the_last_good_record_stays(
    fields: dict[str, object], reason: Reason
) -> None:
    core, backend = await fake_core()
    before = (await core.get(SLOT)).machine
    good = backend.slots[0]
    backend.slots[0] = bad(good, **fields)
    backend.slots[1] = replace(backend.slots[1], price_usd_per_hour=7.0)
    await passes(4)
    assert (await core.get(SLOT)).machine == before
    assert (await core.get("fake-1")).machine.price_usd_per_hour == 7.0
    assert core.quarantine.faults[SLOT].reason is reason
    assert metric(core, "records_quarantined", reason=reason.value) == 1
    backend.slots[0] = good
    await passes(1)
    assert not core.quarantine.faults


async def test_a_bad_first_inventory_ends_the_start_with_a_list() -> None:
    backend = FakeBackend(30)
    backend.slots = [replace(slot, price_usd_per_hour=-1.0) for slot in backend.slots]
    backend.slots.append(backend.slots[0])
    core = make_core(backend)
    await core.start()
    with pytest.raises(StartRefused, match=r"30 bad records: fake-0: price_usd.* is -1.0.*this id twice.*and 10 more"):
        await core.loaded()
    assert not is_ready(core)


async def test_a_duplicate_is_quarantined() -> None:
    core, backend = await fake_core()
    backend.slots.append(replace(backend.slots[0], price_usd_per_hour=5.0))
    await passes(1)
    assert core.quarantine.faults[SLOT].reason is Reason.DUPLICATE


async def test_a_pushed_price_holds_until_the_inventory_changes_its_own() -> None:
    core, backend = await fake_core()
    cursor = (await core.list()).revision
    await core.feed.report_price([SLOT, "fake-1", "nobody"], 0.9)
    assert [r.id for r in (await core.list((), 0, cursor)).records] == [SLOT, "fake-1"]
    await passes(3)
    assert (await core.get(SLOT)).machine.price_usd_per_hour == 0.9
    backend.slots[0] = replace(backend.slots[0], price_usd_per_hour=0.5)
    await passes(1)
    assert (await core.get(SLOT)).machine.price_usd_per_hour == 0.5
    await core.feed.report_price(["fake-1"], math.nan)
    assert (await core.get("fake-1")).machine.price_usd_per_hour == 0.9
    assert core.quarantine.faults["fake-1"].reason is Reason.PRICE


async def test_a_pushed_probability_holds_until_the_host_is_gone() -> None:
    core, _ = await fake_core()
    await bring_to(core, S.IDLE)
    await core.feed.report_interruption(SLOT, 0.5)
    await passes(2)
    assert (await core.get(SLOT)).machine.interruption_probability == 0.5
    await core.delete(SLOT)
    await settle()
    assert (await core.get(SLOT)).machine.interruption_probability == 0.0


@pytest.mark.parametrize(("has_notice", "code"), [(True, "INTERRUPTED"), (False, "HOST_LOST")])
async def test_a_lost_host_fails_at_once_with_its_cause(has_notice: bool, code: str) -> None:
    core, _ = await fake_core(options=NO_WAY_OUT)
    await bring_to(core, S.CONFIGURED)
    if has_notice:
        await core.feed.report_interruption(SLOT, 0.99)
    await core.feed.report_lost(SLOT, "taken")
    record = await core.get(SLOT)
    assert record.machine.last_error == f"{code}: taken"
    assert record.machine.cluster == "c-1"


async def test_a_loss_in_flight_cancels_the_operation_first() -> None:
    core, backend = await fake_core(options=NO_WAY_OUT)
    await bring_to(core, S.IDLE)
    backend.hold(Kind.CONFIGURE)
    await core.configure(SLOT, "c", b"", {})
    await settle()
    await core.feed.report_lost(SLOT, "taken")
    await passes(6)
    assert (await core.get(SLOT)).machine.last_error == "HOST_LOST: taken"


async def test_a_lost_slot_is_removed() -> None:
    core, _ = await fake_core()
    cursor = (await core.list()).revision
    await core.feed.report_lost(SLOT, "withdrawn")
    assert (await core.list((), 0, cursor)).removed_ids == (SLOT,)
