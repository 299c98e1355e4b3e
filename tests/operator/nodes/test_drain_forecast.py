"""The forecast of drains: what fits on the nodes that stay and come, in the scheduler's order, node after node."""

import asyncio
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import msgspec
import pytest

from bigfleet.model.frames import (
    ComingNodes,
    DrainForecast,
    DrainForecastRequest,
    ForecastOutcome,
    NodeStateUpdate,
    Taint,
)
from bigfleet.model.states import MachineState
from bigfleet.operator.kubernetes.objects import NodeObject, PodObject
from bigfleet.operator.nodes import drain_forecast
from bigfleet.operator.nodes.budgets import BUDGETS_SECONDS, DisruptionBudgets
from bigfleet.operator.nodes.drain_forecast import FORECAST_COMING_MAX, DrainForecaster
from bigfleet.operator.nodes.matching import NodeMatcher
from bigfleet.operator.nodes.pod_index import PodsByNode
from bigfleet.operator.nodes.preflight import Preflight
from bigfleet.operator.work_queue import WorkQueue
from bigfleet.sim.kernel.virtual_time import LoopClock
from bigfleet.sim.kubernetes.client import InMemoryApi
from bigfleet.sim.kubernetes.server import InMemoryApiServer
from tests.operator.nodes.node_world import BUDGET, node_body, pod_body

pytestmark = pytest.mark.virtual_time

EIGHT = ComingNodes(count=1, labels={}, resources={"cpu": "8", "memory": "32Gi"})


class Bench:
    """A forecaster and the caches that it reads; machine m-a has node a."""

    def __init__(self, nodes: Sequence[Mapping[str, Any]], pods: Sequence[Mapping[str, Any]]) -> None:
        clock = LoopClock()
        self.server = InMemoryApiServer(clock)
        api = InMemoryApi(self.server)
        self.matcher = NodeMatcher(api=api, queue=WorkQueue(clock=clock, rng=Random(1)), clock=clock)
        self.pods = PodsByNode()
        self.preflight = Preflight(nodes=self.matcher, pods=self.pods, clock=clock)
        self.leaving: set[str] = set()
        self.answers: list[DrainForecast] = []
        self.forecaster = DrainForecaster(
            nodes=self.matcher,
            pods=self.pods,
            budgets=DisruptionBudgets(api=api, clock=clock),
            preflight=self.preflight,
            leaving=lambda: self.leaving,
            clock=clock,
            answer=self.answers.append,
        )
        for body in nodes:
            node = msgspec.convert(body, NodeObject)
            self.matcher.put(node, None)
            machine_id = (node.metadata.labels or {})["bigfleet.lucy.sh/machine-id"]
            self.matcher.node_state(
                NodeStateUpdate(machine_id=machine_id, cluster_id="c", state=MachineState.CONFIGURED)
            )
        for body in pods:
            pod = msgspec.convert(body, PodObject)
            pod.metadata.uid = f"uid-{pod.metadata.name}"
            self.pods.put(pod, None)

    async def ask(self, goes: str, *comes: ComingNodes, scheduler: str = "least-allocated") -> DrainForecast:
        """Return the forecast of draining the nodes of these names."""
        machine_ids = tuple(f"m-{name}" for name in goes)
        request = DrainForecastRequest(request_id="r", machine_ids=machine_ids, comes=comes, scheduler=scheduler)
        return await self.forecaster.forecast(request)


def nodes(names: str, **fields: Any) -> list[dict[str, Any]]:
    return [node_body(name, f"m-{name}", **fields) for name in names]


async def test_pods_may_go_to_nodes_that_come() -> None:
    bench = Bench(nodes("ab"), [pod_body("p", "a", cpu="4"), pod_body("q", "b", cpu="6")])

    assert (await bench.ask("a", EIGHT)).outcome is ForecastOutcome.FITS
    refused = await bench.ask("a")
    assert (refused.outcome, refused.machine_id) == (ForecastOutcome.WOULD_NOT_FIT, "m-a")
    assert refused.message == ("pod d/p fits on no other node: it requests cpu 4; of 1 other nodes: 1 too little cpu")


