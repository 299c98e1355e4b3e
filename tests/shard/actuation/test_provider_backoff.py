"""A provider that takes no calls: nothing starts, and nothing is asked of operators, until it says that it is ready."""

import asyncio

import pytest

from bigfleet.model.frames import BootstrapRequest
from bigfleet.model.states import MachineState
from bigfleet.shard.actuation.provider_backoff import FIRST_SECONDS, MAX_SECONDS
from bigfleet.shard.ports import RefusalKind
from tests.shard.world import ScriptedProvider, World, machine, need

pytestmark = pytest.mark.virtual_time

MACHINES = 8


class UnreadyProvider(ScriptedProvider):
    """Says whether it takes calls, and counts how often it is asked."""

    is_up = False
    asked = 0

    async def accepts_calls(self) -> bool:
        self.asked += 1
        return self.is_up


@pytest.mark.rule("shard 9.6/1")
async def test_nothing_is_asked_of_anyone_while_the_provider_is_not_ready() -> None:
    provider = UnreadyProvider()
    for number in range(MACHINES):
        provider.add(machine(f"m{number}", MachineState.IDLE))
        provider.refusals["configure", f"m{number}"] = [RefusalKind.NOT_READY]
    world = World(provider)
    operator = world.connect("c1")
    operator.report(need("c1", str(4 * MACHINES)))
    await world.cycle()
    assert world.outcomes() == [("Bootstrap", f"m{number}", "refused") for number in range(MACHINES)]

    calls, blobs = len(provider.calls), _blobs(operator.frames)
    assert (calls, blobs) == (1, 1), "the first answer is enough for those that are queued"
    for _ in range(60):
        await asyncio.sleep(10)
        await world.cycle()
    assert (len(provider.calls), _blobs(operator.frames)) == (calls, blobs)
    assert provider.asked <= 600 / MAX_SECONDS + MAX_SECONDS / FIRST_SECONDS
    assert {world.state(f"m{number}") for number in range(MACHINES)} == {MachineState.IDLE}

    provider.is_up = True
    provider.refusals.clear()
    await asyncio.sleep(MAX_SECONDS)
    await world.cycle()
    assert len(provider.calls) == calls + MACHINES


def _blobs(frames: object) -> int:
    assert isinstance(frames, list)
    return sum(isinstance(frame, BootstrapRequest) for frame in frames)
