"""What must hold after any program of a fleet is killed, at any moment: nothing is lost, nothing is left over."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import pytest
import yaml

from bigfleet.demo.kubernetes.components import Component
from bigfleet.model.states import MachineState
from bigfleet.operator.kubernetes.resources import NODES, RECLAIM_ANNOTATION
from tests.kubernetes.cluster import ClusterUnderTest, eventually
from tests.kubernetes.fleet import (
    MANIFESTS,
    PROVIDER,
    SHARD,
    ZONES,
    FleetUnderTest,
    operator_of,
    pod_controller_of,
    pool,
)
from tests.kubernetes.kinds import DEPLOYMENTS, DISRUPTION_BUDGETS, deployment, disruption_budget, pod_template
from tests.kubernetes.ready_pods import watched_pods

pytestmark = pytest.mark.kubernetes

NAME = "one"
API_SERVER = "api server"
ONE_AT_A_TIME = (operator_of(NAME), pod_controller_of(NAME), SHARD, PROVIDER, API_SERVER)
#: Of machines that were not there before.
_COMING = (MachineState.CREATING, MachineState.CONFIGURING, MachineState.CONFIGURED)
GUARDED, UNGUARDED_FEW, UNGUARDED_MANY = 4, 2, 14


@pytest.fixture
async def fleet(cluster: ClusterUnderTest, tmp_path: Path) -> AsyncIterator[FleetUnderTest]:
    pools = [pool("std.4x16", zone, 6) for zone in ZONES]
    async with FleetUnderTest(tmp_path / "fleet", {NAME: cluster}, pools=pools) as opened:
        yield opened


async def crash(fleet: FleetUnderTest, names: Sequence[str]) -> None:
    """Kill programs at once, then start them again."""
    programs = [fleet.program(name) for name in names if name != API_SERVER]
    plane = fleet.clusters[NAME].plane
    kills: list[Awaitable[None]] = [program.kill() for program in programs]
    if API_SERVER in names:
        kills.append(plane.kill(Component.API_SERVER))
    await asyncio.gather(*kills)
    for program in programs:
        program.start()
    if API_SERVER in names:
        await plane.restart(Component.API_SERVER)


class Upheaval:
    """A workload that grows and shrinks, so that machines are being bootstrapped and drained when programs die."""

    def __init__(self, fleet: FleetUnderTest, namespace: str) -> None:
        self._fleet = fleet
        self._cluster = fleet.clusters[NAME]
        self._namespace = namespace

    async def begin(self) -> None:
        budget = disruption_budget("guarded", "guarded", min_available=GUARDED - 1)
        await self._cluster.api.create(DISRUPTION_BUDGETS, budget, namespace=self._namespace)
        template = pod_template(requests={"cpu": "1", "memory": "1Gi"})
        for name, pods in (("guarded", GUARDED), ("plain", UNGUARDED_FEW)):
            await self._cluster.api.create(DEPLOYMENTS, deployment(name, pods, template), namespace=self._namespace)
        await self._fleet.running(NAME, self._namespace, GUARDED + UNGUARDED_FEW)
        await self._fleet.at_rest()

    async def crash_in_a_bootstrap(self, names: Sequence[str]) -> None:
        """Kill programs while machines come, and return once all is well again."""
        before = {machine.id for machine in await self._fleet.machines_of(NAME)}
        await self._scale(UNGUARDED_MANY)

        async def some_machine_comes() -> bool:
            machines = await self._fleet.machines()
            return any(each.state in _COMING and each.id not in before for each in machines)

        await eventually(some_machine_comes, "no machine comes")
        await crash(self._fleet, names)
        await self._fleet.running(NAME, self._namespace, GUARDED + UNGUARDED_MANY)
        await self._fleet.objects_are_exact(NAME)

    async def crash_in_a_drain(self, names: Sequence[str]) -> None:
        """Kill programs while machines go, and return once all is well again."""
        before = set(self._cluster.kubelet.nodes)
        await self._scale(UNGUARDED_FEW)

        async def some_node_goes() -> bool:
            nodes = (await self._cluster.api.list_page(NODES)).items
            is_going = any(RECLAIM_ANNOTATION in (node.metadata.annotations or {}) for node in nodes)
            return is_going or not before <= {node.metadata.name for node in nodes}

        await eventually(some_node_goes, "no Node is drained")
        await crash(self._fleet, names)
        await self._fleet.running(NAME, self._namespace, GUARDED + UNGUARDED_FEW)
        await self._fleet.at_rest(quiet_cycles=0)

    async def _scale(self, pods: int) -> None:
        body = {"spec": {"replicas": pods}}
        await self._cluster.api.patch(DEPLOYMENTS, "plain", body, namespace=self._namespace)


async def upheaval(fleet: FleetUnderTest, rounds: Sequence[Sequence[str]]) -> int:
    """Kill the programs of each round during a bootstrap and during a drain; return the fewest healthy guarded pods."""
    cluster = fleet.clusters[NAME]
    namespace = await cluster.make_namespace()
    course = Upheaval(fleet, namespace)
    await course.begin()
    async with watched_pods(cluster, namespace, "guarded", GUARDED) as healthy:
        for names in rounds:
            await course.crash_in_a_bootstrap(names)
            await course.crash_in_a_drain(names)
        await fleet.at_rest()
    return healthy.lowest


@pytest.mark.slow
async def test_each_program_may_be_killed_during_a_bootstrap_and_during_a_drain(fleet: FleetUnderTest) -> None:
    lowest = await upheaval(fleet, [[name] for name in ONE_AT_A_TIME])

    assert lowest >= GUARDED - 1


@pytest.mark.slow
async def test_all_programs_may_be_killed_at_once_during_a_bootstrap_and_during_a_drain(fleet: FleetUnderTest) -> None:
    lowest = await upheaval(fleet, [ONE_AT_A_TIME])

    assert lowest >= GUARDED - 1


async def test_the_second_operator_of_a_cluster_waits_and_takes_over_when_the_first_dies(fleet: FleetUnderTest) -> None:
    cluster = fleet.clusters[NAME]
    first = fleet.program(operator_of(NAME))
    await logged(lambda: first.events("operator.leadership_acquired"))
    second = fleet.add_operator(NAME, fleet.operator_kubeconfig(NAME), name="second")
    second.start()
    await logged(lambda: second.events("operator.ready"))
    namespace = await cluster.make_namespace()
    await cluster.api.create(DEPLOYMENTS, deployment("web", 4, pod_template()), namespace=namespace)
    await fleet.running(NAME, namespace, 4)
    assert second.events("operator.leadership_acquired") == []
    await first.kill()
    await logged(lambda: second.events("operator.leadership_acquired"))
    await cluster.api.patch(DEPLOYMENTS, "web", {"spec": {"replicas": 8}}, namespace=namespace)
    await fleet.running(NAME, namespace, 8)
    await fleet.objects_are_exact(NAME)


async def test_of_two_operators_with_one_cluster_id_one_holds_the_session_and_the_other_says_why_not(
    fleet: FleetUnderTest,
) -> None:
    """Two installations that do not know of each other, such as in two namespaces: each leads by its own Lease."""
    cluster = fleet.clusters[NAME]
    first = fleet.program(operator_of(NAME))
    await logged(lambda: fleet.program(SHARD).events("session.opened"))
    second = fleet.add_operator(NAME, fleet.operator_kubeconfig(NAME), name="second", lease="another")
    second.start()

    def replaced() -> list[str]:
        ends = [*first.events("session.ended"), *second.events("session.ended")]
        return [end["reason"] for end in ends if end["kind"] == "replaced"]

    await logged(replaced)
    namespace = await cluster.make_namespace()
    await cluster.api.create(DEPLOYMENTS, deployment("web", 4, pod_template()), namespace=namespace)
    await fleet.running(NAME, namespace, 4)

    assert all("replaced by a newer session of this cluster" in reason for reason in replaced())


async def test_an_operator_that_lacks_a_right_names_it_and_does_not_start(fleet: FleetUnderTest) -> None:
    plane = fleet.clusters[NAME].plane
    operator = fleet.program(operator_of(NAME))
    await logged(lambda: operator.events("operator.ready"))
    await operator.stop()
    text = (MANIFESTS / "operator-rights.yaml").read_text(encoding="utf-8")
    documents = list(yaml.safe_load_all(text))
    (granted,) = [each for each in documents if each["kind"] == "ClusterRole"]
    granted["rules"] = [rule for rule in granted["rules"] if "pods/eviction" not in rule["resources"]]
    await plane.kubectl("apply", "-f", "-", standard_input=yaml.safe_dump(granted))
    logged_before = len(operator.lines())
    try:
        operator.start()
        operator.is_wanted = False
        code = await operator.ended()
    finally:
        await plane.kubectl("apply", "-f", str(MANIFESTS / "operator-rights.yaml"))
    lines = operator.lines()[logged_before:]

    assert code == 1
    assert len(lines) == 1
    assert "create pods/eviction" in lines[0]["event"]


async def logged(read: Callable[[], Sequence[object]]) -> None:
    """Return once a program has logged what `read` returns."""

    async def some() -> Sequence[object]:
        return read()

    await eventually(some, "it was not logged")
