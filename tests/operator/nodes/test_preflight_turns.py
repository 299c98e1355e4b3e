"""Preflights of many drains at once: one after the other, with turns for other tasks, each of what is there then."""

import asyncio
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest

from bigfleet.operator.kubernetes.objects import LabelSelectorObject, NodeObject
from bigfleet.operator.kubernetes.scheduling_rules import selects
from bigfleet.operator.nodes import topology_rules
from bigfleet.operator.nodes.preflight import PREFLIGHT_SECONDS_MAX, SLICE_SECONDS, Preflight
from tests.operator.nodes.node_world import node_body, pod_body
from tests.operator.nodes.test_preflight import HOSTNAME, ZONE, Bench, required, spread, term

GRACE_SECONDS = 600.0


class WorkClock:
    """A clock on which time passes with each look at it, as it does with work."""

    def __init__(self, look_seconds: float) -> None:
        self.look_seconds = look_seconds
        self.now_seconds = 0.0
        #: When other tasks had their turn.
        self.turns_seconds: list[float] = []
        #: Called at each of these turns with their number.
        self.on_turn: Callable[[int], None] = lambda number: None

    def monotonic_seconds(self) -> float:
        self.now_seconds += self.look_seconds
        return self.now_seconds

    def unix_nanos(self) -> int:
        return 0

    async def sleep(self, seconds: float) -> None:
        assert seconds == 0
        self.turns_seconds.append(self.now_seconds)
        self.on_turn(len(self.turns_seconds))
        await asyncio.sleep(0)


class Turns:
    """A preflight over nodes of 8 cpu; judges take longer with each look at its clock."""

    def __init__(self, names: Sequence[str], bodies: Sequence[dict[str, Any]], *, look_seconds: float) -> None:
        self.bench = Bench([node_body(name) for name in names], bodies)
        self.clock = WorkClock(look_seconds)
        self.preflight = Preflight(nodes=self.bench.matcher, pods=self.bench.pods, clock=self.clock)
        #: Names of Nodes that are drained or about to be.
        self.leaving: set[str] = set()
        #: Names of Nodes in the order in which they were judged.
        self.judged: list[str] = []

    @classmethod
    def of_two(cls, *, pods: int, cpu: str, look_seconds: float) -> "Turns":
        """Return one over the nodes a, b and c: the first two have as many pods each as are asked for."""
        bodies = [pod_body(f"{node}{number}", node, cpu=cpu) for node in "ab" for number in range(pods)]
        return cls("abc", bodies, look_seconds=look_seconds)

    async def judge(self, name: str, *, is_begun: bool = False, grace_seconds: float = GRACE_SECONDS) -> str | None:
        node: NodeObject | None = self.bench.matcher.node(name)
        assert node is not None
        self.leaving.add(name)
        refusal = await self.preflight.judge(
            f"m-{name}",
            node,
            leaving=lambda: self.leaving,
            deadline_seconds=self.clock.now_seconds + grace_seconds,
            is_begun=is_begun,
        )
        self.judged.append(name)
        return refusal

    def promised(self, name: str) -> list[str]:
        """Return the nodes on which room is promised for the drain of a node, in order of its pods."""
        return [target for _pod, target in sorted(self.preflight.promised(f"m-{name}").items())]


# ---- turns ----------------------------------------------------------------------------------------------------------


async def test_other_tasks_have_their_turn_while_a_forecast_runs() -> None:
    """A forecast of seconds would cost the operator its Lease."""
    turns = Turns.of_two(pods=30, cpu="100m", look_seconds=SLICE_SECONDS / 4)

    assert await turns.judge("a") is None

    moments = turns.clock.turns_seconds
    assert len(moments) > 5
    assert max(after - before for before, after in pairwise(moments)) < 2 * SLICE_SECONDS


async def test_other_tasks_have_their_turn_while_the_forecast_of_a_single_pod_runs() -> None:
    """It reads all pods of the cluster, and the room of all nodes."""
    rules: dict[str, Any] = {"labels": {"app": "x"}, "topologySpreadConstraints": [spread("x", HOSTNAME, 100_000)]}
    bodies = [pod_body("p", "a", **rules)]
    bodies += [pod_body(f"q{number}", f"n{number % 600}", cpu="1m", labels={"app": "x"}) for number in range(4_000)]
    turns = Turns(["a", *(f"n{number}" for number in range(600))], bodies, look_seconds=SLICE_SECONDS)

    def change_every_node(turn: int) -> None:
        for number in range(600):
            turns.bench.put(pod_body(f"r{turn}-{number}", f"n{number}", cpu="0"))

    turns.clock.on_turn = change_every_node

    assert await turns.judge("a") is None

    # 4,000 pods are grouped and counted, 600 nodes have room.
    assert len(turns.clock.turns_seconds) > 10


