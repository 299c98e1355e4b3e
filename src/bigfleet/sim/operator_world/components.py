"""Simulates the other parts of a cluster: workload controllers, garbage collector, scheduler, kubelets.

They act on the objects of the API server past its requests, each second in which something has changed, and stand still
while the API server is away. They know nothing of BigFleet: pods and nodes are all that they look at.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final

from bigfleet.demo.kubernetes.fake_node import FakeNode, node_body, node_conditions
from bigfleet.demo.kubernetes.machine_nodes import nodes_of
from bigfleet.model.clock import Clock
from bigfleet.model.ids import ClusterId
from bigfleet.model.machine import Machine
from bigfleet.model.quantity import parse_quantity
from bigfleet.operator.kubernetes.resources import CAPACITY_REQUESTS, DAEMON_SETS, MACHINE_ID, NODES, PODS
from bigfleet.sim.kubernetes.kinds import POD_DISRUPTION_BUDGETS, REPLICA_SETS, Stored, kind_key
from bigfleet.sim.kubernetes.server import InMemoryApiServer
from bigfleet.sim.observations import Observations
from bigfleet.sim.operator_world.plan import OperatorPlan, WorkloadPlan
from bigfleet.sim.operator_world.watched_api import WatchedApiServer

POD_NAMESPACE: Final = "default"
DAEMON: Final = "node-agent"
_STEP_SECONDS = 1.0
_GRACE_SECONDS = 30


class ClusterComponents:
    """What runs in one cluster beside BigFleet."""

    def __init__(
        self,
        cluster: ClusterId,
        workloads: Iterable[WorkloadPlan],
        plan: OperatorPlan,
        *,
        server: WatchedApiServer,
        machines: Callable[[], Iterable[Machine]],
        clock: Clock,
        observations: Observations,
    ) -> None:
        """`machines` returns all machines as their provider has them."""
        self.cluster = cluster
        self.workloads = {each.name: each for each in workloads}
        #: Pods that each workload is to have.
        self.wanted = {each.name: each.count for each in workloads}
        #: Nodes whose kubelet says that it is not Ready.
        self.unready: set[str] = set()
        self._plan = plan
        self._server = server
        self._machines = machines
        self._clock = clock
        self._observations = observations
        self._pods_made = 0
        self._nodes: dict[str, FakeNode] = {}
        #: When each pod that is being deleted ends, by UID, and when each Node becomes Ready.
        self._ends_seconds: dict[str, float] = {}
        self._ready_seconds: dict[str, float] = {}
        self._collects_seconds = 0.0
        self._seen: tuple[object, ...] = ()
        self._changed = True
        for resource in (PODS, NODES):
            server.store.subscribe(kind_key(resource), self._note_change)
        for workload in self.workloads.values():
            self._install(workload)
        self._install_daemon()

    def _note_change(self, _change: object) -> None:
        self._changed = True

    async def run(self) -> None:
        """Act until cancelled."""
        while True:
            self.step()
            await self._clock.sleep(_STEP_SECONDS)

    def step(self) -> None:
        """Bring the cluster one step on, if the API server is there and something has changed."""
        faults = self._server.faults
        if faults.is_down or faults.is_hanging:
            return
        now_seconds = self._clock.monotonic_seconds()
        seen = (
            tuple(sorted(self.wanted.items())),
            tuple(sorted(self.unready)),
            tuple((m.id, m.state) for m in self._machines() if m.cluster == self.cluster),
        )
        timers = (*self._ends_seconds.values(), *self._ready_seconds.values())
        is_due = self._changed or seen != self._seen or any(at <= now_seconds for at in timers)
        if now_seconds >= self._collects_seconds:
            self._collects_seconds = now_seconds + self._plan.collects_seconds
            self._server.caller = ""
            self._server.collect_garbage()
        if not is_due:
            return
        self._changed, self._seen = False, seen
        self._server.caller = ""
        self._keep_nodes(now_seconds)
        self._keep_replicas()
        self._schedule()
        self._run_pods(now_seconds)

    # ---- workloads --------------------------------------------------------------------------------------------------

    def _install(self, workload: WorkloadPlan) -> None:
        selector = {"matchLabels": {"app": workload.name}}
        metadata = {"name": workload.name, "namespace": POD_NAMESPACE}
        replicas = self.wanted[workload.name]
        self._server.put(REPLICA_SETS, {"metadata": metadata, "spec": {"replicas": replicas, "selector": selector}})
        if workload.unavailable_max is not None:
            spec = {"maxUnavailable": workload.unavailable_max, "selector": selector}
            self._server.put(POD_DISRUPTION_BUDGETS, {"metadata": metadata, "spec": spec})

    def _install_daemon(self) -> None:
        spec = {"template": {"spec": {"containers": [_container(self._plan.daemon_cpu_milli)]}}}
        self._server.put(DAEMON_SETS, {"metadata": {"name": DAEMON, "namespace": "kube-system"}, "spec": spec})

    def _keep_replicas(self) -> None:
        for workload in self.workloads.values():
            controller = self._server.raw(REPLICA_SETS, workload.name, POD_NAMESPACE)
            wanted = self.wanted[workload.name]
            if controller["spec"]["replicas"] != wanted:
                self._server.put(REPLICA_SETS, {**controller, "spec": {**controller["spec"], "replicas": wanted}})
            pods = [pod for pod in self.pods() if is_of(pod, workload.name) and not is_ending(pod)]
            for _ in range(wanted - len(pods)):
                self._make_pod(workload, controller["metadata"]["uid"])
            # Those that wait go first, then the newest.
            surplus = [pod for pod in pods if not node_of(pod)] + [pod for pod in pods if node_of(pod)][::-1]
            for pod in surplus[: max(0, len(pods) - wanted)]:
                self._delete(pod)

    def _make_pod(self, workload: WorkloadPlan, controller_uid: str) -> None:
        self._pods_made += 1
        owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": workload.name, "uid": controller_uid}
        spec: dict[str, Any] = {
            "containers": [_container(workload.cpu_milli)],
            "priority": workload.priority,
            "terminationGracePeriodSeconds": _GRACE_SECONDS,
        }
        if workload.is_exclusive:
            term = {
                "topologyKey": "kubernetes.io/hostname",
                "labelSelector": {"matchLabels": {"app": workload.name}},
            }
            spec["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
        self._server.put(
            PODS,
            {
                "metadata": {
                    "name": f"{workload.name}-{self._pods_made:05d}",
                    "namespace": POD_NAMESPACE,
                    "labels": {"app": workload.name},
                    "ownerReferences": [{**owner, "controller": True}],
                },
                "spec": spec,
            },
        )

    # ---- nodes ------------------------------------------------------------------------------------------------------

    def pods(self) -> list[Stored]:
        """Return all pods as they are stored."""
        return [record.object for record in self._server.store.records(kind_key(PODS))]

    def nodes(self) -> list[Stored]:
        """Return all Nodes as they are stored."""
        return [record.object for record in self._server.store.records(kind_key(NODES))]

    def machine_of(self, node_name: str) -> str:
        """Return the machine that is a Node, "" for a Node that is gone or is no machine of the fleet."""
        node = self._nodes.get(node_name)
        return node.annotations.get(MACHINE_ID, "") if node is not None else ""

    def is_unmanaged(self, node_name: str) -> bool:
        """Return whether a Node is there and is no machine of the fleet."""
        return node_name in self._nodes and not self.machine_of(node_name)

    def _keep_nodes(self, now_seconds: float) -> None:
        wanted = {**nodes_of(self._machines(), self.cluster), **self._unmanaged_nodes()}
        for name in [name for name, node in self._nodes.items() if name not in wanted]:
            del self._nodes[name]
            self._ready_seconds.pop(name, None)
            self._observations.note("node", f"{self.cluster} {name}", "gone")
            if self._server.read(NODES, name) is not None:
                self._server.remove(NODES, name)
            for pod in self.pods():
                if node_of(pod) == name:
                    self._remove_pod(pod)
        for name, node in wanted.items():
            if name in self._nodes:
                continue
            self._nodes[name] = node
            self._observations.note("node", f"{self.cluster} {name}", "joined")
            self._ready_seconds[name] = now_seconds + self._plan.ready_seconds
            body = node_body(node, ready=False, unix_nanos=self._clock.unix_nanos())
            if not self._plan.has_node_labels:
                labels = {key: value for key, value in node.labels.items() if key != MACHINE_ID}
                body = {**body, "metadata": {"name": name, "labels": labels}}
            self._server.put(NODES, body)
            self._make_daemon_pod(name)
        for name in sorted(self._nodes):
            self._report_readiness(name, now_seconds)

    def _unmanaged_nodes(self) -> dict[str, FakeNode]:
        names = [f"other-{number}" for number in range(self._plan.unmanaged_nodes)]
        return {name: FakeNode(name=name, resources={"cpu": "4", "memory": "16Gi"}) for name in names}

    def _report_readiness(self, name: str, now_seconds: float) -> None:
        stored = self._server.raw(NODES, name)
        at_seconds = self._ready_seconds.get(name)
        is_ready = (at_seconds is None or now_seconds >= at_seconds) and name not in self.unready
        if at_seconds is not None and now_seconds >= at_seconds:
            del self._ready_seconds[name]
        if is_ready != is_ready_node(stored):
            conditions = node_conditions(ready=is_ready, unix_nanos=self._clock.unix_nanos())
            self._server.put(NODES, {**stored, "status": {**stored["status"], "conditions": conditions}})

    def _make_daemon_pod(self, node_name: str) -> None:
        owner = {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": DAEMON, "uid": self._daemon_uid()}
        metadata = {
            "name": f"{DAEMON}-{node_name}",
            "namespace": "kube-system",
            "labels": {"app": DAEMON},
            "ownerReferences": [{**owner, "controller": True}],
        }
        spec = {"nodeName": node_name, "containers": [_container(self._plan.daemon_cpu_milli)]}
        self._server.put(PODS, {"metadata": metadata, "spec": spec})

    def _daemon_uid(self) -> str:
        return str(self._server.raw(DAEMON_SETS, DAEMON, "kube-system")["metadata"]["uid"])

    # ---- scheduler --------------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        pods = self.pods()
        waiting = [pod for pod in pods if not node_of(pod) and not is_ending(pod)]
        waiting.sort(key=lambda pod: (-pod["spec"].get("priority", 0), pod["metadata"]["name"]))
        rooms = {name: _Room(node, pods) for name, node in self._open_nodes().items()}
        for pod in waiting:
            chosen = max(
                (room for room in rooms.values() if room.lack_for(pod) == ""),
                key=lambda room: (room.free_cpu, room.name),
                default=None,
            )
            if chosen is not None:
                self._bind(pod, chosen)
                continue
            self._preempt_for(pod, rooms.values())
            self._mark_unschedulable(pod, [room.lack_for(pod) for room in rooms.values()])

    def _preempt_for(self, pod: Stored, rooms: Iterable["_Room"]) -> None:
        """Make room for a pod where that takes fewest others; the room is its own while these leave."""
        found = [(victims, room) for room in rooms if (victims := room.victims_for(pod)) is not None]
        if not found:
            return
        victims, room = min(found, key=lambda each: (len(each[0]), each[1].name))
        for victim in victims:
            self._observations.note("preempted", victim["metadata"]["name"], pod["metadata"]["name"])
            self._delete(victim)
        room.reserve(pod, takes_others=bool(victims))

    def _open_nodes(self) -> dict[str, Stored]:
        return {
            node["metadata"]["name"]: node
            for node in self.nodes()
            if is_ready_node(node) and not node.get("spec", {}).get("unschedulable")
        }

    def _bind(self, pod: Stored, room: "_Room") -> None:
        condition = {"type": "PodScheduled", "status": "True"}
        bound = {
            **pod,
            "spec": {**pod["spec"], "nodeName": room.name},
            "status": {**pod.get("status", {}), "conditions": [condition]},
        }
        self._observations.note("bound", pod["metadata"]["name"], f"{self.cluster} {room.name}")
        self._server.put(PODS, bound)
        room.take(pod)

    def _mark_unschedulable(self, pod: Stored, lacks: list[str]) -> None:
        text = f"0/{len(lacks)} nodes are available"
        text += "".join(f": {lacks.count(lack)} {lack}" for lack in sorted(set(lacks))) or ": no nodes available"
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": f"{text}."}
        status = pod.get("status", {})
        if status.get("conditions") != [condition]:
            current = self._server.raw(PODS, pod["metadata"]["name"], pod["metadata"]["namespace"])
            self._server.put(PODS, {**current, "status": {**status, "conditions": [condition]}})

    # ---- kubelets ---------------------------------------------------------------------------------------------------

    def _run_pods(self, now_seconds: float) -> None:
        for pod in self.pods():
            node, uid = node_of(pod), pod["metadata"]["uid"]
            if not node:
                continue
            if node not in self._nodes:
                self._remove_pod(pod)
            elif is_ending(pod):
                workload = self.workloads.get(pod["metadata"]["labels"]["app"])
                takes_seconds = workload.ends_seconds if workload is not None else 1.0
                if now_seconds >= self._ends_seconds.setdefault(uid, now_seconds + takes_seconds):
                    self._remove_pod(pod)
            elif pod["status"].get("phase") == "Pending" and node not in self.unready:
                conditions = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "True"}]
                self._server.put(PODS, {**pod, "status": {"phase": "Running", "conditions": conditions}})

    def _delete(self, pod: Stored) -> None:
        metadata = pod["metadata"]
        InMemoryApiServer.delete(self._server, PODS, (metadata["namespace"], metadata["name"]), "", None)

    def _remove_pod(self, pod: Stored) -> None:
        self._ends_seconds.pop(pod["metadata"]["uid"], None)
        self._server.remove(PODS, pod["metadata"]["name"], pod["metadata"]["namespace"])

    # ---- a person ---------------------------------------------------------------------------------------------------

    def cordon(self, name: str, *, is_cordoned: bool) -> None:
        """Cordon or uncordon a Node, as a person does."""
        if self._server.read(NODES, name) is None:
            return
        self._server.caller = ""
        stored = self._server.raw(NODES, name)
        self._server.put(NODES, {**stored, "spec": {**stored["spec"], "unschedulable": is_cordoned or None}})

    def delete_request(self, number: int) -> None:
        """Delete one of the CapacityRequests, as a person does."""
        records = self._server.store.records(kind_key(CAPACITY_REQUESTS))
        if records:
            metadata = records[number % len(records)].object["metadata"]
            self._server.caller = ""
            self._server.remove(CAPACITY_REQUESTS, metadata["name"], metadata["namespace"])


class _Room:
    """What is free on one node while pods are placed."""

    def __init__(self, node: Stored, pods: Iterable[Stored]) -> None:
        self.name = str(node["metadata"]["name"])
        #: Somebody has been preempted here.
        self.is_reserved = False
        allocatable = node["status"]["allocatable"]
        self.pods = [pod for pod in pods if node_of(pod) == self.name]
        self.free_cpu = parse_quantity(str(allocatable["cpu"])) - sum(cpu_of(pod) for pod in self.pods)

    def lack_for(self, pod: Stored) -> str:
        """Return what is missing for a pod, "" for nothing."""
        if self.free_cpu < cpu_of(pod):
            return "Insufficient cpu"
        if _is_exclusive(pod) and any(_app(each) == _app(pod) for each in self.pods):
            return "node(s) didn't match pod anti-affinity rules"
        return ""

    def take(self, pod: Stored) -> None:
        """Count a pod that was put here."""
        self.pods.append(pod)
        self.free_cpu -= cpu_of(pod)

    def reserve(self, pod: Stored, *, takes_others: bool) -> None:
        """Keep room for a pod until others have left; no other pod is preempted here in this step."""
        self.free_cpu -= cpu_of(pod)
        self.is_reserved = takes_others

    def victims_for(self, pod: Stored) -> list[Stored] | None:
        """Return the pods of lower priority that must leave for a pod beside those that do; None if that is no help."""
        priority = pod["spec"].get("priority", 0)
        is_excluded = _is_exclusive(pod) and any(_app(each) == _app(pod) for each in self.pods)
        if is_excluded or self.is_reserved:
            return None
        free = self.free_cpu + sum(cpu_of(each) for each in self.pods if is_ending(each))
        lower = [each for each in self.pods if each["spec"].get("priority", priority) < priority]
        victims: list[Stored] = []
        for each in sorted(lower, key=lambda each: (each["spec"]["priority"], each["metadata"]["name"])):
            if free >= cpu_of(pod):
                break
            if not is_ending(each):
                victims.append(each)
                free += cpu_of(each)
        return victims if free >= cpu_of(pod) else None


def node_of(pod: Stored) -> str:
    """Return the node of a pod, "" for one that waits."""
    return str(pod.get("spec", {}).get("nodeName") or "")


def is_of(pod: Stored, app: str) -> bool:
    """Return whether a pod belongs to a workload."""
    return _app(pod) == app


def is_ending(pod: Stored) -> bool:
    """Return whether a pod is being deleted."""
    return "deletionTimestamp" in pod["metadata"]


def is_ready_pod(pod: Stored) -> bool:
    """Return whether a pod runs and is not being deleted."""
    conditions = pod.get("status", {}).get("conditions") or []
    return not is_ending(pod) and any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def is_ready_node(node: Stored) -> bool:
    """Return whether a Node is Ready."""
    conditions = node.get("status", {}).get("conditions") or []
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def cpu_of(pod: Stored) -> int:
    """Return what a pod requests, milli-cpu."""
    return sum(parse_quantity(str(each["resources"]["requests"]["cpu"])) for each in pod["spec"]["containers"])


def _app(pod: Stored) -> str:
    return str((pod["metadata"].get("labels") or {}).get("app", ""))


def _is_exclusive(pod: Stored) -> bool:
    return "affinity" in pod["spec"]


def _container(cpu_milli: int) -> dict[str, Any]:
    requests = {"cpu": f"{cpu_milli}m", "memory": f"{cpu_milli}Ki"}
    return {"name": "main", "resources": {"requests": requests}}
