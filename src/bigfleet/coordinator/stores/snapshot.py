"""Saves the coordinator's tables as one JSON document, exports it, and reads it back for a restore.

docs/spec/coordinator.md §10. Equal tables give equal documents except for their time. An incomplete or changed document
is rejected; this module does not repair one, and does not touch a store.
"""

import hashlib
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from bigfleet.coordinator.stores.codec import UnreadableRow, decode_row, encode_row
from bigfleet.coordinator.stores.protocol import TERM_MAX, TERM_STEP
from bigfleet.coordinator.tables import Edit, RowKey, Table, Tables
from bigfleet.files.bounded import read_bounded
from bigfleet.files.private import make_directory, make_file
from bigfleet.files.sync import sync_path
from bigfleet.model.clock import NANOS_PER_SECOND

SCHEMA: Final = 1
PIECE_BYTES: Final = 1024 * 1024
META_FILE: Final = "meta.json"
STATE_FILE: Final = "state.json"
LATEST: Final = "latest"
#: Bytes of meta.json that are read.
META_BYTES_MAX: Final = 1024 * 1024
#: What a reader takes at most: a store of this size is far beyond what it was made for.
DOCUMENT_BYTES_MAX: Final = 1024 * 1024 * 1024


class SnapshotFault(Exception):
    """A snapshot that cannot be taken or written; the message names file, finding and remedy."""


class Meta(msgspec.Struct, frozen=True):
    """What is known of a document before it is read."""

    schema: int
    term: int
    #: Revision of the store.
    index: int
    #: RFC 3339, UTC.
    saved_at: str
    size: int
    sha256: str


class _Row(msgspec.Struct, frozen=True):
    key: tuple[str, ...]
    value: msgspec.Raw


class _Document(msgspec.Struct, frozen=True):
    schema: int
    term: int
    saved_at: str
    #: By name of the table, rows by key.
    tables: dict[str, list[_Row]]


@dataclass(frozen=True, slots=True)
class TablesSnapshot:
    """A document with its meta."""

    meta: Meta
    document: bytes

    @property
    def meta_json(self) -> bytes:
        """The meta as it goes over the wire and into a file."""
        return msgspec.json.encode(self.meta)

    def pieces(self) -> Iterable[bytes]:
        """Return the document in pieces of 1 MiB."""
        return (self.document[start : start + PIECE_BYTES] for start in range(0, len(self.document), PIECE_BYTES))


@dataclass(frozen=True, slots=True)
class Restored:
    """What a document holds."""

    meta: Meta
    rows: tuple[Edit, ...]

    def term_above(self, term_min: int) -> int:
        """Return the term offset of a restored store: above every leader after the snapshot, as far as one can know."""
        return min(max(self.meta.term, term_min) + TERM_STEP, TERM_MAX)


def snapshot_of(tables: Tables, *, term: int, index: int, saved_at_unix_nanos: int) -> TablesSnapshot:
    """Return the snapshot of the tables."""
    by_table: dict[str, list[_Row]] = {table.value: [] for table in Table}
    for key, row in tables.rows():
        assert row is not None, "tables hold no deletions"
        by_table[key.table.value].append(_Row(key.parts, msgspec.Raw(encode_row(row))))
    saved_at = datetime.fromtimestamp(saved_at_unix_nanos / NANOS_PER_SECOND, UTC).isoformat(timespec="seconds")
    document = msgspec.json.encode(_Document(SCHEMA, term, saved_at, by_table))
    digest = hashlib.sha256(document).hexdigest()
    return TablesSnapshot(Meta(SCHEMA, term, index, saved_at, len(document), digest), document)


def content_digest(tables: Tables) -> bytes:
    """Return a value that differs when anything is new since another moment."""
    digest = hashlib.sha256()
    for key, row in tables.rows():
        assert row is not None, "tables hold no deletions"
        digest.update(msgspec.json.encode((key.table.value, key.parts)) + encode_row(row) + b"\n")
    return digest.digest()


def read_meta(content: bytes, name: str) -> Meta:
    """Return the meta that a file holds. Raises SnapshotFault."""
    try:
        return msgspec.json.decode(content, type=Meta)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SnapshotFault(f"{name}: {error}; it is not the meta.json of a snapshot") from error


