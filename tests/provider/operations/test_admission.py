"""A backend whose slots share room: what it adds and removes is part of the step (docs/spec/provider.md §3, §16)."""

import asyncio
import sqlite3
from pathlib import Path

import pytest

from bigfleet.model.states import MachineState
from bigfleet.provider.backend import Admission, MachineView, Refusal
from bigfleet.provider.backends.fake import FakeBackend, fake_slot
from bigfleet.provider.kit.options import CoreOptions
from bigfleet.provider.records.kinds import Kind
from bigfleet.provider.records.refusal import Code, Refused
from bigfleet.provider.storage.sqlite import SqliteProviderStore
from bigfleet.provider.storage.store import MemoryStore
from tests.provider.harness import fake_core, make_core, metric, refusal_of, settle, started, state_of, token

pytestmark = pytest.mark.virtual_time

S = MachineState


class Room(FakeBackend):
    """One host with room for two small machines or one large one; `small-0`, `small-1` and `large-0` are the slots."""

    def __init__(self) -> None:
        super().__init__(0)
        self.used: dict[str, int] = {}
        self.told: list[tuple[str, MachineState]] = []
        self.answers: list[Admission | Refusal] = []
        self.is_broken = False
        self._sync()

    @staticmethod
    def size(machine_id: str) -> int:
        return 2 if machine_id.startswith("large") else 1

    def _ids(self) -> list[str]:
        free = 2 - sum(self.used.values())
        small = [i for i in ("small-0", "small-1") if i not in self.used][:free]
        return [*self.used, *small, *(["large-0"] if free == 2 else [])]

    def _sync(self) -> None:
        self.slots = [fake_slot(0, id=machine_id) for machine_id in self._ids()]

    def _difference(self) -> Admission:
        before = {slot.id for slot in self.slots}
        self._sync()
        after = {slot.id: slot for slot in self.slots}
        return Admission(
            add=tuple(slot for i, slot in after.items() if i not in before),
            remove=tuple(sorted(before - after.keys())),
            note=f"used {sum(self.used.values())} of 2",
        )

    def admit(self, machine: MachineView, kind: Kind) -> Admission | Refusal:
        if self.is_broken:
            raise RuntimeError("admit broke")
        if kind is not Kind.CREATE:
            return Admission()
        if sum(self.used.values()) + self.size(machine.id) > 2:
            return Refusal("no room for it on any host")
        self.used[machine.id] = self.size(machine.id)
        return self._difference()

    def settle(self, machine: MachineView, reached: MachineState) -> Admission:
        self.told.append((machine.id, reached))
        if reached in (S.SPECULATIVE, S.UNSPECIFIED):
            self.used.pop(machine.id, None)
        return self._difference()


async def test_slots_that_lost_their_room_go_in_the_transaction_of_the_acceptance() -> None:
    backend = Room()
    core = await started(make_core(backend))
    cursor = (await core.list()).revision
    await core.create("small-0")
    listing = await core.list((), 0, cursor)
    assert listing.removed_ids == ("large-0",)
    assert [(r.id, r.state) for r in listing.records] == [("small-0", S.CREATING)]
    assert (await refusal_of(core.create("large-0")))[0] is Code.NOT_FOUND


async def test_slots_come_back_with_the_delete_that_made_room() -> None:
    backend = Room()
    core = await started(make_core(backend))
    await core.create("large-0")
    await settle()
    assert {r.id for r in (await core.list()).records} == {"large-0"}
    await core.delete("large-0")
    await settle()
    assert {(r.id, r.state) for r in (await core.list()).records} == {
        ("large-0", S.SPECULATIVE),
        ("small-0", S.SPECULATIVE),
        ("small-1", S.SPECULATIVE),
    }
    assert backend.told == [("large-0", S.IDLE), ("large-0", S.SPECULATIVE)]


async def test_calls_in_parallel_never_take_the_same_room_twice() -> None:
    backend = Room()
    core = await started(make_core(backend))

    async def outcome(machine_id: str) -> str:
        try:
            await core.create(machine_id)
        except Refused as refused:
            return refused.code.name
        return "OK"

    outcomes = await asyncio.gather(*(outcome(i) for i in ("large-0", "small-0", "small-1")))
    assert outcomes == ["OK", "NOT_FOUND", "NOT_FOUND"]
    assert backend.used == {"large-0": 2}


