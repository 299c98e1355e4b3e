"""Work in the background: timeouts, late results, retries, readiness, queues (docs/spec/provider.md §6, §7, §15)."""

import asyncio
import threading
from collections.abc import Callable
from types import MappingProxyType

import pytest

from bigfleet.model.states import MachineState
from bigfleet.provider.backend import Host, KindLimits, Limits, MachineView, Op, Stockout, Transient
from bigfleet.provider.backends.fake import FakeBackend
from bigfleet.provider.kit.options import CoreOptions
from bigfleet.provider.records.kinds import TIMEOUT_SECONDS, Kind, timeout_seconds
from bigfleet.provider.records.refusal import Code
from tests.patience import PATIENCE_SECONDS
from tests.provider.harness import SLOT, bring_to, fake_core, make_core, metric, refusal_of, settle, started, state_of

pytestmark = pytest.mark.virtual_time

S = MachineState
NO_WAY_OUT = CoreOptions(is_inline=True, failed_hold_seconds=0)


@pytest.mark.parametrize(("grace_seconds", "expected_seconds"), [(0, 600), (30, 600), (600, 660), (3600, 3660)])
def test_a_drain_gets_its_grace_and_a_margin(grace_seconds: int, expected_seconds: float) -> None:
    assert timeout_seconds(Kind.DRAIN, 600, grace_seconds) == expected_seconds
    assert timeout_seconds(Kind.CREATE, 300, grace_seconds) == 300


@pytest.mark.parametrize("kind", [Kind.CREATE, Kind.CONFIGURE, Kind.DRAIN, Kind.DELETE])
async def test_an_overrun_is_failed_at_its_timeout(kind: Kind) -> None:
    core, backend = await fake_core(options=NO_WAY_OUT)
    await bring_to(core, {Kind.CREATE: S.SPECULATIVE, Kind.DRAIN: S.CONFIGURED}.get(kind, S.IDLE))
    backend.hold(kind)
    match kind:
        case Kind.CREATE:
            await core.create(SLOT)
        case Kind.CONFIGURE:
            await core.configure(SLOT, "c", b"", {})
        case Kind.DRAIN:
            await core.drain(SLOT, 0)
        case Kind.DELETE:
            await core.delete(SLOT)
    await asyncio.sleep(TIMEOUT_SECONDS[kind] - 1)
    assert (await core.get(SLOT)).state not in (S.FAILED, S.IDLE, S.CONFIGURED, S.SPECULATIVE)
    await asyncio.sleep(2)
    record = await core.get(SLOT)
    assert record.state is S.FAILED
    assert record.machine.last_error.startswith("TIMEOUT: timeout")
    assert f"{TIMEOUT_SECONDS[kind]:g} s" in record.machine.last_error


class Stubborn(FakeBackend):
    """Swallows its cancellation and succeeds later."""

    async def create(self, machine: MachineView, op: Op) -> Host:
        try:
            await asyncio.sleep(10_000)
        except asyncio.CancelledError:
            await asyncio.sleep(5)
        self.hosts[machine.id] = "late"
        return Host(ref="late")


async def test_a_late_host_changes_no_record_and_is_given_back() -> None:
    backend = Stubborn(1)
    core = await started(make_core(backend, options=NO_WAY_OUT))
    await core.create(SLOT)
    await asyncio.sleep(301)
    failed = await core.get(SLOT)
    assert failed.state is S.FAILED
    await asyncio.sleep(10)
    assert (await core.get(SLOT)).machine == failed.machine
    assert backend.hosts == {}
    assert metric(core, "late_results_total", kind="create", compensated="yes") == 1


async def test_a_result_that_comes_after_the_stop_is_counted_and_begins_no_call() -> None:
    backend = Stubborn(1)
    core = await started(make_core(backend, options=NO_WAY_OUT))
    await core.create(SLOT)
    await settle()
    await core.stop()
    await asyncio.sleep(10)
    assert metric(core, "late_results_total", kind="create", compensated="no") == 1
    assert backend.hosts == {SLOT: "late"}
    assert [kind for kind, _machine, _operation in backend.calls] == []


async def test_a_thread_that_hangs_does_not_hold_up_the_verdict() -> None:
    released, ended = threading.Event(), threading.Event()

    class Blocking(FakeBackend):
        def create(self, machine: MachineView, op: Op) -> Host:  # type: ignore[override]
            released.wait(PATIENCE_SECONDS)
            self.hosts[machine.id] = "late"
            ended.set()
            return Host(ref="late")

    backend = Blocking(1)
    core = await started(make_core(backend, options=CoreOptions(failed_hold_seconds=0)))
    await core.create(SLOT)
    await until(lambda: metric(core, "machines", state="FAILED", capacity_type="ON_DEMAND") == 1)
    assert (await core.get(SLOT)).machine.last_error.startswith("TIMEOUT")
    released.set()
    await asyncio.to_thread(ended.wait, PATIENCE_SECONDS)
    await until(lambda: not backend.hosts)
    await core.stop()


async def until(is_true: Callable[[], bool]) -> None:
    """Let real threads work, whose progress virtual time does not wait for."""
    for _ in range(int(PATIENCE_SECONDS / 0.002)):
        if is_true():
            return
        await asyncio.to_thread(threading.Event().wait, 0.002)
    raise AssertionError("the threads did not get there")


