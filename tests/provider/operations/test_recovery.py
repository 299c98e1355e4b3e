"""The automatic way out of FAILED (docs/spec/provider.md §14)."""

import asyncio
import itertools

import pytest

from bigfleet.model.states import MachineState
from bigfleet.provider.backend import Found, FoundKind, Host, MachineView, Op, Stockout, Transient
from bigfleet.provider.backends.fake import FakeBackend, fake_slot
from bigfleet.provider.inventory.offerings import Offering, OfferingsRead
from bigfleet.provider.inventory.offers import Offers
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.kit.options import CoreOptions
from tests.provider.harness import SLOT, bring_to, make_core, metric, refusal_of, settle, started, state_of, token

pytestmark = pytest.mark.virtual_time

S = MachineState
HOLD_SECONDS = 600.0


class Scripted(FakeBackend):
    """Finds what a test says, after a failing Create or Configure."""

    def __init__(self, found: Found) -> None:
        super().__init__(1)
        self.found = found
        self.adopt_errors = 0
        self.adopt_error: Exception = ConnectionError("cannot look")
        self.adopt_times: list[float] = []
        self.deleted: list[str] = []
        self.error: Exception = RuntimeError("boom")
        self.is_failing = False

    async def create(self, machine: MachineView, op: Op) -> Host:
        if self.is_failing:
            raise self.error
        return await super().create(machine, op)

    async def configure(self, machine: MachineView, cluster: str, blob: bytes, op: Op) -> str | None:
        if self.is_failing:
            raise self.error
        return await super().configure(machine, cluster, blob, op)

    async def delete(self, machine: MachineView, op: Op) -> None:
        self.deleted.append(machine.host.ref)
        await super().delete(machine, op)

    async def adopt(self, machine: MachineView) -> Found:
        self.adopt_times.append(asyncio.get_running_loop().time())
        if self.adopt_errors:
            self.adopt_errors -= 1
            raise self.adopt_error
        return self.found


async def failed_core(found: Found, *, is_bound: bool) -> tuple[CapacityCore, Scripted]:
    backend = Scripted(found)
    core = await started(make_core(backend))
    if is_bound:
        await bring_to(core, S.IDLE)
    backend.is_failing = True
    if is_bound:
        await core.configure(SLOT, "c-1", b"", {"k": "v"}, token=token(3))
    else:
        await core.create(SLOT, token=token(3))
    await settle()
    assert await state_of(core) is S.FAILED
    backend.is_failing = False
    return core, backend


HOST = Host(ref="h-1")
TABLE = [
    (Found(kind=FoundKind.NO_HOST), False, S.SPECULATIVE, ""),
    (Found(kind=FoundKind.NO_HOST), True, S.SPECULATIVE, ""),
    (Found(kind=FoundKind.CLEAN, host=HOST), False, S.IDLE, ""),
    (Found(kind=FoundKind.CLEAN, host=HOST), True, S.IDLE, ""),
    (Found(kind=FoundKind.SERVING, host=HOST), True, S.CONFIGURED, "c-1"),
    (Found(kind=FoundKind.DIRTY, host=HOST), False, S.SPECULATIVE, ""),
    (Found(kind=FoundKind.DIRTY, host=HOST), True, S.FAILED, "c-1"),
]


@pytest.mark.parametrize(("found", "is_bound", "state", "cluster"), TABLE)
async def test_what_is_found_decides(found: Found, is_bound: bool, state: MachineState, cluster: str) -> None:
    core, backend = await failed_core(found, is_bound=is_bound)
    await asyncio.sleep(HOLD_SECONDS - 5)
    assert await state_of(core) is S.FAILED
    await asyncio.sleep(10)
    record = await core.get(SLOT)
    assert (record.state, record.machine.cluster) == (state, cluster)
    assert dict(record.metadata) == ({"k": "v"} if cluster else {})
    assert bool(record.machine.last_error) == (state is S.FAILED)
    assert record.machine.host.is_present == (state in (S.IDLE, S.CONFIGURED, S.FAILED))
    assert backend.deleted == (["h-1"] if found.kind is FoundKind.DIRTY and not is_bound else [])
    # The marks stay.
    assert (await refusal_of(core.drain(SLOT, 0, token=token(3))))[0].name == "FAILED_PRECONDITION"


