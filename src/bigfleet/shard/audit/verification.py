"""Verifies an audit log: no line is changed, missing, moved or added.

docs/spec/shard.md §13. Pure: lines in, findings out. Lines that were cut off at the very end can only be detected with
the head of an earlier check, so a check returns the head. It never changes a log.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from bigfleet.shard.audit.log import AuditHead, AuditLine, digest, read_line

#: After so many a log is not looked at any further.
FINDINGS_MAX = 20


class AuditFault(Enum):
    """What is wrong at a place."""

    GAP = "gap"
    EDITED = "edited"
    REORDERED = "reordered"
    TRUNCATED = "truncated"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong; `line` counts from 1, 0 is the file as a whole."""

    file: str
    line: int
    fault: AuditFault
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What a check saw."""

    findings: tuple[Finding, ...]
    records: int
    #: Number of the first record, 0 when there is none.
    first_sequence: int
    #: The last record; None when there is none.
    head: AuditHead | None


@dataclass(frozen=True, slots=True)
class _Place:
    file: str
    number: int
    #: Without its line feed.
    content: bytes
    has_end: bool


def check(files: Iterable[tuple[str, Iterable[bytes]]], anchor: AuditHead | None = None) -> Checked:
    """Check files, oldest first, each a name and its lines with their line feeds.

    `anchor` is a head that an earlier check returned; its record must be there. At most FINDINGS_MAX are returned.
    """
    checker = _Checker(anchor)
    for name, lines in files:
        checker.begin(name)
        for place in _places(name, lines):
            checker.take(place)
            if len(checker.findings) >= FINDINGS_MAX:
                return checker.result()
    checker.end()
    return checker.result()


def _places(name: str, lines: Iterable[bytes]) -> Iterator[_Place]:
    for number, line in enumerate(lines, 1):
        yield _Place(name, number, line.removesuffix(b"\n"), line.endswith(b"\n"))


class _Checker:
    """Goes along the lines with the chains that the next one may follow."""

    def __init__(self, anchor: AuditHead | None) -> None:
        self.findings: list[Finding] = []
        self._anchor = anchor
        self._is_anchored = anchor is None
        self._records = 0
        self._first_sequence = 0
        self._head: AuditHead | None = None
        #: One chain after a good line; after a bad one every chain that the true next line may go on from.
        self._chains: frozenset[str] = frozenset()
        self._sequences = _Numbers()
        #: Records that are missing so far, by number, and where that showed.
        self._gaps: list[tuple[range, int]] = []
        self._file = ""
        self._is_first_of_file = True

    def begin(self, name: str) -> None:
        """Go on with the next file."""
        self._file, self._is_first_of_file = name, True

    def take(self, place: _Place) -> None:
        """Check the next line."""
        is_first, self._is_first_of_file = self._is_first_of_file, False
        line = read_line(place.content)
        if not place.has_end:
            # Also when it reads like a record: what wrote it always ends a line.
            self._find(place, AuditFault.TRUNCATED, "the last line has no end: its record was cut off")
        elif line is None:
            self._find(place, AuditFault.EDITED, "the line is not a record of an audit log")
        else:
            self._take_record(place, line, is_first)

    def _take_record(self, place: _Place, line: AuditLine, is_first: bool) -> None:
        if is_first and self._head is None and line.previous is None:
            self._find(
                place, AuditFault.TRUNCATED, f"the file begins with record {line.sequence}, and not at its beginning"
            )
        elif self._head is None and line.previous is not None:
            # The first record of all that were given: what it goes on from is what it says itself.
            self._chains = frozenset({line.previous})
        last = self._head.sequence if self._head is not None else line.sequence - 1
        follows = any(line.follows(chain) for chain in self._chains)
        if follows and line.sequence > last:
            if line.sequence > last + 1:
                self._find(
                    place, AuditFault.GAP, f"{_records(last + 1, line.sequence)} not here: they could not be written"
                )
            self._accept(line, frozenset({line.chain}))
            return
        # Whatever of the three it was, the true next line goes on from one of these.
        chains = self._chains | {line.chain} | {digest(chain, line.body) for chain in self._chains}
        self._report_break(place, line, last)
        if line.sequence not in self._sequences:
            self._accept(line, chains)
        else:
            self._chains = chains

    def _report_break(self, place: _Place, line: AuditLine, last: int) -> None:
        if line.sequence in self._sequences:
            self._find(place, AuditFault.REORDERED, f"record {line.sequence} is repeated here")
        elif line.sequence <= last:
            self._find(place, AuditFault.REORDERED, f"record {line.sequence} comes after record {last}")
        elif line.sequence > last + 1:
            self._gaps.append((range(last + 1, line.sequence), len(self.findings)))
            self._find(place, AuditFault.GAP, f"{_records(last + 1, line.sequence)} missing before this line")
        elif not self._chains:
            pass  # the missing beginning was reported already
        else:
            self._find(place, AuditFault.EDITED, f"record {line.sequence} is not as it was written after record {last}")

    def _accept(self, line: AuditLine, chains: frozenset[str]) -> None:
        self._records += 1
        self._first_sequence = self._first_sequence or line.sequence
        self._sequences.add(line.sequence)
        self._chains = chains
        if self._head is None or line.sequence > self._head.sequence:
            self._head = AuditHead(line.sequence, line.chain)
        if self._anchor is not None and line.sequence == self._anchor.sequence:
            self._is_anchored = line.chain == self._anchor.chain

    def end(self) -> None:
        """Judge what only shows when all was read."""
        for missing, position in self._gaps:
            if all(number in self._sequences for number in missing):
                found = self.findings[position]
                text = f"{_records(missing.start, missing.stop)} further down: the lines were moved"
                self.findings[position] = Finding(found.file, found.line, AuditFault.REORDERED, text)
        if not self._is_anchored and self._anchor is not None:
            number = self._anchor.sequence
            is_there = number in self._sequences
            text = f"record {number} is another one than was noted" if is_there else f"record {number} is missing"
            fault = AuditFault.EDITED if is_there else AuditFault.TRUNCATED
            self.findings.append(Finding(self._file, 0, fault, f"{text}: a log with it was verified before"))

    def _find(self, place: _Place, fault: AuditFault, text: str) -> None:
        self.findings.append(Finding(place.file, place.number, fault, text))

    def result(self) -> Checked:
        """Return what was seen so far."""
        return Checked(
            findings=tuple(self.findings),
            records=self._records,
            first_sequence=self._first_sequence,
            head=self._head,
        )


class _Numbers:
    """The numbers of records that were seen; a sound log takes one run, however long it is."""

    def __init__(self) -> None:
        self._runs: list[range] = []

    def add(self, number: int) -> None:
        """Note a number."""
        if self._runs and self._runs[-1].stop == number:
            self._runs[-1] = range(self._runs[-1].start, number + 1)
        else:
            self._runs.append(range(number, number + 1))

    def __contains__(self, number: int) -> bool:
        return any(number in run for run in self._runs)


def _records(first: int, stop: int) -> str:
    return f"record {first} is" if stop == first + 1 else f"records {first} to {stop - 1} are"