class Failing(FakeBackend):
    """Raises what it is given, one after the other, then succeeds."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__(1)
        self.errors = list(errors)
        self.attempts: list[tuple[float, str]] = []

    async def create(self, machine: MachineView, op: Op) -> Host:
        self.attempts.append((asyncio.get_running_loop().time(), op.id))
        if self.errors:
            raise self.errors.pop(0)
        return await super().create(machine, op)


async def test_transient_errors_are_retried_with_the_same_operation_and_growing_waits() -> None:
    backend = Failing(*(Transient("busy") for _ in range(4)))
    core = await started(make_core(backend))
    ack = await core.create(SLOT)
    await asyncio.sleep(60)
    assert await state_of(core) is S.IDLE
    assert {op for _at, op in backend.attempts} == {ack.operation_id}
    gaps = [after - before for (before, _), (after, _) in zip(backend.attempts, backend.attempts[1:], strict=False)]
    assert all(gap <= bound for gap, bound in zip(gaps, (1, 2, 4, 8), strict=True))
    assert metric(core, "retries_total", kind="create") == 4


async def test_a_transient_error_waits_as_long_as_the_substrate_asked() -> None:
    backend = Failing(Transient("busy", retry_after_seconds=17))
    core = await started(make_core(backend))
    await core.create(SLOT)
    await asyncio.sleep(60)
    assert [round(at) for at, _ in backend.attempts] == [0, 17]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (Stockout("none left"), "STOCKOUT: none left"),
        (RuntimeError("boom\n\x00boom"), "BACKEND: RuntimeError: boom  boom"),
    ],
)
async def test_other_errors_are_final(error: Exception, text: str) -> None:
    backend = Failing(error)
    core = await started(make_core(backend, options=NO_WAY_OUT))
    await core.create(SLOT)
    await asyncio.sleep(60)
    assert (await core.get(SLOT)).machine.last_error == text
    assert len(backend.attempts) == 1


async def test_last_error_holds_neither_blob_nor_metadata() -> None:
    class Leaky(FakeBackend):
        async def configure(self, machine: MachineView, cluster: str, blob: bytes, op: Op) -> str | None:
            raise RuntimeError(f"cannot boot with {blob.decode()} and hunter2-value " + "x" * 5000)

    core = await started(make_core(Leaky(1), options=NO_WAY_OUT))
    await bring_to(core, S.IDLE)
    await core.configure(SLOT, "c", b"secret-join-token", {"k": "hunter2-value"})
    await settle()
    text = (await core.get(SLOT)).machine.last_error
    assert "secret" not in text
    assert "hunter2" not in text
    assert len(text.encode()) <= 1024


class Checker:
    """Ready from a moment on."""

    interval_seconds = 2.0

    def __init__(self, ready_at_seconds: float) -> None:
        self.ready_at_seconds = ready_at_seconds

    async def ready(self, machine: MachineView, cluster: str, op: Op) -> bool:
        return asyncio.get_running_loop().time() >= self.ready_at_seconds


async def test_configured_is_shown_only_once_the_node_is_ready() -> None:
    core = await started(make_core(FakeBackend(1), readiness=Checker(100)))
    await core.create(SLOT)
    await settle()
    await core.configure(SLOT, "c", b"", {})
    await asyncio.sleep(99)
    assert await state_of(core) is S.CONFIGURING
    await asyncio.sleep(4)
    assert await state_of(core) is S.CONFIGURED


async def test_a_node_that_never_becomes_ready_ends_in_not_ready() -> None:
    core = await started(make_core(FakeBackend(1), readiness=Checker(1e9), options=NO_WAY_OUT))
    await core.create(SLOT)
    await settle()
    await core.configure(SLOT, "c", b"", {})
    await asyncio.sleep(301)
    text = (await core.get(SLOT)).machine.last_error
    assert text.startswith("NOT_READY: ")
    assert "timeout" in text


def _narrow(*, queue_max: int) -> Limits:
    narrow = KindLimits(timeout_seconds=300, concurrency_max=1, queue_max=queue_max)
    return Limits(kinds=MappingProxyType(dict.fromkeys(Kind, narrow)))


async def test_a_full_queue_refuses_and_changes_nothing() -> None:
    backend = FakeBackend(3, limits=_narrow(queue_max=1))
    core = await started(make_core(backend))
    backend.hold(Kind.CREATE)
    await core.create("fake-0")
    await settle()
    await core.create("fake-1")
    await settle()
    assert (await refusal_of(core.create("fake-2")))[0] is Code.RESOURCE_EXHAUSTED
    assert await state_of(core, "fake-2") is S.SPECULATIVE
    assert [machine for _kind, machine, _op in backend.calls] == ["fake-0"]


async def test_an_operation_that_never_got_a_slot_goes_back_to_where_it_came_from() -> None:
    backend = FakeBackend(2, limits=_narrow(queue_max=10))
    core = await started(make_core(backend))
    for machine_id in ("fake-0", "fake-1"):
        await bring_to(core, S.CONFIGURED, machine_id)
    backend.hold(Kind.DRAIN)
    await core.drain("fake-0", 3600)
    await settle()
    await core.drain("fake-1", 0)
    await asyncio.sleep(301)
    record = await core.get("fake-1")
    assert record.machine.last_error.startswith("QUEUE_TIMEOUT: ")
    assert record.machine.cluster == "c-1"
    await asyncio.sleep(605)
    assert await state_of(core, "fake-1") is S.CONFIGURED
    assert ("fake-1", Kind.DRAIN) not in [(machine, kind) for kind, machine, _op in backend.calls]


async def test_a_provider_says_what_it_waits_for() -> None:
    """`/readyz` shows it, so that the state is not searched for a backend that does not answer."""
    core = make_core(FakeBackend(1))
    reasons = [(core.why_waiting, core.is_ready)]
    await started(core)
    reasons.append((core.why_waiting, core.is_ready))
    await core.stop()
    reasons.append((core.why_waiting, core.is_ready))

    assert reasons == [
        ("waiting for the backend's first inventory; see reconcile.failed in the log", False),
        ("", True),
        ("the provider is stopping", False),
    ]
