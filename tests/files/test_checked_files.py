"""State files under damage: what is read is what was committed, or the start is refused with the file's name.

Each kind of file is written as its process writes it, damaged, and read as its process reads it (docs/operating.md,
"Damaged and lost state files").
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.proof import in_proportion
from tests.files.stored import STATE_FILES, Stored

#: Changes that each file has.
CHANGES = 6
#: What a remedy tells to do, of which each refusal names one.
REMEDIES = ("restore", "move it", "choose another", "run a newer", "start the newer", "make room")


class Kept:
    """One kind of file: what each of its files has, and what a start on them reads."""

    def __init__(self, stored: Stored, *, is_killed: bool) -> None:
        self.stored = stored
        with folder() as place:
            if is_killed:
                write_and_be_killed(stored, stored.path(place))
            else:
                stored.write(stored.path(place), CHANGES)
            # The index of the log is in shared memory only in name: it is made anew from the log.
            self.files: dict[str, bytes] = {
                path.name: path.read_bytes() for path in place.iterdir() if not path.name.endswith("-shm")
            }
            self.content = stored.read(stored.path(place))

    def outcome(self, files: dict[str, bytes]) -> str:
        """Start on other files; return "" when the content is read, else the refusal. Fails for everything else."""
        with folder() as place:
            for name, content in files.items():
                (place / name).write_bytes(content)
            path = self.stored.path(place)
            try:
                read = self.stored.read(path)
            except self.stored.refusal as refusal:
                text = str(refusal)
                assert str(path) in text, "the file is not named"
                assert any(remedy in text for remedy in REMEDIES), text
                for name, content in files.items():
                    left = place / name
                    assert left.suffix in (".lock", ".holder") or left.read_bytes() == content, f"{name} was changed"
                return text
            assert read == self.content, "other content was read"
            return ""


@contextmanager
def folder() -> Iterator[Path]:
    """Yield a new directory, in memory where there is some."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as name:
        yield Path(name)


#: Writes one of the files, and dies before it closes anything.
_KILLED = """
import os, pathlib, sys
from tests.files.stored import STATE_FILES
STATE_FILES[int(sys.argv[1])].write(pathlib.Path(sys.argv[2]), int(sys.argv[3]), lambda: os._exit(9))
"""


def write_and_be_killed(stored: Stored, path: Path) -> None:
    """Write in another process that dies before it closes anything, so that the log stays."""
    arguments = (str(STATE_FILES.index(stored)), str(path), str(CHANGES))
    assert subprocess.run([sys.executable, "-c", _KILLED, *arguments], check=False).returncode == 9


@pytest.fixture(scope="module", params=STATE_FILES, ids=lambda stored: stored.name)
def closed(request: pytest.FixtureRequest) -> Kept:
    """Return the files of a process that ended cleanly."""
    return Kept(request.param, is_killed=False)


@pytest.fixture(scope="module", params=[s for s in STATE_FILES if s.is_power_safe], ids=lambda stored: stored.name)
def killed(request: pytest.FixtureRequest) -> Kept:
    """Return the files of a process that was killed: all that it committed is in the log."""
    return Kept(request.param, is_killed=True)


def flipped(content: bytes, bit: int) -> bytes:
    """Return the content with one bit changed, the bits of its used bytes counted around."""
    place = bit // 8 % len(content)
    return content[:place] + bytes([content[place] ^ 1 << bit % 8]) + content[place + 1 :]


BITS = st.integers(0, 2**24)


@settings(max_examples=in_proportion(60), deadline=None)
@given(bit=BITS, is_used=st.booleans())
def test_a_flipped_bit_changes_nothing_or_is_refused(closed: Kept, bit: int, is_used: bool) -> None:
    """Anywhere in the file; half of the tries in bytes that are not zero, which most of the others are."""
    name = closed.stored.name
    content = closed.files[name]
    if is_used:
        used = [place for place, byte in enumerate(content) if byte]
        bit = used[bit // 8 % len(used)] * 8 + bit % 8
    closed.outcome({**closed.files, name: flipped(content, bit)})


@settings(max_examples=in_proportion(25), deadline=None)
@given(size=st.integers(0, 2**24))
def test_a_file_that_is_cut_anywhere_is_refused(closed: Kept, size: int) -> None:
    name = closed.stored.name
    content = closed.files[name]
    assert closed.outcome({**closed.files, name: content[: size % len(content)]})


@settings(max_examples=in_proportion(25), deadline=None)
@given(bit=BITS)
def test_a_flipped_bit_in_the_log_changes_nothing_or_is_refused(killed: Kept, bit: int) -> None:
    """SQLite reads a log up to the first damaged frame and takes the rest for never written."""
    name = f"{killed.stored.name}-wal"
    killed.outcome({**killed.files, name: flipped(killed.files[name], bit)})


@settings(max_examples=in_proportion(25), deadline=None)
@given(size=st.integers(0, 2**24))
def test_a_log_that_is_cut_anywhere_is_refused(killed: Kept, size: int) -> None:
    name = f"{killed.stored.name}-wal"
    content = killed.files[name]
    assert killed.outcome({**killed.files, name: content[: size % len(content)]})


@settings(max_examples=in_proportion(25), deadline=None)
@given(bit=BITS)
def test_a_damaged_counter_costs_nothing(closed: Kept, bit: int) -> None:
    """A higher number would have the file refused, so the counter has a checksum; the file has all the rest."""
    name = f"{closed.stored.name}.commits"
    with folder() as place:
        for each, content in {**closed.files, name: flipped(closed.files[name], bit)}.items():
            (place / each).write_bytes(content)
        assert closed.stored.read(closed.stored.path(place))[1] == closed.content[1]


#: By name: what happens to the files of a process that ended cleanly, and what the refusal says.
Harm = Callable[[Kept, str], dict[str, bytes]]
HARMS: dict[str, tuple[Harm, str]] = {
    "empty": (lambda kept, name: {**kept.files, name: b""}, "is empty, and .* shows that it was written before"),
    "deleted": (
        lambda kept, name: {each: content for each, content in kept.files.items() if each != name},
        "does not exist, and .* shows that it was written before",
    ),
    "zeros": (lambda kept, name: {**kept.files, name: bytes(len(kept.files[name]))}, r"not a database|malformed"),
    "a page of zeros": (
        lambda kept, name: {**kept.files, name: kept.files[name][:4096] + bytes(4096) + kept.files[name][8192:]},
        "malformed|damaged",
    ),
    "another file": (lambda kept, name: {**kept.files, name: b"text of somebody\n" * 400}, "not a database"),
    "older": (lambda kept, name: {**kept.files, name: older(kept.stored)}, r"it is an older copy"),
}


def older(stored: Stored) -> bytes:
    """Return the file as it was before its last changes."""
    with folder() as place:
        stored.write(stored.path(place), CHANGES - 2)
        return stored.path(place).read_bytes()


@pytest.mark.parametrize("harm", HARMS)
def test_each_harm_is_refused(closed: Kept, harm: str) -> None:
    """None of them is a new, empty state."""
    change, finding = HARMS[harm]
    assert re.search(finding, closed.outcome(change(closed, closed.stored.name)) or "it was not refused")
