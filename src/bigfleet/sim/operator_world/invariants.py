"""Checks the invariants of the operator and the pod controller at every step: K1 to K5 (docs/spec/simulation.md).

The truth is in the objects of the API server and in the frames that the shard has sent, never in the memory of a
process. K4 is checked where a write leaves its process (`bigfleet.sim.operator_world.replicas`).
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator

from bigfleet.model.need import Need
from bigfleet.operator.kubernetes.resources import OWNED_BY_POD, PODS, RECLAIM_ANNOTATION
from bigfleet.sim.kubernetes.kinds import POD_DISRUPTION_BUDGETS, REPLICA_SETS, Stored, kind_key
from bigfleet.sim.kubernetes.store import StoredChange
from bigfleet.sim.observations import RolledUp
from bigfleet.sim.operator_world.components import POD_NAMESPACE, is_ending, is_of, is_ready_pod, node_of
from bigfleet.sim.operator_world.replicas import OPERATOR, POD_CONTROLLER
from bigfleet.sim.operator_world.site import Demand, KubernetesSite, is_annotated

K4_SENTENCE = "Two processes never lead at once, and none that does not lead begins a write."
#: A view may be out of date for a minute, a silent connection takes as long to be noticed, and a frame may be stalled.
STALE_SECONDS_MAX = 400.0


def demand_of(rows: Iterable[Need]) -> Demand:
    """Return what a roll-up asks for: the pods of its rows by priority, without those that are asked for once more."""
    counts: Counter[int] = Counter()
    for row in rows:
        counts[row.profile.priority] += sum(shape.count for shape in row.shapes)
    return tuple(sorted((priority, count) for priority, count in counts.items() if count))


def no_demand_that_was_never_true(event: RolledUp, site: KubernetesSite) -> Iterator[str]:
    """The shard is given no demand that was never true, and none that has long not been true."""
    if event.rows is None or event.cluster != site.name:
        return
    demand = demand_of(event.rows)
    ago_seconds = site.was_true_seconds_ago(demand)
    if ago_seconds is None:
        yield f"{site.name} reported {demand} in pods by priority, which was never true; now it is {site.demand}"
    elif ago_seconds > STALE_SECONDS_MAX:
        yield f"{site.name} reported {demand} in pods by priority, which was last true {ago_seconds:.0f} s ago"


def no_eviction_beyond_the_budget(change: StoredChange, site: KubernetesSite) -> Iterator[str]:
    """The operator takes no pod away beyond the disruption budget that covers it."""
    pod = _taken(change)
    if pod is None or site.server.caller != OPERATOR or not is_ready_pod(pod):
        return
    name = pod["metadata"]["name"]
    for record in site.server.store.records(kind_key(POD_DISRUPTION_BUDGETS), pod["metadata"]["namespace"]):
        app = record.object["metadata"]["name"]
        if not is_of(pod, app):
            continue
        left = sum(is_of(each, app) and is_ready_pod(each) for each in site.components.pods())
        wanted = site.server.raw(REPLICA_SETS, app, POD_NAMESPACE)["spec"]["replicas"]
        least = max(0, wanted - record.object["spec"]["maxUnavailable"])
        if left < least:
            yield f"{name} of {site.name} was taken away: {left} of {wanted} are left, and the budget wants {least}"


def only_what_the_shard_asked_for_is_drained(change: StoredChange, site: KubernetesSite) -> Iterator[str]:
    """The operator takes pods away only from a Node whose machine the shard has asked back."""
    pod = _taken(change)
    if pod is None or site.server.caller != OPERATOR or not node_of(pod):
        return
    name = node_of(pod)
    node = next((each for each in site.components.nodes() if each["metadata"]["name"] == name), None)
    machine = site.components.machine_of(name)
    if node is None or not is_annotated(node):
        yield f"{pod['metadata']['name']} of {site.name} was taken from {name}, which is not being drained"
        return
    annotation = json.loads(node["metadata"]["annotations"][RECLAIM_ANNOTATION])
    if machine not in site.asked.get(annotation["instruction"], ()):
        yield f"{name} of {site.name}, machine {machine}, is drained by {annotation}, which the shard never sent"


def only_what_the_shard_asked_for_is_cordoned(change: StoredChange, site: KubernetesSite) -> Iterator[str]:
    """The operator cordons only Nodes whose machine the shard has asked back."""
    after = change.after
    if after is None or site.server.caller != OPERATOR or not after.get("spec", {}).get("unschedulable"):
        return
    if change.before is not None and change.before.get("spec", {}).get("unschedulable"):
        return
    name = after["metadata"]["name"]
    if not any(site.components.machine_of(name) in machines for machines in site.asked.values()):
        yield f"{name} of {site.name} was cordoned, and the shard has not asked for its machine"


def the_request_of_a_pod_that_lives_stays(change: StoredChange, site: KubernetesSite) -> Iterator[str]:
    """The pod controller deletes no CapacityRequest whose pod lives, unless the pod runs on an unmanaged Node."""
    before = change.before
    if before is None or change.after is not None or site.server.caller != POD_CONTROLLER:
        return
    uid = (before["metadata"].get("labels") or {}).get(OWNED_BY_POD, "")
    living = [pod for pod in site.components.pods() if pod["metadata"]["uid"] == uid and not is_ending(pod)]
    if living and not site.components.is_unmanaged(node_of(living[0])):
        yield f"{before['metadata']['name']} of {site.name} was deleted, and its pod lives"


#: By plural of the kind: the invariants that look at its changes.
CHANGES = {
    PODS.plural: (("K2", no_eviction_beyond_the_budget), ("K3", only_what_the_shard_asked_for_is_drained)),
    "nodes": (("K3", only_what_the_shard_asked_for_is_cordoned),),
    "capacityrequests": (("K5", the_request_of_a_pod_that_lives_stays),),
}


def _taken(change: StoredChange) -> Stored | None:
    """Return a pod that this change begins to take away, as it was before."""
    before, after = change.before, change.after
    if before is None or is_ending(before) or (after is not None and not is_ending(after)):
        return None
    return before
