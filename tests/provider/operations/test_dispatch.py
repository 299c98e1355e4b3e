"""How fast, how many, and not at all while the substrate is unwell (docs/spec/provider.md §15)."""

import asyncio
from types import MappingProxyType

import pytest

from bigfleet.model.states import MachineState
from bigfleet.provider.backend import Host, KindLimits, Limits, MachineView, Op, Transient
from bigfleet.provider.backends.fake import FakeBackend
from bigfleet.provider.kit.options import CoreOptions
from bigfleet.provider.operations.dispatch import Breaker, BreakerState, TokenBucket
from bigfleet.provider.operations.invoke import lane_of
from bigfleet.provider.records.kinds import Kind
from bigfleet.provider.records.refusal import Code, Refused
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.provider.harness import make_core, metric, refusal_of, settle, started, state_of

pytestmark = pytest.mark.virtual_time

S = MachineState
NO_WAY_OUT = CoreOptions(is_inline=True, failed_hold_seconds=0)


def limits(**of_each: object) -> Limits:
    one = KindLimits(timeout_seconds=300, **of_each)  # type: ignore[arg-type]
    return Limits(kinds=MappingProxyType(dict.fromkeys(Kind, one)))


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_a_bucket_lets_a_burst_through_and_then_so_many_a_second() -> None:
    bucket = TokenBucket(2.0, 3, LoopClock())
    begun: list[float] = []

    async def one() -> None:
        await bucket.take()
        begun.append(now())

    await asyncio.gather(*(one() for _ in range(7)))
    assert begun == [0, 0, 0, 0.5, 1.0, 1.5, 2.0]
    await asyncio.sleep(100)
    begun.clear()
    start = now()
    await asyncio.gather(*(one() for _ in range(4)))
    assert [at - start for at in begun] == [0, 0, 0, 0.5]