async def test_nothing_is_promised_or_moved_by_a_forecast() -> None:
    bench = Bench(nodes("ab"), [pod_body("p", "a", cpu="5")])

    assert [(await bench.ask("a")).outcome for _ in range(2)] == [ForecastOutcome.FITS] * 2
    node = bench.matcher.node("b")
    assert node is not None
    assert bench.preflight.promised("m-a") == {}
    assert bench.preflight.refusal("m-b", node, leaving={"b"}) is None


async def test_what_the_scheduler_does_with_one_node_takes_room_from_the_next() -> None:
    """First fit would put p on c and leave d for the large one; least-allocated puts p on d, which is emptier."""
    pods = [
        pod_body("p", "a", cpu="2"),
        pod_body("large", "b", cpu="6"),
        pod_body("full", "b", cpu="2"),
        pod_body("some", "c", cpu="4"),
        pod_body("little", "d", cpu="1"),
    ]
    bench = Bench(nodes("abcd"), pods)

    assert (await bench.ask("b")).outcome is ForecastOutcome.FITS
    refused = await bench.ask("ab")
    assert (refused.outcome, refused.machine_id) == (ForecastOutcome.WOULD_NOT_FIT, "m-b")
    assert "pod d/large fits on no other node" in refused.message
    assert (await bench.ask("ab", scheduler="most-allocated")).outcome is ForecastOutcome.FITS


async def test_a_pod_that_would_wait_in_the_schedulers_order_is_named() -> None:
    """First fit finds room for both; the scheduler puts the first where the second needed to go."""
    gpu = [{"key": "gpu", "effect": "NoSchedule"}]
    stays: dict[str, Any] = {"nodeSelector": {"disk": "ssd"}}
    world = [
        node_body("a", "m-a"),
        node_body("b", "m-b", allocatable={"cpu": "4", "pods": "9"}),
        node_body("c", "m-c", labels={"disk": "ssd"}, allocatable={"cpu": "6", "pods": "9"}),
        node_body("d", "m-d", taints=gpu),
    ]
    bench = Bench(world, [pod_body("large", "a", cpu="4"), pod_body("small", "a", cpu="3", **stays)])

    refused = await bench.ask("a")
    assert refused.outcome is ForecastOutcome.WOULD_NOT_FIT
    assert refused.message.startswith("pod d/small would wait in the scheduler's order: it requests cpu 3; ")


async def test_pods_that_moved_move_again_with_the_node_that_took_them() -> None:
    bench = Bench(nodes("abc"), [pod_body("p", "a", cpu="5"), pod_body("q", "c", cpu="4")])

    assert (await bench.ask("a")).outcome is ForecastOutcome.FITS
    refused = await bench.ask("ab")
    assert (refused.outcome, refused.machine_id) == (ForecastOutcome.WOULD_NOT_FIT, "m-b")
    assert "pod d/p" in refused.message
    assert (await bench.ask("ab", EIGHT)).outcome is ForecastOutcome.FITS


@pytest.mark.parametrize(
    ("coming", "spec", "fits"),
    [
        (EIGHT, {"nodeSelector": {"disk": "ssd"}}, False),
        (ComingNodes(count=1, labels={"disk": "ssd"}, resources={"cpu": "8"}), {"nodeSelector": {"disk": "ssd"}}, True),
        (
            ComingNodes(count=1, labels={}, resources={"cpu": "8"}, taints=(Taint("gpu", "", "NoSchedule"),)),
            {},
            False,
        ),
        (ComingNodes(count=1, labels={}, resources={"cpu": "8", "pods": "0"}), {}, False),
        (ComingNodes(count=0, labels={}, resources={"cpu": "8"}), {}, False),
    ],
)
async def test_nodes_that_come_are_as_they_are_described(coming: ComingNodes, spec: dict[str, Any], fits: bool) -> None:
    bench = Bench(nodes("a"), [pod_body("p", "a", **spec)])

    assert ((await bench.ask("a", coming)).outcome is ForecastOutcome.FITS) == fits


async def test_nodes_that_are_drained_offer_no_room() -> None:
    bench = Bench(nodes("ab"), [pod_body("p", "a")])
    assert (await bench.ask("a")).outcome is ForecastOutcome.FITS
    bench.leaving = {"b"}

    assert (await bench.ask("a")).outcome is ForecastOutcome.WOULD_NOT_FIT


