"""Packs what distinguishes a machine from its like, host reference, node name and last error, into few bytes.

Half a million machines have a host reference and a node name each, and all but some have no last error. As two strings
they take 150 bytes a machine, packed 80, and one behind the other in one piece of memory 50. No character is lost.
"""

from array import array
from collections.abc import Sequence
from itertools import compress
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

#: The reference's bytes behind their number, then the node name; or the three texts themselves, where that cannot be.
HostTexts = bytes | tuple[str, str, str]

#: A machine without any of them.
NO_TEXTS: Final = b""
#: The longest host reference that is packed, in bytes: its number is one byte, as on the wire.
REF_BYTES_MAX: Final = 127
#: The longest packed texts that stand in a column, in bytes.
_IN_COLUMN_MAX: Final = 65_535
#: Bytes that no text stands in any more; with more than this, and than those in use, a column is written again.
_UNUSED_MAX: Final = 1_048_576


def pack(host_ref: str, node_name: str, last_error: str) -> HostTexts:
    """Return the three texts packed, as far as they can be."""
    if not (host_ref or node_name or last_error):
        return NO_TEXTS
    if not last_error:
        try:
            ref = host_ref.encode()
            if len(ref) <= REF_BYTES_MAX:
                return bytes((len(ref),)) + ref + node_name.encode()
        except UnicodeEncodeError:
            pass
    return host_ref, node_name, last_error


def unpack(texts: HostTexts) -> tuple[str, str, str]:
    """Return host reference, node name and last error."""
    if isinstance(texts, tuple):
        return texts
    if not texts:
        return "", "", ""
    end = 1 + texts[0]
    return texts[1:end].decode(), texts[end:].decode(), ""


def gathered(content: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> bytes:
    """Return pieces of some bytes, one behind the other."""
    ends = np.cumsum(sizes)
    if not len(ends):
        return b""
    if (starts[1:] == starts[:-1] + sizes[:-1]).all():
        piece: bytes = content[starts[0] : starts[0] + ends[-1]].tobytes()
        return piece
    shift = np.repeat(starts - (ends - sizes), sizes)
    shift += np.arange(len(shift))
    pieces: bytes = content[shift].tobytes()
    return pieces


class PickedTexts(NamedTuple):
    """The texts of some machines, by their numbers in a column."""

    column: "HostTextColumn"
    numbers: npt.NDArray[np.int64]


class HostTextColumn:
    """Packed texts of many machines by number, one behind the other in one piece of memory.

    Invariant: texts in `_others` take no bytes of the content; `_unused` counts the bytes of the content that are no
    machine's.
    """

    def __init__(self) -> None:
        self._content = bytearray()
        self._starts = array("Q")
        self._sizes = array("H")
        #: What cannot be packed, or is too long.
        self._others: dict[int, HostTexts] = {}
        self._unused = 0

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> HostTexts:
        start = self._starts[number]
        content = bytes(self._content[start : start + self._sizes[number]])
        return content or self._others.get(number, NO_TEXTS)

    def append(self, texts: HostTexts) -> None:
        """Add the texts of one machine more."""
        self._starts.append(0)
        self._sizes.append(0)
        self[len(self._starts) - 1] = texts

    def __setitem__(self, number: int, texts: HostTexts) -> None:
        if self[number] == texts:
            return
        self._others.pop(number, None)
        self._unused += self._sizes[number]
        if isinstance(texts, bytes) and len(texts) <= _IN_COLUMN_MAX:
            self._starts[number], self._sizes[number] = len(self._content), len(texts)
            self._content += texts
        else:
            self._starts[number] = self._sizes[number] = 0
            self._others[number] = texts
        if self._unused > max(_UNUSED_MAX, len(self._content) // 2):
            self._write_again()

    def extend(self, content: bytes, sizes: npt.NDArray[np.int64]) -> None:
        """Add packed texts of many machines, one behind the other; none is longer than 65,535 bytes."""
        starts = len(self._content) + np.cumsum(sizes) - sizes
        self._starts.frombytes(starts.astype(np.uint64).tobytes())
        self._sizes.frombytes(sizes.astype(np.uint16).tobytes())
        self._content += content

    def extend_from(self, picked: PickedTexts) -> None:
        """Add the texts of some machines of another column."""
        other, numbers = picked
        first, others = len(self), other._others
        starts, sizes = other._places(numbers)
        self.extend(gathered(np.frombuffer(other._content, np.uint8), starts, sizes), sizes)
        if others:
            self._others |= {first + place: others[n] for place, n in enumerate(numbers.tolist()) if n in others}

    def have_ref(self, first: int, last: int) -> npt.NDArray[np.bool_]:
        """Return which machines from the first number up to the last have a host reference, where all are packed."""
        starts, sizes = self._places(slice(first, last))
        has_ref = sizes > 0
        has_ref[has_ref] = np.frombuffer(self._content, np.uint8)[starts[has_ref]] != 0
        return has_ref

    def are(self, numbers: npt.NDArray[np.int64], refs: Sequence[str], names: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Return for each of some machines whether it has this host reference, this node name and no last error.

        False also where it is not known without a look at the machine itself.
        """
        if max(map(len, refs), default=0) > REF_BYTES_MAX:
            return np.zeros(len(numbers), np.bool_)
        wanted = [f"{chr(len(ref))}{ref}{name}" if ref or name else "" for ref, name in zip(refs, names, strict=True)]
        starts, sizes = self._places(numbers)
        same: npt.NDArray[np.bool_] = np.fromiter(map(len, wanted), np.int64, len(wanted)) == sizes
        if self._others:
            # They take no bytes either.
            same &= np.array([number not in self._others for number in numbers.tolist()], np.bool_)
        if not same.all():
            starts, sizes, wanted = starts[same], sizes[same], list(compress(wanted, same.tolist()))
        text = "".join(wanted)
        if not text.isascii():
            return np.zeros(len(numbers), np.bool_)
        expected, packed = text.encode(), gathered(np.frombuffer(self._content, np.uint8), starts, sizes)
        if expected != packed:
            others = np.flatnonzero(np.frombuffer(expected, np.uint8) != np.frombuffer(packed, np.uint8))
            same[np.flatnonzero(same)[np.searchsorted(np.cumsum(sizes), others, side="right")]] = False
        return same

    def _places(self, numbers: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return where the texts of some numbers begin, and how many bytes they have."""
        starts = np.frombuffer(self._starts, np.uint64)[numbers].astype(np.int64)
        return starts, np.frombuffer(self._sizes, np.uint16)[numbers].astype(np.int64)

    def _write_again(self) -> None:
        starts, sizes = self._places(slice(None))
        content = gathered(np.frombuffer(self._content, np.uint8), starts, sizes)
        self._starts = array("Q", (np.cumsum(sizes) - sizes).astype(np.uint64).tobytes())
        self._content, self._unused = bytearray(content), 0