async def test_drains_that_are_judged_at_once_are_not_promised_the_same_room() -> None:
    turns = Turns.of_two(pods=10, cpu="500m", look_seconds=0.003)

    first, second = await asyncio.gather(turns.judge("a"), turns.judge("b"))

    assert first is None
    assert "fits on no other node" in (second or "")
    assert len(turns.promised("a")) == 10
    assert turns.promised("b") == []


# ---- what a drain waits ---------------------------------------------------------------------------------------------


def many_drains(*, look_seconds: float) -> tuple[Turns, list[str]]:
    """Return forty nodes with one pod each that are to be drained, and one that has room for all."""
    names = [f"n{number:02}" for number in range(40)]
    bodies = [pod_body(f"p-{name}", name, cpu="100m") for name in names]
    return Turns([*names, "z"], bodies, look_seconds=look_seconds), names


async def test_a_drain_is_not_refused_because_many_others_are_judged_before_it() -> None:
    """The shard would hold its machine for 10 min, and double that each time, although its pods fit."""
    turns, names = many_drains(look_seconds=0.1)

    refusals = await asyncio.gather(*(turns.judge(name) for name in names))

    assert turns.clock.now_seconds > 2 * PREFLIGHT_SECONDS_MAX
    assert refusals == [None] * len(names)
    assert [turns.promised(name) for name in names] == [["z"]] * len(names)


async def test_a_drain_whose_turn_comes_when_half_its_grace_is_over_is_refused_without_a_look() -> None:
    """Its pods would have too little time to leave under their budgets."""
    turns, names = many_drains(look_seconds=0.1)

    refusals = await asyncio.gather(*(turns.judge(name, grace_seconds=60) for name in names))

    late = [refusal for refusal in refusals if refusal is not None]
    assert 0 < len(late) < len(names)
    assert set(late) == {"its forecast, with those of other drains before it, took longer than 30 s"}
    assert turns.clock.now_seconds < 30 + PREFLIGHT_SECONDS_MAX
    assert [turns.promised(name) for name in names] == [["z"]] * (40 - len(late)) + [[]] * len(late)


async def test_a_drain_is_refused_when_its_own_forecast_takes_too_long() -> None:
    """What it would begin with is too old by then."""
    turns = Turns.of_two(pods=30, cpu="100m", look_seconds=1.0)

    first, second = await asyncio.gather(turns.judge("a"), turns.judge("b"))

    assert first == second == "its forecast took longer than 10 s"
    assert turns.promised("a") == []
    turns.clock.look_seconds = 0.001
    assert await turns.judge("a") is None


async def test_a_drain_that_has_begun_waits_for_one_forecast_and_no_longer() -> None:
    """Its evictions wait for its forecast."""
    turns, names = many_drains(look_seconds=0.1)
    waiting = [asyncio.create_task(turns.judge(name)) for name in names[1:]]
    await asyncio.sleep(0)
    began_seconds = turns.clock.now_seconds

    assert await turns.judge(names[0], is_begun=True) is None

    assert turns.judged[1:] == [names[0]]
    assert turns.clock.now_seconds - began_seconds < PREFLIGHT_SECONDS_MAX
    await asyncio.gather(*waiting)


async def test_a_drain_that_is_given_up_while_it_waits_holds_up_no_other() -> None:
    turns, names = many_drains(look_seconds=0.01)
    first, second, third = (asyncio.create_task(turns.judge(name)) for name in names[:3])
    await asyncio.sleep(0)
    second.cancel()
    first.cancel()

    assert await third is None
    assert turns.promised(names[0]) == turns.promised(names[1]) == []


# ---- what a forecast is made of -------------------------------------------------------------------------------------


async def test_a_forecast_is_made_of_what_is_there_when_its_turn_comes() -> None:
    turns = Turns.of_two(pods=10, cpu="100m", look_seconds=0.003)
    first, second = asyncio.create_task(turns.judge("a")), asyncio.create_task(turns.judge("b"))
    await asyncio.sleep(0)
    turns.bench.put(pod_body("other", "c", cpu="6500m"))

    assert await first is None
    assert "too little cpu" in (await second or "")


def fill(turns: Turns) -> None:
    turns.bench.put(pod_body("other", "b", cpu="7500m"))


def cordon(turns: Turns) -> None:
    turns.bench.node("b", unschedulable=True)


def delete(turns: Turns) -> None:
    node = turns.bench.matcher.node("b")
    assert node is not None
    turns.bench.matcher.remove(node)


def drain(turns: Turns) -> None:
    turns.leaving.add("b")


def come(turns: Turns) -> None:
    turns.bench.put(pod_body("p9", "a"))


def fill_in_part(turns: Turns) -> None:
    turns.bench.put(pod_body("other", "b", cpu="7"))


