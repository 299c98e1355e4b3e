"""A drained machine whose former cluster left data on it goes to no other cluster (docs/spec/provider.md §2.1)."""

from dataclasses import replace
from pathlib import Path

import pytest

from bigfleet.model.states import MachineState
from bigfleet.provider.backend import Host, Limits, MachineView, Op, Reset
from bigfleet.provider.backends.fake import FakeBackend, fake_slot
from bigfleet.provider.backends.multiplex import Multiplex
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.records.record import Record
from bigfleet.provider.records.refusal import Code
from bigfleet.provider.records.validate import Reason, facts_fault
from bigfleet.provider.storage.sqlite import SqliteProviderStore
from bigfleet.provider.storage.store import MemoryStore, Store
from tests.provider.harness import SLOT, make_core, refusal_of, settle, started

LABEL = "bigfleet.dev/reset"


def backend_of(reset: Reset | None) -> FakeBackend:
    return FakeBackend(3, limits=Limits(reset=reset))


async def core_of(backend: FakeBackend, store: Store | None = None) -> CapacityCore:
    return await started(make_core(backend, store=store or MemoryStore()))


async def resting(core: CapacityCore, state: MachineState) -> Record:
    """Return the first machine, which must have arrived."""
    await settle()
    record = await core.get(SLOT)
    assert record.state is state
    return record


async def configure(core: CapacityCore, cluster: str) -> Record:
    await core.configure(SLOT, cluster, b"blob", {"k": "v"})
    return await resting(core, MachineState.CONFIGURED)


async def drain(core: CapacityCore) -> Record:
    await core.drain(SLOT, 0)
    return await resting(core, MachineState.IDLE)


async def served(core: CapacityCore, cluster: str = "team-a") -> None:
    """Let the first machine serve a cluster and drain it."""
    await core.create(SLOT)
    await resting(core, MachineState.IDLE)
    await configure(core, cluster)
    await drain(core)


async def expect_refused(core: CapacityCore, cluster: str) -> None:
    text = f"{SLOT} served team-a and its drain resets nothing: it can only return to team-a, or be deleted"
    assert await refusal_of(core.configure(SLOT, cluster, b"blob", {"k": "v"})) == (Code.ABORTED, text)
    machine = (await core.get(SLOT)).machine
    assert (machine.state, machine.cluster) == (MachineState.IDLE, "")


async def test_a_machine_that_is_not_reset_returns_to_its_cluster_only() -> None:
    core = await core_of(backend_of(Reset.NONE))
    await served(core)

    await expect_refused(core, "team-b")

    assert (await configure(core, "team-a")).machine.cluster == "team-a"
    await drain(core)
    await expect_refused(core, "team-b")
    await core.stop()


async def test_a_machine_that_was_deleted_is_another_host() -> None:
    core = await core_of(backend_of(Reset.NONE))
    await served(core)
    await core.delete(SLOT)
    await resting(core, MachineState.SPECULATIVE)
    await core.create(SLOT)
    await resting(core, MachineState.IDLE)

    assert (await configure(core, "team-b")).machine.cluster == "team-b"
    await core.stop()


@pytest.mark.parametrize("reset", [Reset.REBOOT, Reset.REIMAGE, None])
async def test_a_machine_that_was_reset_goes_to_every_cluster(reset: Reset | None) -> None:
    core = await core_of(backend_of(reset))
    await served(core)

    assert (await configure(core, "team-b")).machine.cluster == "team-b"
    await core.stop()


async def test_a_restart_with_another_declaration_forgets_nothing(tmp_path: Path) -> None:
    backend = backend_of(Reset.NONE)
    core = await core_of(backend, SqliteProviderStore(tmp_path / "s.db"))
    await served(core)
    await core.stop()

    backend.limits = Limits(reset=Reset.REIMAGE)
    core = await core_of(backend, SqliteProviderStore(tmp_path / "s.db"))
    await expect_refused(core, "team-b")
    # The drain of now resets the host.
    await configure(core, "team-a")
    await drain(core)
    assert (await configure(core, "team-b")).machine.cluster == "team-b"
    await core.stop()


async def test_a_machine_that_was_recovered_without_a_drain_is_not_reset_either() -> None:
    backend = backend_of(Reset.NONE)
    core = await core_of(backend)
    await core.create(SLOT)
    await resting(core, MachineState.IDLE)
    await configure(core, "team-a")
    await core.feed.report_lost(SLOT, "unplugged")
    await resting(core, MachineState.FAILED)
    await core.administration.recover("uid 0", SLOT, "idle", is_out_of_service=True)

    await expect_refused(core, "team-b")
    await core.stop()


@pytest.mark.parametrize("reset", list(Reset))
async def test_every_machine_shows_the_declaration(reset: Reset) -> None:
    core = await core_of(backend_of(reset))
    for record in (await core.list()).records:
        assert record.machine.labels[LABEL] == reset.value
    await core.create(SLOT)
    assert (await resting(core, MachineState.IDLE)).machine.labels[LABEL] == reset.value
    await core.stop()


async def test_the_label_of_a_machine_overrides_the_declaration() -> None:
    backend = backend_of(Reset.REIMAGE)
    backend.slots = [replace(slot, labels={LABEL: "none"}) for slot in backend.slots]
    core = await core_of(backend)
    await served(core)

    await expect_refused(core, "team-b")
    await core.stop()


async def test_labels_of_a_create_do_not_hide_the_declaration() -> None:
    class Labelling(FakeBackend):
        async def create(self, machine: MachineView, op: Op) -> Host:
            return replace(await super().create(machine, op), labels={"rack": "b-17"})

    core = await core_of(Labelling(3, limits=Limits(reset=Reset.NONE)))
    await served(core)

    assert (await core.get(SLOT)).machine.labels == {"rack": "b-17", LABEL: "none"}
    await expect_refused(core, "team-b")
    await core.stop()


async def test_parts_of_a_multiplex_declare_each_for_itself() -> None:
    other = backend_of(Reset.REIMAGE)
    other.slots = [replace(slot, id=slot.id.replace("fake", "other")) for slot in other.slots]
    core = await started(make_core(Multiplex({"fake-": backend_of(Reset.NONE), "other-": other})))

    shown = {record.id: record.machine.labels[LABEL] for record in (await core.list()).records}
    assert {value for id, value in shown.items() if id.startswith("fake-")} == {"none"}
    assert {value for id, value in shown.items() if id.startswith("other-")} == {"reimage"}
    await served(core)
    await expect_refused(core, "team-b")
    await core.stop()


def test_a_label_with_another_value_is_a_fault() -> None:
    slot = replace(fake_slot(0, id=SLOT), labels={LABEL: "sometimes"})
    assert facts_fault(slot) == (
        Reason.LABEL,
        "label 'bigfleet.dev/reset' is 'sometimes'; write one of none, reboot, reimage",
    )
