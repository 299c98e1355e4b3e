"""Results that no record takes, and calls that end as cancelled: one machine pays, the others go on.

docs/spec/provider.md §6, §9, §11.
"""

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from bigfleet.model.machine import Machine
from bigfleet.model.states import MachineState
from bigfleet.provider.backend import Found, FoundKind, Host, MachineView, Op, Slot, Stockout
from bigfleet.provider.backends.fake import FakeBackend
from bigfleet.provider.kit.options import CoreOptions
from bigfleet.provider.records.refusal import ChangeRefused, Code
from bigfleet.provider.storage.sqlite import SqliteProviderStore
from bigfleet.provider.storage.store import Batch, MemoryStore
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
)

pytestmark = pytest.mark.virtual_time

S = MachineState
NO_WAY_OUT = CoreOptions(is_inline=True, failed_hold_seconds=0)
CANCELLED = "BackendCancelled: something that the backend waited for was cancelled"


def untyped_host(**fields: Any) -> Host:
    """Return what a program without a type checker may return."""
    return Host(**fields)


class Careless(FakeBackend):
    """Returns what a test says from the Create of the first machine."""

    def __init__(self, result: object) -> None:
        super().__init__(2)
        self.result = result

    async def create(self, machine: MachineView, op: Op) -> Host:
        host = await super().create(machine, op)
        return cast(Host, self.result) if machine.id == SLOT else host


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (untyped_host(ref=42), "ref is 42, it must be text"),
        (untyped_host(ref="h", node_name=None), "node_name is None, it must be text"),
        (untyped_host(ref="h-\udc80"), r"ref is 'h-\udc80', it must be text"),
        (untyped_host(ref="h", labels={"rack": 7}), "labels['rack'] is 7; key and value must be text"),
        (untyped_host(ref="h", labels={7: "rack"}), "labels[7] is 'rack'; key and value must be text"),
        (untyped_host(ref="h", labels=("rack",)), "labels is ('rack',), it must be a map of text to text"),
        (untyped_host(ref="h", resources={"cpu": 8}), "resources['cpu'] is 8; key and value must be text"),
        (untyped_host(ref="h", price_usd_per_hour="0.4"), "price_usd_per_hour is '0.4', it must be a number"),
        (untyped_host(ref="h", price_usd_per_hour=True), "price_usd_per_hour is True, it must be a number"),
    ],
)
async def test_a_host_that_no_record_takes_fails_its_create_and_no_other(
    result: Host, text: str, tmp_path: Path
) -> None:
    """The state file holds nothing of it: the next start reads every row."""
    path = tmp_path / "s.db"
    store = SqliteProviderStore(path, is_power_safe=False)
    core = await started(make_core(Careless(result), store=store, options=NO_WAY_OUT))
    await core.create(SLOT)
    await core.create("fake-1")
    await asyncio.sleep(1)
    record = await core.get(SLOT)
    assert (record.state, record.machine.last_error) == (S.FAILED, f"BACKEND: create returned a bad host: {text}")
    assert await state_of(core, "fake-1") is S.IDLE
    await core.stop()
    again = SqliteProviderStore(path, is_power_safe=False)
    assert len(again.load(b"incarnat").records) == 2
    again.close()


async def test_a_node_name_that_is_no_unicode_fails_its_configure() -> None:
    class Undecodable(FakeBackend):
        async def configure(self, machine: MachineView, cluster: str, blob: bytes, op: Op) -> str | None:
            return "node-\udc80"

    core = await started(make_core(Undecodable(1), options=NO_WAY_OUT))
    await bring_to(core, S.IDLE)
    await core.configure(SLOT, "c", b"", {})
    await settle()
    text = r"BACKEND: configure returned the node name 'node-\udc80', which is no Unicode"
    assert (await core.get(SLOT)).machine.last_error == text


async def test_a_stockout_whose_hold_is_no_number_has_the_usual_one(tmp_path: Path) -> None:
    class Texted(FakeBackend):
        async def create(self, machine: MachineView, op: Op) -> Host:
            raise Stockout("none left", cast(float, "300"))

    path = tmp_path / "s.db"
    core = await started(make_core(Texted(1), store=SqliteProviderStore(path, is_power_safe=False)))
    await core.create(SLOT)
    await asyncio.sleep(595)
    assert await state_of(core) is S.FAILED
    await asyncio.sleep(10)
    assert await state_of(core) is S.SPECULATIVE
    await core.stop()


async def test_a_bad_host_that_adopt_found_is_not_taken() -> None:
    class Misled(FakeBackend):
        async def create(self, machine: MachineView, op: Op) -> Host:
            raise RuntimeError("boom")

        async def adopt(self, machine: MachineView) -> Found:
            return Found(kind=FoundKind.CLEAN, host=untyped_host(ref=42))

    core = await started(make_core(Misled(1)))
    await core.create(SLOT)
    await asyncio.sleep(6000)
    assert await state_of(core) is S.FAILED
    assert metric(core, "recoveries_total", by="auto", result="retried") == 1


# ---- what the checks let through -------------------------------------------------------------------------------------


