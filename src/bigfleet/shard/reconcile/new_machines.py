"""Inserts many unknown machines of one List at once.

The first List of a large fleet has only unknown machines. Distinct facts and bindings are validated once each, and a
machine is inserted here only if its record has no other effect than a frame to its cluster: no refusal, no warning. All
others are handled one by one. Both ways must treat each record alike.
"""

from array import array
from collections import Counter
from collections.abc import Sequence, Set
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from bigfleet.engine.columns.store import NOTE_BYTES
from bigfleet.model.clock import Clock
from bigfleet.model.ids import MachineId
from bigfleet.model.ownership import Owned
from bigfleet.shard.inventory.host_texts import PickedTexts
from bigfleet.shard.inventory.ingest import Ingest, Moment, PlainBinding
from bigfleet.shard.inventory.inventory import Inventory
from bigfleet.shard.inventory.machine_record import Picked
from bigfleet.shard.inventory.record_checks import are_ids_sound
from bigfleet.shard.ports import RecordsInParts, SplitRecords
from bigfleet.shard.reconcile.ownership_filter import OwnershipFilter

#: Fewer new machines than this are taken one by one: many at once get their rows with a merge of all.
NEW_MIN: Final = 1_000
#: Machines that are looked up before other tasks get their turn, a few milliseconds of work.
LOOKED_UP_PER_TURN_MAX: Final = 10_000
#: Machines that are inserted before other tasks get their turn, with one merge of all rows.
INSERTED_PER_TURN_MAX: Final = 16_384

Mask = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int64]


async def split_new(parts: RecordsInParts, places: Sequence[int], inventory: Inventory, clock: Clock) -> SplitRecords:
    """Return the records at some places that can be read in parts, of machines that are not known and listed once."""
    split = await parts.read(places)
    listed, is_known = set[MachineId](), False
    for first in range(0, len(split.ids), LOOKED_UP_PER_TURN_MAX):
        await clock.sleep(0)
        ids = split.ids[first : first + LOOKED_UP_PER_TURN_MAX]
        listed.update(ids)
        is_known = is_known or (len(inventory) > 0 and not inventory.lacking(ids).all())
    if not is_known and len(listed) == len(split.ids):
        return split
    times = Counter(split.ids)
    return split.chosen([machine_id not in inventory and times[machine_id] == 1 for machine_id in split.ids])


def places_without(places: Sequence[int], others: "array[int]") -> list[int]:
    """Return the places that are not among the others; both ascend."""
    left: list[int] = np.setdiff1d(np.asarray(places, np.int64), np.frombuffer(others, np.int64), True).tolist()
    return left


class Taken(NamedTuple):
    """What became of some records, by their number among those that were split."""

    #: Of other shards' machines, which are not known here.
    foreign: list[int]
    #: To be taken one by one.
    rest: list[int]
    #: Of machines that were inserted and that their cluster, which is connected, has not been shown yet.
    unshown: list[int]


