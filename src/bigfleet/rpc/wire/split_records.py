"""Reads records of a large List in parts, each distinct part once.

Half a million records have some ten thousand sets of facts and of bindings; only ids, host references and node names
are a machine's own. A record that cannot be split (`bigfleet.rpc.wire.record_scan`), or of which a part cannot be read,
is left to the plain reader. Both readers return the same for each record.
"""

from array import array
from collections.abc import Callable, Sequence
from itertools import compress
from sys import intern
from typing import Final, Generic, TypeVar, cast

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from bigfleet.model.clock import Clock
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import Machine
from bigfleet.rpc.wire.convert_machine import machine_from_wire, metadata_from_wire, state_from_wire
from bigfleet.rpc.wire.gen import provider_pb2
from bigfleet.rpc.wire.record_scan import PADDING, Cut, Places, Span, cut_records
from bigfleet.shard.inventory.host_texts import gathered, unpack
from bigfleet.shard.ports import ListedBinding, SplitRecords

T = TypeVar("T")

#: Records that are read before other tasks get their turn, some milliseconds of work.
_RECORDS_PER_TURN_MAX: Final = 4_000
#: Distinct facts, and distinct bindings, of one answer; records with others are left out.
_PARTS_MAX: Final = 131_072
#: Records that lie together are read where they are; scattered ones are copied.
_WINDOW_FACTOR_MAX: Final = 2
_UNREADABLE: Final = -1
_PROVIDER_TAG: Final = b"\x0a"


class _Parts(Generic[T]):
    """Distinct parts in the order of their first sight, by their bytes."""

    def __init__(self, read: Callable[[bytes], T]) -> None:
        self._read = read
        #: By what stands in front of many parts, which is not copied for each, and by the rest.
        self._numbers: dict[bytes, dict[bytes, int]] = {}
        self._seen = 0
        self.values: list[T] = []

    def numbers(self, contents: Sequence[bytes], prefix: bytes = b"") -> list[int]:
        """Return the number of each part behind a prefix of all, `_UNREADABLE` for one that cannot be read."""
        numbers = self._numbers.setdefault(prefix, {})
        found = list(map(numbers.get, contents))
        return [
            self._number(prefix, content, numbers) if number is None else number
            for number, content in zip(found, contents, strict=True)
        ]

    def _number(self, prefix: bytes, content: bytes, numbers: dict[bytes, int]) -> int:
        number = numbers.get(content)
        if number is not None:
            return number
        if self._seen >= _PARTS_MAX:
            return _UNREADABLE
        self._seen += 1
        try:
            value = self._read(prefix + content)
        except (DecodeError, UnicodeDecodeError):
            number = _UNREADABLE
        else:
            number = len(self.values)
            self.values.append(value)
        numbers[content] = number
        return number


