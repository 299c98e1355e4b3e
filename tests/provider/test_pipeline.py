"""The checks of a mutating call, their order, the fence and repeats (docs/spec/provider.md §3, §4, §5)."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import cast

import pytest

from bigfleet.model.states import MachineState
from bigfleet.provider.backend import Backend
from bigfleet.provider.backends.fake import FakeBackend
from bigfleet.provider.kit.core import AcceptedCall, CapacityCore
from bigfleet.provider.records.calls import BLOB_BYTES_MAX, METADATA_BYTES_MAX
from bigfleet.provider.records.fence import NO_TOKEN, Token
from bigfleet.provider.records.kinds import Kind
from bigfleet.provider.records.refusal import Code
from bigfleet.provider.storage.store import MemoryStore
from tests.provider.harness import (
    SLOT,
    bring_to,
    fake_core,
    is_ready,
    make_core,
    metric,
    refusal_of,
    settle,
    started,
    state_of,
    token,
)

pytestmark = pytest.mark.virtual_time

S = MachineState
INT64_MAX = 2**63 - 1
INT64_MIN = -(2**63)


def call(
    core: CapacityCore, kind: Kind, machine_id: str = SLOT, with_token: Token = NO_TOKEN
) -> Awaitable[AcceptedCall]:
    match kind:
        case Kind.CREATE:
            return core.create(machine_id, token=with_token)
        case Kind.CONFIGURE:
            return core.configure(machine_id, "c-1", b"blob", {"k": "v"}, token=with_token)
        case Kind.DRAIN:
            return core.drain(machine_id, 0, token=with_token)
        case Kind.DELETE:
            return core.delete(machine_id, token=with_token)


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("state", [S.SPECULATIVE, S.IDLE, S.CONFIGURED])
async def test_each_call_is_taken_from_its_source_state_alone(kind: Kind, state: MachineState) -> None:
    core, _ = await fake_core()
    await bring_to(core, state)
    sources = {Kind.CREATE: S.SPECULATIVE, Kind.CONFIGURE: S.IDLE, Kind.DRAIN: S.CONFIGURED, Kind.DELETE: S.IDLE}
    repeats = {(Kind.CREATE, S.IDLE), (Kind.CONFIGURE, S.CONFIGURED)}
    before = await core.get(SLOT)

    if sources[kind] is state or (kind, state) in repeats:
        await call(core, kind)
    else:
        code, message = await refusal_of(call(core, kind))
        assert code is Code.ABORTED
        assert message == f"out of position: {kind.method} needs {sources[kind].name}, {SLOT} is {state.name}"
        assert await core.get(SLOT) == before


@pytest.mark.parametrize("kind", Kind)
async def test_the_fence_comes_before_the_look_at_the_machine(kind: Kind) -> None:
    core, _ = await fake_core()
    assert (await refusal_of(call(core, kind, "nobody", token(5))))[0] is Code.NOT_FOUND
    assert (await refusal_of(call(core, kind, "nobody", token(5))))[0] is Code.FAILED_PRECONDITION
    assert (await refusal_of(call(core, kind, "nobody", token(6))))[0] is Code.NOT_FOUND


BAD_ARGUMENTS: dict[str, Callable[[CapacityCore], Awaitable[AcceptedCall]]] = {
    "empty machine": lambda c: c.create("", token=token(1)),
    "long machine": lambda c: c.create("m" * 254, token=token(1)),
    "empty cluster": lambda c: c.configure(SLOT, "", b"", {}, token=token(1)),
    "long cluster": lambda c: c.configure(SLOT, "ä" * 127, b"", {}, token=token(1)),
    "negative grace": lambda c: c.drain(SLOT, -1, token=token(1)),
    "long shard": lambda c: c.create(SLOT, token=token(1, shard="s" * 254)),
    "epoch without shard": lambda c: c.create(SLOT, token=Token("", 1, 0)),
    "sequence without shard": lambda c: c.create(SLOT, token=Token("", 0, -1)),
    "metadata": lambda c: c.configure(SLOT, "c", b"", {"k": "v" * METADATA_BYTES_MAX}, token=token(1)),
    "blob": lambda c: c.configure(SLOT, "c", b"x" * (BLOB_BYTES_MAX + 1), {}, token=token(1)),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
async def test_bad_arguments_are_refused_before_the_fence_moves(name: str) -> None:
    core, _ = await fake_core()
    assert (await refusal_of(BAD_ARGUMENTS[name](core)))[0] is Code.INVALID_ARGUMENT
    await core.create(SLOT, token=token(1))


async def test_arguments_at_their_bounds_are_taken() -> None:
    core, _ = await fake_core()
    await bring_to(core, S.IDLE)
    await core.configure(SLOT, "c" * 253, b"x" * BLOB_BYTES_MAX, {"k": "v" * (METADATA_BYTES_MAX - 1)})


TOKENS = [
    # (epoch, sequence), passes
    ((1, 5), True),
    ((1, 5), False),
    ((1, 4), False),
    ((1, 9), True),
    ((0, INT64_MAX), False),
    ((2, -7), True),
    ((2, -8), False),
    ((2, 0), True),
    ((1, INT64_MAX), False),
    ((INT64_MAX, INT64_MAX), True),
    ((INT64_MAX, INT64_MAX), False),
    ((INT64_MAX, INT64_MIN), False),
]


async def test_tokens_pass_exactly_when_strictly_newer() -> None:
    core, _ = await fake_core()
    for (epoch, sequence), passes in TOKENS:
        code, _message = await refusal_of(core.drain(SLOT, 0, token=token(sequence, epoch=epoch)))
        assert code is (Code.ABORTED if passes else Code.FAILED_PRECONDITION), (epoch, sequence)


async def test_negative_tokens_pass_on_first_contact_and_zero_is_a_token() -> None:
    core, _ = await fake_core()
    await core.create(SLOT, token=Token("s", INT64_MIN, INT64_MIN))
    await core.create("fake-1", token=Token("s", 0, 0))
    assert (await refusal_of(core.create("fake-1", token=Token("s", 0, 0))))[0] is Code.FAILED_PRECONDITION


async def test_marks_leak_neither_between_shards_nor_between_machines() -> None:
    core, _ = await fake_core()
    await core.create(SLOT, token=token(100, shard="a"))
    await core.create("fake-1", token=token(1, shard="a"))
    await core.create(SLOT, token=token(1, shard="b"))


async def test_absent_tokens_are_never_fenced_and_leave_no_mark() -> None:
    core, _ = await fake_core()
    await core.create(SLOT, token=token(7))
    await core.create(SLOT)
    assert (await refusal_of(core.create(SLOT, token=token(7))))[0] is Code.FAILED_PRECONDITION


async def test_a_token_moves_its_mark_even_when_the_call_is_refused() -> None:
    core, _ = await fake_core()
    assert (await refusal_of(core.drain(SLOT, 0, token=token(50))))[0] is Code.ABORTED
    assert (await refusal_of(core.create(SLOT, token=token(50))))[0] is Code.FAILED_PRECONDITION
    assert await state_of(core) is S.SPECULATIVE


async def test_a_repeat_returns_the_same_operation_and_begins_nothing() -> None:
    core, backend = await fake_core()
    backend.hold(Kind.CREATE)
    first = await core.create(SLOT)
    again = await core.create(SLOT)
    backend.release(SLOT)
    await settle()
    later = await core.create(SLOT)

    assert first.operation_id == again.operation_id == later.operation_id
    assert [kind for kind, _id, _op in backend.calls] == [Kind.CREATE]
    assert first.operation_id.startswith("op-")
    assert len(first.operation_id) <= 64


async def test_a_drain_on_idle_is_a_repeat_only_while_it_is_the_latest_operation() -> None:
    core, _ = await fake_core()
    await bring_to(core, S.CONFIGURED)
    drained = await core.drain(SLOT, 0)
    await settle()
    assert (await core.drain(SLOT, 9)).operation_id == drained.operation_id
    await core.delete(SLOT)
    await settle()
    await core.create(SLOT)
    await settle()
    assert (await refusal_of(core.drain(SLOT, 0)))[0] is Code.ABORTED


@pytest.mark.parametrize(
    ("cluster", "metadata", "differs"), [("c-2", {"k": "v"}, "cluster_id"), ("c-1", {}, "shard_metadata")]
)
async def test_a_configure_that_binds_otherwise_is_a_conflict(
    cluster: str, metadata: dict[str, str], differs: str
) -> None:
    core, _ = await fake_core()
    await bring_to(core, S.CONFIGURED)
    code, message = await refusal_of(core.configure(SLOT, cluster, b"another blob", metadata))
    assert code is Code.ALREADY_EXISTS
    assert differs in message
    assert "c-2" not in message


async def test_parallel_equal_calls_are_one_operation() -> None:
    core, backend = await fake_core()
    acks = await asyncio.gather(*(core.create(SLOT, token=token(n, shard=f"s-{n}")) for n in range(16)))
    await settle()
    assert len({ack.operation_id for ack in acks}) == 1
    assert len(backend.calls) == 1


async def test_five_transitions_have_five_ids() -> None:
    core, _ = await fake_core()
    ids = []
    for kind in (Kind.CREATE, Kind.CONFIGURE, Kind.DRAIN, Kind.CONFIGURE, Kind.DRAIN):
        ids.append((await call(core, kind)).operation_id)
        await settle()
    assert len(set(ids)) == 5


async def test_the_ack_shows_the_transitional_state_with_its_binding() -> None:
    core, backend = await fake_core()
    await bring_to(core, S.IDLE)
    backend.hold(Kind.CONFIGURE)
    sent = {"": "empty", "k\x00": "\x01", "ü": "日本"}
    ack = await core.configure(SLOT, "c-9", b"", sent)
    sent["later"] = "x"

    assert ack.record.state is S.CONFIGURING
    assert ack.record.machine.cluster == "c-9"
    assert dict(ack.record.metadata) == {"": "empty", "k\x00": "\x01", "ü": "日本"}


async def test_a_drain_keeps_the_binding_until_it_clears_all_of_it_at_once() -> None:
    core, backend = await fake_core()
    await bring_to(core, S.CONFIGURED)
    backend.hold(Kind.DRAIN)
    await core.drain(SLOT, 0)
    await settle()
    during = await core.get(SLOT)
    backend.release(SLOT)
    await settle()
    after = await core.get(SLOT)

    assert (during.state, during.machine.cluster, dict(during.metadata)) == (S.DRAINING, "c-1", {"k": "v"})
    assert (after.state, after.machine.cluster, dict(after.metadata)) == (S.IDLE, "", {})


async def test_fixed_capacity_is_not_deleted() -> None:
    backend = FakeBackend(1)
    backend.slots = [replace(backend.slots[0], fixed=True)]
    core = await started(make_core(backend))
    await bring_to(core, S.IDLE)
    assert (await refusal_of(core.delete(SLOT)))[0] is Code.UNIMPLEMENTED
    assert await state_of(core) is S.IDLE


async def test_a_failed_commit_leaves_no_trace() -> None:
    store = MemoryStore()
    core, backend = await fake_core(store=store)
    store.is_failing = True
    assert (await refusal_of(core.create(SLOT, token=token(1))))[0] is Code.UNAVAILABLE
    assert not is_ready(core)
    assert (await refusal_of(core.create(SLOT, token=token(1))))[0] is Code.UNAVAILABLE
    assert await state_of(core) is S.SPECULATIVE
    store.is_failing = False
    await asyncio.sleep(2)
    assert is_ready(core)
    await core.create(SLOT, token=token(1))
    await settle()
    assert await state_of(core) is S.IDLE
    assert len(backend.calls) == 1


async def test_a_completion_waits_for_a_store_that_is_down() -> None:
    store = MemoryStore()
    core, backend = await fake_core(store=store)
    backend.hold(Kind.CREATE)
    await core.create(SLOT)
    await settle()
    store.is_failing = True
    backend.release(SLOT)
    await asyncio.sleep(5)
    assert await state_of(core) is S.CREATING
    store.is_failing = False
    await asyncio.sleep(3)
    assert await state_of(core) is S.IDLE


async def test_reads_and_refusals_by_name() -> None:
    core, _ = await fake_core()
    assert (await refusal_of(core.get("")))[0] is Code.INVALID_ARGUMENT
    assert (await refusal_of(core.get("nobody")))[0] is Code.NOT_FOUND
    await core.stop()
    assert (await refusal_of(core.create(SLOT)))[0] is Code.UNAVAILABLE


async def test_a_fence_rejection_is_counted() -> None:
    core, _ = await fake_core()
    await core.create(SLOT, token=token(2))
    await refusal_of(core.create(SLOT, token=token(1)))
    assert metric(core, "fence_rejections_total", method="Create") == 1
    assert metric(core, "fence_marks", scope="known") == 1


async def test_a_backend_with_a_wrong_signature_is_refused_at_construction() -> None:
    class Wrong(FakeBackend):
        async def create(self, machine: object) -> None:  # type: ignore[override]
            """Take too little."""

    with pytest.raises(TypeError, match=r"Wrong.create must be callable as create\(self, machine, op\)"):
        make_core(cast(Backend, Wrong(1)))