def read_document(meta: Meta, document: bytes, name: str) -> Restored:
    """Return what a document holds. Raises SnapshotFault when it is not what its meta says."""
    if meta.schema != SCHEMA:
        raise SnapshotFault(f"{name}: has schema {meta.schema}, this program knows {SCHEMA}; run a newer bigfleet")
    if len(document) != meta.size or hashlib.sha256(document).hexdigest() != meta.sha256:
        raise SnapshotFault(f"{name}: is not what its meta.json says, {meta.size} bytes; take another snapshot")
    try:
        parsed = msgspec.json.decode(document, type=_Document)
        names = {table.value: table for table in Table}
        unknown = sorted(parsed.tables.keys() - names.keys())
        if unknown or (parsed.schema, parsed.term) != (SCHEMA, meta.term) or not 0 <= meta.term <= TERM_MAX:
            raise SnapshotFault(f"{name}: {unknown or 'schema or term'} cannot be taken; run a newer bigfleet")
        rows: list[Edit] = []
        for table_name, table_rows in parsed.tables.items():
            for row in table_rows:
                key = RowKey(names[table_name], row.key)
                rows.append(Edit(key, decode_row(key, bytes(row.value))))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, UnreadableRow) as error:
        raise SnapshotFault(f"{name}: {error}; take another snapshot") from error
    return Restored(meta, tuple(rows))


def read_snapshot(path: Path) -> Restored:
    """Return what a directory, or its state.json, holds. Raises SnapshotFault."""
    folder = path if path.is_dir() else path.parent
    state = path / STATE_FILE if path.is_dir() else path
    try:
        meta = read_meta(read_bounded(folder / META_FILE, META_BYTES_MAX), str(folder / META_FILE))
        if state.stat().st_size > DOCUMENT_BYTES_MAX:
            raise SnapshotFault(f"{state}: is larger than {DOCUMENT_BYTES_MAX} bytes, and no snapshot of a coordinator")
        return read_document(meta, read_bounded(state, DOCUMENT_BYTES_MAX), str(state))
    except OSError as error:
        raise SnapshotFault(
            f"{error.filename}: {error.strerror}; name a directory with {META_FILE} and {STATE_FILE}"
        ) from error


def write_snapshot(folder: Path, snapshot: TablesSnapshot) -> None:
    """Write both files of a snapshot into a directory that does not exist yet: whole, or not at all.

    Raises SnapshotFault.
    """
    beside = folder.with_name(f".{folder.name}.part")
    try:
        make_directory(folder.parent)
        shutil.rmtree(beside, ignore_errors=True)
        make_directory(beside)
        _write_synced(beside / META_FILE, snapshot.meta_json)
        _write_synced(beside / STATE_FILE, snapshot.document)
        sync_path(beside)
        if folder.exists():
            raise SnapshotFault(f"{folder}: exists already; choose another directory")
        beside.rename(folder)
        sync_path(folder.parent)
    except OSError as error:
        raise SnapshotFault(
            f"{error.filename or folder}: {error.strerror}; choose a directory that can be written"
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def export(directory: Path, snapshot: TablesSnapshot, *, keep: int) -> Path:
    """Write a snapshot under its moment and index, point `latest` at it, and remove the oldest beyond `keep`.

    Returns where it is. Raises SnapshotFault.
    """
    saved_at = datetime.fromisoformat(snapshot.meta.saved_at)
    folder = directory / f"{saved_at:%Y%m%d-%H%M%S}-{snapshot.meta.index}"
    if not folder.exists():
        write_snapshot(folder, snapshot)
    try:
        pointer = directory / f".{LATEST}.part"
        pointer.unlink(missing_ok=True)
        pointer.symlink_to(folder.name)
        pointer.replace(directory / LATEST)
        exports = sorted(each for each in directory.iterdir() if (each / META_FILE).is_file() and not each.is_symlink())
        for old in exports[: max(0, len(exports) - keep)]:
            shutil.rmtree(old)
    except OSError as error:
        raise SnapshotFault(
            f"{error.filename or directory}: {error.strerror}; choose a directory that can be written"
        ) from error
    return folder


def _write_synced(path: Path, content: bytes) -> None:
    make_file(path)
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