async def test_a_backend_that_cannot_look_three_times_is_asked_at_growing_intervals() -> None:
    core, backend = await failed_core(Found(kind=FoundKind.NO_HOST), is_bound=False)
    backend.adopt_errors = 1000
    await asyncio.sleep(12 * 3600)
    times = backend.adopt_times
    between = [later - earlier for earlier, later in itertools.pairwise(times)]

    assert between[:4] == pytest.approx([HOLD_SECONDS, HOLD_SECONDS, 2 * HOLD_SECONDS, 4 * HOLD_SECONDS], abs=5)
    assert between[4:] == pytest.approx([3600.0] * len(between[4:]), abs=5)
    assert len(between) >= 12
    assert await state_of(core) is S.FAILED
    assert metric(core, "recoveries_total", by="auto", result="retried") == 1
    [shown] = core.administration.status("test")["failed"]
    assert f"{len(times)} times" in shown["recovery"]
    assert "cannot look" in shown["recovery"]
    backend.adopt_errors = 0
    await asyncio.sleep(3610)
    assert await state_of(core) is S.SPECULATIVE


async def test_a_short_hold_grows_from_a_minute_after_three_errors_of_adopt() -> None:
    """An outage of a substrate that an author's program reports with a wrong exit code must not end recovery."""
    backend = Scripted(Found(kind=FoundKind.NO_HOST))
    backend.is_failing, backend.adopt_errors = True, 5
    core = await started(make_core(backend, options=CoreOptions(is_inline=True, failed_hold_seconds=1.0)))
    await core.create(SLOT)
    await asyncio.sleep(700)
    between = [later - earlier for earlier, later in itertools.pairwise(backend.adopt_times)]

    assert between == pytest.approx([1, 1, 120, 240, 480][: len(between)], abs=3)
    assert await state_of(core) is S.FAILED
    await asyncio.sleep(300)
    assert await state_of(core) is S.SPECULATIVE


async def test_a_failed_machine_that_was_not_looked_at_shows_no_recovery() -> None:
    core, _ = await failed_core(Found(kind=FoundKind.NO_HOST), is_bound=False)
    [shown] = core.administration.status("test")["failed"]
    assert shown["recovery"] == ""


async def test_a_transient_error_of_adopt_is_no_try_however_often_it_comes() -> None:
    """A substrate that is down for hours says nothing about its machines."""
    core, backend = await failed_core(Found(kind=FoundKind.NO_HOST), is_bound=False)
    backend.adopt_errors, backend.adopt_error = 10, Transient("down")
    await asyncio.sleep(10 * HOLD_SECONDS + 60)
    assert await state_of(core) is S.FAILED
    await asyncio.sleep(HOLD_SECONDS)
    assert await state_of(core) is S.SPECULATIVE
    assert metric(core, "recoveries_total", by="auto", result="retried") == 0


async def test_transient_errors_between_others_do_not_count_with_them() -> None:
    core, backend = await failed_core(Found(kind=FoundKind.NO_HOST), is_bound=False)
    for error in (ConnectionError("no"), Transient("down"), ConnectionError("no"), Transient("down")):
        backend.adopt_errors, backend.adopt_error = 1, error
        await asyncio.sleep(HOLD_SECONDS + 5)
    assert await state_of(core) is S.FAILED
    await asyncio.sleep(HOLD_SECONDS + 5)
    assert await state_of(core) is S.SPECULATIVE


async def test_after_a_transient_error_a_minute_passes_also_when_a_stockout_asked_for_no_hold() -> None:
    backend = Scripted(Found(kind=FoundKind.NO_HOST))
    backend.error, backend.is_failing = Stockout("none", retry_after_seconds=0.0), True
    backend.adopt_errors, backend.adopt_error = 1000, Transient("down")
    core = await started(make_core(backend))
    await core.create(SLOT)
    await asyncio.sleep(545)
    gaps = [after - before for before, after in zip(backend.adopt_times, backend.adopt_times[1:], strict=False)]
    assert len(gaps) >= 7
    assert all(59.9 < gap < 62 for gap in gaps)


