"""The loop of virtual time."""

import asyncio

import pytest

from bigfleet.sim.kernel.virtual_time import Deadlock, LoopClock, run_virtual

pytestmark = pytest.mark.virtual_time


async def test_an_hour_of_sleep_moves_the_clock_by_an_hour() -> None:
    """Waiting costs no real time and moves the loop's clock exactly."""
    clock = LoopClock()
    await clock.sleep(3600)

    assert clock.monotonic_seconds() == 3600.0


async def test_timeouts_run_on_virtual_time() -> None:
    """asyncio.timeout ends at its virtual deadline."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(7):
            await asyncio.Event().wait()

    assert LoopClock().monotonic_seconds() == 7.0


async def test_timers_fire_in_order_of_their_deadline() -> None:
    """A later timer never overtakes an earlier one."""
    seen: list[int] = []

    async def note(seconds: int) -> None:
        await LoopClock().sleep(seconds)
        seen.append(seconds)

    await asyncio.gather(*(note(seconds) for seconds in (30, 10, 20)))

    assert seen == [10, 20, 30]


def test_a_loop_in_which_everybody_waits_for_ever_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadlock ends in an error, not in a hang."""
    monkeypatch.setattr("bigfleet.sim.kernel.virtual_time._DEADLOCK_REAL_SECONDS", 0.05)

    async def wait_for_nothing() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run_virtual(wait_for_nothing)
