"""Checks what must hold in every cluster after the faults have ended: K6 to K11 (docs/spec/simulation.md).

The truth is the provider's disk and the objects of the API server.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime

from bigfleet.model.clock import NANOS_PER_SECOND
from bigfleet.model.quantity import parse_quantity
from bigfleet.model.states import MachineState
from bigfleet.operator.kubernetes.resources import CAPACITY_REQUESTS, OWNED_BY_POD, RECLAIM_ANNOTATION, UPCOMING_NODES
from bigfleet.sim.kubernetes.eviction import eviction_refusal
from bigfleet.sim.kubernetes.kinds import POD_DISRUPTION_BUDGETS, Stored, kind_key
from bigfleet.sim.operator_world.components import DAEMON, POD_NAMESPACE, cpu_of, is_ending, is_of, node_of
from bigfleet.sim.operator_world.invariants import CHANGES, K4_SENTENCE, demand_of, no_demand_that_was_never_true
from bigfleet.sim.operator_world.site import KubernetesSite, is_annotated
from bigfleet.sim.operator_world.world import OperatorWorld

S = MachineState
#: A cluster that nothing disturbs goes on with its drains within this time.
DRAIN_SECONDS_MAX = 40.0

Check = Callable[[OperatorWorld, KubernetesSite], Iterator[str]]


def each_pod_has_its_request(_world: OperatorWorld, site: KubernetesSite) -> Iterator[str]:
    """At rest each pod that asks for capacity has one CapacityRequest, and each of these has its pod.

    Pods on unmanaged Nodes ask for none.
    """
    pods = {
        pod["metadata"]["uid"]: pod
        for pod in site.components.pods()
        if not is_of(pod, DAEMON) and not site.components.is_unmanaged(node_of(pod))
    }
    requests = Counter(
        (stored.metadata.labels or {}).get(OWNED_BY_POD, "") for stored in site.server.read_all(CAPACITY_REQUESTS)
    )
    for uid in sorted(pods.keys() | requests.keys()):
        if uid not in pods:
            yield f"a request of {site.name} stands for the pod {uid}, which is gone or needs none"
        elif requests[uid] != 1:
            yield f"{pods[uid]['metadata']['name']} of {site.name} has {requests[uid]} requests"


def upcoming_nodes_are_the_bound_machines(world: OperatorWorld, site: KubernetesSite) -> Iterator[str]:
    """At rest the UpcomingNodes are the machines that are bound to the cluster: Ready, or Failed."""
    bound = {
        str(each.id): "Ready" if each.state is S.CONFIGURED else "Failed"
        for each in world.machines()
        if each.cluster == site.name and each.state in (S.CONFIGURED, S.FAILED)
    }
    shown = {each.spec.machine_id: each.status.phase for each in site.server.read_all(UPCOMING_NODES)}
    for machine_id in sorted(bound.keys() | shown.keys()):
        if machine_id not in shown:
            yield f"{machine_id} is bound to {site.name}, and has no UpcomingNode"
        elif machine_id not in bound:
            yield f"{machine_id} is not bound to {site.name}, and has an UpcomingNode, {shown[machine_id]}"
        elif shown[machine_id] != bound[machine_id]:
            yield f"{machine_id} is {bound[machine_id]} in {site.name}, and its UpcomingNode is {shown[machine_id]}"


def has_leaving_machines(world: OperatorWorld, site: KubernetesSite) -> bool:
    """Return whether the operator still shows a machine that left the cluster, as it does for ten minutes."""
    bound = {str(each.id) for each in world.machines() if each.cluster == site.name}
    return any(
        each.spec.machine_id not in bound and each.status.phase in ("Launched", "Failed")
        for each in site.server.read_all(UPCOMING_NODES)
    )


def the_demand_in_force_is_what_is_stored(world: OperatorWorld, site: KubernetesSite) -> Iterator[str]:
    """At rest the demand in force at the shard is a recount of the CapacityRequests that the API server holds."""
    shard = world.shards[0].shard
    if shard is None:
        return
    counts = Counter(stored.spec.priority for stored in site.server.read_all(CAPACITY_REQUESTS))
    stored = tuple(sorted(counts.items()))
    in_force = demand_of(shard.intake.table.rows_of(site.name))
    if in_force != stored:
        yield f"{site.name}: in force are {in_force} in pods by priority, and stored are {stored}"


def pods_run_where_a_machine_could_host_them(world: OperatorWorld, site: KubernetesSite) -> Iterator[str]:
    """At rest no pod waits that a free machine could host."""
    free = [each for each in world.machines() if each.state in (S.IDLE, S.SPECULATIVE)]
    daemon = world.operator_plan.daemon_cpu_milli
    for pod in site.components.pods():
        if node_of(pod) or is_ending(pod):
            continue
        could = [each.id for each in free if parse_quantity(each.allocatable["cpu"]) - daemon >= cpu_of(pod)]
        if could:
            yield f"{pod['metadata']['name']} of {site.name} waits, and {could[0]} is free"


def nodes_in_service_are_open(world: OperatorWorld, site: KubernetesSite) -> Iterator[str]:
    """At rest no Node of a machine in service is cordoned, or marked as being drained."""
    serving = {each.id for each in world.machines() if each.state is S.CONFIGURED}
    for node in site.components.nodes():
        name = node["metadata"]["name"]
        if site.components.machine_of(name) not in serving:
            continue
        if is_annotated(node):
            yield f"{name} of {site.name} is marked as being drained, and its machine is in service"
        elif node.get("spec", {}).get("unschedulable"):
            yield f"{name} of {site.name} is cordoned, and its machine is in service"


def drains_go_on(world: OperatorWorld, site: KubernetesSite) -> Iterator[str]:
    """A drain goes on, also after a restart: undisturbed, pods that may leave do, and then the shard is answered."""
    now_seconds, since_seconds = world.clock.monotonic_seconds(), site.waiting_since_seconds
    waiting = dict(_waiting_for_operator(world, site))
    site.waiting_since_seconds = {key: since_seconds.get(key, now_seconds) for key in sorted(waiting)}
    for key, since in site.waiting_since_seconds.items():
        waits_seconds = min(now_seconds - since, site.quiet_seconds())
        if waits_seconds >= DRAIN_SECONDS_MAX:
            yield f"{waiting[key]}, {waits_seconds:.0f} s long"


def _waiting_for_operator(world: OperatorWorld, site: KubernetesSite) -> Iterator[tuple[str, str]]:
    """Yield the UID of each pod and Node of a drain that only the operator can carry on, with a sentence."""
    pods = site.components.pods()
    for name, text in sorted(_drained_nodes(world, site).items()):
        there = [pod for pod in pods if node_of(pod) == name and not is_of(pod, DAEMON)]
        for pod in there:
            if not is_ending(pod) and _may_leave(pod, site, pods):
                yield (
                    pod["metadata"]["uid"],
                    f"{pod['metadata']['name']} of {site.name} may leave {name}, drained by {text}",
                )
        if not there and site.is_connected and json.loads(text)["instruction"] not in site.answered:
            yield name, f"{name} of {site.name} is empty, and its drain {text} has no result"


def _drained_nodes(world: OperatorWorld, site: KubernetesSite) -> dict[str, str]:
    """Return the annotations of the Nodes whose drains are not over, by the Node's name."""
    found = {}
    for node in site.components.nodes():
        if is_annotated(node):
            text = node["metadata"]["annotations"][RECLAIM_ANNOTATION]
            deadline_seconds = datetime.fromisoformat(json.loads(text)["deadline"]).timestamp()
            if deadline_seconds > world.clock.unix_nanos() / NANOS_PER_SECOND:
                found[node["metadata"]["name"]] = text
    return found


def _may_leave(pod: Stored, site: KubernetesSite, pods: list[Stored]) -> bool:
    budgets = [each.object for each in site.server.store.records(kind_key(POD_DISRUPTION_BUDGETS), POD_NAMESPACE)]
    app = (pod["metadata"].get("labels") or {}).get("app", "")
    return eviction_refusal(pod, budgets, pods, site.components.wanted.get(app)) is None


#: In this order.
AT_REST: tuple[tuple[str, Check], ...] = (
    ("K6", each_pod_has_its_request),
    ("K7", upcoming_nodes_are_the_bound_machines),
    ("K8", the_demand_in_force_is_what_is_stored),
    ("K9", pods_run_where_a_machine_could_host_them),
    ("K10", nodes_in_service_are_open),
)

_CHECKS = (
    ("K1", no_demand_that_was_never_true),
    *(each for checks in CHANGES.values() for each in checks),
    *AT_REST,
    ("K11", drains_go_on),
)
#: What K1 to K11 promise, with their names.
SENTENCES: tuple[tuple[str, str], ...] = (
    *((name, " ".join((check.__doc__ or "").split())) for name, check in _CHECKS),
    ("K4", K4_SENTENCE),
)
