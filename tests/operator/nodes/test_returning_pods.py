"""Pods that tolerate the cordon come back to the Node that is drained: they are evicted once, and do not hold it up."""

import asyncio

import pytest

from bigfleet.model.frames import DrainOutcome
from bigfleet.operator.kubernetes.resources import PODS
from bigfleet.sim.kubernetes.kinds import kind_key
from bigfleet.sim.kubernetes.store import StoredChange
from tests.operator.nodes.node_world import NodeWorld

pytestmark = pytest.mark.virtual_time

#: As calico-typha, tigera-operator and many volume controllers have it.
TOLERATES_ALL: list[dict[str, str]] = [{"operator": "Exists"}]
UNSCHEDULABLE = "node.kubernetes.io/unschedulable"


class ReturningPod:
    """One replica whose successors are bound to the Node `n` at once."""

    def __init__(self, world: NodeWorld, name: str, tolerations: list[dict[str, str]]) -> None:
        self._world = world
        self._name = name
        self._tolerations = tolerations
        self.made = 0
        world.server.store.subscribe(kind_key(PODS), self._hear)
        self._make()

    def _make(self) -> None:
        self.made += 1
        self._world.pod(self._name.format(self.made), "n", tolerations=self._tolerations)

    def _hear(self, change: StoredChange) -> None:
        if change.after is None:
            asyncio.get_running_loop().call_soon(self._make)


@pytest.mark.parametrize("name", ["web-{}", "web-0"], ids=["deployment", "stateful set"])
@pytest.mark.parametrize(
    "tolerations",
    [TOLERATES_ALL, [{"key": UNSCHEDULABLE, "operator": "Exists", "effect": "NoSchedule"}]],
    ids=["everything", "the cordon"],
)
async def test_a_pod_that_comes_back_is_evicted_once_and_does_not_hold_up_the_drain(
    world: NodeWorld, name: str, tolerations: list[dict[str, str]]
) -> None:
    world.node("n", "m")
    replica = ReturningPod(world, name, tolerations)
    operator = world.operator()
    operator.instruct("m", grace_seconds=600)
    result = await operator.result()

    assert result.outcome is DrainOutcome.DRAINED
    assert asyncio.get_running_loop().time() < 10
    assert operator.observer.answers == ["accepted"]
    assert replica.made == 2


@pytest.mark.parametrize("tolerations", [[], [{"key": UNSCHEDULABLE, "operator": "Exists", "effect": "NoExecute"}]])
async def test_a_pod_that_is_bound_against_the_cordon_is_evicted_until_the_deadline(
    world: NodeWorld, tolerations: list[dict[str, str]]
) -> None:
    """The scheduler did not put it there."""
    world.node("n", "m")
    ReturningPod(world, "web-{}", tolerations)
    operator = world.operator()
    operator.instruct("m", grace_seconds=60)
    result = await operator.result()

    assert result.outcome is DrainOutcome.GRACE_EXPIRED
    assert len(operator.observer.answers) > 5


async def test_a_pod_that_tolerates_everything_is_awaited_while_it_has_not_left(world: NodeWorld) -> None:
    world.node("n", "m")
    world.kubelet.dwell_seconds = 30.0
    world.pod("p", "n", tolerations=TOLERATES_ALL)
    operator = world.operator()
    operator.instruct("m", grace_seconds=600)
    result = await operator.result()

    assert result.outcome is DrainOutcome.DRAINED
    assert asyncio.get_running_loop().time() >= 30
