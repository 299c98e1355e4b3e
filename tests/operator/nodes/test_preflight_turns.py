"""Preflights of many drains at once: one after the other, with turns for other tasks, and each for a bounded time."""

import asyncio
from itertools import pairwise

from bigfleet.operator.kubernetes.objects import NodeObject
from bigfleet.operator.nodes.preflight import SLICE_SECONDS, Preflight
from tests.operator.nodes.node_world import node_body, pod_body
from tests.operator.nodes.test_preflight import Bench


class WorkClock:
    """A clock on which time passes with each look at it, as it does with work."""

    def __init__(self, look_seconds: float) -> None:
        self.look_seconds = look_seconds
        self.now_seconds = 0.0
        #: When other tasks had their turn.
        self.turns_seconds: list[float] = []

    def monotonic_seconds(self) -> float:
        self.now_seconds += self.look_seconds
        return self.now_seconds

    def unix_nanos(self) -> int:
        return 0

    async def sleep(self, seconds: float) -> None:
        assert seconds == 0
        self.turns_seconds.append(self.now_seconds)
        await asyncio.sleep(0)


class Turns:
    """A preflight over the nodes a, b and c: the first two have as many pods each as are asked for."""

    def __init__(self, *, pods: int, cpu: str, look_seconds: float) -> None:
        bodies = [pod_body(f"{node}{number}", node, cpu=cpu) for node in "ab" for number in range(pods)]
        self.bench = Bench([node_body(name) for name in "abc"], bodies)
        self.clock = WorkClock(look_seconds)
        self.preflight = Preflight(nodes=self.bench.matcher, pods=self.bench.pods, clock=self.clock)

    async def judge(self, name: str, leaving: str) -> str | None:
        node: NodeObject | None = self.bench.matcher.node(name)
        assert node is not None
        return await self.preflight.judge(f"m-{name}", node, leaving=lambda: set(leaving))


async def test_other_tasks_have_their_turn_while_a_forecast_runs() -> None:
    """A forecast of seconds would cost the operator its Lease."""
    turns = Turns(pods=30, cpu="100m", look_seconds=0.03)

    assert await turns.judge("a", "a") is None

    moments = turns.clock.turns_seconds
    assert len(moments) > 5
    assert max(after - before for before, after in pairwise(moments)) < 2 * SLICE_SECONDS


async def test_drains_that_are_judged_at_once_are_not_promised_the_same_room() -> None:
    turns = Turns(pods=10, cpu="500m", look_seconds=0.03)

    first, second = await asyncio.gather(turns.judge("a", "ab"), turns.judge("b", "ab"))

    assert first is None
    assert "fits on no other node" in (second or "")
    assert len(turns.preflight.promised("m-a")) == 10
    assert turns.preflight.promised("m-b") == {}


async def test_a_drain_is_refused_when_its_forecast_takes_too_long() -> None:
    """What it waits is taken from its grace; the shard asks again later."""
    turns = Turns(pods=30, cpu="100m", look_seconds=1.0)

    refusals = await asyncio.gather(turns.judge("a", "ab"), turns.judge("b", "ab"))

    assert all("took longer than 10 s" in (refusal or "") for refusal in refusals)
    assert turns.preflight.promised("m-a") == {}
    turns.clock.look_seconds = 0.001
    assert await turns.judge("a", "a") is None
