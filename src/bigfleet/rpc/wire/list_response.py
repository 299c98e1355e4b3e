"""Locates and digests the records of an answer to List without converting them to machines.

Most records of a large fleet are equal from List to List, and the shard recognises them by their digest
(`bigfleet.shard.reconcile.unchanged_records`), so some hundreds of half a million are read. This needs providers that
encode an unchanged record in the same bytes; otherwise all records are read. This module does not interpret a record.
"""

from array import array
from collections.abc import Sequence
from typing import overload

import xxhash
from google.protobuf.message import DecodeError

from bigfleet.model.clock import Clock
from bigfleet.model.ids import MachineId
from bigfleet.model.limits.record_limits import RECORD_BYTES_MAX
from bigfleet.rpc.wire.convert_machine import machine_from_wire
from bigfleet.rpc.wire.gen import provider_pb2
from bigfleet.rpc.wire.repeated_fields import cut
from bigfleet.rpc.wire.split_records import RecordSplitter
from bigfleet.shard.ports import ListedMachine, Listing, OversizedRecord, ProviderRefusal, RefusalKind

#: Fields that are found before other tasks get their turn, some milliseconds of work.
_FIELDS_PER_TURN_MAX = 2_000
#: The tag of `MachineList.machines`: field 1, length-delimited.
_MACHINES_TAG = 0x0A


class ListedRecords(Sequence[ListedMachine]):
    """The records of one answer, each read when it is asked for. Raises ProviderRefusal for one that is no machine."""

    def __init__(self, content: bytes, starts: "array[int]", ends: "array[int]") -> None:
        self._content = content
        self._starts = starts
        self._ends = ends

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, place: int) -> ListedMachine: ...
    @overload
    def __getitem__(self, place: slice) -> list[ListedMachine]: ...
    def __getitem__(self, place: int | slice) -> ListedMachine | list[ListedMachine]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        content = self._content[self._starts[place] : self._ends[place]]
        try:
            message = provider_pb2.Machine.FromString(content)
        except DecodeError as error:
            raise unreadable("MachineList") from error
        if len(content) > RECORD_BYTES_MAX:
            # To read all of it would hold up the loop.
            return OversizedRecord.of(MachineId(message.id), len(content))
        return ListedMachine(*machine_from_wire(message))


async def read_listing(content: bytes, clock: Clock) -> Listing:
    """Return what an answer lists, read in turns. Raises ProviderRefusal when it is no MachineList."""
    starts, ends = array("Q"), array("Q")
    digests, rest, position = bytearray(), bytearray(), 0
    digest = xxhash.xxh3_128_digest
    try:
        while position < len(content):
            first = len(starts)
            position = cut(content, position, _FIELDS_PER_TURN_MAX, _MACHINES_TAG, (starts, ends), rest)
            fresh = zip(starts[first:], ends[first:], strict=True)
            digests += b"".join([digest(content[start:end]) for start, end in fresh])
            # Sessions are served while a large fleet is read.
            await clock.sleep(0)
        others = provider_pb2.MachineList.FromString(bytes(rest))
    except DecodeError as error:
        raise unreadable("MachineList") from error
    return Listing(
        records=ListedRecords(content, starts, ends),
        digests=bytes(digests),
        parts=RecordSplitter(content, starts, ends, clock),
        revision=others.revision,
        removed_ids=tuple(others.removed_ids),
        tombstones=others.tombstones,
    )


def unreadable(name: str) -> ProviderRefusal:
    """Return the refusal for an answer that was accepted and cannot be read."""
    text = f"the answer is no {name}; is this address a capacity provider?"
    return ProviderRefusal(RefusalKind.UNKNOWN_OUTCOME, text)
