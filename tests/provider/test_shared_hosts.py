"""One host under two machine ids (docs/spec/provider.md §9): no call ever goes to a host under a second id."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace

import pytest

from bigfleet.model.states import MachineState
from bigfleet.provider.backend import ExistingHost, Found, FoundKind, Host, LateResult, MachineView, Op, Slot
from bigfleet.provider.backends.fake import FakeBackend, fake_slot
from bigfleet.provider.backends.multiplex import Multiplex
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.kit.options import CoreOptions
from bigfleet.provider.records.record import Record
from bigfleet.provider.records.refusal import Code, StartRefused
from bigfleet.provider.records.validate import Reason
from bigfleet.provider.storage.store import Batch, Loaded, MemoryStore
from tests.provider.harness import SLOT, bring_to, make_core, refusal_of, settle, started, state_of

pytestmark = pytest.mark.virtual_time

S = MachineState
OTHER = "fake-1"
NO_WAY_OUT = CoreOptions(is_inline=True, failed_hold_seconds=0)
PASS = 67.0


class NamedHosts(FakeBackend):
    """Shows hosts and answers creates as a test says; remembers the hosts that were deleted."""

    def __init__(self, count: int = 4, id_prefix: str = "") -> None:
        super().__init__(count)
        if id_prefix:
            self.slots = [fake_slot(number, id=f"{id_prefix}fake-{number}") for number in range(count)]
        #: What the inventory shows in place of the hosts that there are, by id.
        self.shown: dict[str, str] | None = None
        self.answers: dict[str, str] = {}
        self.found: dict[str, Found] = {}
        self.deleted: list[tuple[str, str]] = []
        self.compensated: list[str] = []

    async def inventory(self) -> Iterable[Slot]:
        shown = self.hosts if self.shown is None else self.shown
        known = {slot.id: slot for slot in self.slots}
        return [
            *self.slots,
            *(ExistingHost.of(known.get(each, fake_slot(0, id=each)), host_ref=ref) for each, ref in shown.items()),
        ]

    async def create(self, machine: MachineView, op: Op) -> Host:
        await self._enter(machine, op)
        ref = self.hosts.setdefault(machine.id, self.answers.get(machine.id, f"host-{machine.id}"))
        return Host(ref=ref)

    async def delete(self, machine: MachineView, op: Op) -> None:
        self.deleted.append((machine.id, machine.host.ref))
        await super().delete(machine, op)

    async def adopt(self, machine: MachineView) -> Found:
        return self.found.get(machine.id) or await super().adopt(machine)


class Compensating(NamedHosts):
    async def compensate(self, machine: MachineView, late: LateResult) -> None:
        self.compensated.append("" if late.host is None else late.host.ref)


async def core_of(backend: NamedHosts, options: CoreOptions = NO_WAY_OUT) -> CapacityCore:
    return await started(make_core(backend, options=options))


def quarantined(core: CapacityCore, machine_id: str) -> tuple[Reason, str]:
    fault = core.quarantine.faults[machine_id]
    return fault.reason, fault.text


@pytest.mark.parametrize("second_id", [OTHER, "FAKE-0"], ids=["a slot", "an id that is new"])
async def test_a_host_that_serves_is_not_taken_under_a_second_id(second_id: str) -> None:
    backend = NamedHosts()
    core = await core_of(backend)
    await bring_to(core, S.CONFIGURED)
    backend.shown = {second_id: f"host-{SLOT}"}
    await asyncio.sleep(PASS)
    reason, text = quarantined(core, second_id)

    assert reason is Reason.SHARED_HOST
    assert f"host-{SLOT}" in text
    assert SLOT in text
    await asyncio.sleep(6 * PASS)
    code, _ = await refusal_of(core.delete(second_id))
    assert code in (Code.ABORTED, Code.NOT_FOUND)
    await settle()
    assert backend.deleted == []


async def test_a_host_that_appears_under_two_ids_is_taken_under_none() -> None:
    backend = NamedHosts()
    core = await core_of(backend)
    backend.shown = {SLOT: "twin", OTHER: "twin"}
    await asyncio.sleep(5 * PASS)

    assert (await state_of(core, SLOT), await state_of(core, OTHER)) == (S.SPECULATIVE, S.SPECULATIVE)
    for machine_id, other in ((SLOT, OTHER), (OTHER, SLOT)):
        reason, text = quarantined(core, machine_id)
        assert reason is Reason.SHARED_HOST
        assert other in text
    backend.shown = {OTHER: "twin"}
    await asyncio.sleep(3 * PASS)
    assert (await core.get(OTHER)).machine.host.ref == "twin"
    assert dict(core.quarantine.faults) == {}


async def test_a_first_inventory_with_one_host_under_two_ids_ends_the_start() -> None:
    backend = NamedHosts()
    backend.shown = {SLOT: "twin", OTHER: "twin"}
    core = make_core(backend)
    await core.start()
    with pytest.raises(StartRefused, match="twin"):
        await core.loaded()


async def test_a_create_that_answers_another_machines_host_fails() -> None:
    backend = NamedHosts()
    core = await core_of(backend)
    await bring_to(core, S.CONFIGURED)
    backend.answers[OTHER] = f"host-{SLOT}"
    await core.create(OTHER)
    await settle()
    record = await core.get(OTHER)

    assert (record.state, record.machine.host.is_present) == (S.FAILED, False)
    assert f"host-{SLOT}" in record.machine.last_error
    assert SLOT in record.machine.last_error
    assert (await state_of(core), backend.deleted) == (S.CONFIGURED, [])


async def test_of_two_creates_that_answer_one_host_at_the_same_time_one_fails() -> None:
    backend = NamedHosts()
    core = await core_of(backend)
    backend.answers = {SLOT: "twin", OTHER: "twin"}
    await asyncio.gather(core.create(SLOT), core.create(OTHER))
    await settle()
    records = [await core.get(SLOT), await core.get(OTHER)]

    assert sorted(record.state.name for record in records) == ["FAILED", "IDLE"]
    assert [record.machine.host.ref for record in records if record.state is S.IDLE] == ["twin"]
    [lost] = [record for record in records if record.state is S.FAILED]
    assert "twin" in lost.machine.last_error


@pytest.mark.parametrize("kind", [FoundKind.CLEAN, FoundKind.DIRTY])
async def test_adopt_that_finds_another_machines_host_is_an_error(kind: FoundKind) -> None:
    backend = NamedHosts()
    core = await core_of(backend, CoreOptions(is_inline=True, failed_hold_seconds=60.0))
    await bring_to(core, S.CONFIGURED)
    backend.shown = {SLOT: f"host-{SLOT}"}
    backend.answers[OTHER] = f"host-{SLOT}"
    backend.found[OTHER] = Found(kind=kind, host=Host(ref=f"host-{SLOT}"))
    await core.create(OTHER)
    await asyncio.sleep(1000)

    assert (await state_of(core, OTHER), await state_of(core)) == (S.FAILED, S.CONFIGURED)
    assert backend.deleted == []


@pytest.mark.parametrize("backend_type", [NamedHosts, Compensating])
async def test_a_late_host_that_is_another_machines_is_not_deleted(
    backend_type: type[NamedHosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = backend_type()
    options = CoreOptions(is_inline=True, failed_hold_seconds=0, transition_timeout_seconds=10.0)
    core = await core_of(backend, options)
    await bring_to(core, S.CONFIGURED)
    late: list[asyncio.Event] = [asyncio.Event()]

    async def swallows(machine: MachineView, op: Op) -> Host:
        try:
            await late[0].wait()
        except asyncio.CancelledError:
            await late[0].wait()
        return Host(ref=f"host-{SLOT}")

    monkeypatch.setattr(backend, "create", swallows)
    await core.create(OTHER)
    await asyncio.sleep(11)
    assert await state_of(core, OTHER) is S.FAILED
    late[0].set()
    await settle()

    assert (backend.deleted, backend.compensated) == ([], [])


async def test_a_host_moves_to_another_id_once_its_machine_gave_it_up() -> None:
    backend = NamedHosts()
    core = await core_of(backend)
    backend.answers = {SLOT: "shelf-7", OTHER: "shelf-7"}
    await bring_to(core, S.IDLE)
    await core.delete(SLOT)
    await settle()
    await bring_to(core, S.IDLE, OTHER)
    assert (await core.get(OTHER)).machine.host.ref == "shelf-7"
    await core.delete(OTHER)
    await settle()
    backend.shown = {"fake-2": "shelf-7"}
    await asyncio.sleep(3 * PASS)

    assert (await core.get("fake-2")).machine.host.ref == "shelf-7"
    assert dict(core.quarantine.faults) == {}


async def test_a_host_moves_to_another_id_once_the_loss_of_its_machine_was_recovered() -> None:
    backend = NamedHosts()
    core = await core_of(backend, CoreOptions(is_inline=True, failed_hold_seconds=60.0))
    await bring_to(core, S.IDLE)
    backend.shown = {OTHER: f"host-{SLOT}"}
    backend.found[SLOT] = Found(kind=FoundKind.NO_HOST)
    await asyncio.sleep(10 * PASS)

    assert await state_of(core) is S.SPECULATIVE
    assert (await core.get(OTHER)).machine.host.ref == f"host-{SLOT}"


async def test_parts_of_a_multiplex_may_use_one_ref_each() -> None:
    parts = {prefix: NamedHosts(2, prefix) for prefix in ("a/", "b/")}
    core = await started(make_core(Multiplex(parts), options=NO_WAY_OUT))
    for prefix, part in parts.items():
        part.answers[f"{prefix}fake-0"] = "node-1"
        await bring_to(core, S.IDLE, f"{prefix}fake-0")
    await asyncio.sleep(2 * PASS)

    assert [(await core.get(f"{prefix}fake-0")).machine.host.ref for prefix in parts] == ["node-1", "node-1"]
    assert dict(core.quarantine.faults) == {}


class FormerStore(MemoryStore):
    """Retains what was committed, so that a test can change it before the next start."""

    def __init__(self) -> None:
        super().__init__()
        self.records: dict[str, Record] = {}
        self.head = 0

    def load(self, new_incarnation: bytes) -> Loaded:
        return Loaded(
            incarnation=new_incarnation,
            head=self.head,
            records=tuple(sorted(self.records.values(), key=lambda record: record.revision)),
        )

    def commit(self, batch: Batch) -> None:
        super().commit(batch)
        self.records |= {record.id: record for record in batch.records}
        self.head = batch.head


async def test_no_call_goes_to_a_host_that_an_older_state_shows_under_two_ids() -> None:
    """A state file of a former version may have such a pair; no call is taken until one id gave the host up."""
    store = FormerStore()
    backend = NamedHosts()
    core = await started(make_core(backend, store=store, options=NO_WAY_OUT))
    await bring_to(core, S.CONFIGURED)
    await bring_to(core, S.IDLE, OTHER)
    await core.stop()
    record = store.records[OTHER]
    host = record.machine.host._replace(ref=f"host-{SLOT}")
    store.records[OTHER] = replace(record, machine=replace(record.machine, host=host))
    backend.shown = {SLOT: f"host-{SLOT}", OTHER: f"host-{SLOT}"}
    core = await started(make_core(backend, store=store, options=NO_WAY_OUT))
    calls = len(backend.calls)
    for call in (core.delete(OTHER), core.configure(OTHER, "c-2", b"", {}), core.drain(SLOT, 0)):
        code, text = await refusal_of(call)
        assert code is Code.ABORTED
        assert f"host-{SLOT}" in text
    assert len(backend.calls) == calls
    backend.shown = {SLOT: f"host-{SLOT}"}
    await asyncio.sleep(4 * PASS)
    await core.administration.recover("test", OTHER, "speculative", is_out_of_service=False)
    await core.drain(SLOT, 0)
    await settle()
    assert await state_of(core) is S.IDLE
