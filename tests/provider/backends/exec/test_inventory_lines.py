"""An inventory in JSON lines is whole or nothing, whatever the pieces in which it comes."""

import json
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.model.states import CapacityType
from bigfleet.provider.backend import ExistingHost, Slot
from bigfleet.provider.backends.exec.inventory_lines import (
    LINE_BYTES_MAX,
    InventoryLines,
    InventoryRead,
    InventoryRefused,
)

SLOT = {"id": "r/0", "instance_type": "r640", "zone": "row-1", "price_usd_per_hour": 0.5, "labels": {"rack": "7"}}
END = '{"end": true, "unread_prefixes": []}'
FLEET = "\n".join(
    (
        json.dumps({"slot": {**SLOT, "allocatable": {"cpu": "4"}}}),
        "",
        json.dumps({"host": {"id": "r/0", "host_ref": "bmc-0", "ready_in": "team-a"}}),
        json.dumps({"host": {"id": "r/1", "host_ref": "bmc-1", "instance_type": "r640", "zone": "row-2",
                             "capacity_type": "bare-metal", "resources": {"cpu": "8"}}}),
        END,
    )
)  # fmt: skip


def read(text: str, pieces: Iterable[int] = ()) -> InventoryRead:
    """Read a text that comes in pieces which end at these places."""
    lines, content, begin = InventoryLines(), text.encode(), 0
    for end in (*sorted(pieces), len(content)):
        lines.take(content[begin:end])
        begin = end
    return lines.read()


def test_slots_and_hosts() -> None:
    inventory = read(FLEET + "\n")
    slot, host, other = inventory.facts
    assert slot == Slot(
        id="r/0",
        instance_type="r640",
        zone="row-1",
        capacity_type=CapacityType.ON_DEMAND,
        resources={"cpu": "4"},
        allocatable={"cpu": "4"},
        labels={"rack": "7"},
        price_usd_per_hour=0.5,
    )
    assert host == ExistingHost.of(slot, host_ref="bmc-0", in_cluster="team-a")
    assert isinstance(other, ExistingHost)
    assert (other.zone, other.capacity_type, other.allocatable) == ("row-2", CapacityType.BARE_METAL, {"cpu": "8"})
    assert inventory.ready_in == {"r/0": "team-a"}


@given(pieces=st.lists(st.integers(0, len(FLEET)), max_size=6))
def test_pieces_make_no_difference(pieces: list[int]) -> None:
    assert read(FLEET, pieces) == read(FLEET)


@given(cut=st.integers(0, len(FLEET) - 1))
def test_an_inventory_that_was_cut_off_is_none(cut: int) -> None:
    with pytest.raises(InventoryRefused):
        read(FLEET[:cut])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", 'inventory ended after 0 lines without {"end": true}'),
        ("{}\n" + END, "inventory line 1 must have one of slot, host and end"),
        ('{"slot": {"id": "a"}}\n' + END, "inventory line 1 is not understood: slot.instance_type: is missing"),
        ('{"host": {"id": "a", "host_ref": "b", "x": 1}}\n' + END, "host.x: unknown key; there are id, host_ref"),
        ('{"host": {"id": "a", "host_ref": "b"}}\n' + END, "'a' has no instance_type, and no slot of that id"),
        (END + "\n" + END, "inventory line 2 comes after the end"),
        ('{"end": true, "host": {"id": "a", "host_ref": "b"}}', "must have one of slot, host and end"),
        ("warning: slow\n" + END, "inventory line 1 is not understood"),
        ("\udcff\n" + END, "inventory line 1 is not understood"),
        ("x" * (LINE_BYTES_MAX + 1), "inventory line 1 is longer than 64 KiB"),
    ],
)
def test_a_line_that_is_not_understood_discards_the_whole(text: str, reason: str) -> None:
    def read_bytes() -> None:
        lines = InventoryLines()
        lines.take(text.encode("utf-8", "surrogateescape"))
        lines.read()

    with pytest.raises(InventoryRefused) as refused:
        read_bytes()
    assert reason in str(refused.value)


def test_hosts_of_slots_that_are_offered_elsewhere_leave_out_what_those_say() -> None:
    slot = Slot(id="a", instance_type="t", zone="z", capacity_type=CapacityType.SPOT, interruption_probability=0.1)
    lines = InventoryLines({"a": slot}.get)
    lines.take(b'{"host": {"id": "a", "host_ref": "h", "price_usd_per_hour": 2}}\n' + END.encode())
    (host,) = lines.read().facts
    assert (host.zone, host.capacity_type, host.price_usd_per_hour) == ("z", CapacityType.SPOT, 2.0)
