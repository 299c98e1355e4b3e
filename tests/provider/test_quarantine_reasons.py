"""What the quarantine shows of an id, and records that a shard would reject (docs/spec/provider.md §9)."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from bigfleet.model.limits.record_limits import LABELS_MAX, RESOURCE_NAMES_MAX, TEXT_BYTES_MAX
from bigfleet.model.states import MachineState
from bigfleet.provider.backend import Host, MachineView, Op
from bigfleet.provider.backends.fake import FakeBackend, fake_slot
from bigfleet.provider.records.validate import Reason
from tests.provider.harness import SLOT, fake_core, make_core, settle, started

pytestmark = pytest.mark.virtual_time

S = MachineState
PASS = 67.0
LONG = "x" * (TEXT_BYTES_MAX + 1)


async def test_a_slot_that_is_named_twice_is_a_duplicate_whatever_its_second_line_says() -> None:
    core, backend = await fake_core(2)
    backend.slots.append(replace(backend.slots[0], instance_type="another"))
    await asyncio.sleep(PASS)
    fault = core.quarantine.faults[SLOT]

    assert fault.reason is Reason.DUPLICATE
    assert "names this id twice" in fault.text
    assert "instance_type" in fault.text


async def test_the_first_fault_of_an_id_is_shown_with_the_later_ones() -> None:
    core, backend = await fake_core(2)
    backend.slots[0] = replace(backend.slots[0], price_usd_per_hour=-1.0)
    backend.slots.append(replace(backend.slots[0], price_usd_per_hour=-2.0))
    await asyncio.sleep(PASS)
    fault = core.quarantine.faults[SLOT]

    assert fault.reason is Reason.DUPLICATE
    assert fault.text.index("-1") < fault.text.index("twice") < fault.text.index("-2")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"price_usd_per_hour": 1e300}, Reason.PRICE),
        ({"price_usd_per_hour": 1.1e9}, Reason.PRICE),
        ({"labels": {f"k{number}": "v" for number in range(LABELS_MAX + 1)}}, Reason.LIMITS),
        ({"labels": {"l": LONG}}, Reason.LIMITS),
        ({"labels": {"l": "a\x1b[2J"}}, Reason.LIMITS),
        ({"resources": {f"r{number}": "1" for number in range(RESOURCE_NAMES_MAX + 1)}}, Reason.LIMITS),
    ],
    ids=["a huge price", "a high price", "labels", "a long label", "an escape", "resources"],
)
async def test_what_a_shard_rejects_is_quarantined(changes: dict[str, Any], reason: Reason) -> None:
    core, backend = await fake_core(2)
    before = (await core.get(SLOT)).machine
    backend.slots[0] = replace(backend.slots[0], **changes)
    await asyncio.sleep(PASS)

    assert core.quarantine.faults[SLOT].reason is reason
    assert (await core.get(SLOT)).machine == before


async def test_a_new_slot_with_a_long_zone_is_quarantined() -> None:
    core, backend = await fake_core(2)
    backend.slots.append(replace(fake_slot(2, id="fake-2"), zone=LONG))
    await asyncio.sleep(PASS)
    assert core.quarantine.faults["fake-2"].reason is Reason.LIMITS


@pytest.mark.parametrize(
    ("host", "text"),
    [
        (Host(ref=LONG), "host_ref"),
        (Host(ref="h", node_name=LONG), "node_name"),
        (Host(ref="h", price_usd_per_hour=1e300), "price"),
        (Host(ref="h", labels={"l": LONG}), "1,025 bytes"),
    ],
    ids=["ref", "node name", "price", "label"],
)
async def test_a_create_that_answers_what_a_shard_rejects_fails(host: Host, text: str) -> None:
    class Hostile(FakeBackend):
        async def create(self, machine: MachineView, op: Op) -> Host:
            return host

    core = await started(make_core(Hostile(1)))
    await core.create(SLOT)
    await settle()
    record = await core.get(SLOT)

    assert record.state is S.FAILED
    assert text.replace(",", "") in record.machine.last_error.replace(",", "")