class NewMachines:
    """The split records of one answer, all of machines that were not known when it was read."""

    def __init__(
        self,
        split: SplitRecords,
        digests: bytes,
        *,
        inventory: Inventory,
        ingest: Ingest,
        ownership_filter: OwnershipFilter,
    ) -> None:
        """`digests` are those of all records of the answer."""
        self.split = split
        self._inventory = inventory
        self._ingest = ingest
        self._filter = ownership_filter
        places = np.frombuffer(split.places, np.int64)
        self._digests = np.frombuffer(digests, np.uint64).reshape(-1, NOTE_BYTES // 8)[places]
        self._facts = np.frombuffer(split.facts, np.int32).astype(np.int64)
        self._bindings = np.frombuffer(split.bindings, np.int32).astype(np.int64)
        self._has_provider = np.array([facts.host.provider != "" for facts in split.facts_values], np.bool_)
        #: Of facts and bindings, by their numbers.
        self._is_sound: dict[int, bool] = {}
        self._plain: dict[int, PlainBinding] = {}
        #: Whose a machine is, by what its binding says, or by its facts, as long as the same is owned.
        self._owned: Owned | None = None
        self._is_ours_by_binding: dict[int, bool | None] = {}
        self._is_ours_by_facts: dict[int, bool] = {}
        self._inserted = 0

    def take(self, first: int, last: int, marked: Set[str], moment: Moment) -> Taken:
        """Insert those of some records of which nothing more is to be done; `marked` machines are among the rest."""
        ids, facts, bindings = self.split.ids[first:last], self._facts[first:last], self._bindings[first:last]
        asked = marked | self._filter.owned.rows.keys()
        # A first List need not look up what it has inserted itself.
        is_alone = self._inventory.insertions == self._inserted
        is_new = np.ones(len(ids), np.bool_) if is_alone else self._inventory.lacking(ids)
        if asked:
            is_new &= np.array([machine_id not in asked for machine_id in ids], np.bool_)
        is_ours = self._ours(facts, bindings)
        is_simple = is_new & is_ours & self._is_simple(first, last)
        numbers = np.arange(first, last)
        self._insert(numbers[is_simple], moment)
        is_foreign = is_new & ~is_ours
        unshown = numbers[is_simple & self._is_connected(bindings)]
        return Taken(numbers[is_foreign].tolist(), numbers[~is_simple & ~is_foreign].tolist(), unshown.tolist())

    def digest(self, number: int) -> bytes:
        """Return the digest of a record."""
        content: bytes = self._digests[number].tobytes()
        return content

    def _ours(self, facts: Numbers, bindings: Numbers) -> Mask:
        """Return which machines are ours; none is known or has a row of its own."""
        if self._owned is not self._filter.owned:
            self._owned = self._filter.owned
            self._is_ours_by_binding, self._is_ours_by_facts = {}, {}
        by_binding, by_facts = self._is_ours_by_binding, self._is_ours_by_facts
        listed, values = self.split.binding_values, self.split.facts_values
        for number in np.unique(bindings).tolist():
            if number not in by_binding:
                by_binding[number] = self._filter.owns_by_binding(listed[number])
        said = [by_binding[number] for number in bindings.tolist()]
        if all(said):
            return np.ones(len(bindings), np.bool_)
        for number in np.unique(facts).tolist():
            if number not in by_facts:
                by_facts[number] = self._filter.owns_by_facts(values[number])
        pairs = zip(said, facts.tolist(), strict=True)
        return np.array([by_facts[number] if answer is None else answer for answer, number in pairs], np.bool_)

    def _is_simple(self, first: int, last: int) -> Mask:
        """Return which machines only have to be inserted."""
        facts, bindings = self._facts[first:last], self._bindings[first:last]
        fact_numbers, which_facts = np.unique(facts, return_inverse=True)
        for number in fact_numbers.tolist():
            if number not in self._is_sound:
                self._is_sound[number] = self._ingest.is_sound(self.split.facts_values[number])
        is_sound = np.array([self._is_sound[number] for number in fact_numbers.tolist()], np.bool_)[which_facts]
        numbers, which = np.unique(bindings, return_inverse=True)
        for number in numbers.tolist():
            if number not in self._plain:
                self._plain[number] = self._ingest.plain_binding(self.split.binding_values[number])
        plain = [self._plain[number] for number in numbers.tolist()]
        may_have, may_lack = (np.array([each[place] for each in plain], np.bool_) for place in (1, 2))
        has_host = self.split.texts.have_ref(first, last) | self._has_provider[facts]
        simple: Mask = is_sound & np.where(has_host, may_have[which], may_lack[which])
        ids = self.split.ids[first:last]
        if not are_ids_sound(ids):
            simple &= np.array([are_ids_sound([machine_id]) for machine_id in ids], np.bool_)
        return simple

    def _is_connected(self, bindings: Numbers) -> Mask:
        """Return which machines have a cluster with a session."""
        numbers, which = np.unique(bindings, return_inverse=True)
        clusters = [self.split.binding_values[number].cluster for number in numbers.tolist()]
        connected: Mask = np.array([self._ingest.is_connected(cluster) for cluster in clusters], np.bool_)[which]
        return connected

    def _insert(self, numbers: Numbers, moment: Moment) -> None:
        if not len(numbers):
            return
        chosen, split, inventory = numbers.tolist(), self.split, self._inventory
        # Numbers of the vocabulary are those of now: it may have been made again since the batch before.
        facts, which_facts = np.unique(self._facts[numbers], return_inverse=True)
        bindings, which_bindings = np.unique(self._bindings[numbers], return_inverse=True)
        self._ingest.insert_many(
            [split.ids[number] for number in chosen],
            Picked([inventory.numbered_facts(split.facts_values[number]) for number in facts.tolist()], which_facts),
            Picked(
                [inventory.numbered_binding(self._plain[number].binding) for number in bindings.tolist()],
                which_bindings,
            ),
            PickedTexts(split.texts, numbers),
            self._digests[numbers],
            moment,
        )
        self._inserted += len(chosen)
