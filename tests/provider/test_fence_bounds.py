"""The fence's maps stay within their bounds, whatever machines and shards callers name (docs/spec/provider.md §4)."""

import asyncio

import pytest

from bigfleet.provider.backends.fake import FakeBackend
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.records import fence
from bigfleet.provider.records.fence import Fence, Mark, Token
from bigfleet.provider.records.refusal import Code, Refused
from bigfleet.provider.storage.store import MemoryStore
from tests.provider.harness import make_core, started

pytestmark = pytest.mark.virtual_time

BOUND = 20


async def call(core: CapacityCore, machine_id: str, shard_id: str, sequence: int = 1) -> Code | None:
    """Delete a machine, which each of them refuses in the end; return with which status."""
    try:
        await core.delete(machine_id, token=Token(shard_id, 1, sequence))
    except Refused as refused:
        return refused.code
    return None


async def test_calls_for_machines_that_nobody_knows_leave_so_many_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Least recently used first, in memory and in the store."""
    monkeypatch.setattr(fence, "UNKNOWN_MARKS_MAX", BOUND)
    store = MemoryStore()
    core = await started(make_core(FakeBackend(1), store=store))
    for number in range(10 * BOUND):
        assert await call(core, f"nobody-{number}", "s") is Code.NOT_FOUND
    assert core._ledger.fence.unknown_count <= BOUND + 1
    assert len(core._ledger.fence._unknown_shards) <= BOUND + 1
    assert core._ledger.fence.mark(f"nobody-{10 * BOUND - 1}", "s") is not None
    assert len(store.load(b"").marks) <= BOUND + 1
    await core.stop()


async def test_shards_that_call_for_one_machine_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller in plain text that names ever new shards left a mark for each, for good."""
    monkeypatch.setattr(fence, "SHARDS_PER_MACHINE_MAX", BOUND)
    monkeypatch.setattr(fence, "UNKNOWN_MARK_SECONDS_MAX", 60)
    core = await started(make_core(FakeBackend(1)))
    codes = [await call(core, "fake-0", f"s{number}") for number in range(10 * BOUND)]
    assert codes[BOUND:] == [Code.RESOURCE_EXHAUSTED] * (9 * BOUND)
    assert Code.RESOURCE_EXHAUSTED not in codes[:BOUND]
    assert core._ledger.fence.known_count == BOUND
    await asyncio.sleep(1)
    # Shards that have a mark are served on, and stay fenced.
    assert await call(core, "fake-0", "s0", sequence=2) is not Code.RESOURCE_EXHAUSTED
    assert await call(core, "fake-0", "s0", sequence=2) is Code.FAILED_PRECONDITION
    # Marks of shards that are gone make room after a while, the oldest first.
    await asyncio.sleep(fence.UNKNOWN_MARK_SECONDS_MAX + 1)
    assert await call(core, "fake-0", "late") is not Code.RESOURCE_EXHAUSTED
    assert core._ledger.fence.known_count == BOUND
    assert core._ledger.fence.mark("fake-0", "s1") is None
    await core.stop()


def test_the_fence_holds_its_bound_at_full_size() -> None:
    """100,000 unknown ids and a few more."""
    full = Fence()
    for number in range(fence.UNKNOWN_MARKS_MAX + 50):
        mark = Mark(machine_id=f"m{number}", shard_id="s", epoch=1, sequence=1, used_unix_nanos=number)
        full.put(mark, is_known=False)
        full.evict(full.evictable(number, {(mark.machine_id, mark.shard_id)}))
    assert full.unknown_count == fence.UNKNOWN_MARKS_MAX
    assert full.mark("m49", "s") is None
    assert full.mark("m50", "s") is not None
