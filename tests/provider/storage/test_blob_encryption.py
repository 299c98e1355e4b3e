"""Stored bootstrap blobs: sealed, bound to one operation, gone with its end (docs/spec/provider.md §12)."""

import random
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from bigfleet.model.states import MachineState
from bigfleet.provider.backend import CONFIGURE_WAITS, ConfigureWaits, MachineView, Op, Ready
from bigfleet.provider.backends.fake import FakeBackend
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.kit.options import CoreOptions
from bigfleet.provider.records.kinds import Kind
from bigfleet.provider.storage.blob_encryption import BlobKey, KeyFault, read_key
from bigfleet.provider.storage.sqlite import SqliteProviderStore
from tests.provider.harness import SLOT, make_core, settle, started, state_of
from tests.provider.operations.test_restart import kill

S = MachineState
KEY = bytes(range(32))
BLOB = b"a join token that nobody may read"


class Remembering(FakeBackend):
    """Keeps what it was given to boot with."""

    def __init__(self, *, resumable: bool = True) -> None:
        super().__init__(2, resumable=frozenset(Kind) if resumable else frozenset())
        self.blobs: list[tuple[str, int, bytes]] = []

    async def configure(self, machine: MachineView, cluster: str, blob: bytes, op: Op) -> str | None:
        self.blobs.append((op.id, op.attempt, blob))
        return await super().configure(machine, cluster, blob, op)


async def core_on(
    path: Path, backend: FakeBackend, key: bytes | None, readiness: Ready | ConfigureWaits = CONFIGURE_WAITS
) -> tuple[CapacityCore, SqliteProviderStore]:
    store = SqliteProviderStore(path, is_power_safe=False)
    options = CoreOptions(is_inline=True, intent_key=key, failed_hold_seconds=0)
    return await started(make_core(backend, store=store, options=options, readiness=readiness)), store


async def interrupted(path: Path, backend: FakeBackend, key: bytes | None) -> str:
    """Leave a Configure in flight behind, as a kill does, and return its operation."""
    core, store = await core_on(path, backend, key)
    await core.create(SLOT)
    await settle()
    backend.hold(Kind.CONFIGURE)
    ack = await core.configure(SLOT, "c-1", BLOB, {})
    await settle()
    await kill(core, store)
    return ack.operation_id


def everything_stored(path: Path) -> bytes:
    return b"".join(file.read_bytes() for file in path.parent.glob(path.name + "*"))


@pytest.mark.virtual_time
async def test_a_configure_is_driven_again_with_its_blob_and_the_same_operation(tmp_path: Path) -> None:
    path, backend = tmp_path / "s.db", Remembering()
    operation = await interrupted(path, backend, KEY)
    assert BLOB not in everything_stored(path)
    backend.unhold(Kind.CONFIGURE)
    core, _ = await core_on(path, backend, KEY)
    await settle()
    assert await state_of(core) is S.CONFIGURED
    assert backend.blobs == [(operation, 1, BLOB), (operation, 2, BLOB)]
    with sqlite3.connect(path) as file:
        assert file.execute("SELECT count(*) FROM secrets").fetchone() == (0,)
    await core.stop()


@pytest.mark.virtual_time
@pytest.mark.parametrize("key", [None, bytes(32)], ids=["no key", "another key"])
async def test_without_the_key_the_blob_is_of_no_use(tmp_path: Path, key: bytes | None) -> None:
    path, backend = tmp_path / "s.db", Remembering()
    await interrupted(path, backend, KEY)
    core, _ = await core_on(path, backend, key)
    await settle()
    record = await core.get(SLOT)
    assert record.machine.last_error.startswith("RESTARTED: ")
    assert len(backend.blobs) == 1
    with sqlite3.connect(path) as file:
        assert file.execute("SELECT count(*) FROM secrets").fetchone() == (0,)
    await core.stop()


class ReadyAtOnce:
    interval_seconds = 2.0

    async def ready(self, machine: MachineView, cluster: str, op: Op) -> bool:
        return True


@pytest.mark.virtual_time
async def test_without_a_stored_blob_only_the_checker_runs(tmp_path: Path) -> None:
    path, backend = tmp_path / "s.db", Remembering()
    await interrupted(path, backend, None)
    core, _ = await core_on(path, backend, KEY, ReadyAtOnce())
    await settle()
    assert await state_of(core) is S.CONFIGURED
    assert len(backend.blobs) == 1
    await core.stop()


@pytest.mark.virtual_time
async def test_a_configure_is_driven_three_times_at_most(tmp_path: Path) -> None:
    path, backend = tmp_path / "s.db", Remembering()
    operation = await interrupted(path, backend, KEY)
    for _ in range(3):
        core, store = await core_on(path, backend, KEY)
        await settle()
        await kill(core, store)
    core, _ = await core_on(path, backend, KEY)
    assert (await core.get(SLOT)).machine.last_error.startswith("RESTARTED: ")
    assert [(op, attempt) for op, attempt, _blob in backend.blobs] == [(operation, n) for n in (1, 2, 3)]
    await core.stop()


@pytest.mark.virtual_time
async def test_a_configure_that_fails_takes_its_blob_along(tmp_path: Path) -> None:
    class Failing(Remembering):
        async def configure(self, machine: MachineView, cluster: str, blob: bytes, op: Op) -> str | None:
            raise RuntimeError("no")

    core, _ = await core_on(tmp_path / "s.db", Failing(), KEY)
    await core.create(SLOT)
    await settle()
    await core.configure(SLOT, "c", BLOB, {})
    await settle()
    assert await state_of(core) is S.FAILED
    with sqlite3.connect(tmp_path / "s.db") as file:
        assert file.execute("SELECT count(*) FROM secrets").fetchone() == (0,)
    await core.stop()


def test_a_sealed_blob_opens_for_its_machine_and_operation_alone() -> None:
    key = BlobKey(KEY, random.Random(1))
    sealed = key.seal(BLOB, "m-1", "op-1")
    assert key.open(sealed) == BLOB
    assert key.open(replace(sealed, machine_id="m-2")) is None
    assert key.open(replace(sealed, operation_id="op-2")) is None
    assert key.open(replace(sealed, text=sealed.text[:-1])) is None
    assert key.open(replace(sealed, text=b"")) is None
    assert key.seal(BLOB, "m-1", "op-1").text != sealed.text
    assert BLOB not in sealed.text
    assert "text" not in repr(sealed)


def test_a_key_file_has_32_bytes(tmp_path: Path) -> None:
    with pytest.raises(KeyFault, match="No such file"):
        read_key(tmp_path / "none")
    (tmp_path / "short").write_bytes(b"short")
    with pytest.raises(KeyFault, match="5 bytes"):
        read_key(tmp_path / "short")
    (tmp_path / "key").write_bytes(KEY)
    assert read_key(tmp_path / "key") == KEY
