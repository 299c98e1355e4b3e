"""Stores the records of a shard's machines by id in few bytes each.

A dictionary of records takes 200 bytes a machine, half of them for the tuple, the table and the two strings that the
machine does not share. Here a record is three references at one place of three lists, found through a table of numbers.
Records that were changed lately are in a small dictionary and are packed together later.
"""

from array import array
from collections.abc import Iterator, MutableMapping, Sequence
from itertools import chain, compress
from operator import attrgetter, eq
from typing import Final, cast

import numpy as np
import numpy.typing as npt

from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.validation import ensure
from bigfleet.shard.inventory.host_texts import NO_TEXTS, HostTextColumn, PickedTexts, pack, unpack
from bigfleet.shard.inventory.machine_record import FACTS_OF, Binding, Facts, InventoryRecord

#: Records that wait to be packed; one more and all are, a few milliseconds of work.
UNPACKED_MAX: Final = 4096
_EMPTY: Final = -1
_SLOTS_MIN: Final = 64
#: So few machines are looked up one by one.
_ONE_BY_ONE_MAX: Final = 16
_LAST_ERROR: Final = attrgetter("last_error")

Places = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class PackedRecords(MutableMapping[MachineId, InventoryRecord]):
    """Records by machine.

    Invariants: a machine has at most one place; a place without facts has no record: the machine's record waits to be
    packed, or the place is free; a machine's slots lead to its place before an empty slot.
    """

    def __init__(self) -> None:
        #: Records that wait to be packed.
        self._unpacked: dict[MachineId, InventoryRecord] = {}
        #: By place; None at a place that is free.
        self._ids: list[MachineId | None] = []
        self._facts: list[Facts | None] = []
        self._bindings: list[Binding | None] = []
        self._texts = HostTextColumn()
        self._free: list[int] = []
        #: How many places have a record.
        self._packed = 0
        #: Places by hash of the id, each at the first slot that was empty behind the hash's own.
        self._slots = array("i", [_EMPTY]) * _SLOTS_MIN
        self._slots_used = 0
        #: How often a machine that had no record got one.
        self.insertions = 0

    def __len__(self) -> int:
        return self._packed + len(self._unpacked)

    def __iter__(self) -> Iterator[MachineId]:
        # A place with facts has a machine.
        packed = compress(cast(list[MachineId], self._ids), self._facts)
        return chain(packed, self._unpacked)

    def __contains__(self, machine_id: object) -> bool:
        if machine_id in self._unpacked:
            return True
        place = self._place(machine_id)
        return place >= 0 and self._facts[place] is not None

    def lacking(self, ids: Sequence[MachineId]) -> Mask:
        """Return for each of many machines whether it has no record."""
        table: npt.NDArray[np.int32] = np.frombuffer(self._slots, np.int32)
        slots = np.array(list(map(hash, ids)), np.int64) & np.int64(len(table) - 1)
        lacks: Mask = table[slots] == _EMPTY
        for each in np.flatnonzero(~lacks).tolist():
            lacks[each] = ids[each] not in self
        if self._unpacked:
            for each in [each for each, machine_id in enumerate(ids) if machine_id in self._unpacked]:
                lacks[each] = False
        return lacks

    def equal(self, machines: Sequence[Machine]) -> Mask:
        """Return for each of many machines whether its record says the same of it, but for stamps.

        False also where it is not known without a look at the record itself. Fastest in the order in which they came.
        """
        places = self._places([machine.id for machine in machines])
        numbers = np.flatnonzero(places >= 0)
        for has_equal in (self._have_facts, self._have_bindings, self._have_texts):
            asked = machines if len(numbers) == len(machines) else [machines[number] for number in numbers.tolist()]
            numbers = numbers[has_equal(places[numbers], asked)]
        equal = np.zeros(len(machines), np.bool_)
        equal[numbers] = True
        return equal

    def _have_facts(self, places: Places, machines: Sequence[Machine]) -> Mask:
        facts = map(self._facts.__getitem__, places.tolist())
        # Most maps and texts are one object in both, so that they are not compared.
        return np.fromiter(map(eq, facts, map(FACTS_OF, machines)), np.bool_, len(machines))

    def _have_bindings(self, places: Places, machines: Sequence[Machine]) -> Mask:
        # A place with facts has a binding.
        bindings = map(cast(list[Binding], self._bindings).__getitem__, places.tolist())
        same = [
            state is machine.state and cluster == machine.cluster
            for machine, (state, cluster, _stamp) in zip(machines, bindings, strict=True)
        ]
        return np.array(same, np.bool_)

    def _have_texts(self, places: Places, machines: Sequence[Machine]) -> Mask:
        refs, names = [machine.host.ref for machine in machines], [machine.node_name for machine in machines]
        has_texts = self._texts.are(places, refs, names)
        if any(map(_LAST_ERROR, machines)):
            has_texts &= np.array([not machine.last_error for machine in machines], np.bool_)
        return has_texts

    def __getitem__(self, machine_id: MachineId) -> InventoryRecord:
        record = self.find(machine_id)
        if record is None:
            raise KeyError(machine_id)
        return record

    def find(self, machine_id: MachineId) -> InventoryRecord | None:
        """Return the record of a machine, None when there is none."""
        record = self._unpacked.get(machine_id)
        if record is not None:
            return record
        place = self._place(machine_id)
        if place < 0:
            return None
        facts, binding = self._facts[place], self._bindings[place]
        if facts is None or binding is None:
            return None
        return InventoryRecord(facts, binding, *unpack(self._texts[place]))

    def __setitem__(self, machine_id: MachineId, record: InventoryRecord) -> None:
        if machine_id not in self._unpacked:
            place = self._place(machine_id)
            # Of a machine that has a record the place has facts.
            self.insertions += place < 0 or self._facts[place] is None
            if place >= 0:
                self._empty(place)
        self._unpacked[machine_id] = record
        if len(self._unpacked) > UNPACKED_MAX:
            self._pack()

    def __delitem__(self, machine_id: MachineId) -> None:
        was_unpacked = self._unpacked.pop(machine_id, None) is not None
        place = self._place(machine_id)
        if place >= 0:
            if self._facts[place] is None and not was_unpacked:
                raise KeyError(machine_id)
            self._empty(place)
            self._ids[place] = None
            self._free.append(place)
        elif not was_unpacked:
            raise KeyError(machine_id)

    def add(
        self,
        ids: Sequence[MachineId],
        facts: Sequence[Facts],
        bindings: Sequence[Binding],
        texts: PickedTexts,
    ) -> None:
        """Add records of distinct machines that have none, in parts."""
        self.insertions += len(ids)
        self._texts.extend_from(texts)
        self._place_all(ids, facts, bindings)

    def _place_all(self, ids: Sequence[MachineId], facts: Sequence[Facts], bindings: Sequence[Binding]) -> None:
        """Give machines places, whose texts are there."""
        first = len(self._ids)
        self._ids += ids
        self._facts += facts
        self._bindings += bindings
        self._packed += len(ids)
        self._give_slots(first)

    def _pack(self) -> None:
        waiting, self._unpacked = self._unpacked, {}
        fresh = []
        for machine_id, record in waiting.items():
            place = self._place(machine_id)
            if place >= 0:
                self._put(place, record)
                self._packed += 1
            else:
                fresh.append(machine_id)
        records = [waiting[machine_id] for machine_id in fresh]
        while fresh and self._free:
            place, machine_id = self._free.pop(), fresh.pop()
            self._ids[place] = machine_id
            self._put(place, records.pop())
            self._packed += 1
            self._give_slot(place)
        for record in records:
            self._texts.append(pack(record.host_ref, record.node_name, record.last_error))
        self._place_all(fresh, [record.facts for record in records], [record.binding for record in records])

    def _put(self, place: int, record: InventoryRecord) -> None:
        self._facts[place], self._bindings[place] = record.facts, record.binding
        self._texts[place] = pack(record.host_ref, record.node_name, record.last_error)

    def _empty(self, place: int) -> None:
        if self._facts[place] is not None:
            self._packed -= 1
        self._facts[place] = self._bindings[place] = None
        self._texts[place] = NO_TEXTS

    # ---- places by id ------------------------------------------------------------------------------------------------

    def _place(self, machine_id: object) -> int:
        """Return the place of a machine, -1 when it has none."""
        slots, ids = self._slots, self._ids
        last = len(slots) - 1
        slot = hash(machine_id) & last
        while (place := slots[slot]) >= 0:
            if ids[place] == machine_id:
                return place
            slot = (slot + 1) & last
        return _EMPTY

    def _places(self, ids: Sequence[MachineId]) -> Places:
        """Return the places of many machines, -1 for those that have none."""
        held, found = self._ids, np.full(len(ids), _EMPTY, np.int64)
        if ids:
            # Most Lists have one order.
            first = max(0, self._place(ids[0]))
            is_next = list(map(eq, held[first : first + len(ids)], ids))
            found[: len(is_next)] = np.where(is_next, np.arange(first, first + len(is_next)), _EMPTY)
        left = np.flatnonzero(found == _EMPTY)
        table: npt.NDArray[np.int32] = np.frombuffer(self._slots, np.int32)
        last = np.int64(len(table) - 1)
        slots = np.array([hash(ids[number]) for number in left.tolist()], np.int64) & last
        while len(left) > _ONE_BY_ONE_MAX:
            places = table[slots]
            is_taken = places != _EMPTY
            left, slots, places = left[is_taken], slots[is_taken], places[is_taken]
            here, wanted = map(held.__getitem__, places.tolist()), map(ids.__getitem__, left.tolist())
            is_found = np.fromiter(map(eq, here, wanted), np.bool_, len(left))
            found[left[is_found]] = places[is_found]
            left, slots = left[~is_found], (slots[~is_found] + 1) & last
        for number in left.tolist():
            found[number] = self._place(ids[number])
        return found

    def _give_slot(self, place: int) -> None:
        self._slots_used += 1
        if 2 * self._slots_used > len(self._slots):
            self._give_slots(len(self._ids))
            return
        last = len(self._slots) - 1
        slot = hash(self._ids[place]) & last
        while self._slots[slot] >= 0:
            slot = (slot + 1) & last
        self._slots[slot] = place

    def _give_slots(self, first: int) -> None:
        """Give the places from one on their slots, all of them where the slots have become few; free ones get none."""
        self._slots_used += len(self._ids) - first
        slots = self._slots
        if 2 * self._slots_used > len(slots):
            first, self._slots_used = 0, len(self._ids) - len(self._free)
            slots = array("i", [_EMPTY]) * max(_SLOTS_MIN, 1 << (2 * self._slots_used).bit_length())
        table: npt.NDArray[np.int32] = np.frombuffer(slots, np.int32)
        ids = self._ids[first:]
        places, wanted = np.arange(first, first + len(ids), dtype=np.int32), np.array(list(map(hash, ids)), np.int64)
        if self._free:
            has_machine = np.array([each is not None for each in ids], np.bool_)
            places, wanted = places[has_machine], wanted[has_machine]
        last = np.int64(len(table) - 1)
        while len(places):
            wanted &= last
            is_empty = table[wanted] == _EMPTY
            table[wanted[is_empty]] = places[is_empty]
            # Of several that want one slot the last one has got it.
            is_left = table[wanted] != places
            places, wanted = places[is_left], wanted[is_left] + 1
        self._slots = slots

    def validate(self) -> None:
        """Compare everything with the invariants. Raises InvariantBroken."""
        sizes = {len(self._ids), len(self._facts), len(self._bindings), len(self._texts)}
        ensure(len(sizes) == 1, "packed records: lists of different sizes")
        ensure(self._packed == sum(facts is not None for facts in self._facts), "packed records: miscounted")
        ensure(all(self._ids[place] is None for place in self._free), "packed records: a free place has a machine")
        known = [machine_id for machine_id in self._ids if machine_id is not None]
        ensure(len(known) + len(self._free) == len(self._ids), "packed records: a place without machine is not free")
        for place, machine_id in enumerate(self._ids):
            if machine_id is None:
                continue
            ensure(self._place(machine_id) == place, f"packed records: {machine_id} is not found at its place")
            is_packed, waits = self._facts[place] is not None, machine_id in self._unpacked
            ensure(is_packed != waits, f"packed records: {machine_id} has two records, or none")
