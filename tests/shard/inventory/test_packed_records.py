"""Packed records are a dictionary of records, and texts that are packed come back as they were."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import HostRef, Machine
from bigfleet.model.states import MachineState
from bigfleet.model.validation import InvariantBroken
from bigfleet.shard.inventory import packed_records
from bigfleet.shard.inventory.host_texts import NO_TEXTS, REF_BYTES_MAX, HostTextColumn, PickedTexts, pack, unpack
from bigfleet.shard.inventory.machine_record import FACTS_OF, Binding, Facts, InventoryRecord, binding_of
from bigfleet.shard.inventory.packed_records import PackedRecords
from tests.engine.proof import in_proportion
from tests.shard.world import machine

texts = st.text(max_size=5) | st.sampled_from(
    ["", "i-0123", "\x00", "\ud800", "r" * REF_BYTES_MAX, "é" * REF_BYTES_MAX]
)


@given(texts, texts, texts)
@settings(max_examples=in_proportion(100), deadline=None)
def test_texts_come_back_as_they_were(host_ref: str, node_name: str, last_error: str) -> None:
    """For any texts; without any, nothing is stored."""
    assert unpack(pack(host_ref, node_name, last_error)) == (host_ref, node_name, last_error)
    assert (pack(host_ref, node_name, last_error) is NO_TEXTS) == (not host_ref + node_name + last_error)


def record(number: int) -> InventoryRecord:
    """Return a record like no other number's."""
    shown = machine("m", MachineState.IDLE, price_usd_per_hour=float(number))
    facts = Facts("p", shown.instance_type, shown.zone, shown.capacity_type, {}, {}, {}, shown.price_usd_per_hour, 0.0)
    return InventoryRecord(facts, binding_of(shown), f"ref-{number}", f"node-{number}", "")


names = st.integers(0, 30).map(lambda number: MachineId(f"m-{number}" if number else ""))
steps = st.one_of(
    st.tuples(st.just("set"), names),
    st.tuples(st.just("set"), names),
    st.tuples(st.just("delete"), names),
    st.tuples(st.just("add"), st.lists(names, max_size=20, unique=True)),
)


class SameHash(str):
    """An id that wants the same slot as every other."""

    __slots__ = ()

    def __hash__(self) -> int:
        return 3


@given(st.lists(steps, max_size=40), st.sampled_from([0, 2, 4096]), st.booleans())
@settings(max_examples=in_proportion(200), deadline=None)
def test_packed_records_are_a_dictionary(
    story: list[tuple[str, MachineId | list[MachineId]]], unpacked_max: int, collides: bool
) -> None:
    """Set, deleted, added many at once, packed and not, also where all ids want one slot."""
    packed, expected, number, insertions = PackedRecords(), dict[MachineId, InventoryRecord](), 0, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_records, "UNPACKED_MAX", unpacked_max)
        for kind, subject in story:
            number, before = number + 1, set(expected)
            subjects = [subject] if isinstance(subject, str) else subject
            ids = [MachineId(SameHash(each)) if collides else each for each in subjects]
            if kind == "set":
                packed[ids[0]] = expected[ids[0]] = record(number)
            elif kind == "delete" and ids[0] in expected:
                del packed[ids[0]], expected[ids[0]]
            elif kind == "delete":
                with pytest.raises(KeyError):
                    del packed[ids[0]]
            else:
                add(packed, expected, [each for each in ids if each not in expected], number)
            packed.validate()
            insertions += len(expected.keys() - before)
            assert packed.insertions == insertions
            assert (dict(packed), len(packed), len(list(packed))) == (expected, len(expected), len(expected))
            asked = [MachineId(SameHash(f"m-{each}") if collides else f"m-{each}") for each in range(31)]
            assert packed.lacking(asked).tolist() == [each not in expected for each in asked]
            assert [packed.find(each) for each in asked] == [expected.get(each) for each in asked]


def add(
    packed: PackedRecords, expected: dict[MachineId, InventoryRecord], ids: Sequence[MachineId], number: int
) -> None:
    """Add records of these ids many at once."""
    records = [record(100 * number + each) for each in range(len(ids))]
    facts: list[Facts] = [each.facts for each in records]
    bindings: list[Binding] = [each.binding for each in records]
    column = HostTextColumn()
    for each in records:
        column.append(pack(each.host_ref, each.node_name, each.last_error))
    packed.add(ids, facts, bindings, PickedTexts(column, np.arange(len(ids))))
    expected.update(zip(ids, records, strict=True))


plain = st.sampled_from(["", "a", "b", "ab"])
kinds = st.sampled_from(["same", "same", "texts", "price", "labels", "state", "cluster", "unknown"])


