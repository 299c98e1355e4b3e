"""What a reply has shown, a kill does not take back (docs/spec/provider.md §11, §12)."""

import asyncio
from pathlib import Path

import pytest

from bigfleet.model.states import MachineState
from bigfleet.provider.backends.fake import FakeBackend
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.records.kinds import Kind
from bigfleet.provider.records.refusal import Code
from bigfleet.provider.storage.sqlite import SqliteProviderStore
from bigfleet.provider.storage.store import Store
from tests.provider.harness import SLOT, bring_to, make_core, refusal_of, settle, started, state_of, token

S = MachineState


async def kill(core: CapacityCore, store: Store) -> None:
    """End every task of the core where it stands, and let go of the file, as kill -9 does."""
    own = asyncio.current_task()
    tasks = [task for task in asyncio.all_tasks() if task is not own]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    store.close()


async def restarted(backend: FakeBackend, path: Path) -> tuple[CapacityCore, SqliteProviderStore]:
    store = SqliteProviderStore(path, is_power_safe=False)
    return await started(make_core(backend, store=store)), store


@pytest.mark.virtual_time
async def test_marks_operations_bindings_and_cursors_survive_a_kill(tmp_path: Path) -> None:
    backend = FakeBackend(6)
    core, store = await restarted(backend, tmp_path / "s.db")
    await bring_to(core, S.IDLE)
    ack = await core.configure(SLOT, "c-1", b"", {"k": "v\x00"}, token=token(9))
    await settle()
    before = await core.get(SLOT)
    cursor = (await core.list()).revision
    await kill(core, store)

    core, store = await restarted(backend, tmp_path / "s.db")
    after = await core.get(SLOT)
    assert (after.machine, dict(after.metadata), after.revision) == (before.machine, {"k": "v\x00"}, before.revision)
    assert (await core.list((), 0, cursor)).records == ()
    assert (await refusal_of(core.drain(SLOT, 0, token=token(9))))[0] is Code.FAILED_PRECONDITION
    assert (await core.configure(SLOT, "c-1", b"", {"k": "v\x00"})).operation_id == ack.operation_id
    await core.drain(SLOT, 0, token=token(1, shard="another"))
    await core.stop()


@pytest.mark.virtual_time
async def test_an_interrupted_create_fails_or_is_driven_again_with_the_same_id(tmp_path: Path) -> None:
    for is_resumable in (False, True):
        backend = FakeBackend(2, resumable=frozenset(Kind) if is_resumable else frozenset())
        path = tmp_path / f"{is_resumable}.db"
        core, store = await restarted(backend, path)
        backend.hold(Kind.CREATE)
        ack = await core.create(SLOT)
        await settle()
        await kill(core, store)
        core, store = await restarted(backend, path)
        await settle()
        if is_resumable:
            assert await state_of(core) is S.CREATING
            backend.release(SLOT)
            await settle()
            assert await state_of(core) is S.IDLE
            assert {op for _kind, _machine, op in backend.calls} == {ack.operation_id}
        else:
            assert (await core.get(SLOT)).machine.last_error.startswith("RESTARTED: ")
        await core.stop()


@pytest.mark.virtual_time
async def test_an_operation_is_driven_three_times_at_most(tmp_path: Path) -> None:
    backend = FakeBackend(1, resumable=frozenset(Kind))
    backend.hold(Kind.CREATE)
    core, store = await restarted(backend, tmp_path / "s.db")
    await core.create(SLOT)
    await settle()
    for _ in range(3):
        assert await state_of(core) is S.CREATING
        await kill(core, store)
        core, store = await restarted(backend, tmp_path / "s.db")
        await settle()
    assert (await core.get(SLOT)).machine.last_error.startswith("RESTARTED: ")
    assert len(backend.calls) == 3
    await core.stop()
