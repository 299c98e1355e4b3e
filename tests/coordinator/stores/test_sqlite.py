"""The coordinator's file: durable, held by one process, and never recreated silently (docs/spec/coordinator.md §3)."""

import asyncio
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from bigfleet.coordinator.commands import AddShard, BindCluster, CommandRefused, RemoveShard
from bigfleet.coordinator.stores.protocol import TERM_STEP, LeaderInfo, NotLeader, StoreUnavailable
from bigfleet.coordinator.stores.sqlite import SqliteStateStore, StoreFault
from bigfleet.coordinator.tables import DomainRow, DomainState, Edit, RowKey, ShardRow, Table, Tables
from bigfleet.model.ids import ClusterId, ShardId
from tests.files.editing import edit

ME = LeaderInfo("replica-0", "here:7790")
EAST = ShardId("east-0")


def opened(path: Path) -> SqliteStateStore:
    return SqliteStateStore(path, leader=ME)


@pytest.mark.rule("coordinator 3/1")
async def test_each_start_has_a_higher_term_and_the_rows_of_the_last(tmp_path: Path) -> None:
    terms = []
    for start in range(3):
        store = opened(tmp_path / "c.db")
        won = await store.campaign()
        terms.append(won.term)
        if not start:
            await store.commit(AddShard(EAST, "east:7780", 3, 10))
        else:
            assert won.tables.shards == {EAST: ShardRow("east:7780", 10, 3)}
        await store.close()

    assert terms == [1, 2, 3]


async def test_who_does_not_lead_writes_nothing(tmp_path: Path) -> None:
    store = opened(tmp_path / "c.db")
    with pytest.raises(NotLeader):
        await store.commit(AddShard(EAST, "east:7780", 3, 10))
    await store.campaign()
    await store.resign()
    with pytest.raises(NotLeader):
        await store.commit(AddShard(EAST, "east:7780", 3, 10))
    with pytest.raises(NotLeader):
        await store.raise_term(9)

    assert await store.lost() == "leadership was given up"
    assert (await store.load()).shards == {}
    assert store.leader() is None
    await store.close()


@pytest.mark.rule("coordinator 3/9")
async def test_a_term_is_raised_above_what_shards_have_seen(tmp_path: Path) -> None:
    store = opened(tmp_path / "c.db")
    await store.campaign()
    raised = await store.raise_term(77)
    await store.close()
    again = opened(tmp_path / "c.db")

    assert raised == 77 + TERM_STEP
    assert (await again.campaign()).term == raised + 1
    await again.close()


async def test_a_refused_command_changes_nothing(tmp_path: Path) -> None:
    store = opened(tmp_path / "c.db")
    await store.campaign()
    with pytest.raises(CommandRefused):
        await store.commit(BindCluster(ClusterId("c1"), EAST, 1))
    await store.close()

    assert (await opened(tmp_path / "c.db").load()).clusters == {}


async def test_a_write_that_fails_is_not_taken(tmp_path: Path) -> None:
    store = opened(tmp_path / "c.db")
    await store.campaign()
    store._connection.execute("PRAGMA query_only = 1")
    with pytest.raises(StoreUnavailable, match="readonly"):
        await store.commit(AddShard(EAST, "east:7780", 3, 10))
    store._connection.execute("PRAGMA query_only = 0")

    assert (await store.load()).shards == {}
    await store.commit(AddShard(EAST, "east:7780", 3, 10))
    await store.commit(RemoveShard(EAST))
    await store.close()


@pytest.mark.rule("coordinator 3/12")
def test_a_second_process_is_told_who_holds_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    code = (
        "import sys, pathlib\n"
        "from bigfleet.coordinator.stores.sqlite import SqliteStateStore\n"
        "from bigfleet.coordinator.stores.protocol import LeaderInfo\n"
        "store = SqliteStateStore(pathlib.Path(sys.argv[1]), leader=LeaderInfo('other', ''))\n"
        "print('open', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(StoreFault, match=rf"c\.db: held by process {other.pid} on .*; stop it"):
            opened(path)
        other.kill()
    # Killed, it holds nothing any more.
    asyncio.run(opened(path).close())


@pytest.mark.rule("coordinator 3/13")
async def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE theirs (a)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(StoreFault, match="is not a coordinator's file"):
        opened(path)

    assert path.read_bytes() == before


@pytest.mark.rule("coordinator 3/13")
async def test_noise_is_named_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    path.write_bytes(b"not a database, but long enough to look at it" * 100)
    with pytest.raises(StoreFault, match="not a database; move it and "):
        opened(path)

    assert path.read_bytes().startswith(b"not a database")


@pytest.mark.rule("coordinator 3/13")
async def test_a_newer_schema_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    await opened(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 7")
    connection.close()
    with pytest.raises(StoreFault, match="has schema 7, this program knows 2; run a newer bigfleet"):
        opened(path)


@pytest.mark.rule("coordinator 3/13")
@pytest.mark.parametrize(
    ("statement", "finding"),
    [
        ("INSERT INTO rows VALUES ('shards', 'east-0', x'7b7d')", "shards/east-0: Object missing required field"),
        ("INSERT INTO rows VALUES ('shards', 'east-0', x'ff')", "shards/east-0: "),
        ("INSERT INTO rows VALUES ('planets', 'mars', x'7b7d')", "there is no table 'planets'"),
        ("INSERT INTO rows VALUES ('domains', 'zone', x'7b7d')", "domains/zone: is no key of domains"),
    ],
)
async def test_a_row_that_does_not_read_back_ends_the_start(tmp_path: Path, statement: str, finding: str) -> None:
    path = tmp_path / "c.db"
    await opened(path).close()
    edit(path, statement)
    with pytest.raises(StoreFault, match=finding):
        opened(path)


@pytest.mark.rule("coordinator 3/13")
async def test_a_key_that_would_not_read_back_is_not_written(tmp_path: Path) -> None:
    """A snapshot of another store may have one; the file stays as it was."""
    path = tmp_path / "c.db"
    store = opened(path)
    row = Edit(RowKey(Table.DOMAINS, ("zone", "a\0b")), DomainRow(EAST, DomainState.ASSIGNED))
    with pytest.raises(StoreUnavailable, match=r"domains: the key .* has a NUL character"):
        store.restore([row], term=5)
    assert await store.load() == Tables()
    await store.close()

    again = opened(path)
    assert await again.load() == Tables()
    await again.close()


async def test_who_could_not_write_its_term_does_not_lead(tmp_path: Path) -> None:
    """As with a full disk: readers would be sent here, where there is no leader."""
    store = opened(tmp_path / "c.db")
    store._connection.execute("PRAGMA query_only = 1")
    with pytest.raises(StoreUnavailable):
        await store.campaign()
    assert (store.leader(), await store.is_leader()) == (None, False)
    store._connection.execute("PRAGMA query_only = 0")
    await store.campaign()
    assert store.leader() == ME
    await store.close()
