"""Authors who write plain functions: real threads, what they hold up, and what they push.

docs/spec/provider.md §13, §15, §16. Nothing here waits for a length of time: threads wait for the test, and the test
for what becomes visible.
"""

import asyncio
import threading
from collections.abc import Iterable
from types import MappingProxyType

from bigfleet.model.states import MachineState
from bigfleet.provider.backend import Feed, Host, KindLimits, Limits, MachineView, Op, Slot
from bigfleet.provider.backends.fake import FakeBackend
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.kit.options import CoreOptions
from bigfleet.provider.records.kinds import Kind
from tests.patience import PATIENCE_SECONDS, wait_until_async
from tests.provider.harness import make_core, metric, started, state_of

S = MachineState
SHORT = Limits(
    kinds=MappingProxyType({kind: KindLimits(timeout_seconds=0.05) for kind in Kind}),
    threads_max=1,
)


class Threaded(FakeBackend):
    """Creates in a thread that waits until it is let go."""

    def __init__(self, count: int, limits: Limits | None = None) -> None:
        super().__init__(count, limits=limits)
        self.may_end = threading.Event()
        self.entered: list[str] = []

    def create(self, machine: MachineView, op: Op) -> Host:  # type: ignore[override]
        self.entered.append(machine.id)
        assert self.may_end.wait(PATIENCE_SECONDS)
        self.hosts[machine.id] = f"host-{op.id}"
        return Host(ref=f"host-{op.id}")


async def test_a_thread_that_overran_keeps_its_place_and_its_machine_until_it_ended() -> None:
    backend = Threaded(2, SHORT)
    core = await started(make_core(backend, options=CoreOptions(failed_hold_seconds=0.01)))

    async def has_failed(machine_id: str) -> bool:
        return await state_of(core, machine_id) is S.FAILED

    await core.create("fake-0")
    await wait_until_async(lambda: has_failed("fake-0"))
    await core.create("fake-1")
    await wait_until_async(lambda: has_failed("fake-1"))
    # The one thread is still in the first call, so the second one never began; nobody looked at the first machine.
    assert backend.entered == ["fake-0"]
    assert (await core.get("fake-0")).machine.last_error.startswith("TIMEOUT")
    assert (await core.get("fake-1")).machine.last_error.startswith("QUEUE_TIMEOUT")
    backend.may_end.set()

    async def is_given_back() -> bool:
        return await state_of(core, "fake-0") is S.SPECULATIVE and not backend.hosts

    await wait_until_async(is_given_back)
    assert metric(core, "late_results_total", kind="create", compensated="yes") == 1
    await core.create("fake-1")

    async def is_there() -> bool:
        return await state_of(core, "fake-1") is S.IDLE

    await wait_until_async(is_there)
    await core.stop()


async def test_a_thread_that_ends_after_the_stop_begins_no_task() -> None:
    backend = Threaded(1)
    core = await started(make_core(backend, options=CoreOptions()))
    await core.create("fake-0")

    async def is_entered() -> bool:
        return backend.entered == ["fake-0"]

    await wait_until_async(is_entered)
    await core.stop()
    backend.may_end.set()

    async def is_counted() -> bool:
        return metric(core, "late_results_total", kind="create", compensated="no") == 1

    await wait_until_async(is_counted)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert backend.hosts != {}


async def test_threads_of_one_kind_do_not_wait_for_those_of_another() -> None:
    class Plain(Threaded):
        def configure(self, machine: MachineView, cluster: str, blob: bytes, op: Op) -> str | None:  # type: ignore[override]
            return "node"

    slow = Limits(
        kinds=MappingProxyType({kind: KindLimits(timeout_seconds=60) for kind in Kind}),
        threads_max=1,
    )
    backend = Plain(2, slow)
    backend.hosts["fake-1"] = "there"
    core = await started(make_core(backend, options=CoreOptions()))

    async def is_idle() -> bool:
        return await state_of(core, "fake-1") is S.IDLE

    await wait_until_async(is_idle)
    await core.create("fake-0")

    async def is_held() -> bool:
        return backend.entered == ["fake-0"]

    await wait_until_async(is_held)
    await core.configure("fake-1", "c", b"", {})

    async def is_configured() -> bool:
        return await state_of(core, "fake-1") is S.CONFIGURED

    await wait_until_async(is_configured)
    backend.may_end.set()
    await core.stop()


async def test_a_push_from_any_thread_returns_after_its_commit() -> None:
    class Feeding(FakeBackend):
        def __init__(self) -> None:
            super().__init__(2)
            self.seen: list[str] = []
            self.got: Feed | None = None
            self.has_feed = threading.Event()

        async def feed(self, feed: Feed) -> None:
            self.got = feed
            self.has_feed.set()
            await asyncio.Event().wait()

    backend = Feeding()
    core = await started(make_core(backend, options=CoreOptions(failed_hold_seconds=0)))
    await bring_to_idle(core)

    def push() -> None:
        assert backend.has_feed.wait(PATIENCE_SECONDS)
        assert backend.got is not None
        asyncio.run(backend.got.report_price(["fake-0"], 0.7))
        backend.seen.append(f"{core._ledger.view.get('fake-0').machine.price_usd_per_hour}")  # type: ignore[union-attr]
        asyncio.run(backend.got.report_lost("fake-0", "burnt"))
        backend.seen.append(core._ledger.view.get("fake-0").state.name)  # type: ignore[union-attr]

    await asyncio.to_thread(push)
    assert backend.seen == ["0.7", "FAILED"]
    await core.stop()


async def bring_to_idle(core: CapacityCore) -> None:
    await core.create("fake-0")

    async def is_idle() -> bool:
        return await state_of(core, "fake-0") is S.IDLE

    await wait_until_async(is_idle)


async def test_a_generator_is_read_in_a_thread() -> None:
    class Paged(FakeBackend):
        def __init__(self) -> None:
            super().__init__(3)
            self.threads: set[str] = set()

        def inventory(self) -> Iterable[Slot]:  # type: ignore[override]
            for slot in self.slots:
                self.threads.add(threading.current_thread().name)
                yield slot

    backend = Paged()
    core = await started(make_core(backend, options=CoreOptions()))
    assert len((await core.list()).records) == 3
    assert all(name.startswith("backend") for name in backend.threads)
    await core.stop()
