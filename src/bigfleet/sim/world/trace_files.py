"""Stores a run on disk: its plan, its lines and its hash, compressed, so that it can be replayed.

One JSON value per line, in gzip: the plan, then (nanoseconds, kind, subject, text) of each entry, then the hash. A
replay needs the program only. A file is validated when it is read.
"""

import gzip
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from bigfleet.sim.kernel.journal import JournalEntry
from bigfleet.sim.plan_generator import WorldPlan
from bigfleet.sim.world.run import WorldResult

FORMAT = "bigfleet simulation trace 1"
BYTES_MAX = 256 * 1024 * 1024


class TraceFileFault(ValueError):
    """The file is no trace; the message names file and finding."""


class _Head(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    plan: WorldPlan


class WorldTrace(NamedTuple):
    """What a file holds."""

    plan: WorldPlan
    entries: list[JournalEntry]
    trace_hash: str


def write_trace(path: Path, result: WorldResult) -> None:
    """Write a run. Raises OSError."""
    lines = [
        msgspec.json.encode(_Head(FORMAT, result.plan)),
        *(msgspec.json.encode(tuple(entry)) for entry in result.journal.entries),
        msgspec.json.encode({"hash": result.trace_hash}),
    ]
    # Without a time in the header, equal runs give equal files.
    path.write_bytes(gzip.compress(b"\n".join(lines) + b"\n", mtime=0))


def read_trace(path: Path) -> WorldTrace:
    """Return what a file holds. Raises TraceFileFault."""
    try:
        with gzip.open(path) as file:
            content = file.read(BYTES_MAX + 1)
        if len(content) > BYTES_MAX:
            raise TraceFileFault(f"{path}: holds more than {BYTES_MAX} bytes; this is no trace of ours")
        lines = content.splitlines()
        if len(lines) < 2:
            raise TraceFileFault(f"{path}: it ends before the hash; name a trace that was written to its end")
        first, *middle, last = lines
        head = msgspec.json.decode(first, type=_Head)
        if head.format != FORMAT:
            raise TraceFileFault(f"{path}: its format is {head.format!r}, this program reads {FORMAT!r}")
        entries = [JournalEntry(*msgspec.json.decode(line, type=tuple[int, str, str, str])) for line in middle]
        return WorldTrace(head.plan, entries, msgspec.json.decode(last, type=dict[str, str])["hash"])
    except OSError as error:
        raise TraceFileFault(f"{path}: {error.strerror or error}; name a trace that `sim run --trace` wrote") from error
    except (msgspec.MsgspecError, ValueError, KeyError, EOFError, zlib.error) as error:
        if isinstance(error, TraceFileFault):
            raise
        raise TraceFileFault(f"{path}: no trace of a simulation ({error}); name one that `sim run` wrote") from error


def first_difference(
    one: Iterable[JournalEntry], other: Iterable[JournalEntry]
) -> tuple[JournalEntry | None, JournalEntry | None] | None:
    """Return the first entries that differ, None where one course ended; None when they are equal."""
    ours, theirs = list(one), list(other)
    for left, right in zip(ours, theirs, strict=False):
        if left != right:
            return left, right
    if len(ours) == len(theirs):
        return None
    shorter = min(len(ours), len(theirs))
    return (ours[shorter] if len(ours) > shorter else None, theirs[shorter] if len(theirs) > shorter else None)
