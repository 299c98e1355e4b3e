"""Runs a whole fleet for tests: provider, shard, and for each cluster an operator and a pod controller, as processes.

    async with FleetUnderTest(tmp_path, {"east": east, "west": west}, pools=[pool("std.4x16", "sim-1a", 10)]) as fleet:
        ...  # create pods in `east`; the provider's machines join as Nodes of the fake kubelet
        await fleet.program(SHARD).kill()

The programs have the rights of the manifests and no others. This module does not schedule a pod or bind a machine.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

import msgspec

from bench.quality.bound import lower_bound
from bench.quality.values import Instance, Offer
from bigfleet.cli.runtime.system import SystemClock
from bigfleet.cli.up.kubernetes.run import ProviderMachines
from bigfleet.cli.up.observer import ShardObserver
from bigfleet.demo.kubernetes.fake_node import FakeNode
from bigfleet.demo.kubernetes.machine_nodes import node_name, nodes_of
from bigfleet.model import vector
from bigfleet.model.clock import NANOS_PER_SECOND
from bigfleet.model.ids import ClusterId
from bigfleet.model.machine import Machine
from bigfleet.model.node_identity import node_labels, node_taints
from bigfleet.model.states import BOUND_STATES, MachineState
from bigfleet.operator.demand.capacity_requests import request_of_spec
from bigfleet.operator.kubernetes.api import ApiError, Resource
from bigfleet.operator.kubernetes.objects import KubernetesObject, PodObject
from bigfleet.operator.kubernetes.resources import (
    AVAILABLE_CAPACITIES,
    CAPACITY_REQUESTS,
    MACHINE_ID,
    PODS,
    UPCOMING_NODES,
)
from bigfleet.operator.requests import CapacityRequest, UnmappableRequest
from bigfleet.provider.backends.simulated.book import Entry
from bigfleet.provider.records.record import ErrorCode
from bigfleet.rpc.clients.provider import GrpcProvider, ProviderDeadlines
from bigfleet.rpc.wire.convert_machine import machine_from_wire
from bigfleet.sim.packing.comparison import (
    PackedCost,
    cluster_of,
    offers_of,
    packed_cost,
    paid_anyway_usd_per_hour,
)
from tests.files.editing import editing
from tests.kubernetes.api_proxy import ApiProxy
from tests.kubernetes.cluster import ROOT, ClusterUnderTest, eventually, is_ready, until_nothing
from tests.kubernetes.program import Program
from tests.processes import free_port

PROVIDER = "provider"
SHARD = "shard"
REGION = "sim-1"
ZONES = ("sim-1a", "sim-1b", "sim-1c")
SYSTEM_NAMESPACE = "bigfleet-system"
OPERATOR_ACCOUNT = "bigfleet-operator"
POD_CONTROLLER_ACCOUNT = "bigfleet-pod-controller"
MANIFESTS = ROOT / "deploy" / "kubernetes" / "base"
#: Machines boot within a few seconds.
TIME_SCALE = 0.02
#: From a reclaim notice until the host is taken: some cycles of the shard, once the provider has started again.
_NOTICE_SECONDS = 8.0
#: Seconds since the world began that no test reaches.
_FOR_EVER = 1e12

#: How soon a program that ended by itself is started again.
_RESTART_SECONDS = 1.0
#: More than a machine is excess before it is reclaimed (`--reclaim-after`).
QUIET_CYCLES = 8
#: One machine in so many may be room that the scheduler did without.
_SLACK_SHARE = 10
#: What is logged when a Lease could not be renewed in time, or a watch was ended before its first event.
_SLOW_API_SERVER = (
    "leadership_lost",
    "another operator of this cluster may lead now",
    "drain.started_without_session",
    "the server ended it at once",
)
_ON_OFFER = (MachineState.IDLE, MachineState.SPECULATIVE)

Pool = dict[str, Any]
K = TypeVar("K", bound=KubernetesObject)


def operator_of(cluster: str) -> str:
    """Return the name of a cluster's operator among the programs."""
    return f"operator-{cluster}"


def pod_controller_of(cluster: str) -> str:
    """Return the name of a cluster's pod controller among the programs."""
    return f"pod-controller-{cluster}"


