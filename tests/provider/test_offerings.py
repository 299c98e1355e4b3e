"""Offerings: the file, its mistakes, and what growing and shrinking do (docs/spec/provider.md §12, §19)."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from bigfleet.model.states import CapacityType, MachineState
from bigfleet.provider.backend import ExistingHost, Slot
from bigfleet.provider.backends.fake import FakeBackend, fake_slot
from bigfleet.provider.inventory.offerings import OfferingsUnreadable, read_offerings
from bigfleet.provider.inventory.offers import Offers, seed_offers
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.kit.options import CoreOptions
from bigfleet.provider.records.kinds import Kind
from bigfleet.provider.records.refusal import Code, OfferingsRefused
from bigfleet.provider.storage.sqlite import SqliteProviderStore
from bigfleet.provider.storage.store import Store
from tests.provider.harness import make_core, metric, refusal_of, settle, started, state_of
from tests.provider.operations.test_restart import kill

S = MachineState
GOOD = {"instance_type": "t", "zone": "z", "count": 3, "price_per_hour": 0.1}
PREFIX = "p/on-demand/t/z/"
#: Longer than three passes with their jitter.
THREE_PASSES = 210.0


def written(path: Path, *entries: Any) -> Path:
    path.write_text(json.dumps(list(entries)), encoding="utf-8")
    return path


def offers_of(path: Path) -> Offers:
    return Offers(read_offerings(path, "p"), owner="p")


class Hosts(FakeBackend):
    """Knows the hosts of whatever slot was created, and offers nothing itself."""

    def __init__(self) -> None:
        super().__init__(0)

    async def inventory(self) -> list[Slot]:
        return [fact for fact in await super().inventory() if isinstance(fact, ExistingHost)]

    def learn(self, core: CapacityCore) -> None:
        self.slots = core.offered


async def core_with(offers: Offers, store: Store | None = None) -> tuple[CapacityCore, Hosts]:
    backend = Hosts()
    options = CoreOptions(is_inline=True, offers=offers, provider="p")
    core = await started(make_core(backend, options=options, store=store))
    backend.learn(core)
    return core, backend


async def ids(core: CapacityCore) -> list[str]:
    return sorted(record.id for record in (await core.list()).records)


# ---- the file ---------------------------------------------------------------------------------------------------


def test_each_unit_is_a_slot_named_after_what_it_is(tmp_path: Path) -> None:
    entry = {
        **GOOD,
        "capacity_type": "Bare-Metal",
        "allocatable": {"cpu": "4"},
        "labels": {"a": "b"},
        "price_per_hour": 0,
        "fixed": True,
    }
    read = read_offerings(written(tmp_path / "o.json", entry, {**GOOD, "count": 0, "zone": "y"}), "p")
    assert read.faults == ()
    slots = Offers(read, owner="p").slots(())
    assert list(slots) == [f"p/bare-metal/t/z/{n:03d}" for n in range(3)]
    slot = slots["p/bare-metal/t/z/000"]
    assert (slot.capacity_type, slot.fixed, dict(slot.labels)) == (CapacityType.BARE_METAL, True, {"a": "b"})
    assert dict(slot.resources) == dict(slot.allocatable) == {"cpu": "4"}


@pytest.mark.parametrize("name", ["spot", "SPOT", "Spot"])
def test_capacity_types_are_read_in_any_case(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / "o.json", {**GOOD, "capacity_type": name, "interruption_probability": 0.1})
    assert read_offerings(path, "p").offerings[0].template.capacity_type is CapacityType.SPOT


@pytest.mark.parametrize("name", ["on_demand", "on-demand", "ondemand", "ON_DEMAND", "OnDemand"])
def test_capacity_types_are_read_with_any_separator(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / "o.json", {**GOOD, "capacity_type": name})
    assert read_offerings(path, "p").offerings[0].prefix == PREFIX


@pytest.mark.parametrize(
    ("change", "key", "reason"),
    [
        ({"zone": None}, "zone", "missing"),
        ({"count": -1}, "count", "missing"),
        ({"count": 1.5}, "count", "missing"),
        ({"count": True}, "count", "missing"),
        ({"count": 10**9}, "count", "missing"),
        ({"instance_type": ""}, "instance_type", "missing"),
        ({"instance_type": "a b"}, "instance_type", "id"),
        ({"instance_type": "t" * 253}, "instance_type", "id"),
        ({"capacity_type": "cheap"}, "capacity_type", "missing"),
        ({"price": 1}, "price", "missing"),
        ({"price_per_hour": float("nan")}, "price_per_hour", "price"),
        ({"price_per_hour": -0.1}, "price_per_hour", "price"),
        ({"price_per_hour": "0.1"}, "price_per_hour", "missing"),
        ({"price_per_hour": 0}, "price_per_hour", "price"),
        ({"price_per_hour": None}, "price_per_hour", "missing"),
        ({"capacity_type": "spot"}, "interruption_probability", "missing"),
        ({"interruption_probability": 1.5}, "interruption_probability", "probability"),
        ({"labels": {"zone": "z"}}, "labels", "label"),
        ({"labels": {"a": 1}}, "labels", "missing"),
        ({"allocatable": {"cpu": "many"}}, "resources", "quantity"),
        ({"fixed": "yes"}, "fixed", "missing"),
    ],
)
def test_a_mistake_names_file_entry_and_key(tmp_path: Path, change: dict[str, object], key: str, reason: str) -> None:
    path = written(tmp_path / "o.json", {**GOOD, "zone": "y"}, {**GOOD, **change})
    read = read_offerings(path, "p")
    assert [(f.place, f.key, f.fault.reason.value) for f in read.faults] == [("o.json: entry 1", key, reason)]
    assert len(read.offerings) == 1


def test_all_mistakes_of_an_entry_are_told(tmp_path: Path) -> None:
    entry = {**GOOD, "count": -2, "price_per_hour": float("nan"), "labels": {"zone": "z"}, "resources": {"cpu": "four"}}
    faults = read_offerings(written(tmp_path / "o.json", entry), "p").faults
    assert [fault.key for fault in faults] == ["count", "price_per_hour", "labels", "resources"]


def test_a_price_that_is_not_there_is_missing(tmp_path: Path) -> None:
    entry = {key: value for key, value in GOOD.items() if key != "price_per_hour"}
    (fault,) = read_offerings(written(tmp_path / "o.json", entry), "p").faults
    assert str(fault).startswith("o.json: entry 0: price_per_hour: is missing")


def test_the_same_kind_twice_is_a_mistake_of_the_second(tmp_path: Path) -> None:
    read = read_offerings(written(tmp_path / "o.json", GOOD, {**GOOD, "count": 9}), "p")
    assert [(f.place, f.fault.reason.value) for f in read.faults] == [("o.json: entry 1", "duplicate")]
    assert read.offerings[0].count == 3


@pytest.mark.parametrize(("text", "message"), [("{}", "not an array"), ("[", "not JSON"), (None, "No such file")])
def test_what_is_no_array_of_offerings_is_said(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "o.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(OfferingsUnreadable, match=message):
        read_offerings(path, "p")


# ---- at the start -----------------------------------------------------------------------------------------------


@pytest.mark.virtual_time
async def test_a_first_start_with_mistakes_lists_them(tmp_path: Path) -> None:
    path = written(tmp_path / "o.json", GOOD, *({**GOOD, "count": -1} for _ in range(25)))
    core = make_core(Hosts(), options=CoreOptions(is_inline=True, offers=offers_of(path), provider="p"))
    with pytest.raises(OfferingsRefused, match=r"25 mistakes: o.json: entry 1: count.*and 5 more"):
        await core.start()


@pytest.mark.virtual_time
async def test_offers_are_served_while_the_first_inventory_fails(tmp_path: Path) -> None:
    class Down(Hosts):
        async def inventory(self) -> list[Slot]:
            raise ConnectionError("the substrate is down")

    offers = offers_of(written(tmp_path / "o.json", GOOD))
    core = await started(make_core(Down(), options=CoreOptions(is_inline=True, offers=offers, provider="p")))
    assert await ids(core) == [f"{PREFIX}{n:03d}" for n in range(3)]
    await core.create(f"{PREFIX}000")


@pytest.mark.virtual_time
async def test_a_later_start_with_mistakes_serves_what_it_had(tmp_path: Path) -> None:
    path, file = tmp_path / "s.db", written(tmp_path / "o.json", GOOD)
    store = SqliteProviderStore(path, is_power_safe=False)
    core, _ = await core_with(offers_of(file), store)
    await kill(core, store)
    written(file, {**GOOD, "count": "x"}, {**GOOD, "zone": "y", "count": 1})
    core, _ = await core_with(offers_of(file), SqliteProviderStore(path, is_power_safe=False))
    await asyncio.sleep(THREE_PASSES)
    assert await ids(core) == [*(f"p/on-demand/t/y/{0:03d}",), *(f"{PREFIX}{n:03d}" for n in range(3))]
    assert metric(core, "records_quarantined", reason="missing") == 1
    assert list(core.quarantine.faults) == ["o.json: entry 0"]
    await core.stop()


@pytest.mark.virtual_time
async def test_seeds_replace_the_slots_of_the_inventory() -> None:
    backend = FakeBackend(4)
    offers = seed_offers(fake_slot(n, id=f"p-{n}") for n in range(2))
    core = await started(make_core(backend, options=CoreOptions(is_inline=True, offers=offers)))
    await asyncio.sleep(THREE_PASSES)
    assert await ids(core) == ["p-0", "p-1"]


# ---- while serving ----------------------------------------------------------------------------------------------


@pytest.mark.virtual_time
async def test_a_file_that_grows_adds_slots_at_once(tmp_path: Path) -> None:
    file = written(tmp_path / "o.json", GOOD)
    core, _ = await core_with(offers_of(file))
    await core.replace_offers(offers_of(written(file, {**GOOD, "count": 5}, {**GOOD, "zone": "y", "count": 1})))
    assert await ids(core) == ["p/on-demand/t/y/000", *(f"{PREFIX}{n:03d}" for n in range(5))]


@pytest.mark.virtual_time
async def test_a_file_that_shrinks_takes_the_highest_free_slots_and_machines_in_use_leave_after_their_delete(
    tmp_path: Path,
) -> None:
    file = written(tmp_path / "o.json", {**GOOD, "count": 6})
    core, _ = await core_with(offers_of(file))
    for number in (4, 5):
        await core.create(f"{PREFIX}{number:03d}")
    await settle()
    await core.replace_offers(offers_of(written(file, {**GOOD, "count": 1})))
    await asyncio.sleep(THREE_PASSES)
    assert await ids(core) == [f"{PREFIX}004", f"{PREFIX}005"]
    await core.delete(f"{PREFIX}005")
    await settle()
    await asyncio.sleep(THREE_PASSES)
    assert await ids(core) == [f"{PREFIX}004"]
    await core.delete(f"{PREFIX}004")
    await settle()
    await asyncio.sleep(THREE_PASSES)
    assert await ids(core) == [f"{PREFIX}004"]
    assert await state_of(core, f"{PREFIX}004") is S.SPECULATIVE


@pytest.mark.virtual_time
async def test_a_changed_price_and_label_reach_free_slots(tmp_path: Path) -> None:
    file = written(tmp_path / "o.json", GOOD)
    core, _ = await core_with(offers_of(file))
    await core.replace_offers(offers_of(written(file, {**GOOD, "price_per_hour": 0.2, "labels": {"a": "b"}})))
    await settle()
    record = await core.get(f"{PREFIX}001")
    assert (record.machine.price_usd_per_hour, dict(record.machine.labels)) == (0.2, {"a": "b"})


@pytest.mark.virtual_time
async def test_a_broken_entry_is_quarantined_and_its_slots_stay_until_the_file_is_mended(tmp_path: Path) -> None:
    file = written(tmp_path / "o.json", GOOD)
    core, _ = await core_with(offers_of(file))
    await core.replace_offers(offers_of(written(file, {**GOOD, "price_per_hour": -1})))
    await asyncio.sleep(THREE_PASSES)
    assert len(await ids(core)) == 3
    assert (await core.get(f"{PREFIX}000")).machine.price_usd_per_hour == 0.1
    assert metric(core, "records_quarantined", reason="price") == 1
    await core.replace_offers(offers_of(written(file, {**GOOD, "count": 2})))
    assert metric(core, "records_quarantined", reason="price") == 0
    await asyncio.sleep(THREE_PASSES)
    assert len(await ids(core)) == 2
    assert (await refusal_of(core.get(f"{PREFIX}002")))[0] is Code.NOT_FOUND


@pytest.mark.virtual_time
async def test_a_file_that_loses_most_of_its_slots_meets_the_brake(tmp_path: Path) -> None:
    file = written(tmp_path / "o.json", {**GOOD, "count": 40})
    core, _ = await core_with(offers_of(file))
    await core.replace_offers(offers_of(written(file, {**GOOD, "count": 10})))
    await asyncio.sleep(THREE_PASSES)
    assert len(await ids(core)) == 40
    assert metric(core, "reconcile_brake_engaged") == 1
    assert len(core.administration.accept_losses("uid 0")) == 30
    await settle()
    assert await ids(core) == [f"{PREFIX}{n:03d}" for n in range(10)]
    assert metric(core, "reconcile_brake_engaged") == 0


@pytest.mark.virtual_time
async def test_a_create_in_flight_is_not_shrunk_away(tmp_path: Path) -> None:
    file = written(tmp_path / "o.json", GOOD)
    core, backend = await core_with(offers_of(file))
    backend.hold(Kind.CREATE)
    await core.create(f"{PREFIX}002")
    await core.replace_offers(offers_of(written(file, {**GOOD, "count": 0})))
    await asyncio.sleep(THREE_PASSES)
    assert await ids(core) == [f"{PREFIX}002"]