async def test_room_that_is_promised_to_a_drain_is_taken() -> None:
    bench = Bench(nodes("abc"), [pod_body("p", "a", cpu="5"), pod_body("q", "b", cpu="5")])
    node = bench.matcher.node("a")
    assert node is not None
    bench.leaving = {"a"}
    assert bench.preflight.refusal("m-a", node, leaving={"a", "b"}) is None

    assert (await bench.ask("b")).outcome is ForecastOutcome.WOULD_NOT_FIT


async def test_what_cannot_be_told_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shard then does as with an operator that cannot be asked."""
    bench = Bench(nodes("ab"), [pod_body("p", "a")])
    many = ComingNodes(count=FORECAST_COMING_MAX + 1, labels={}, resources={})

    strange, crowded = await bench.ask("x"), await bench.ask("a", many)
    assert (strange.outcome, strange.message) == (ForecastOutcome.UNSPECIFIED, "no node of machine m-x")
    assert (crowded.outcome, "1001 nodes would come" in crowded.message) == (ForecastOutcome.UNSPECIFIED, True)
    monkeypatch.setattr(drain_forecast, "FORECAST_CHECKS_MAX", 1)
    large = await bench.ask("a")
    assert (large.outcome, "2 placements" in large.message) == (ForecastOutcome.UNSPECIFIED, True)


async def test_the_newest_request_is_answered_and_a_fault_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(nodes("ab"), [pod_body("p", "a")])
    running = asyncio.create_task(bench.forecaster.run())
    for number in (1, 2):
        bench.forecaster.ask(DrainForecastRequest(request_id=f"r{number}", machine_ids=("m-a",)))
    await asyncio.sleep(1)
    assert [(each.request_id, each.outcome) for each in bench.answers] == [("r2", ForecastOutcome.FITS)]

    monkeypatch.setattr(bench.preflight, "rooms", lambda _away: 1 / 0)
    bench.forecaster.ask(DrainForecastRequest(request_id="r3", machine_ids=("m-a",)))
    await asyncio.sleep(1)
    assert bench.answers[1].outcome is ForecastOutcome.UNSPECIFIED
    assert bench.answers[1].message == "the operator failed: ZeroDivisionError; see its log"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_pod_that_must_not_be_moved_has_no_place_on_any_node() -> None:
    marked = pod_body("p", "a", annotations={"karpenter.sh/do-not-disrupt": "true"})
    bench = Bench(nodes("ab"), [marked])

    refused = await bench.ask("a", EIGHT)

    assert (refused.outcome, refused.machine_id) == (ForecastOutcome.WOULD_NOT_FIT, "m-a")
    assert "must not be evicted by a voluntary drain" in refused.message


async def test_pods_with_one_host_port_need_a_node_each() -> None:
    bodies = [pod_body(f"p-{name}", name) for name in "ab"]
    for body in bodies:
        body["spec"]["containers"][0]["ports"] = [{"hostPort": 8080}]

    one = await Bench(nodes("ab"), bodies).ask("ab", EIGHT)
    two = await Bench(nodes("ab"), bodies).ask("ab", EIGHT, EIGHT)

    assert one.outcome is ForecastOutcome.WOULD_NOT_FIT
    assert "host port 8080/TCP taken" in one.message
    assert two.outcome is ForecastOutcome.FITS


async def test_a_pod_that_its_budget_never_lets_go_is_named() -> None:
    bench = Bench(nodes("ab"), [pod_body("p", "a", labels={"app": "db"}, ready=True)])
    before = await bench.ask("a", EIGHT)
    bench.server.put(
        BUDGET,
        {
            "metadata": {"name": "db", "namespace": "d"},
            "spec": {"selector": {"matchLabels": {"app": "db"}}, "minAvailable": 1},
            "status": {"desiredHealthy": 1, "expectedPods": 1},
        },
    )
    await asyncio.sleep(BUDGETS_SECONDS)
    answer = await bench.ask("a", EIGHT)

    assert before.outcome is ForecastOutcome.FITS
    assert (answer.outcome, answer.machine_id) == (ForecastOutcome.WOULD_NOT_FIT, "m-a")
    assert answer.message == ("pod d/p can never be evicted: the disruption budget db wants 1 healthy pods of 1")