async def test_a_refusal_is_exhaustion_moves_the_mark_and_changes_nothing() -> None:
    backend = Room()
    core = await started(make_core(backend))
    backend.used["elsewhere"] = 2
    before = (await core.list()).revision
    assert await refusal_of(core.create("small-0", token=token(5))) == (
        Code.RESOURCE_EXHAUSTED,
        "no room for it on any host",
    )
    assert (await core.list((), 0, before)).records == ()
    assert (await refusal_of(core.create("small-0", token=token(5))))[0] is Code.FAILED_PRECONDITION


async def test_an_admit_that_breaks_moves_the_mark_and_is_the_servers_error() -> None:
    backend = Room()
    core = await started(make_core(backend))
    backend.is_broken = True
    with pytest.raises(RuntimeError, match="admit broke"):
        await core.create("small-0", token=token(5))
    backend.is_broken = False
    assert (await refusal_of(core.create("small-0", token=token(5))))[0] is Code.FAILED_PRECONDITION
    await core.create("small-0", token=token(6))


async def test_a_failed_commit_gives_the_room_back() -> None:
    backend = Room()
    store = MemoryStore()
    core = await started(make_core(backend, store=store))
    store.is_failing = True
    assert (await refusal_of(core.create("large-0")))[0] is Code.UNAVAILABLE
    store.is_failing = False
    await asyncio.sleep(3)
    assert backend.used == {}
    assert {r.id for r in (await core.list()).records} == {"small-0", "small-1", "large-0"}
    await core.create("small-1")
    await settle()
    assert {r.id for r in (await core.list()).records} == {"small-0", "small-1"}


async def test_losses_and_failures_are_told_too() -> None:
    backend = Room()
    core = await started(make_core(backend, options=CoreOptions(is_inline=True, failed_hold_seconds=10)))
    await core.create("small-0")
    await settle()
    await core.feed.report_lost("small-0", "gone")
    assert backend.told[-1] == ("small-0", S.FAILED)
    backend.hosts.clear()
    await asyncio.sleep(70)
    assert backend.told[-1] == ("small-0", S.SPECULATIVE)
    await core.feed.report_lost("small-1", "withdrawn")
    assert backend.told[-1] == ("small-1", S.UNSPECIFIED)


async def test_an_admission_never_takes_a_machine_in_use_nor_adds_a_bad_slot() -> None:
    class Careless(FakeBackend):
        def admit(self, machine: MachineView, kind: Kind) -> Admission | Refusal:
            bad = fake_slot(0, id="bad id")
            return Admission(add=(bad, fake_slot(0, id="fake-1")), remove=("fake-0", machine.id, "nobody"))

        def settle(self, machine: MachineView, reached: MachineState) -> Admission:
            raise RuntimeError("settle broke")

    core = await started(make_core(Careless(3)))
    await core.create("fake-0")
    await settle()
    await core.create("fake-1")
    await settle()
    assert (await state_of(core, "fake-0"), await state_of(core, "fake-1")) == (S.IDLE, S.IDLE)
    assert metric(core, "records_quarantined", reason="id") == 1


async def test_a_slot_that_returns_without_room_is_removed_at_once() -> None:
    class Shrinking(Room):
        def settle(self, machine: MachineView, reached: MachineState) -> Admission:
            super().settle(machine, reached)
            return Admission(remove=(machine.id,)) if reached is S.SPECULATIVE else Admission()

    core = await started(make_core(Shrinking()))
    await core.create("large-0")
    await settle()
    await core.delete("large-0")
    await settle()
    assert (await refusal_of(core.get("large-0")))[0] is Code.NOT_FOUND


async def test_the_slots_of_an_admission_are_as_durable_as_its_acceptance(tmp_path: Path) -> None:
    store = SqliteProviderStore(tmp_path / "s.db", is_power_safe=False)
    core = await started(make_core(Room(), store=store))
    await core.create("small-0")
    with sqlite3.connect(tmp_path / "s.db") as file:
        assert {row[0] for row in file.execute("SELECT id FROM machines")} == {"small-0", "small-1"}
        assert {row[0] for row in file.execute("SELECT id FROM tombstones")} == {"large-0"}
    await core.stop()


def test_admit_without_settle_is_an_error_at_construction() -> None:
    class Half(FakeBackend):
        def admit(self, machine: MachineView, kind: Kind) -> Admission | Refusal:
            return Admission()

    with pytest.raises(TypeError, match="settle"):
        make_core(Half(1))


async def test_without_admit_everything_is_admitted() -> None:
    core, _ = await fake_core()
    await core.create("fake-0")
    await settle()
    assert await state_of(core, "fake-0") is S.IDLE
