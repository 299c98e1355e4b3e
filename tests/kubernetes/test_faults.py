"""What must hold after any program of a fleet is killed, at any moment: nothing is lost, nothing is left over."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence, Set
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import yaml

from bigfleet.demo.kubernetes.components import Component
from bigfleet.model.states import MachineState
from bigfleet.operator.kubernetes.resources import NODES, RECLAIM_ANNOTATION
from bigfleet.shard.cycle.reclaim_delay import FIT_HOLD_FIRST_SECONDS
from tests.kubernetes.api_proxy import (
    ApiProxy,
    empty_objects,
    expired_watches,
    forward,
    page,
    status_text,
    too_many_requests,
)
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
from tests.kubernetes.program import Program
from tests.kubernetes.ready_pods import watched_pods

pytestmark = pytest.mark.kubernetes

NAME = "one"
API_SERVER = "api server"
ETCD = "etcd"
ONE_AT_A_TIME = (operator_of(NAME), pod_controller_of(NAME), SHARD, PROVIDER, API_SERVER, ETCD)
_COMPONENTS = {ETCD: Component.ETCD, API_SERVER: Component.API_SERVER}
#: When something is disturbed, of what is under way then; each is also over once a later one has come.
BOOTSTRAP_MOMENTS = ("pods wait", "a machine is created", "it is configured", "a Node is there", "a Node is Ready")
DRAIN_MOMENTS = ("pods are gone", "a machine is drained", "a Node is annotated", "pods are evicted", "a Node has gone")
#: Pods of a quarter of a machine that a budget guards, and of more than half a machine that none does. When they were
#: many and become few, guarded ones are left on machines that are not needed, and have to be evicted.
GUARDED = {"few": 4, "many": 8}
PLAIN = {"few": 1, "many": 6}
HEALTHY_MIN = GUARDED["few"] - 1
#: For how long the API server misbehaves in the quick tests.
MISBEHAVES_SECONDS = 15.0
OPERATOR_RIGHTS, POD_CONTROLLER_RIGHTS = "operator-rights.yaml", "pod-controller-rights.yaml"
EXPIRED_EVENT = f'{{"type":"ERROR","object":{status_text(410, "Expired", "too old resource version")}}}\n'.encode()

Disturbance = Callable[[], Awaitable[None]]


@pytest.fixture
async def fleet(cluster: ClusterUnderTest, tmp_path: Path) -> AsyncIterator[FleetUnderTest]:
    pools = [pool("std.4x16", zone, 6) for zone in ZONES]
    async with FleetUnderTest(tmp_path / "fleet", {NAME: cluster}, pools=pools) as opened:
        yield opened


@pytest.fixture
async def proxy(cluster: ClusterUnderTest) -> AsyncIterator[ApiProxy]:
    async with ApiProxy(cluster.plane) as opened:
        yield opened


@pytest.fixture
async def proxied_fleet(cluster: ClusterUnderTest, proxy: ApiProxy, tmp_path: Path) -> AsyncIterator[FleetUnderTest]:
    """A fleet whose operator and pod controller reach the API server through `proxy`."""
    pools = [pool("std.4x16", zone, 6) for zone in ZONES]
    async with FleetUnderTest(tmp_path / "fleet", {NAME: cluster}, pools=pools, proxies={NAME: proxy}) as opened:
        yield opened


def crash(fleet: FleetUnderTest, names: Sequence[str]) -> Disturbance:
    """Kill programs at once, then start them again."""

    async def disturb() -> None:
        programs = [fleet.program(name) for name in names if name not in _COMPONENTS]
        components = [component for name, component in _COMPONENTS.items() if name in names]
        plane = fleet.clusters[NAME].plane
        kills: list[Awaitable[None]] = [program.kill() for program in programs]
        kills += [plane.kill(component) for component in components]
        await asyncio.gather(*kills)
        for program in programs:
            program.start()
        for component in components:
            await plane.restart(component)

    return disturb


class Upheaval:
    """A workload that grows and shrinks, so that machines are bootstrapped and drained when something is disturbed."""

    def __init__(self, fleet: FleetUnderTest, namespace: str) -> None:
        self._fleet = fleet
        self._cluster = fleet.clusters[NAME]
        self._namespace = namespace

    async def begin(self) -> None:
        budget = disruption_budget("guarded", "guarded", min_available=HEALTHY_MIN)
        await self._cluster.api.create(DISRUPTION_BUDGETS, budget, namespace=self._namespace)
        for name, pods, cpu in (("guarded", GUARDED["few"], "1"), ("plain", PLAIN["few"], "2500m")):
            made = deployment(name, pods, pod_template(requests={"cpu": cpu, "memory": "1Gi"}))
            await self._cluster.api.create(DEPLOYMENTS, made, namespace=self._namespace)
        await self._running("few")
        await self._fleet.at_rest()

    async def disturb_a_bootstrap(self, disturb: Disturbance, moment: str = BOOTSTRAP_MOMENTS[1]) -> None:
        """Disturb something while machines come, and return once all is well again."""
        before: set[str] = {machine.id for machine in await self._fleet.machines_of(NAME)}
        nodes_before = set(self._cluster.kubelet.nodes)
        stage = BOOTSTRAP_MOMENTS.index(moment)
        await self._scale("many")

        async def has_come() -> bool:
            return stage <= await self._bootstrap_stage(before, nodes_before)

        await eventually(has_come, f"it does not come to: {moment}")
        await disturb()
        await self._running("many")
        await self._fleet.objects_are_exact(NAME)

    async def _bootstrap_stage(self, machines_before: Set[str], nodes_before: set[str]) -> int:
        nodes = [
            node for node in (await self._cluster.api.list_page(NODES)).items if node.metadata.name not in nodes_before
        ]
        if nodes:
            return 4 if any(node.is_ready for node in nodes) else 3
        machines = [machine for machine in await self._fleet.machines() if machine.id not in machines_before]
        states = {machine.state for machine in machines}
        if states & {MachineState.CONFIGURING, MachineState.CONFIGURED}:
            return 2
        return 1 if MachineState.CREATING in states else 0

    async def disturb_a_drain(self, disturb: Disturbance, moment: str = DRAIN_MOMENTS[2]) -> None:
        """Disturb something while machines go, and return once all is well again."""
        before = set(self._cluster.kubelet.nodes)
        stage = DRAIN_MOMENTS.index(moment)
        await self._scale("few")

        async def has_come() -> bool:
            return stage <= await self._drain_stage(before)

        # While pods that end are still seen, because watches were dropped, they fit nowhere else.
        await eventually(has_come, f"it does not come to: {moment}", held_seconds=FIT_HOLD_FIRST_SECONDS)
        await disturb()
        await self._running("few")
        # A machine that is still to go would be bound again in the next round, and nothing would be new there.
        await self._fleet.at_rest()

    async def _drain_stage(self, nodes_before: set[str]) -> int:
        nodes = {node.metadata.name: node for node in (await self._cluster.api.list_page(NODES)).items}
        if not nodes_before <= nodes.keys():
            return 4
        drained = {name for name, node in nodes.items() if RECLAIM_ANNOTATION in (node.metadata.annotations or {})}
        if drained:
            pods = [pod for pod in await self._cluster.pods(self._namespace) if pod.spec.node_name in drained]
            return 3 if any(pod.is_terminating for pod in pods) else 2
        figures = await self._fleet.observer.look()
        return 1 if any(state is MachineState.DRAINING for state, _ in figures.machines) else 0

    async def grow(self) -> None:
        """Return once many pods run."""
        await self._scale("many")
        await self._running("many")

    async def shrink(self) -> None:
        """Return once few pods are left; the machines that they do not need are drained from then on."""
        await self._scale("few")
        await self._running("few")

    async def _scale(self, size: str) -> None:
        for name, pods in (("plain", PLAIN[size]), ("guarded", GUARDED[size])):
            body = {"spec": {"replicas": pods}}
            await self._cluster.api.patch(DEPLOYMENTS, name, body, namespace=self._namespace)

    async def _running(self, size: str) -> None:
        await self._fleet.running(NAME, self._namespace, GUARDED[size] + PLAIN[size])


def evicted_pods(cluster: ClusterUnderTest, namespace: str) -> set[str]:
    """Return the pods of a namespace whose eviction was asked for, and neither refused nor too late."""
    asked = [each for each in cluster.audited(is_eviction=True) if each.object_ref.namespace == namespace]
    return {each.object_ref.name for each in asked if each.response_status.code not in (404, 429)}


async def upheaval(
    fleet: FleetUnderTest,
    rounds: Sequence[tuple[Disturbance, Disturbance]],
    *,
    bootstrap_moment: str = BOOTSTRAP_MOMENTS[1],
    drain_moment: str = DRAIN_MOMENTS[2],
) -> None:
    """Disturb a bootstrap and a drain in each round, and check that the budget held though pods were evicted."""
    cluster = fleet.clusters[NAME]
    namespace = await cluster.make_namespace()
    course = Upheaval(fleet, namespace)
    await course.begin()
    async with watched_pods(cluster, namespace, "guarded", GUARDED["few"]) as healthy:
        for in_bootstrap, in_drain in rounds:
            await course.disturb_a_bootstrap(in_bootstrap, bootstrap_moment)
            await course.disturb_a_drain(in_drain, drain_moment)
        await fleet.at_rest()
    evicted = evicted_pods(cluster, namespace)

    assert healthy.lowest_left(evicted) >= HEALTHY_MIN
    assert evicted


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(DRAIN_MOMENTS)))
async def test_each_program_may_be_killed_at_any_moment(fleet: FleetUnderTest, number: int) -> None:
    """One at a time and all at once, during a bootstrap and during a drain."""
    kills = [crash(fleet, names) for names in (*([name] for name in ONE_AT_A_TIME), ONE_AT_A_TIME)]
    await upheaval(
        fleet,
        [(kill, kill) for kill in kills],
        bootstrap_moment=BOOTSTRAP_MOMENTS[number],
        drain_moment=DRAIN_MOMENTS[number],
    )


#: Drains may be held for ten minutes in each round; the suite's limit for one test is 20 minutes.
LONG = pytest.mark.timeout(7200)


async def refuse_everything(proxy: ApiProxy) -> None:
    proxy.answer = too_many_requests(retry_after_seconds=1)
    proxy.cut_watches()
    await asyncio.sleep(MISBEHAVES_SECONDS)
    proxy.answer = forward


async def refuse_watches(proxy: ApiProxy) -> None:
    proxy.answer = expired_watches
    proxy.end_watches(EXPIRED_EVENT)
    await asyncio.sleep(MISBEHAVES_SECONDS)
    proxy.answer = forward


async def drop_watches(proxy: ApiProxy) -> None:
    for _ in range(int(MISBEHAVES_SECONDS)):
        proxy.cut_watches()
        await asyncio.sleep(1.0)


async def hang(proxy: ApiProxy, seconds: float = MISBEHAVES_SECONDS) -> None:
    proxy.hang()
    await asyncio.sleep(seconds)
    proxy.resume()


async def answer_nonsense(proxy: ApiProxy) -> None:
    """Answer as a load balancer without an API server, a login page and a broken cache do, each for a while."""
    for answer in (page(200), page(302), page(401), page(404), empty_objects):
        for last_words in (b'{"type":"MODIFIED","object":{"metadata":{"na', b"\xff\xfe\n", b"x" * (17 << 20)):
            proxy.answer = answer
            proxy.end_watches(last_words)
            await asyncio.sleep(1.0)
            proxy.answer = forward
            await asyncio.sleep(1.0)


def check_starts(fleet: FleetUnderTest, *, outages: int) -> None:
    """Check that an operator ended no more than once in each outage in which no Lease can be renewed."""
    operator, controller = fleet.program(operator_of(NAME)), fleet.program(pod_controller_of(NAME))
    assert operator.starts_total <= 1 + outages, "\n".join(operator.complaints())
    assert controller.starts_total == 1, "\n".join(controller.complaints())


@pytest.mark.slow
async def test_an_api_server_may_refuse_hang_and_drop_watches(proxied_fleet: FleetUnderTest, proxy: ApiProxy) -> None:
    rounds = [
        (partial(refuse_everything, proxy), partial(drop_watches, proxy)),
        (partial(refuse_watches, proxy), partial(hang, proxy)),
    ]
    await upheaval(proxied_fleet, rounds)

    check_starts(proxied_fleet, outages=2)


@pytest.mark.slow
@LONG
async def test_an_api_server_may_answer_nonsense_and_hang_for_90_seconds(
    proxied_fleet: FleetUnderTest, proxy: ApiProxy
) -> None:
    rounds = [
        (partial(hang, proxy, 90.0), partial(refuse_everything, proxy)),
        (partial(answer_nonsense, proxy), partial(answer_nonsense, proxy)),
        (partial(drop_watches, proxy), partial(refuse_watches, proxy)),
        (partial(hang, proxy), partial(hang, proxy, 90.0)),
    ]
    await upheaval(proxied_fleet, rounds)

    # Nonsense is one as well if each renewal meets it.
    check_starts(proxied_fleet, outages=6)


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


@asynccontextmanager
async def without(fleet: FleetUnderTest, file: str, *resources: str) -> AsyncIterator[None]:
    """Take the rights on some resources from the roles of a manifest, and give them back."""
    plane = fleet.clusters[NAME].plane
    documents = list(yaml.safe_load_all((MANIFESTS / file).read_text(encoding="utf-8")))
    for each in documents:
        if each["kind"] in ("ClusterRole", "Role"):
            each["rules"] = [rule for rule in each["rules"] if not set(resources) & set(rule["resources"])]
    await plane.kubectl("apply", "-f", "-", standard_input=yaml.safe_dump_all(documents))
    try:
        yield
    finally:
        await plane.kubectl("apply", "-f", str(MANIFESTS / file))


async def test_an_operator_that_lacks_a_right_names_it_and_does_not_start(fleet: FleetUnderTest) -> None:
    operator = fleet.program(operator_of(NAME))
    await logged(lambda: operator.events("operator.ready"))
    await operator.stop()
    logged_before = len(operator.lines())
    async with without(fleet, OPERATOR_RIGHTS, "pods/eviction"):
        operator.start()
        operator.is_wanted = False
        code = await operator.ended()
    lines = operator.lines()[logged_before:]

    assert code == 1
    assert len(lines) == 1
    assert "create pods/eviction" in lines[0]["event"]


def missing(program: Program) -> str:
    """Return what a program said last of the rights that it lacks."""
    found = program.events("operator.rights_missing")
    return str(found[-1]["missing"]) if found else ""


@pytest.mark.slow
async def test_an_operator_that_loses_rights_names_them_and_goes_on_with_the_others(fleet: FleetUnderTest) -> None:
    cluster, operator = fleet.clusters[NAME], fleet.program(operator_of(NAME))
    namespace = await cluster.make_namespace()
    await logged(lambda: operator.events("operator.leadership_acquired"))
    async with without(fleet, OPERATOR_RIGHTS, "upcomingnodes", "capacityrequests/status"):
        await cluster.api.create(DEPLOYMENTS, deployment("web", 4, pod_template()), namespace=namespace)
        await fleet.running(NAME, namespace, 4)
        await logged(lambda: "create upcomingnodes.bigfleet.lucy.sh" in missing(operator))
    await logged(lambda: operator.events("operator.rights_restored"))
    await fleet.objects_are_exact(NAME)

    assert "patch capacityrequests.bigfleet.lucy.sh/status" in missing(operator)
    assert "deploy/kubernetes" in operator.events("operator.rights_missing")[0]["advice"]
    assert operator.starts_total == 1


@pytest.mark.slow
async def test_machines_stay_in_service_while_the_right_to_evict_is_missing(fleet: FleetUnderTest) -> None:
    cluster, operator = fleet.clusters[NAME], fleet.program(operator_of(NAME))
    namespace = await cluster.make_namespace()
    course = Upheaval(fleet, namespace)
    await course.begin()
    await course.grow()
    async with watched_pods(cluster, namespace, "guarded", GUARDED["many"]) as healthy:
        async with without(fleet, OPERATOR_RIGHTS, "pods/eviction"):
            await course.shrink()
            await logged(lambda: "create pods/eviction" in missing(operator))
            await logged(lambda: fleet.program(SHARD).events("drain.rejected"))
        await logged(lambda: operator.events("operator.rights_restored"))
        await fleet.at_rest()
    refused = [line for line in operator.events("drain.ended") if line["outcome"] != "DRAINED"]
    nodes = (await cluster.api.list_page(NODES)).items

    assert {line["outcome"] for line in refused} == {"WOULD_NOT_FIT"}
    assert all("the operator lacks a right: " in line["reason"] for line in refused)
    assert healthy.lowest_left(evicted_pods(cluster, namespace)) >= HEALTHY_MIN
    assert not any(node.spec.unschedulable for node in nodes)
    assert operator.starts_total == 1


async def test_a_pod_controller_that_loses_a_right_names_it_and_recovers(fleet: FleetUnderTest) -> None:
    cluster, controller = fleet.clusters[NAME], fleet.program(pod_controller_of(NAME))
    namespace = await cluster.make_namespace()
    await logged(lambda: controller.events("operator.leadership_acquired"))
    async with without(fleet, POD_CONTROLLER_RIGHTS, "capacityrequests"):
        await cluster.api.create(DEPLOYMENTS, deployment("web", 4, pod_template()), namespace=namespace)
        await logged(lambda: "create capacityrequests.bigfleet.lucy.sh" in missing(controller))
    await fleet.running(NAME, namespace, 4)
    await fleet.objects_are_exact(NAME)

    assert controller.starts_total == 1


@pytest.mark.slow
async def test_without_the_right_to_its_lease_no_process_leads_and_each_says_why(fleet: FleetUnderTest) -> None:
    cluster = fleet.clusters[NAME]
    operator, controller = fleet.program(operator_of(NAME)), fleet.program(pod_controller_of(NAME))
    for program in (operator, controller):
        await logged(partial(program.events, "operator.leadership_acquired"))
    async with (
        without(fleet, OPERATOR_RIGHTS, "leases"),
        without(fleet, POD_CONTROLLER_RIGHTS, "leases"),
    ):
        await logged(lambda: "update leases.coordination.k8s.io" in missing(controller))
        await logged(lambda: [line for line in plain_lines(operator) if "RBAC: missing rights: " in line])
    namespace = await cluster.make_namespace()
    await cluster.api.create(DEPLOYMENTS, deployment("web", 4, pod_template()), namespace=namespace)
    await fleet.running(NAME, namespace, 4)
    await fleet.objects_are_exact(NAME)
    first = plain_lines(operator)[0]

    assert "leadership was lost for want of a right" in first
    assert "leases" in first
    assert "another operator" not in "".join(plain_lines(operator))
    assert controller.starts_total == 1


def plain_lines(program: Program) -> list[str]:
    """Return what a program wrote that is no log line: the reason for which it ended."""
    return [line["event"] for line in program.lines() if line["level"] == "plain"]


async def logged(read: Callable[[], object]) -> None:
    """Return once `read` returns something true, such as what a program has logged."""

    async def some() -> object:
        return read()

    await eventually(some, "it was not logged")
