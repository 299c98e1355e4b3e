"""The book of rooms and the records beside it: durable, and never taken for something else (docs/spec/provider.md
§22)."""

import sqlite3
from pathlib import Path

import pytest

from bigfleet.provider.backends.partitioned.book import SqliteInstanceBook, StoredChoice, read_records
from bigfleet.provider.backends.partitioned.ports import Carved, CarveSize
from bigfleet.provider.records.refusal import StartRefused

ROW = StoredChoice(operation_id="op-1", carved=Carved("n", "g-z-half-000", CarveSize(15_960, 2, 99_960, 1, 1)))


async def test_rows_are_there_after_the_book_was_closed_and_the_latest_one_counts(tmp_path: Path) -> None:
    path = tmp_path / "s.db.rooms"
    book = SqliteInstanceBook(path, is_power_safe=True)
    assert book.load() == {}
    await book.put("m", StoredChoice(operation_id="op-0", carved=ROW.carved))
    await book.put("m", ROW)
    book.close()
    again = SqliteInstanceBook(path, is_power_safe=False)
    assert again.load() == {"m": ROW}
    again.close()


def test_a_file_that_is_no_book_is_refused_by_name(tmp_path: Path) -> None:
    garbage, other = tmp_path / "garbage", tmp_path / "other"
    garbage.write_bytes(b"not a database, and longer than a header of one hundred bytes" * 4)
    with sqlite3.connect(other) as connection:
        connection.execute("PRAGMA application_id=1")
    for path, text in ((garbage, "file is not a database"), (other, "these are no rooms that this version reads")):
        with pytest.raises(StartRefused, match=f"{path.name}: {text}"):
            SqliteInstanceBook(path, is_power_safe=True).load()


def test_records_that_cannot_be_read_end_the_start_instead_of_freeing_every_room(tmp_path: Path) -> None:
    damaged = tmp_path / "s.db"
    assert read_records(damaged) == ()
    with sqlite3.connect(damaged) as connection:
        connection.execute("CREATE TABLE machines (id, revision, state_since_unix_nanos, record, operation)")
        connection.execute("INSERT INTO machines VALUES ('m', 1, 1, x'7b', NULL)")
        connection.execute("PRAGMA user_version=1")
    connection.close()
    with pytest.raises(StartRefused, match=r"s\.db: "):
        read_records(damaged)