class RecordSplitter:
    """The records of one answer, read in parts."""

    def __init__(self, content: bytes, starts: "array[int]", ends: "array[int]", clock: Clock) -> None:
        self._content = content
        self._starts = starts
        self._ends = ends
        self._clock = clock

    async def read(self, places: Sequence[int]) -> SplitRecords:
        """Return those of the records at these places that can be read in parts, in turns."""
        facts, bindings, split = _Parts(_read_facts), _Parts(_read_binding), SplitRecords()
        split.facts_values, split.binding_values = facts.values, bindings.values
        for first in range(0, len(places), _RECORDS_PER_TURN_MAX):
            if first:
                await self._clock.sleep(0)
            self._read_turn(places[first : first + _RECORDS_PER_TURN_MAX], facts, bindings, split)
        return split

    def _read_turn(
        self, places: Sequence[int], facts: _Parts[Machine], bindings: _Parts[ListedBinding], split: SplitRecords
    ) -> None:
        content, record_starts, record_ends = self._window(places)
        padded = np.frombuffer(content + bytes(PADDING), np.uint8)
        cut = cut_records(padded, record_starts, record_ends)
        chosen = np.flatnonzero(cut.is_cut)
        provider = _alike(padded, cut.providers, chosen)
        spans = [cut.facts, cut.more_facts] if provider is not None else [cut.providers, cut.facts, cut.more_facts]
        facts_numbers = np.array(facts.numbers(_joined(content, spans, chosen), provider or b""), np.int32)
        binding_numbers = np.array(bindings.numbers(_joined(content, (cut.states, cut.bindings), chosen)), np.int32)
        texts, sizes = _host_texts(padded, cut, chosen)
        is_read = (facts_numbers != _UNREADABLE) & (binding_numbers != _UNREADABLE)
        ids = _decoded(padded, cut.ids, chosen)
        if ids is None or not texts.isascii():
            contents = _slices(content, cut.ids, chosen)
            ends = np.cumsum(sizes)
            packed = [texts[start:end] for start, end in zip((ends - sizes).tolist(), ends.tolist(), strict=True)]
            are_texts = [_is_utf8(each) and _is_packed(text) for each, text in zip(contents, packed, strict=True)]
            is_read &= np.array(are_texts, np.bool_)
            ids = [each.decode(errors="replace") for each in contents]
        if not is_read.all():
            chosen, ids = chosen[is_read], list(compress(ids, is_read))
            texts, sizes = _host_texts(padded, cut, chosen)
            facts_numbers, binding_numbers = facts_numbers[is_read], binding_numbers[is_read]
        split.places.frombytes(np.asarray(places, np.int64)[chosen].tobytes())
        split.ids += cast(list[MachineId], ids)
        split.texts.extend(texts, sizes)
        split.facts.frombytes(facts_numbers.tobytes())
        split.bindings.frombytes(binding_numbers.tobytes())

    def _window(self, places: Sequence[int]) -> tuple[bytes, Places, Places]:
        """Return bytes that hold the records at some places, ascending, and where each begins and ends in them."""
        chosen = np.asarray(places, np.int64)
        starts = np.frombuffer(self._starts, np.uint64)[chosen].astype(np.int64)
        ends = np.frombuffer(self._ends, np.uint64)[chosen].astype(np.int64)
        first, last = int(starts[0]), int(ends[-1])
        if last - first <= _WINDOW_FACTOR_MAX * int((ends - starts).sum()) + PADDING:
            return self._content[first:last], starts - first, ends - first
        # What lies between them is most of it.
        records = [self._content[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
        record_ends = np.cumsum(ends - starts)
        return b"".join(records), record_ends - (ends - starts), record_ends


def _slices(content: bytes, span: Span, chosen: Places) -> list[bytes]:
    starts, ends = span.starts[chosen].tolist(), span.ends[chosen].tolist()
    return [content[start:end] for start, end in zip(starts, ends, strict=True)]


def _joined(content: bytes, spans: Sequence[Span], chosen: Places) -> list[bytes]:
    """Return the bytes of several spans of each record, one behind the other."""
    return list(map(b"".join, zip(*(_slices(content, span, chosen) for span in spans), strict=True)))


def _alike(padded: npt.NDArray[np.uint8], span: Span, chosen: Places) -> bytes | None:
    """Return what stands in a span of each record where that is the same in all, else None."""
    starts = span.starts[chosen]
    sizes = span.ends[chosen] - starts
    if not len(starts) or (sizes != sizes[0]).any():
        return None
    contents = padded[starts[:, np.newaxis] + np.arange(sizes[0])]
    return contents[0].tobytes() if (contents == contents[0]).all() else None


def _host_texts(padded: npt.NDArray[np.uint8], cut: Cut, chosen: Places) -> tuple[bytes, Places]:
    """Return reference and node name of each record as `host_texts` packs them, and how many bytes each has.

    The wire writes a reference as it is packed, behind its number; the padding is a reference of no characters.
    """
    ref_starts, name_starts = cut.refs.starts[chosen], cut.node_names.starts[chosen]
    ref_sizes, name_sizes = cut.refs.ends[chosen] - ref_starts, cut.node_names.ends[chosen] - name_starts
    has_ref, has_name = (ref_sizes > 0) & (padded[ref_starts] != 0), name_sizes > 0
    ref_sizes = np.where(has_ref, ref_sizes, has_name)
    ref_starts = np.where(has_ref, ref_starts, len(padded) - PADDING)
    starts, sizes = np.stack((ref_starts, name_starts), axis=1), np.stack((ref_sizes, name_sizes), axis=1)
    return gathered(padded, starts.reshape(-1), sizes.reshape(-1)), sizes.sum(axis=1)


def _decoded(padded: npt.NDArray[np.uint8], span: Span, chosen: Places) -> list[str] | None:
    """Return the text of a span of each record; None where one is no text, or has a NUL, which parts them here."""
    starts, sizes = span.starts[chosen], span.ends[chosen] - span.starts[chosen]
    # Behind each text one byte of the padding, a NUL.
    starts = np.stack((starts, np.full_like(starts, len(padded) - PADDING)), axis=1)
    sizes = np.stack((sizes, np.ones_like(sizes)), axis=1)
    try:
        texts = gathered(padded, starts.reshape(-1), sizes.reshape(-1)).decode().split("\0")
    except UnicodeDecodeError:
        return None
    return texts[:-1] if len(texts) == len(chosen) + 1 else None


def _is_utf8(content: bytes) -> bool:
    # Most ids are; asking takes a third of reading.
    if content.isascii():
        return True
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_packed(texts: bytes) -> bool:
    if texts.isascii():
        return True
    try:
        unpack(texts)
    except UnicodeDecodeError:
        return False
    return True


def _read_facts(content: bytes) -> Machine:
    """Return a machine of these facts that is nothing else: the host's provider, if there is one, and the fields."""
    provider = ""
    if content[:1] == _PROVIDER_TAG:
        end = 2 + content[1]
        provider, content = content[2:end].decode(), content[end:]
    message = provider_pb2.Machine.FromString(content)
    if provider:
        message.host.provider = provider
    return machine_from_wire(message)[0]


def _read_binding(content: bytes) -> ListedBinding:
    message = provider_pb2.Machine.FromString(content)
    return ListedBinding(
        state_from_wire(message.state), ClusterId(intern(message.cluster)), metadata_from_wire(message.shard_metadata)
    )
