"""The loop of the deterministic world: time, order, processes that die and stop."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from bigfleet.sim.kernel.loop import KernelClock, KernelLoop, Livelock, run_kernel
from bigfleet.sim.kernel.processes import Process
from bigfleet.sim.kernel.streams import Streams
from bigfleet.sim.kernel.virtual_time import Deadlock

T = TypeVar("T")


def run(main: Callable[[KernelLoop], Coroutine[Any, Any, T]], seed: int = 1) -> T:
    """Run on a kernel loop of a seed."""
    return run_kernel(main, random.Random(seed))


def test_time_jumps_to_the_next_timer_and_counts_nanoseconds() -> None:
    async def main(loop: KernelLoop) -> tuple[int, float]:
        await asyncio.sleep(3600.000000001)
        return loop.now_nanos, KernelClock(loop).monotonic_seconds()

    assert run(main) == (3_600_000_000_001, 3600.000000001)


def test_a_timer_that_is_later_by_a_rounding_error_is_later() -> None:
    """Whoever waits for the rest of a time gets there, however small the rest is."""

    async def main(loop: KernelLoop) -> int:
        await asyncio.sleep(278.174)
        rounds = 0
        until = loop.time() + 5.7e-14
        while loop.time() < until:
            rounds += 1
            assert rounds < 10
            async with asyncio.timeout_at(until):
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    break
        return rounds

    assert run(main) < 10


def order(seed: int) -> list[int]:
    """Return in which order ten tasks come to run that are ready at the same moment."""

    async def main(_loop: KernelLoop) -> list[int]:
        seen: list[int] = []

        async def note(number: int) -> None:
            seen.append(number)

        await asyncio.gather(*(note(number) for number in range(10)))
        return seen

    return run(main, seed)


def test_who_is_ready_at_one_moment_runs_in_an_order_of_the_seed() -> None:
    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(8)}) == 8
    assert sorted(order(3)) == list(range(10))


def test_the_dead_run_nothing_more_not_even_their_last_lines() -> None:
    async def main(_loop: KernelLoop) -> list[str]:
        said: list[str] = []
        process = Process("p")

        async def work() -> None:
            try:
                await asyncio.sleep(5)
                said.append("went on")
            finally:
                said.append("cleaned up")

        process.spawn(work())
        await asyncio.sleep(1)
        process.kill()
        await asyncio.sleep(10)
        assert process.died.is_set()
        return list(said)

    assert run(main) == []


def test_a_process_dies_before_its_nth_step() -> None:
    async def main(_loop: KernelLoop) -> int:
        process, steps = Process("p"), 0

        async def work() -> None:
            nonlocal steps
            while True:
                steps += 1
                await asyncio.sleep(0)

        process.dies_at_step = 7
        process.spawn(work())
        await asyncio.sleep(1)
        return steps

    assert run(main) == 6


def test_a_paused_process_goes_on_where_it_stood_and_knows_nothing_of_it() -> None:
    async def main(loop: KernelLoop) -> list[float]:
        times: list[float] = []
        process = Process("p")

        async def work() -> None:
            for _ in range(3):
                await asyncio.sleep(1)
                times.append(loop.time())

        process.spawn(work())
        await asyncio.sleep(1.5)
        process.pause()
        await asyncio.sleep(10)
        process.resume()
        await asyncio.sleep(5)
        return times

    assert run(main) == [1.0, 11.5, 12.5]


def test_what_a_process_starts_belongs_to_it() -> None:
    async def main(_loop: KernelLoop) -> bool:
        process, went_on = Process("p"), False

        async def child() -> None:
            nonlocal went_on
            await asyncio.sleep(2)
            went_on = True

        async def parent() -> None:
            await asyncio.create_task(child())

        process.spawn(parent())
        await asyncio.sleep(1)
        process.kill()
        await asyncio.sleep(5)
        return went_on

    assert not run(main)


def test_waiting_for_nothing_is_told_and_a_thread_is_refused() -> None:
    async def forever(_loop: KernelLoop) -> None:
        await asyncio.Event().wait()

    async def thread(_loop: KernelLoop) -> None:
        await asyncio.to_thread(print)

    with pytest.raises(Deadlock):
        run(forever)
    with pytest.raises(RuntimeError, match="asks for a thread"):
        run(thread)


def test_tasks_that_wake_each_other_without_end_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def for_ever(loop: KernelLoop) -> None:
        def again() -> None:
            loop.call_soon(again)

        again()
        await asyncio.sleep(1)

    monkeypatch.setattr("bigfleet.sim.kernel.loop.STEPS_PER_MOMENT_MAX", 100)
    with pytest.raises(Livelock, match=r"more than 100 callbacks at 0\.000 s"):
        run(for_ever)


def test_a_draw_of_one_stream_moves_no_other() -> None:
    one, other = Streams(5), Streams(5)
    one.of("network").random()

    assert one.of("crash").random() == other.of("crash").random()
    assert one.of("crash").random() != one.of("network").random()
    assert one.ids("a").new_id() == other.ids("a").new_id() != one.ids("b").new_id()


def test_who_runs_aside_moves_nobody_else() -> None:
    """A process that runs aside changes neither the order of the others nor the numbers of what they make."""

    def course(with_aside: bool) -> list[tuple[str, float]]:
        async def main(loop: KernelLoop) -> list[tuple[str, float]]:
            told: list[tuple[str, float]] = []

            async def worker(name: str) -> None:
                for _ in range(5):
                    await asyncio.wait([asyncio.ensure_future(asyncio.sleep(0.001 * n)) for n in range(3)])
                    told.append((name, loop.time()))

            async def noise() -> None:
                while True:
                    await asyncio.gather(*(asyncio.sleep(0.0005) for _ in range(4)))

            if with_aside:
                Process("aside", is_aside=True).spawn(noise())
            await asyncio.gather(*(worker(f"w{number}") for number in range(4)))
            return told

        return run(main)

    assert course(True) == course(False)
