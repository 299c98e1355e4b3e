"""What a program pushes: each line once, bad lines passed over, restarts that wait longer each time, an orderly end."""

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest

from bigfleet.cli.runtime.system import SystemClock
from bigfleet.provider.backends.exec.push_lines import _LineQueue, run_feed
from bigfleet.provider.programs.process import ProgramProcess, TakeOutput
from bigfleet.provider.programs.runner import ProgramFailed, ProgramRunner
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.patience import wait_until_async


class RecordingFeed:
    """Notes what was pushed."""

    def __init__(self) -> None:
        self.pushed: list[tuple[object, ...]] = []

    async def report_price(self, ids: Iterable[str], usd_per_hour: float) -> None:
        self.pushed.append(("price", *ids, usd_per_hour))

    async def report_interruption(self, id: str, probability: float, reclaim_at_unix_nanos: int | None = None) -> None:
        self.pushed.append(("interruption", id, probability, reclaim_at_unix_nanos))

    async def report_lost(self, id: str, reason: str) -> None:
        self.pushed.append(("lost", id, reason))


def runner_in(folder: Path, script: str) -> ProgramRunner:
    program = folder / "program"
    program.write_text(f'#!/bin/sh\ncd "$(dirname "$0")"\n{script}\n')
    program.chmod(0o700)
    return ProgramRunner(str(program), clock=SystemClock(), terminate_seconds=2.0)


async def test_lines_are_pushed_until_the_standard_input_closes(tmp_path: Path) -> None:
    script = """
echo '{"price": {"ids": ["a", "b"], "usd": 0.5}}'
echo '{"interruption": {"id": "a", "probability": 0.99, "reclaim_at": "1970-01-01T00:02:00Z"}}'
echo '{"interruption": {"id": "b", "probability": 0.5}}'
echo 'no json'
echo '{"lost": {"id": "a", "reason": "gone"}, "price": {"ids": [], "usd": 1}}'
echo '{"lost": {"id": "a", "reason": "gone", "when": 1}}'
echo '{"lost": {"id": "a", "reason": "gone"}}'
cat > /dev/null
echo closed > closed
"""
    feed = RecordingFeed()
    task = asyncio.create_task(run_feed(runner_in(tmp_path, script), feed, SystemClock()))

    async def is_pushed() -> bool:
        return len(feed.pushed) >= 4

    await wait_until_async(is_pushed)
    assert feed.pushed == [
        ("price", "a", "b", 0.5),
        ("interruption", "a", 0.99, 120_000_000_000),
        ("interruption", "b", 0.5, None),
        ("lost", "a", "gone"),
    ]
    assert not (tmp_path / "closed").exists()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (tmp_path / "closed").read_text() == "closed\n"


class Unstartable(ProgramRunner):
    """A program that cannot be started, and when it was tried."""

    def __init__(self, clock: LoopClock) -> None:
        super().__init__("program", clock=clock)
        self.tried_seconds: list[float] = []

    async def start(self, verb: str, take_output: TakeOutput) -> ProgramProcess:
        self.tried_seconds.append(self._clock.monotonic_seconds())
        raise ProgramFailed("program: No such file or directory")


@pytest.mark.virtual_time
async def test_an_end_starts_it_again_later_each_time() -> None:
    clock = LoopClock()
    runner = Unstartable(clock)
    task = asyncio.create_task(run_feed(runner, RecordingFeed(), clock))
    await clock.sleep(300.0)
    task.cancel()
    waits = [
        round(later - sooner) for sooner, later in zip(runner.tried_seconds, runner.tried_seconds[1:], strict=False)
    ]
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]


async def test_a_queue_says_when_to_stop_and_when_to_read_on() -> None:
    lines = _LineQueue()

    assert not lines.take(b"x\n" * 1000)
    assert lines.take(b"x\n")
    for _ in range(500):
        await lines.next()
        assert not lines.is_half_empty
    await lines.next()
    assert lines.is_half_empty


class WaitingFeed(RecordingFeed):
    """Commits nothing before it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_commit = asyncio.Event()
        self.is_asked = asyncio.Event()

    async def report_lost(self, id: str, reason: str) -> None:
        self.is_asked.set()
        await self.may_commit.wait()
        await super().report_lost(id, reason)


async def test_a_program_is_read_no_further_while_lines_wait(tmp_path: Path) -> None:
    """It writes more than pipe and queue hold: it goes on only when lines were committed."""
    script = """
yes '{"lost": {"id": "a", "reason": "gone"}}' | head -n 40000
echo written > written
cat > /dev/null
"""
    feed = WaitingFeed()
    task = asyncio.create_task(run_feed(runner_in(tmp_path, script), feed, SystemClock()))
    await feed.is_asked.wait()
    await asyncio.sleep(0.5)
    assert not (tmp_path / "written").exists()

    feed.may_commit.set()

    async def is_pushed() -> bool:
        return len(feed.pushed) >= 40_000

    await wait_until_async(is_pushed)
    assert len(feed.pushed) == 40_000
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (tmp_path / "written").exists()


async def test_a_line_without_an_end_is_passed_over() -> None:
    lines = _LineQueue()
    for _ in range(3):
        lines.take(b"x" * 60_000)
    lines.take(b"rest\nnext\n")
    lines.end()
    assert [await lines.next(), await lines.next()] == [b"next", None]