def pairs(words: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    """Draw machines: what is known of each, and what is shown."""
    three = st.tuples(words, words, st.sampled_from(["", "", "broken"]))
    return st.lists(st.tuples(three, three, kinds), max_size=40)


@given(
    pairs(plain) | pairs(plain | texts),
    st.sampled_from([0, 2, 4096]),
    st.sampled_from([0, 16]),
    st.booleans(),
    st.randoms(),
)
@settings(max_examples=in_proportion(300), deadline=None)
def test_many_machines_are_compared_as_one_by_one(
    many: list[tuple[tuple[str, str, str], tuple[str, str, str], str]],
    unpacked_max: int,
    one_by_one_max: int,
    collides: bool,
    order: Random,
) -> None:
    """No machine is said to be equal that is not; none is missed that is packed, while all texts are plain."""
    packed, asked, expected = PackedRecords(), list[Machine](), list[bool]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_records, "UNPACKED_MAX", unpacked_max)
        patch.setattr(packed_records, "_ONE_BY_ONE_MAX", one_by_one_max)
        for number, (known, shown, kind) in enumerate(many):
            machine_id = MachineId(SameHash(f"m-{number}") if collides else f"m-{number}")
            stored = with_texts(machine_id, *known)
            if kind != "unknown":
                packed[machine_id] = InventoryRecord(facts_of(stored), binding_of(stored), *known)
            changes: dict[str, dict[str, Any]] = {
                "texts": {"host": HostRef("p", shown[0]), "node_name": shown[1], "last_error": shown[2]},
                "price": {"price_usd_per_hour": 7.0},
                "labels": {"labels": {"a": "c"}},
                "state": {"state": MachineState.CONFIGURING},
                "cluster": {"cluster": ClusterId("c2")},
            }
            # A map of its own, as that of a record that was converted by itself.
            asked.append(replace(stored, **{"labels": dict(stored.labels), **changes.get(kind, {})}))
            is_same = kind == "same" or (kind == "texts" and known == shown)
            expected.append(is_same)
        numbers = list(range(len(many)))
        order.shuffle(numbers)
        for chosen in (range(len(many)), numbers):
            equal = packed.equal([asked[number] for number in chosen]).tolist()
            assert not any(is_equal and not expected[number] for is_equal, number in zip(equal, chosen, strict=True))
            words = "".join(f"{each.host.ref}{each.node_name}" for each in asked)
            if words.isascii() and REF_BYTES_MAX * "r" not in words and unpacked_max == 0:
                assert equal == [expected[number] and not asked[number].last_error for number in chosen]


def with_texts(machine_id: MachineId, host_ref: str, node_name: str, last_error: str) -> Machine:
    """Return a machine with these texts."""
    return machine(
        machine_id,
        MachineState.IDLE,
        host=HostRef("p", host_ref),
        node_name=node_name,
        last_error=last_error,
        labels={"a": "b"},
    )


def facts_of(shown: Machine) -> Facts:
    """Return the facts of a machine."""
    return Facts(*FACTS_OF(shown))


@pytest.mark.parametrize("one_by_one_max", [0, 16])
@pytest.mark.parametrize("step", [1, -1])
@pytest.mark.parametrize("hashes", [SameHash, str])
def test_many_machines_are_found_in_any_order(
    one_by_one_max: int, step: int, hashes: type[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among as many that are not known, and that want the same slots."""
    monkeypatch.setattr(packed_records, "_ONE_BY_ONE_MAX", one_by_one_max)
    packed, expected = PackedRecords(), dict[MachineId, InventoryRecord]()
    add(packed, expected, [MachineId(hashes(f"m-{number}")) for number in range(100)], 1)
    asked = [MachineId(hashes(f"m-{number}")) for number in range(200)][::step]
    places = [int(each.removeprefix("m-")) for each in asked]

    assert packed._places(asked).tolist() == [place if place < 100 else -1 for place in places]


def test_a_slot_that_is_lost_is_found_by_validation() -> None:
    """The check of the invariants has teeth."""
    packed = PackedRecords()
    add(packed, {}, [MachineId("a"), MachineId("b")], 1)
    packed.validate()
    for slot, place in enumerate(packed._slots):
        if place == 1:
            packed._slots[slot] = -1

    # The other id, where both want one slot: it is behind this one then.
    with pytest.raises(InvariantBroken, match="is not found at its place"):
        packed.validate()


def no_texts(machines: int) -> PickedTexts:
    """Return the texts of machines that have none."""
    column = HostTextColumn()
    column.extend(b"", np.zeros(machines, np.int64))
    return PickedTexts(column, np.arange(machines))


def test_free_places_take_no_slots_once_slots_are_given_anew() -> None:
    """All of them would want one slot, and each would be tried behind all others."""
    records, shown = PackedRecords(), record(1)
    old = [MachineId(f"old-{number}") for number in range(2_000)]
    records.add(old, [shown.facts] * len(old), [shown.binding] * len(old), no_texts(len(old)))
    for machine_id in old[1:]:
        del records[machine_id]
    new = [MachineId(f"new-{number}") for number in range(7_000)]
    records.add(new, [shown.facts] * len(new), [shown.binding] * len(new), no_texts(len(new)))

    assert sum(place >= 0 for place in records._slots) == len(records) == len(new) + 1
    records.validate()
