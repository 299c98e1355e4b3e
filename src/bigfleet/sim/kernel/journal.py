"""Records what happened in one run, as lines with their virtual time, and a hash over all of them.

Two runs are equal when their hashes are (docs/spec/simulation.md, S19). The newest lines are stored for people; the
hash covers every one. Nothing that differs between two processes may be written: no address, no order of a set, no real
time.
"""

import hashlib
from collections import Counter, deque
from typing import NamedTuple

#: Lines that are stored by default; the hash goes on beyond it.
LINES_MAX = 200_000


class JournalEntry(NamedTuple):
    """One thing that happened."""

    at_nanos: int
    kind: str
    subject: str
    text: str

    @property
    def line(self) -> str:
        """The entry as people read it."""
        return f"{self.at_nanos / 1e9:12.3f}  {self.kind:<10} {self.subject:<34} {self.text}".rstrip()


class Journal:
    """The entries of one run, in order."""

    def __init__(self, lines_max: int = LINES_MAX) -> None:
        self.entries: deque[JournalEntry] = deque(maxlen=lines_max)
        self.counts: Counter[str] = Counter()
        #: The run is over: what its remains still say while they are collected is no part of it.
        self.is_closed = False
        self._digest = hashlib.blake2b(digest_size=16)

    def note(self, at_nanos: int, kind: str, subject: str, text: str = "") -> None:
        """Write one entry; after the end of the run nothing is written."""
        if self.is_closed:
            return
        entry = JournalEntry(at_nanos, kind, subject, text)
        self._digest.update(f"{at_nanos}\x1f{kind}\x1f{subject}\x1f{text}\n".encode("utf-8", "surrogatepass"))
        self.counts[kind] += 1
        self.entries.append(entry)

    @property
    def hash(self) -> str:
        """The hash over every entry so far, in hexadecimal."""
        return self._digest.copy().hexdigest()
