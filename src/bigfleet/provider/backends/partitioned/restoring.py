"""Restores after a restart the placement of each machine, from records and the placement table.

docs/spec/provider.md §12, §22. A record that names a host is authoritative; otherwise the placement table counts, if
its row belongs to the operation of the record. This module must not choose a host.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from bigfleet.model.quantity import MILLI, parse_quantity
from bigfleet.model.states import MachineState
from bigfleet.provider.backend import Slot
from bigfleet.provider.backends.partitioned.book import StoredChoice
from bigfleet.provider.backends.partitioned.ports import Carved, CarveSize
from bigfleet.provider.records.record import Record

_CPU: Final = MILLI
_MIB: Final = MILLI << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A machine in use: what it was offered as, and where it stands; None while that was not chosen."""

    slot: Slot
    carved: Carved | None


def restored(records: Iterable[Record], rows: Mapping[str, StoredChoice]) -> dict[str, Lease]:
    """Return the leases of machines that are in use."""
    return {
        record.id: Lease(slot=record.slot, carved=_carved(record, rows.get(record.id)))
        for record in records
        if record.state is not MachineState.SPECULATIVE
    }


def instances_of(leases: Mapping[str, Lease]) -> dict[str, Carved]:
    """Return what stands, by the names of the instances."""
    return {lease.carved.instance: lease.carved for lease in leases.values() if lease.carved is not None}


def _carved(record: Record, row: StoredChoice | None) -> Carved | None:
    ref = record.machine.host.ref
    if not ref:
        operation = record.operation
        is_for_it = row is not None and (operation is None or operation.id == row.operation_id)
        return row.carved if row is not None and is_for_it else None
    if row is not None and row.carved.ref == ref:
        return row.carved
    host, slash, instance = ref.partition("/")
    return Carved(host, instance, size_offered(record.slot)) if slash else None


def size_offered(slot: Slot) -> CarveSize:
    """Return the size that a slot's resources show: what is left to go by where the book is lost."""

    def amount(name: str, unit: int) -> int:
        quantity = slot.resources.get(name)
        return 0 if quantity is None else parse_quantity(quantity) // unit

    return CarveSize(
        memory_mib=amount("memory", _MIB),
        vcpus=amount("cpu", _CPU),
        disk_mib=amount("ephemeral-storage", _MIB),
        disks=1,
        spindles=0,
    )