def pool(instance_type: str, zone: str, count: int, *, capacity_type: str = "on_demand", **fields: Any) -> Pool:
    """Return machines that a provider offers; on demand ones exist once they are created."""
    return {"instance_type": instance_type, "zone": zone, "count": count, "capacity_type": capacity_type, **fields}


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetCost:
    """What a fleet costs, beside what a packer pays that may move every pod."""

    #: That are bound to clusters, and those of them that host no pods.
    machines: int
    unused: int
    usd_per_hour: float
    packed: PackedCost
    #: The bound of `bench.quality` on any fleet for that demand.
    least_usd_per_hour: float


class FleetUnderTest:
    """A fleet whose clusters are control planes that run already. Use it as an async context manager.

    At the end the programs stop, and everything that the clusters hold of this fleet is deleted.
    """

    def __init__(
        self,
        folder: Path,
        clusters: Mapping[str, ClusterUnderTest],
        *,
        pools: Sequence[Pool],
        rack_size: int = 48,
        shard_flags: Sequence[str] = (),
        bootstrap_flags: Sequence[str] = ("--bootstrap-stub",),
        operator_flags: Sequence[str] = (),
        pod_controller_flags: Sequence[str] = (),
        proxies: Mapping[str, ApiProxy] | None = None,
    ) -> None:
        """Take clusters by name; the programs of one with a proxy reach its API server through that."""
        self.folder = folder
        self.clusters = dict(clusters)
        self.programs: dict[str, Program] = {}
        #: Nodes that every cluster has beside its machines.
        self.unmanaged_nodes: dict[str, FakeNode] = {}
        self._pools = list(pools)
        self._rack_size = rack_size
        self._shard_flags = tuple(shard_flags)
        self._operator_flags = (*bootstrap_flags, *operator_flags)
        self._pod_controller_flags = tuple(pod_controller_flags)
        self._proxies = dict(proxies or {})
        self._ports: dict[str, int] = {}
        self._zones_out: tuple[str, ...] = ()
        self._following: list[asyncio.Task[None]] = []
        self._kubeconfigs: dict[str, Path] = {}

    async def __aenter__(self) -> "FleetUnderTest":
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in (PROVIDER, SHARD):
            self._ports[name], self._ports[f"{name}-metrics"] = free_port(), free_port()
        self._write_world()
        self.programs = {PROVIDER: self._provider(), SHARD: self._shard()}
        for name, cluster in self.clusters.items():
            await install_rights(cluster)
            self.add_operator(name, await self._kubeconfig(name, OPERATOR_ACCOUNT))
            self.add_pod_controller(name, await self._kubeconfig(name, POD_CONTROLLER_ACCOUNT))
        clock = SystemClock()
        self._provider_client = GrpcProvider(
            self.address_of(PROVIDER),
            deadlines=ProviderDeadlines(call_seconds=30.0, list_seconds=30.0),
            clock=clock,
        )
        self._machines = ProviderMachines(self._provider_client, clock)
        self.observer = ShardObserver(self.address_of(SHARD), tuple(self.clusters), clock)
        for program in self.programs.values():
            program.start()
        self._following = [asyncio.create_task(self._follow(name)) for name in self.clusters]
        self._following.append(asyncio.create_task(self._restart_what_ends()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # The operators first: what is removed from now on is none of their business.
            await asyncio.gather(*(program.stop() for name, program in self.programs.items() if name != PROVIDER))
            await self.programs[PROVIDER].stop()
        finally:
            for task in self._following:
                task.cancel()
            ended = await asyncio.gather(*self._following, return_exceptions=True)
            await self.observer.close()
            await self._provider_client.close()
        for each in ended:
            if isinstance(each, Exception) and error is None:
                raise each
        await asyncio.gather(*(_remove_everything(cluster) for cluster in self.clusters.values()))

    # ---- programs

    def program(self, name: str) -> Program:
        return self.programs[name]

    def address_of(self, name: str) -> str:
        return f"127.0.0.1:{self._ports[name]}"

    async def _restart_what_ends(self) -> None:
        """Start programs that ended by themselves again, as a kubelet does."""
        while True:
            for program in self.programs.values():
                if program.has_ended:
                    program.start()
            await asyncio.sleep(_RESTART_SECONDS)

    def add_operator(self, cluster: str, kubeconfig: Path, *, name: str = "", lease: str = "") -> Program:
        """Add an operator without starting it; a second one of a cluster needs a name and a Lease of its own."""
        arguments = (
            "operator",
            "--cluster-id", cluster,
            "--shard-addr", self.address_of(SHARD),
            "--kubeconfig", str(kubeconfig),
            "--namespace", SYSTEM_NAMESPACE,
            "--metrics-addr", f"127.0.0.1:{free_port()}",
            "--rollup-interval", "2s",
            *(("--lease-name", lease) if lease else ()),
            *self._operator_flags,
        )  # fmt: skip
        return self._add(name or operator_of(cluster), arguments)

    def add_pod_controller(self, cluster: str, kubeconfig: Path) -> Program:
        """Add the pod controller of a cluster without starting it."""
        arguments = (
            "pod-controller",
            "--kubeconfig", str(kubeconfig),
            "--namespace", SYSTEM_NAMESPACE,
            "--metrics-addr", f"127.0.0.1:{free_port()}",
            *self._pod_controller_flags,
        )  # fmt: skip
        return self._add(pod_controller_of(cluster), arguments)

    def operator_kubeconfig(self, cluster: str) -> Path:
        return self._kubeconfigs[f"{cluster}/{OPERATOR_ACCOUNT}"]

    def complaints(self) -> list[str]:
        """Return the warnings and errors that all programs logged."""
        return [line for program in self.programs.values() for line in program.complaints()]

    def unexplained(self) -> list[str]:
        """Return the complaints but for what follows when an API server without a processor is slow."""
        return [line for line in self.complaints() if not any(event in line for event in _SLOW_API_SERVER)]

    def _add(self, name: str, arguments: Sequence[str]) -> Program:
        self.programs[name] = Program(name, arguments, self.folder / f"{name}.log")
        return self.programs[name]

    def _provider(self) -> Program:
        arguments = (
            "provider", "simulated",
            "--addr", self.address_of(PROVIDER),
            "--metrics-addr", self.address_of(f"{PROVIDER}-metrics"),
            "--state", str(self._state),
            "--world", str(self.folder / "world.json"),
            "--time-scale", repr(TIME_SCALE),
            "--failed-hold", "5s",
            "--reconcile-interval", "1s",
        )  # fmt: skip
        return Program(PROVIDER, arguments, self.folder / "provider.log")

    def _shard(self) -> Program:
        arguments = (
            "shard",
            "--listen", self.address_of(SHARD),
            "--metrics-addr", self.address_of(f"{SHARD}-metrics"),
            "--data-dir", str(self.folder / "shard"),
            # For whoever looks for the cause of a failure: `bigfleet replay`.
            "--record", str(self.folder / "shard.recording"),
            "--provider-addr", self.address_of(PROVIDER),
            "--cycle-interval", "1s",
            "--reclaim-after", "4s",
            "--reclaim-cap-fraction", "0",
            "--plan-wait", "5s",
            *self._shard_flags,
        )  # fmt: skip
        return Program(SHARD, arguments, self.folder / "shard.log")

    async def _kubeconfig(self, cluster: str, account: str) -> Path:
        path = await self.clusters[cluster].plane.service_account_kubeconfig(SYSTEM_NAMESPACE, account)
        if cluster in self._proxies:
            path = self._proxies[cluster].kubeconfig(path)
        self._kubeconfigs[f"{cluster}/{account}"] = path
        return path

    # ---- the world

    @property
    def _state(self) -> Path:
        return self.folder / "provider.db"

    def _write_world(self) -> None:
        world = {
            "region": REGION,
            "zones": ZONES,
            "rack_size": self._rack_size,
            "pools": self._pools,
            "interruption": {"truth_factor": 0.0},
            "stockouts": [{"zone": zone, "from_seconds": 0.0, "to_seconds": _FOR_EVER} for zone in self._zones_out],
        }
        (self.folder / "world.json").write_text(json.dumps(world), encoding="utf-8")

    async def lose_hosts(self, ids: Sequence[str]) -> None:
        """Let the hosts of machines die without a warning; the provider is restarted for it."""
        await self._change_world(ids, self._zones_out)

    async def interrupt_hosts(self, ids: Sequence[str]) -> None:
        """Let the provider give a reclaim notice for machines, and take their hosts once it has run out."""
        await self._change_world(ids, self._zones_out, notice_seconds=_NOTICE_SECONDS)

    async def lose_zone(self, zone: str) -> None:
        """Let every host of a zone die without a warning, and the zone give none until `restore_zones`."""
        ids = [machine.id for machine in await self.machines() if machine.zone == zone]
        await self._change_world(ids, (*self._zones_out, zone))

    async def restore_zones(self) -> None:
        """Let all zones give hosts again."""
        await self._change_world((), ())

    async def _change_world(
        self, ids: Sequence[str], zones_out: tuple[str, ...], *, notice_seconds: float | None = None
    ) -> None:
        """Stop the provider, end the hosts of machines, and start it in a world without some zones."""
        provider = self.programs[PROVIDER]
        await provider.stop()
        self._zones_out = zones_out
        self._write_world()
        now = SystemClock().unix_nanos()
        with editing(Path(f"{self._state}.cloud")) as connection:
            for machine_id, row in connection.execute("SELECT id, entry FROM machines").fetchall():
                entry = msgspec.json.decode(row, type=Entry)
                if machine_id in ids and entry.host is not None:
                    entry.host.dies_unix_nanos = now + int((notice_seconds or 0.0) * NANOS_PER_SECOND)
                    entry.host.notice_unix_nanos = None if notice_seconds is None else now
                    text = msgspec.json.encode(entry)
                    connection.execute("UPDATE machines SET entry = ? WHERE id = ?", (text, machine_id))
        provider.start()

    # ---- what there is

    async def machines(self) -> Sequence[Machine]:
        """Return what the provider lists; what it listed before while it is away."""
        return await self._machines.read()

    async def machines_of(self, cluster: str) -> list[Machine]:
        """Return the machines that are bound to a cluster, in any state."""
        return [machine for machine in await self.machines() if machine.cluster == cluster]

    async def _follow(self, name: str) -> None:
        async def read() -> Mapping[str, FakeNode]:
            return {**nodes_of(await self.machines(), ClusterId(name)), **self.unmanaged_nodes}

        await self.clusters[name].follow_machines(read)

    async def requests(self, cluster: str) -> list[CapacityRequest]:
        """Return the demand of a cluster as its CapacityRequests say it, those that cannot be mapped left out."""
        found = []
        for stored in (await self.clusters[cluster].api.list_page(CAPACITY_REQUESTS, limit=0)).items:
            metadata = stored.metadata
            with suppress(UnmappableRequest):
                found.append(request_of_spec(stored.spec, metadata.namespace, "/".join(metadata.key)))
        return found

    async def cost(self) -> FleetCost:
        """Return what the bound machines cost, and what a packer pays for the demand of this moment.

        Idle machines are held for some minutes before they are released: they are not what the clusters cost. Those
        that are paid for even if they serve nobody count on both sides.
        """
        figures = await self.observer.look_after(SystemClock().unix_nanos())
        machines = [machine_from_wire(message)[0] for message in figures.inventory]
        bound = [machine for machine in machines if machine.state in BOUND_STATES]
        others = [machine for machine in machines if machine.state not in BOUND_STATES]
        demand = {name: await self.requests(name) for name in self.clusters}
        paid_anyway = sum(map(paid_anyway_usd_per_hour, machines))
        packing = tuple(cluster_of(name, requests) for name, requests in demand.items())
        # Their prices are rents already.
        offers = cast("tuple[Offer, ...]", tuple(offers_of(machines)))
        instance = Instance(family="fleet", size="", seed=0, offers=offers, steps=(packing,))
        unused = 0
        for name, cluster in self.clusters.items():
            pods = (await cluster.api.list_page(PODS, limit=0)).items
            unused += len(unused_machines(await self.machines_of(name), pods))
        return FleetCost(
            machines=len(bound),
            unused=unused,
            usd_per_hour=sum(machine.price_usd_per_hour for machine in bound)
            + sum(map(paid_anyway_usd_per_hour, others)),
            packed=await asyncio.to_thread(packed_cost, demand, machines),
            least_usd_per_hour=paid_anyway + await asyncio.to_thread(lower_bound, instance),
        )

    def interrupted(self) -> set[str]:
        """Return the machines that the provider took after a notice."""
        lost = self.programs[PROVIDER].events("inventory.machine_lost")
        return {line["machine"] for line in lost if line["code"] == ErrorCode.INTERRUPTED.value}

    async def hostable_pods(self, name: str) -> list[str]:
        """Return the pending pods of a cluster that some machine on offer could host, with that machine.

        Judged by amounts, node selector and taints alone, against what the provider lists and has not bound.
        """
        offered = [each for each in await self.machines() if each.state in _ON_OFFER]
        free = [each for each in offered if each.zone not in self._zones_out]
        pods = (await self.clusters[name].api.list_page(PODS, limit=0)).items
        pending = [each for each in pods if not each.spec.node_name and each.metadata.deletion_timestamp is None]
        pairs = ((pod, next((each for each in free if could_host(each, pod)), None)) for pod in pending)
        return [f"{pod.metadata.name} on {machine.id}" for pod, machine in pairs if machine is not None]

    async def superfluous(self, name: str, *, has_room: bool = True) -> list[str]:
        """Return the machines of a cluster that are on their way, or whose nodes host no pods but those of daemons.

        A machine whose reclaim was answered with WOULD_NOT_FIT is held beside what the demand needs, and explains one
        that hosts nothing: the shard had chosen the other one to go. A composition has room for what the scheduler
        cannot pack well. Where `has_room`, a tenth of the machines may be such room that the scheduler did without; it
        is given back a while later (docs/limits.md).
        """
        pods = (await self.clusters[name].api.list_page(PODS, limit=0)).items
        machines = await self.machines_of(name)
        unused = unused_machines(machines, pods)
        refused = {line["machine"] for line in self.programs[SHARD].events("drain.rejected")}
        moving = [each for each in machines if each.state is not MachineState.CONFIGURED]
        held = sum(each.id in refused and each not in unused for each in machines)
        explained = held + (len(machines) // _SLACK_SHARE if has_room else 0)
        return [f"{each.id} {each.state.label}" for each in (*moving, *unused[explained:])]

    # ---- waits

    async def at_rest(
        self, *, quiet_cycles: int = QUIET_CYCLES, poll_seconds: float = 0.1, has_room: bool = True
    ) -> None:
        """Return once no pod waits that could be hosted, every machine serves a pod, and all objects are exact.

        That holds then while the shard decides so many times, and starts nothing any more. `has_room` is that of
        `superfluous`.
        """
        began, actions = 0, -1

        async def unrest() -> list[str]:
            nonlocal began, actions
            found = []
            for name in self.clusters:
                found += await self.hostable_pods(name)
                found += await self.superfluous(name, has_room=has_room)
                found += [text for text in [await self.difference(name)] if text]
            figures = await self.observer.look()
            if found or figures.cycle < began or self.observer.actions.total != actions:
                began, actions = figures.cycle, self.observer.actions.total
            if figures.cycle < began + quiet_cycles:
                found.append(f"the shard has decided {figures.cycle - began} times since its last action")
            return found

        try:
            await until_nothing(unrest, "the fleet does not come to rest", poll_seconds=poll_seconds)
        except AssertionError as error:
            raise AssertionError("\n".join([str(error), *self.complaints()])) from None

    async def objects_are_exact(self, name: str) -> None:
        """Return once a cluster's UpcomingNodes are those of its bound machines, its requests those of its live pods.

        Nodes are those machines too. Raises AssertionError with what differs.
        """

        await until_nothing(lambda: self.difference(name), f"{name} has other objects than it should")

    async def difference(self, name: str) -> str:
        """Return how a cluster's objects differ from its machines and pods, "" when they do not."""
        cluster = self.clusters[name]
        bound = {machine.id for machine in await self.machines_of(name)}
        upcoming = await cluster.api.list_page(UPCOMING_NODES, limit=0)
        # One whose bootstrap was rolled back is shown for a while, as Launched (docs/spec/operator.md §8).
        named = {each.spec.machine_id for each in upcoming.items if each.status.phase != "Launched"}
        if named != bound:
            return f"UpcomingNodes without a machine: {named - bound}; machines without one: {bound - named}"
        nodes = {each.annotations[MACHINE_ID] for each in cluster.kubelet.nodes.values()}
        if nodes != bound:
            return f"Nodes without a machine: {nodes - bound}; machines without one: {bound - nodes}"
        pods = await cluster.api.list_page(PODS, limit=0)
        live = {f"cr-{pod.metadata.uid}" for pod in pods.items if _is_live(pod)}
        requests = await cluster.api.list_page(CAPACITY_REQUESTS, limit=0)
        stored = {each.metadata.name for each in requests.items}
        if stored != live:
            return f"CapacityRequests without a pod: {stored - live}; pods without one: {live - stored}"
        return ""

    async def running(self, name: str, namespace: str, count: int) -> list[PodObject]:
        """Return the pods of a namespace once there are `count`, all Ready; else fail with all programs' complaints."""
        try:
            return await self.clusters[name].running_pods(namespace, count)
        except AssertionError:
            found = await self.clusters[name].pods(namespace)
            states = [(pod.metadata.name, pod.spec.node_name, is_ready(pod)) for pod in found]
            machines = [(each.id, each.state.name, each.cluster) for each in await self.machines()]
            raise AssertionError(
                f"{name}/{namespace} has not {count} running pods: {states}\n{machines}\n"
                + "\n".join(self.complaints()[-30:])
            ) from None


def unused_machines(machines: Sequence[Machine], pods: Sequence[PodObject]) -> list[Machine]:
    """Return the Configured machines whose nodes host no pods but those of daemons."""
    used = {pod.spec.node_name for pod in pods if _is_live(pod)}
    return [each for each in machines if each.state is MachineState.CONFIGURED and node_name(each) not in used]


def could_host(machine: Machine, pod: PodObject) -> bool:
    """Return whether an empty machine has the amounts and labels that a pod asks for, and no taint that it minds."""
    supply = vector.parse_vector(machine.allocatable or machine.resources)
    wanted = vector.parse_vector(
        {
            name: str(amount)
            for container in pod.spec.containers[:1]
            for name, amount in (container.resources.requests or {}).items()
        }
    )
    labels = node_labels(machine)
    selected = all(labels.get(key) == value for key, value in (pod.spec.node_selector or {}).items())
    return selected and vector.covers(supply, wanted) and not (list(node_taints(machine)) and not pod.spec.tolerations)


async def install_rights(cluster: ClusterUnderTest) -> None:
    """Install our definitions, and the service accounts with exactly the rights of the manifests."""
    await cluster.install_definitions()
    files = ("namespace.yaml", "operator-rights.yaml", "pod-controller-rights.yaml")
    await cluster.plane.kubectl("apply", *(part for name in files for part in ("-f", str(MANIFESTS / name))))


def _is_live(pod: PodObject) -> bool:
    owners = pod.metadata.owner_references or ()
    return pod.status.phase not in ("Succeeded", "Failed") and not any(each.kind == "DaemonSet" for each in owners)


async def _remove_everything(cluster: ClusterUnderTest) -> None:
    """Delete machines, namespaces and our objects, and wait until the next test meets none of them."""
    await cluster.remove_namespaces()
    await asyncio.gather(*(cluster.kubelet.remove_node(name) for name in list(cluster.kubelet.nodes)))

    async def is_empty() -> bool:
        pods = await cluster.api.list_page(PODS, limit=0)
        return not pods.items

    await eventually(is_empty, "pods are left")
    await _delete_all(cluster, UPCOMING_NODES)
    await _delete_all(cluster, AVAILABLE_CAPACITIES)


async def _delete_all(cluster: ClusterUnderTest, resource: Resource[K]) -> None:
    for each in (await cluster.api.list_page(resource, limit=0)).items:
        with suppress(ApiError):
            await cluster.api.delete(resource, each.metadata.name)
