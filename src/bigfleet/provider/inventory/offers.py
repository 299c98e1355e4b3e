"""Lists the slots on offer beside the inventory: from an offerings file, or a number of seeds.

docs/spec/provider.md §12, §13, §19. A kind that shrinks loses its highest free slots; machines in use stay until their
Delete. A kind whose entry is broken stays as it is. This module must not remove a record: what is no longer offered is
missing, and `bigfleet.provider.inventory.reconcile` decides about what is missing.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from bigfleet.model.states import MachineState
from bigfleet.provider.backend import Slot
from bigfleet.provider.inventory.offerings import Offering, OfferingsRead
from bigfleet.provider.records.record import Record


class Offers:
    """What is on offer now. The owner replaces it as a whole."""

    def __init__(self, read: OfferingsRead, *, owner: str, seeds: Iterable[Slot] = ()) -> None:
        """`owner` is the prefix of all ids that could be offered; with mistakes in the file all of them are held.

        `seeds` are slots in place of those that the inventory offers.
        """
        self._seeds = {slot.id: slot for slot in seeds}
        self.faults = read.faults
        self._offerings = {offering.prefix: offering for offering in read.offerings}
        self._owner = f"{owner}/"

    def after(self, former: "Offers | None") -> "Offers":
        """Return these offers, with the former ones of kinds that a mistake may have taken out of the file."""
        if not self.faults or former is None:
            return self
        retained = [offering for prefix, offering in former._offerings.items() if prefix not in self._offerings]
        both = OfferingsRead(offerings=(*self._offerings.values(), *retained), faults=self.faults)
        return Offers(both, owner=self._owner.rstrip("/"))

    @property
    def replaces_inventory(self) -> bool:
        """Return whether the slots of the inventory are left aside."""
        return bool(self._seeds)

    def is_held(self, machine_id: str) -> bool:
        """Return whether nothing follows from the absence of an id: a broken entry may have been its own."""
        return bool(self.faults) and machine_id.startswith(self._owner)

    def has_room_for(self, record: Record, records: Iterable[Record]) -> bool:
        """Return whether a machine of an offered kind stays on offer once it is free; others are not known.

        `records` are all machines that there are.
        """
        prefix = record.id[: record.id.rfind("/") + 1]
        offering = self._offerings.get(prefix)
        if offering is None or self.is_held(record.id):
            return True
        machine = replace(record.machine, state=MachineState.SPECULATIVE)
        freed = replace(record, machine=machine)
        kind = [freed if other.id == record.id else other for other in records if other.id.startswith(prefix)]
        tail = record.id[len(prefix) :]
        return tail.isascii() and tail.isdigit() and int(tail) in _numbers(offering, kind)

    def slots(self, records: Iterable[Record]) -> dict[str, Slot]:
        """Return every slot on offer by id, given the machines that there are."""
        kinds: defaultdict[str, list[Record]] = defaultdict(list)
        for record in records:
            prefix = record.id[: record.id.rfind("/") + 1]
            if prefix in self._offerings:
                kinds[prefix].append(record)
        offered = dict(self._seeds)
        for prefix, offering in self._offerings.items():
            for number in _numbers(offering, kinds[prefix]):
                slot = offering.slot(number)
                offered[slot.id] = slot
        return offered


def _numbers(offering: Offering, records: Iterable[Record]) -> list[int]:
    """Return the numbers of a kind that are on offer: what there is, made larger or smaller to the count."""
    numbers: dict[int, bool] = {}
    for record in records:
        tail = record.id[len(offering.prefix) :]
        if tail.isascii() and tail.isdigit() and offering.slot(int(tail)).id == record.id:
            numbers[int(tail)] = record.state is MachineState.SPECULATIVE
    excess = len(numbers) - offering.count
    for number in sorted((n for n, is_free in numbers.items() if is_free), reverse=True)[: max(0, excess)]:
        del numbers[number]
    candidate = 0
    while len(numbers) < offering.count:
        numbers.setdefault(candidate, True)
        candidate += 1
    return sorted(numbers)


def seed_offers(slots: Iterable[Slot]) -> Offers:
    """Return offers of exactly these slots, in place of those of the inventory."""
    return Offers(OfferingsRead(offerings=(), faults=()), owner="", seeds=slots)