async def test_a_wait_that_is_cut_off_gives_its_token_back() -> None:
    bucket = TokenBucket(1.0, 1, LoopClock())
    await bucket.take()
    waiting = [asyncio.create_task(bucket.take()) for _ in range(5)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await asyncio.sleep(1)
    before = now()
    await bucket.take()
    assert now() == before


async def test_the_breaker_opens_after_ten_failures_and_one_call_probes() -> None:
    seen: list[BreakerState] = []
    breaker = Breaker(LoopClock(), seen.append)
    for _ in range(9):
        await breaker.wait()
        breaker.failed()
    breaker.succeeded()
    for _ in range(10):
        await breaker.wait()
        breaker.failed()
    assert breaker.refuses_new_work
    passed: list[float] = []

    async def one() -> None:
        await breaker.wait()
        passed.append(now())

    tasks = [asyncio.create_task(one()) for _ in range(3)]
    await asyncio.sleep(35)
    assert passed == [30.0]
    assert breaker.refuses_new_work
    breaker.failed()
    await asyncio.sleep(35)
    assert passed == [30.0, 65.0]
    breaker.succeeded()
    await asyncio.gather(*tasks)
    assert len(passed) == 3
    expected = [BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN] * 2
    assert seen == [*expected[:3], BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.CLOSED]


async def test_a_probe_that_is_cut_off_lets_another_one_probe() -> None:
    breaker = Breaker(LoopClock(), lambda _state: None)
    for _ in range(10):
        breaker.failed()
    await asyncio.sleep(30)
    await breaker.wait()
    breaker.ended_without_word()
    before = now()
    await breaker.wait()
    assert now() == before


class Unwell(FakeBackend):
    """Every create fails for a while, in a way that may pass."""

    def __init__(self, count: int, well_at_seconds: float, limits: Limits | None = None) -> None:
        super().__init__(count, limits=limits)
        self.well_at_seconds = well_at_seconds
        self.begun: list[float] = []

    async def create(self, machine: MachineView, op: Op) -> Host:
        self.begun.append(now())
        if now() < self.well_at_seconds:
            raise Transient("try later", retry_after_seconds=1)
        return await super().create(machine, op)


async def test_while_open_new_creates_are_refused_queued_work_waits_and_slots_are_not_burnt() -> None:
    backend = Unwell(30, 70)
    core = await started(make_core(backend, options=NO_WAY_OUT))
    await asyncio.gather(*(core.create(f"fake-{number}") for number in range(12)))
    await asyncio.sleep(5)
    assert len(backend.begun) == 12
    assert metric(core, "breaker_state", kind="create") == 2
    code, _message = await refusal_of(core.create("fake-20"))
    assert code is Code.UNAVAILABLE
    assert await state_of(core, "fake-20") is S.SPECULATIVE
    await asyncio.sleep(40)
    assert len(backend.begun) == 13
    await asyncio.sleep(100)
    assert metric(core, "breaker_state", kind="create") == 0
    assert [await state_of(core, f"fake-{number}") for number in range(12)] == [S.IDLE] * 12
    await core.create("fake-20")


async def test_other_kinds_go_on_while_creates_are_unwell() -> None:
    backend = Unwell(30, 1e9)
    backend.hosts["fake-29"] = "host"
    core = await started(make_core(backend, options=NO_WAY_OUT))
    await asyncio.sleep(200)
    await asyncio.gather(*(core.create(f"fake-{number}") for number in range(12)))
    await asyncio.sleep(5)
    await core.configure("fake-29", "c", b"", {})
    await settle()
    assert await state_of(core, "fake-29") is S.CONFIGURED


async def test_calls_begin_no_faster_than_the_rate_retries_included() -> None:
    backend = Unwell(10, 3, limits=limits(rate_per_second=0.5, burst=2))
    core = await started(make_core(backend, options=NO_WAY_OUT))
    for number in range(4):
        await core.create(f"fake-{number}")
    await asyncio.sleep(60)
    assert len(backend.begun) > 4
    for window in range(0, 60, 10):
        assert sum(window <= at < window + 10 for at in backend.begun) <= 2 + 5
    assert [await state_of(core, f"fake-{number}") for number in range(4)] == [S.IDLE] * 4


async def test_acceptances_in_one_commit_do_not_overfill_the_queue() -> None:
    backend = FakeBackend(9, limits=limits(concurrency_max=2, queue_max=3))
    core = await started(make_core(backend))
    backend.hold(Kind.CREATE)

    async def outcome(number: int) -> str:
        try:
            await core.create(f"fake-{number}")
        except Refused as refused:
            return refused.code.name
        return "OK"

    outcomes = await asyncio.gather(*(outcome(number) for number in range(9)))
    assert sorted(outcomes) == ["OK"] * 5 + ["RESOURCE_EXHAUSTED"] * 4
    await settle()
    assert (len(backend.calls), metric(core, "operations_queued", kind="create")) == (2, 3)


async def test_an_overrun_keeps_its_place_until_it_really_ended() -> None:
    class Stubborn(FakeBackend):
        running = 0
        most = 0

        async def create(self, machine: MachineView, op: Op) -> Host:
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                await asyncio.sleep(10_000)
            except asyncio.CancelledError:
                await asyncio.sleep(50)
            self.running -= 1
            raise RuntimeError("too late")

    backend = Stubborn(2, limits=limits(concurrency_max=1))
    core = await started(make_core(backend, options=NO_WAY_OUT))
    await core.create("fake-0")
    await core.create("fake-1")
    await asyncio.sleep(700)
    assert backend.most == 1
    errors = [(await core.get(f"fake-{n}")).machine.last_error.split(":")[0] for n in range(2)]
    assert errors == ["TIMEOUT", "QUEUE_TIMEOUT"]


def test_what_an_author_leaves_open_is_1000_coroutines_and_64_threads() -> None:
    class Plain(FakeBackend):
        def create(self, machine: MachineView, op: Op) -> Host:  # type: ignore[override]
            return Host(ref="r")

    backend = Plain(1)
    assert lane_of(backend, Kind.CREATE).concurrency_max == 64
    assert lane_of(backend, Kind.DRAIN).concurrency_max == 1000
    assert lane_of(backend, Kind.DRAIN).queue_max == 10_000
    assert lane_of(backend, Kind.DRAIN).rate_per_second is None
