"""Records outside of the limits are rejected alone, in both ways in which records are taken."""

import math
from dataclasses import replace
from typing import Any

import pytest

from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.limits.record_limits import LABELS_MAX, RESOURCE_NAMES_MAX, TEXT_BYTES_MAX
from bigfleet.model.machine import HostRef, Machine
from bigfleet.model.states import MachineState
from bigfleet.rpc.wire.convert_machine import machine_to_wire
from bigfleet.rpc.wire.gen import provider_pb2
from bigfleet.rpc.wire.list_response import read_listing
from bigfleet.shard.inventory.ingest import REJECTIONS_LOGGED_MAX
from bigfleet.shard.inventory.machine_record import FACTS_OF, Facts, InventoryRecord, binding_of
from bigfleet.shard.inventory.record_checks import record_fault
from bigfleet.shard.ports import ListedMachine
from bigfleet.shard.reconcile.new_machines import NEW_MIN
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.shard.world import ScriptedProvider, World, machine

S = MachineState
SOUND = machine("m0", S.IDLE)
LONG = "x" * (TEXT_BYTES_MAX + 1)
#: The fewest characters that have too many bytes.
WIDE = "\U0001f600" * (TEXT_BYTES_MAX // 4 + 1)

HOSTILE: dict[str, dict[str, Any]] = {
    "no id": {"id": ""},
    "long id": {"id": "x" * 254},
    "NUL in the id": {"id": "a\0b"},
    "newline in the id": {"id": "a\nb"},
    "escape in the id": {"id": "\x1b[31mred"},
    "blank id": {"id": " "},
    "price": {"price_usd_per_hour": math.inf},
    "huge price": {"price_usd_per_hour": 1.7e308},
    "label keys": {"labels": {f"k{number}": "v" for number in range(LABELS_MAX + 1)}},
    "long label": {"labels": {"k": LONG}},
    "escape in a label": {"labels": {"a\nb": "\x1b[2J"}},
    "resource names": {"resources": {f"r{number}": "1" for number in range(RESOURCE_NAMES_MAX + 1)}},
    "digits": {"allocatable": {"cpu": "9" * 2_000}},
    "escape in a resource": {"resources": {"x\x1by": "1"}},
    "type": {"instance_type": "t\x1b]0;x\x07"},
    "zone": {"zone": LONG},
    "provider": {"host": HostRef("p\n", "r")},
    "reference": {"host": HostRef("p", LONG)},
    "node": {"node_name": LONG},
    "bytes of a reference": {"host": HostRef("p", WIDE)},
    "bytes of a node": {"node_name": WIDE},
    "cluster": {"cluster": ClusterId("a b"), "state": S.CONFIGURED},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_record_outside_of_the_limits_has_a_fault_of_bounded_length(case: str) -> None:
    """The sentence names no more than a part of what is too long."""
    fault = record_fault(ListedMachine(replace(SOUND, **HOSTILE[case]), {}))
    assert fault is not None
    assert len(fault[1]) < 200
    assert record_fault(ListedMachine(SOUND, {})) is None


@pytest.mark.parametrize("case", [case for case, facts in HOSTILE.items() if "id" not in facts])
def test_a_record_outside_of_the_limits_is_rejected_also_after_a_good_one(case: str) -> None:
    """The good one has every part that the hostile one does not change, the same objects."""
    known = InventoryRecord(Facts(*FACTS_OF(SOUND)), binding_of(SOUND), SOUND.host.ref, SOUND.node_name, "")
    hostile = ListedMachine(replace(SOUND, **HOSTILE[case]), {})

    assert record_fault(hostile, known) == record_fault(hostile)
    assert record_fault(ListedMachine(replace(SOUND, price_usd_per_hour=2.0), {}), known) is None


def hostile_records() -> list[Machine]:
    """Return one machine for each case; those of an id have that id."""
    named = [replace(SOUND, id=MachineId(f"x{number}")) for number in range(len(HOSTILE))]
    return [replace(each, **facts) for each, facts in zip(named, HOSTILE.values(), strict=True)]


@pytest.mark.virtual_time
@pytest.mark.parametrize("others", [2, NEW_MIN + 10], ids=["one by one", "many at once"])
async def test_hostile_records_are_rejected_and_the_others_are_taken(others: int) -> None:
    """The first List has them among sound ones, as bytes; the count names the reason."""
    honest = [machine(f"h{number}", S.IDLE) for number in range(others)]
    world = World(ScriptedProvider())
    # Each of its labels is within the limits.
    large = machine("large", S.IDLE, labels={f"k{number}": "x" * 1_000 for number in range(200)})
    records = [machine_to_wire(each, {}) for each in (*hostile_records(), large, *honest)]
    content = provider_pb2.MachineList(machines=records).SerializeToString()
    world.provider.listings.append(await read_listing(content, LoopClock()))
    await world.shard.reconciler.run()

    assert {each.id for each in world.shard.inventory} == {each.id for each in honest}
    assert world.metric("machines_rejected_total", reason="limits") == len(HOSTILE) - 1
    assert world.metric("machines_rejected_total", reason="price") == 2


@pytest.mark.virtual_time
async def test_a_known_machine_stays_as_it_was_and_many_rejections_have_few_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The last good record stays in force; all rejections are counted, and a bounded number is logged."""
    provider = ScriptedProvider()
    known = [machine(f"h{number}", S.IDLE) for number in range(3 * REJECTIONS_LOGGED_MAX)]
    provider.add(*known)
    world = World(provider)
    await world.cycle()
    provider.add(*(replace(each, zone="\x1b[2J") for each in known))
    await world.cycle()
    assert {each.id: each.zone for each in world.shard.inventory} == {each.id: each.zone for each in known}
    assert world.metric("machines_rejected_total", reason="limits") == len(known)
    assert capsys.readouterr().out.count("inventory.record_rejected") == REJECTIONS_LOGGED_MAX
