"""Judges placements by the scheduler's rules, on JSON objects and without any code of the operator.

Slow and literal: every rule is computed afresh from all pods for each placement. Amounts are whole numbers.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

Json = Mapping[str, Any]


def cluster_fault(
    nodes: Sequence[Json], staying: Sequence[tuple[Json, Json]], moves: Sequence[tuple[Json, Json]]
) -> str | None:
    """Say why pods cannot move to nodes in any order; None when some order satisfies every rule at each step.

    `nodes` are all that stay; `staying` are pods with their nodes, `moves` pods with the nodes that they are to have.
    """
    fault: str | None = None
    for order in itertools.islice(itertools.permutations(moves), 720):
        placed = list(staying)
        for pod, node in order:
            fault = step_fault(nodes, placed, pod, node)
            if fault is not None:
                break
            placed.append((pod, node))
        else:
            return None
    return fault


def step_fault(nodes: Sequence[Json], placed: Sequence[tuple[Json, Json]], pod: Json, node: Json) -> str | None:
    """Say why the scheduler would not put the pod there now, None when it would."""
    name = node["metadata"]["name"]
    if all(n["metadata"]["name"] != name for n in nodes):
        return f"{name} is not there"
    if node["spec"].get("unschedulable") or node["status"]["conditions"][0]["status"] != "True":
        return f"{name} takes no pods"
    tolerated = {t["key"] for t in pod["spec"].get("tolerations", ())}
    for taint in node["spec"].get("taints", ()):
        if taint["effect"] != "PreferNoSchedule" and taint["key"] not in tolerated:
            return f"taint of {name}"
    if not selects_node(pod, node):
        return f"selector against {name}"
    on_node = [p for p, n in placed if n["metadata"]["name"] == name]
    if len(on_node) + 1 > int(node["status"]["allocatable"]["pods"]):
        return f"pods of {name}"
    for resource in ("cpu", "memory"):
        wanted = sum(requested(p, resource) for p in (*on_node, pod))
        # A node that is overcommitted already takes pods that request none of that resource.
        if requested(pod, resource) and wanted > int(node["status"]["allocatable"][resource]):
            return f"{resource} of {name}"
    if any(_ports_conflict(wanted, taken) for wanted in _host_ports(pod) for p in on_node for taken in _host_ports(p)):
        return f"host ports of {name}"
    return _others_fault(nodes, placed, pod, node)


def _host_ports(pod: Json) -> list[Json]:
    return [port for port in pod["spec"]["containers"][0].get("ports", ()) if "hostPort" in port]


def _ports_conflict(one: Json, other: Json) -> bool:
    every = (None, "", "0.0.0.0")
    ips = (one.get("hostIP"), other.get("hostIP"))
    same_ip = ips[0] == ips[1] or ips[0] in every or ips[1] in every
    same_protocol = one.get("protocol", "TCP") == other.get("protocol", "TCP")
    return bool(same_ip and same_protocol and one["hostPort"] == other["hostPort"])


def _others_fault(nodes: Sequence[Json], placed: Sequence[tuple[Json, Json]], pod: Json, node: Json) -> str | None:
    for term in _terms(pod, "podAntiAffinity"):
        for other, place in placed:
            if _matches(term, other) and _together(node, place, term["topologyKey"]):
                return "anti-affinity of the pod"
    for other, place in placed:
        for term in _terms(other, "podAntiAffinity"):
            if _matches(term, pod) and _together(node, place, term["topologyKey"]):
                return "anti-affinity of another pod"
    terms = _terms(pod, "podAffinity")
    # Kubernetes counts them by domain: one on a node without any of the keys matches no pod.
    friends = [
        (p, n)
        for p, n in placed
        if all(_matches(term, p) for term in terms)
        and any(term["topologyKey"] in n["metadata"]["labels"] for term in terms)
    ]
    for term in terms:
        if term["topologyKey"] not in node["metadata"]["labels"]:
            return "affinity: no such domain"
        starts = not friends and all(_matches(t, pod) for t in terms)
        if not starts and not any(_together(node, place, term["topologyKey"]) for _p, place in friends):
            return "affinity"
    for spread in pod["spec"].get("topologySpreadConstraints", ()):
        if spread["whenUnsatisfiable"] == "DoNotSchedule" and not _spreads(nodes, placed, pod, node, spread):
            return "spread"
    return None


def _spreads(nodes: Sequence[Json], placed: Sequence[tuple[Json, Json]], pod: Json, node: Json, spread: Json) -> bool:
    key = spread["topologyKey"]
    counts = {n["metadata"]["labels"][key]: 0 for n in nodes if _counts(pod, n)}
    domain = node["metadata"]["labels"].get(key)
    if domain not in counts:
        return False
    for other, place in placed:
        if _counts(pod, place) and place["metadata"]["labels"][key] in counts and _matches(spread, other):
            counts[place["metadata"]["labels"][key]] += 1
    least = min(counts.values())
    return counts[domain] + _matches(spread, pod) - least <= int(spread["maxSkew"])


def _counts(pod: Json, node: Json) -> bool:
    keys = [s["topologyKey"] for s in pod["spec"].get("topologySpreadConstraints", ())]
    return all(key in node["metadata"]["labels"] for key in keys) and selects_node(pod, node)


def selects_node(pod: Json, node: Json) -> bool:
    """Return whether node selector and required node affinity of the pod accept the node."""
    labels = node["metadata"]["labels"]
    for key, value in pod["spec"].get("nodeSelector", {}).items():
        if labels.get(key) != value:
            return False
    rules = pod["spec"].get("affinity", {}).get("nodeAffinity")
    if rules is None:
        return True
    terms = rules["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    return any(all(_expression(e, labels) for e in term["matchExpressions"]) for term in terms)


def requested(pod: Json, resource: str) -> int:
    """Return what the pod's one container requests."""
    return int(pod["spec"]["containers"][0]["resources"]["requests"].get(resource, 0))


def _expression(expression: Json, labels: Mapping[str, str]) -> bool:
    key, values = expression["key"], expression.get("values", ())
    return {
        "In": key in labels and labels[key] in values,
        "NotIn": key not in labels or labels[key] not in values,
        "Exists": key in labels,
        "DoesNotExist": key not in labels,
    }[expression["operator"]]


def _terms(pod: Json, kind: str) -> list[Json]:
    rules = pod["spec"].get("affinity", {}).get(kind) or {}
    return list(rules.get("requiredDuringSchedulingIgnoredDuringExecution") or ())


def _matches(term: Json, pod: Json) -> bool:
    labels = pod["metadata"]["labels"]
    return all(labels.get(key) == value for key, value in term["labelSelector"]["matchLabels"].items())


def _together(one: Json, other: Json, key: str) -> bool:
    labels, others = one["metadata"]["labels"], other["metadata"]["labels"]
    return key in labels and labels[key] == others.get(key)