@pytest.mark.parametrize("change", [fill, cordon, delete, drain])
async def test_a_forecast_is_made_again_if_its_room_is_gone_at_its_end(change: Callable[[Turns], None]) -> None:
    """The pods would wait for a new machine, or be moved twice."""
    turns = Turns("abc", [pod_body(f"p{number}", "a") for number in range(8)], look_seconds=SLICE_SECONDS)
    turns.clock.on_turn = lambda number: change(turns) if number == 10 else None

    assert await turns.judge("a") is None

    assert turns.promised("a") == ["c"] * 8
    assert len(turns.clock.turns_seconds) > 20


async def test_a_forecast_is_made_again_for_pods_that_come_to_the_node_meanwhile() -> None:
    turns = Turns("abc", [pod_body(f"p{number}", "a") for number in range(8)], look_seconds=SLICE_SECONDS)
    turns.clock.on_turn = lambda number: come(turns) if number == 10 else None

    assert await turns.judge("a") is None

    assert turns.promised("a") == ["b"] * 8 + ["c"]


async def test_room_that_is_promised_to_other_drains_is_not_there_at_the_end_of_a_forecast() -> None:
    turns = Turns("abcd", [pod_body("other", "d", cpu="3")], look_seconds=SLICE_SECONDS)
    turns.leaving.add("a")
    assert await turns.judge("d") is None
    for number in range(4):
        turns.bench.put(pod_body(f"p{number}", "a"))
    last = len(turns.clock.turns_seconds) + 8

    def fill_at(number: int) -> None:
        if number == last:
            turns.bench.put(pod_body("q", "b", cpu="2"))

    turns.clock.on_turn = fill_at

    assert turns.promised("d") == ["b"]
    assert await turns.judge("a") is None
    assert turns.promised("a") == ["b", "b", "b", "c"]


async def test_a_forecast_stands_if_its_room_is_smaller_at_its_end_and_large_enough() -> None:
    turns = Turns("abc", [pod_body(f"p{number}", "a", cpu="100m") for number in range(8)], look_seconds=SLICE_SECONDS)
    turns.clock.on_turn = lambda number: fill_in_part(turns) if number == 10 else None

    assert await turns.judge("a") is None

    assert turns.promised("a") == ["b"] * 8
    assert len(turns.clock.turns_seconds) < 25


async def test_a_forecast_that_is_never_true_at_its_end_is_given_up() -> None:
    turns = Turns("abc", [pod_body(f"p{number}", "a") for number in range(8)], look_seconds=SLICE_SECONDS)

    def replace_a_pod(number: int) -> None:
        turns.bench.put(pod_body(f"q{number}", "a"))
        if number > 1:
            turns.bench.pods.remove(turns.bench.put(pod_body(f"q{number - 1}", "a")))

    turns.clock.on_turn = replace_a_pod

    assert await turns.judge("a") == "its forecast took longer than 10 s"
    assert turns.promised("a") == []


@pytest.mark.parametrize("is_made_again", [False, True])
async def test_a_node_that_is_gone_when_its_turn_comes_takes_no_room(is_made_again: bool) -> None:
    """Its drain ends by the UID; a promise for it would never be released."""
    turns = Turns.of_two(pods=5, cpu="100m", look_seconds=0.003)
    first, second = asyncio.create_task(turns.judge("a")), asyncio.create_task(turns.judge("b"))
    await asyncio.sleep(0)
    node = turns.bench.matcher.node("b")
    assert node is not None
    turns.bench.matcher.remove(node)
    if is_made_again:
        turns.bench.node("b", uid="another")

    assert await first is None
    assert await second is None
    assert turns.promised("b") == []


# ---- what a forecast costs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rules",
    [
        {"topologySpreadConstraints": [spread("x", ZONE, 1_000)]},
        {"affinity": {"podAffinity": required(term("x", ZONE))}},
        {"affinity": {"podAntiAffinity": required(term("y", ZONE))}},
    ],
    ids=["spread", "affinity", "anti-affinity"],
)
def test_a_rule_is_evaluated_once_for_pods_that_are_alike(
    rules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forecast that looks at each pod of a large cluster for each kind of pod takes seconds."""
    looks = 0

    def selects_counted(selector: LabelSelectorObject | None, labels: dict[str, str] | None) -> bool:
        nonlocal looks
        looks += 1
        return selects(selector, labels)

    monkeypatch.setattr(topology_rules, "selects", selects_counted)
    bench = Bench([node_body(name, labels={ZONE: "1"}) for name in "abc"], [])
    for number in range(200):
        bench.put(pod_body(f"p{number}", "b", cpu="1m", labels={"app": "x"}, **rules))
    bench.put(pod_body("p", "a", labels={"app": "x"}, **rules))

    assert bench.refusal("a") is None
    assert looks < 20
