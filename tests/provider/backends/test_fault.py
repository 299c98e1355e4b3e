"""The backend that fails on request, selector by selector (docs/spec/provider.md §20)."""

import asyncio

import pytest

from bigfleet.model.states import MachineState
from bigfleet.provider.backends.fault import FaultBackend, FaultReadiness
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.kit.options import CoreOptions
from bigfleet.provider.records.record import Record
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.provider.harness import SLOT, make_core, metric, settle, started, state_of

pytestmark = pytest.mark.virtual_time
S = MachineState
T_SECONDS = 2.0


async def fault_core(*, failed_hold_seconds: float = 600.0) -> tuple[CapacityCore, FaultBackend]:
    backend = FaultBackend(6, clock=LoopClock())
    options = CoreOptions(is_inline=True, transition_timeout_seconds=T_SECONDS, failed_hold_seconds=failed_hold_seconds)
    return await started(make_core(backend, readiness=FaultReadiness(), options=options)), backend


async def configured(core: CapacityCore, cluster: str, after_seconds: float = 0.2) -> Record:
    """Bring the first slot to a host and bind it; return its record some time later."""
    await core.create(SLOT)
    await settle()
    await core.configure(SLOT, cluster, b"", {"k": "v"})
    await asyncio.sleep(after_seconds)
    return await core.get(SLOT)


async def test_eight_slots_more_cannot_be_created() -> None:
    core, backend = await fault_core()
    labelled = [slot for slot in backend.slots if slot.labels]
    assert [slot.id for slot in labelled] == [f"faultcreate-{n}" for n in range(8)]
    assert {tuple(slot.labels.items()) for slot in labelled} == {(("conformance.fault/create", "error"),)}
    assert len(backend.slots) == 14
    for slot in labelled:
        await core.create(slot.id)
    await settle()
    for slot in labelled:
        record = await core.get(slot.id)
        assert record.state is S.FAILED
        assert record.machine.last_error.startswith("BACKEND: AskedToFail: ")
        assert not record.machine.host.is_present


async def test_any_other_cluster_is_served() -> None:
    core, _backend = await fault_core()
    assert (await configured(core, "team-a")).state is S.CONFIGURED
    await core.drain(SLOT, 0)
    await settle()
    assert await state_of(core) is S.IDLE
    await core.delete(SLOT)
    await settle()
    assert await state_of(core) is S.SPECULATIVE


async def test_a_configure_that_errs_errs_at_once() -> None:
    core, _backend = await fault_core()
    record = await configured(core, "fault-error")
    assert (record.state, record.machine.last_error) == (
        S.FAILED,
        "BACKEND: AskedToFail: the cluster is fault-error",
    )
    assert (record.machine.cluster, dict(record.metadata)) == ("fault-error", {"k": "v"})


async def test_a_configure_that_hangs_fails_at_the_time_out_and_leaves_a_clean_host() -> None:
    core, backend = await fault_core(failed_hold_seconds=30)
    assert (await configured(core, "fault-timeout", T_SECONDS - 0.1)).state is S.CONFIGURING
    await asyncio.sleep(0.2)
    record = await core.get(SLOT)
    assert record.machine.last_error == "TIMEOUT: timeout: configure did not end in 2 s"
    assert backend.clusters == {}
    await asyncio.sleep(35)
    assert await state_of(core) is S.IDLE


async def test_a_late_success_changes_nothing_and_is_found_serving() -> None:
    core, backend = await fault_core(failed_hold_seconds=30)
    failed = await configured(core, "fault-slow-ok", T_SECONDS + 0.5)
    assert failed.state is S.FAILED
    assert backend.clusters == {}
    await asyncio.sleep(1)
    assert backend.clusters == {SLOT: "fault-slow-ok"}
    assert await core.get(SLOT) == failed
    assert metric(core, "late_results_total", kind="configure", compensated="no") == 1
    await asyncio.sleep(35)
    assert await state_of(core) is S.CONFIGURED


async def test_without_readiness_a_machine_is_never_configured_and_stays_failed() -> None:
    core, backend = await fault_core(failed_hold_seconds=30)
    record = await configured(core, "fault-readiness-block", T_SECONDS - 0.1)
    assert record.state is S.CONFIGURING
    assert backend.clusters == {SLOT: "fault-readiness-block"}
    await asyncio.sleep(0.2)
    record = await core.get(SLOT)
    assert record.machine.last_error.startswith("NOT_READY: timeout")
    await asyncio.sleep(100)
    assert await core.get(SLOT) == record


async def test_a_drain_that_errs_fails_and_the_machine_is_found_serving() -> None:
    core, _backend = await fault_core(failed_hold_seconds=30)
    assert (await configured(core, "fault-drain-error")).state is S.CONFIGURED
    await core.drain(SLOT, 0)
    await settle()
    record = await core.get(SLOT)
    assert (record.state, record.machine.last_error) == (
        S.FAILED,
        "BACKEND: AskedToFail: the cluster is fault-drain-error",
    )
    await asyncio.sleep(35)
    record = await core.get(SLOT)
    assert (record.state, record.machine.cluster) == (S.CONFIGURED, "fault-drain-error")