async def test_the_hold_doubles_with_each_failure_in_a_row() -> None:
    core, backend = await failed_core(Found(kind=FoundKind.NO_HOST), is_bound=False)
    await asyncio.sleep(HOLD_SECONDS + 5)
    backend.is_failing = True
    await core.create(SLOT)
    await asyncio.sleep(HOLD_SECONDS + 5)
    assert await state_of(core) is S.FAILED
    await asyncio.sleep(HOLD_SECONDS + 5)
    assert await state_of(core) is S.SPECULATIVE


async def test_a_stockout_says_itself_how_long_it_holds() -> None:
    backend = Scripted(Found(kind=FoundKind.NO_HOST))
    backend.error, backend.is_failing = Stockout("none", retry_after_seconds=30), True
    core = await started(make_core(backend))
    await core.create(SLOT)
    await asyncio.sleep(25)
    assert await state_of(core) is S.FAILED
    await asyncio.sleep(10)
    assert await state_of(core) is S.SPECULATIVE


async def test_a_lost_host_is_looked_for_after_a_minute() -> None:
    core, backend = await failed_core(Found(kind=FoundKind.NO_HOST), is_bound=False)
    await asyncio.sleep(HOLD_SECONDS + 5)
    await bring_to(core, S.IDLE)
    backend.hosts.clear()
    await core.feed.report_lost(SLOT, "taken")
    await asyncio.sleep(65)
    assert await state_of(core) is S.SPECULATIVE


async def test_a_hold_of_zero_switches_it_off() -> None:
    backend = Scripted(Found(kind=FoundKind.NO_HOST))
    backend.is_failing = True
    core = await started(make_core(backend, options=CoreOptions(is_inline=True, failed_hold_seconds=0)))
    await core.create(SLOT)
    await asyncio.sleep(10 * HOLD_SECONDS)
    assert await state_of(core) is S.FAILED


async def test_a_slot_that_is_offered_no_more_goes_with_its_host() -> None:
    """At once, not three passes later; the removal is told to readers."""
    backend = Scripted(Found(kind=FoundKind.NO_HOST))
    core = await started(make_core(backend))
    await bring_to(core, S.IDLE)
    before = (await core.list()).revision
    backend.slots.clear()
    backend.hosts.clear()
    await asyncio.sleep(65)
    await core.feed.report_lost(SLOT, "taken")
    await asyncio.sleep(65)
    listing = await core.list(since=before)
    assert (listing.records, listing.removed_ids) == ((), (SLOT,))
    assert metric(core, "recoveries_total", by="auto", result="no_host") == 1


async def test_a_slot_is_kept_while_no_inventory_denied_it() -> None:
    backend = Scripted(Found(kind=FoundKind.NO_HOST))
    core = await started(make_core(backend, options=CoreOptions(is_inline=True, reconcile_interval_seconds=1e6)))
    await bring_to(core, S.IDLE)
    backend.slots.clear()
    await core.feed.report_lost(SLOT, "taken")
    await asyncio.sleep(65)
    assert await state_of(core) is S.SPECULATIVE


async def test_slots_are_kept_when_an_inventory_misses_very_many() -> None:
    backend = Scripted(Found(kind=FoundKind.NO_HOST))
    backend.slots = FakeBackend(20).slots
    core = await started(make_core(backend))
    await bring_to(core, S.IDLE)
    backend.slots.clear()
    backend.hosts.clear()
    await asyncio.sleep(65)
    await core.feed.report_lost(SLOT, "taken")
    await asyncio.sleep(65)
    assert await state_of(core) is S.SPECULATIVE


async def test_a_slot_in_excess_of_its_offering_goes_with_its_host() -> None:
    """The highest free numbers go first, and a machine that failed is free once it has no host."""
    offered = OfferingsRead(offerings=(Offering(template=fake_slot(0, id=""), prefix="fake/x/", count=2),), faults=())
    backend = Scripted(Found(kind=FoundKind.NO_HOST))
    backend.slots.clear()
    core = await started(make_core(backend, options=CoreOptions(is_inline=True, offers=Offers(offered, owner="fake"))))
    await core.create("fake/x/001")
    await settle()
    fewer = OfferingsRead(offerings=(Offering(template=fake_slot(0, id=""), prefix="fake/x/", count=1),), faults=())
    await core.replace_offers(Offers(fewer, owner="fake"))
    await core.feed.report_lost("fake/x/001", "taken")
    await asyncio.sleep(65)
    assert [record.id for record in (await core.list()).records] == ["fake/x/000"]