async def test_a_change_without_bytes_is_refused_and_the_others_of_its_batch_are_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core, _ = await fake_core(3)
    encode = core._ledger._encode

    def fails(machine: Machine, metadata: Mapping[str, str]) -> tuple[bytes, ...]:
        if machine.id == SLOT and machine.state is S.CREATING:
            raise TypeError("bad argument type")
        return encode(machine, metadata)

    monkeypatch.setattr(core._ledger, "_encode", fails)
    ids = [f"fake-{number}" for number in range(3)]
    outcomes = await asyncio.gather(*(core.create(each) for each in ids), return_exceptions=True)
    await settle()
    assert [isinstance(each, ChangeRefused) for each in outcomes] == [True, False, False]
    assert [await state_of(core, each) for each in ids] == [S.SPECULATIVE, S.IDLE, S.IDLE]
    assert is_ready(core)


async def test_a_result_that_no_row_takes_fails_its_operation_and_no_other() -> None:
    class Picky(MemoryStore):
        def commit(self, batch: Batch) -> None:
            if any(record.id == SLOT and record.state is S.IDLE for record in batch.records):
                raise TypeError("no row takes it")

    core, _ = await fake_core(3, store=Picky(), options=NO_WAY_OUT)
    for number in range(3):
        await core.create(f"fake-{number}")
    await settle()
    record = await core.get(SLOT)
    assert record.state is S.FAILED
    assert record.machine.last_error.startswith("BACKEND: what create returned cannot be used: ChangeRefused: ")
    assert record.machine.last_error.endswith("TypeError: no row takes it")
    assert [await state_of(core, f"fake-{number}") for number in (1, 2)] == [S.IDLE, S.IDLE]
    assert is_ready(core)


async def test_a_commit_that_cannot_be_shown_ends_readiness_and_no_call_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    core, _ = await fake_core(2)

    def breaks(_batch: Batch) -> None:
        raise AssertionError("a mark moved back")

    monkeypatch.setattr(core._ledger, "_apply", breaks)
    with pytest.raises(AssertionError, match="moved back"):
        await core.create(SLOT)
    await settle()
    assert not is_ready(core)
    assert (await refusal_of(core.create("fake-1")))[0] is Code.UNAVAILABLE
    await core.stop()


# ---- calls that end as cancelled -------------------------------------------------------------------------------------


async def wait_for_what_is_cancelled() -> None:
    """Wait as for a task that several calls share, which one of them took down with it."""
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


class Cancelled(FakeBackend):
    """Waits for what is cancelled, where a test says."""

    def __init__(self, method: str) -> None:
        super().__init__(2)
        self.method = method

    async def inventory(self) -> Iterable[Slot]:
        if self.method == "inventory":
            await wait_for_what_is_cancelled()
        return await super().inventory()

    async def create(self, machine: MachineView, op: Op) -> Host:
        if self.method == "create":
            await wait_for_what_is_cancelled()
        return await super().create(machine, op)

    async def adopt(self, machine: MachineView) -> Found:
        if self.method == "adopt":
            await wait_for_what_is_cancelled()
        return await super().adopt(machine)


class CancelledChecker:
    """Never learns whether a node is Ready."""

    interval_seconds = 2.0

    async def ready(self, machine: MachineView, cluster: str, op: Op) -> bool:
        await wait_for_what_is_cancelled()
        return True


async def test_a_call_that_ends_as_cancelled_fails_its_operation() -> None:
    core = await started(make_core(Cancelled("create"), options=NO_WAY_OUT))
    await core.create(SLOT)
    await settle()
    record = await core.get(SLOT)
    assert (record.state, record.machine.last_error) == (S.FAILED, f"BACKEND: {CANCELLED}")


async def test_a_readiness_check_that_ends_as_cancelled_fails_its_configure() -> None:
    core = await started(make_core(FakeBackend(1), readiness=CancelledChecker(), options=NO_WAY_OUT))
    await bring_to(core, S.IDLE)
    await core.configure(SLOT, "c", b"", {})
    await settle()
    text = f"NOT_READY: the readiness check broke: {CANCELLED}"
    assert (await core.get(SLOT)).machine.last_error == text


async def test_an_inventory_that_ends_as_cancelled_is_read_again() -> None:
    backend = Cancelled("")
    core = await started(make_core(backend))
    backend.method = "inventory"
    await asyncio.sleep(200)
    backend.method = ""
    backend.slots = FakeBackend(3).slots
    await asyncio.sleep(70)
    assert await state_of(core, "fake-2") is S.SPECULATIVE


async def test_a_look_that_ends_as_cancelled_is_a_failed_one() -> None:
    backend = Cancelled("create")
    core = await started(make_core(backend))
    await core.create(SLOT)
    await settle()
    backend.method = "adopt"
    await asyncio.sleep(605)
    assert await state_of(core) is S.FAILED
    backend.method = ""
    await asyncio.sleep(605)
    assert await state_of(core) is S.SPECULATIVE


async def test_a_core_stops_while_its_inventory_is_being_read() -> None:
    """A cancellation of the kit's own is none of the backend."""

    class Slow(FakeBackend):
        is_slow = False

        async def inventory(self) -> Iterable[Slot]:
            if self.is_slow:
                await asyncio.sleep(1000)
            return await super().inventory()

    backend = Slow(1)
    core = await started(make_core(backend))
    backend.is_slow = True
    await asyncio.sleep(100)
    async with asyncio.timeout(1):
        await core.stop()
    assert all(task.done() for task in core._background)
