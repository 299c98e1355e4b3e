"""Evaluates labels, taints and host ports by the scheduler's rules; maps requirements on nodes to those on machines.

Resources and rules about other pods are not considered. A rule that cannot be evaluated counts as no match.
"""

from collections.abc import Iterable, Mapping, Set
from typing import Final, NamedTuple

from bigfleet.model.labels import ARCH
from bigfleet.operator.kubernetes.objects import (
    LabelSelectorObject,
    LabelSelectorRequirement,
    NodeObject,
    NodeSelectorTerm,
    NodeTaint,
    PodSpec,
    Toleration,
)
from bigfleet.operator.kubernetes.pod_requests import is_sidecar
from bigfleet.operator.kubernetes.resources import HOSTNAME, LABEL_ALIASES, MACHINE_ID, OPERATING_SYSTEM

_NO_LABELS: Final[Mapping[str, str]] = {}
#: Taints that keep new pods away; PreferNoSchedule does not.
_KEEPING_EFFECTS: Final = frozenset({"NoSchedule", "NoExecute"})
#: The only field that a node selector may name.
_NAME_FIELD: Final = "metadata.name"
_LINUX, _WINDOWS = "linux", "windows"
_TCP: Final = "TCP"
#: The address that conflicts with every address.
_EVERY_IP: Final = "0.0.0.0"  # noqa: S104

#: Labels that every node of a machine has, also if the provider does not state them.
_OF_EVERY_NODE: Final = frozenset({MACHINE_ID, HOSTNAME, OPERATING_SYSTEM, ARCH})

#: Key, operator in Kubernetes spelling, sorted values.
MachineRequirement = tuple[str, str, tuple[str, ...]]


# ---- label selectors ------------------------------------------------------------------------------------------------


def selects(selector: LabelSelectorObject | None, labels: Mapping[str, str] | None) -> bool:
    """Return whether a label selector matches: None matches nothing, an empty one everything."""
    if selector is None:
        return False
    have = labels or _NO_LABELS
    return all(have.get(key) == value for key, value in (selector.match_labels or _NO_LABELS).items()) and all(
        _holds(expression, have.get(expression.key)) for expression in selector.match_expressions or ()
    )


def with_label_keys(
    selector: LabelSelectorObject | None,
    labels: Mapping[str, str] | None,
    match_keys: Iterable[str] | None,
    mismatch_keys: Iterable[str] | None = None,
) -> LabelSelectorObject | None:
    """Return the selector with the values that a pod's labels have for `matchLabelKeys` and `mismatchLabelKeys`.

    Keys that the pod lacks are ignored. API servers write the values into the selector of pod affinity, so an
    expression that is there already is not repeated. No selector stays none.
    """
    if selector is None:
        return None
    have = labels or _NO_LABELS
    expressions = list(selector.match_expressions or ())
    for keys, operator in ((match_keys, "In"), (mismatch_keys, "NotIn")):
        for key in keys or ():
            if key in have:
                merged = LabelSelectorRequirement(key=key, operator=operator, values=[have[key]])
                if merged not in expressions:
                    expressions.append(merged)
    return LabelSelectorObject(match_labels=selector.match_labels, match_expressions=expressions)


# ---- nodes ----------------------------------------------------------------------------------------------------------


def admits(node: NodeObject, spec: PodSpec) -> bool:
    """Return whether the node has what the pod's node selector and its required node affinity ask for."""
    labels = node.metadata.labels or _NO_LABELS
    if any(labels.get(key) != value for key, value in (spec.node_selector or _NO_LABELS).items()):
        return False
    terms = node_terms(spec)
    return terms is None or any(_matches_term(term, node, labels) for term in terms)


def node_terms(spec: PodSpec) -> list[NodeSelectorTerm] | None:
    """Return the alternatives of the required node affinity, of which a node must match one; None without any rule."""
    affinity = spec.affinity.node_affinity if spec.affinity is not None else None
    required = affinity.required_during_scheduling_ignored_during_execution if affinity is not None else None
    return None if required is None else required.node_selector_terms or []


def repelling_taint(taints: Iterable[NodeTaint] | None, tolerations: Iterable[Toleration] | None) -> NodeTaint | None:
    """Return the first taint that keeps the pod away, None when all are tolerated."""
    accepted = tuple(tolerations or ())
    for taint in taints or ():
        if taint.effect in _KEEPING_EFFECTS and not any(_tolerates(toleration, taint) for toleration in accepted):
            return taint
    return None


def _matches_term(term: NodeSelectorTerm, node: NodeObject, labels: Mapping[str, str]) -> bool:
    if not term.match_expressions and not term.match_fields:
        # An empty term selects no node.
        return False
    return all(_holds_of_node(r, labels.get(r.key)) for r in term.match_expressions or ()) and all(
        r.key == _NAME_FIELD and _holds_of_node(r, node.metadata.name) for r in term.match_fields or ()
    )


def _tolerates(toleration: Toleration, taint: NodeTaint) -> bool:
    if toleration.effect and toleration.effect != taint.effect:
        return False
    if toleration.key and toleration.key != taint.key:
        return False
    if toleration.operator == "Exists":
        return True
    # An empty key means every key, but only with Exists.
    return bool(toleration.key) and toleration.operator in ("", "Equal") and toleration.value == taint.value


# ---- expressions ----------------------------------------------------------------------------------------------------


def _holds(requirement: LabelSelectorRequirement, value: str | None) -> bool:
    match requirement.operator:
        case "In":
            return value is not None and value in (requirement.values or ())
        case "NotIn":
            return value is None or value not in (requirement.values or ())
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case _:
            return False


def _holds_of_node(requirement: LabelSelectorRequirement, value: str | None) -> bool:
    """Evaluate a requirement of a node selector, which may also compare numbers."""
    if requirement.operator not in ("Gt", "Lt"):
        return _holds(requirement, value)
    bounds = requirement.values or ()
    if value is None or len(bounds) != 1:
        return False
    try:
        have, bound = int(value), int(bounds[0])
    except ValueError:
        return False
    return have > bound if requirement.operator == "Gt" else have < bound


# ---- machines -------------------------------------------------------------------------------------------------------


def machine_requirement(key: str, operator: str, values: Iterable[str]) -> MachineRequirement | None:
    """Return a requirement on a node's label as one on its machine's, None if every machine is to satisfy it.

    Each kubelet says its system and architecture, and a machine only if its provider does. So these exist, as does the
    machine-id, and a machine that does not say its system runs Linux.
    """
    key, distinct = LABEL_ALIASES.get(key, key), tuple(sorted(set(values)))
    if operator == "Exists" and key in (OPERATING_SYSTEM, ARCH, MACHINE_ID):
        return None
    if key == OPERATING_SYSTEM and operator == "In" and _LINUX in distinct:
        return None if _WINDOWS in distinct else (key, "NotIn", (_WINDOWS,))
    return (key, operator, distinct)


def excludes_machines(key: str, operator: str) -> bool:
    """Return whether a requirement on a node's label is satisfied by no node of a machine."""
    return operator == "DoesNotExist" and LABEL_ALIASES.get(key, key) in _OF_EVERY_NODE


def machine_admits(labels: Mapping[str, str], spec: PodSpec) -> bool:
    """Return whether a machine with these labels satisfies the requirements that a request has for the pod.

    Its node may not, because it has labels that the machine does not state.
    """
    selected = (machine_requirement(key, "In", (value,)) for key, value in (spec.node_selector or _NO_LABELS).items())
    if not _machine_holds(selected, labels):
        return False
    terms = node_terms(spec)
    return terms is None or any(
        _machine_holds((machine_requirement(r.key, r.operator, r.values or ()) for r in expressions), labels)
        for expressions in (term.match_expressions for term in terms if not term.match_fields)
        if expressions and not any(excludes_machines(r.key, r.operator) for r in expressions)
    )


def _machine_holds(requirements: Iterable[MachineRequirement | None], labels: Mapping[str, str]) -> bool:
    return all(
        _holds(LabelSelectorRequirement(key=each[0], operator=each[1], values=list(each[2])), labels.get(each[0]))
        for each in requirements
        if each is not None
    )


# ---- host ports -----------------------------------------------------------------------------------------------------


class HostPort(NamedTuple):
    """A port of a node that a pod takes."""

    ip: str
    protocol: str
    port: int

    def __str__(self) -> str:
        return f"{self.port}/{self.protocol}"


def host_ports(spec: PodSpec) -> frozenset[HostPort]:
    """Return the ports of its node that a pod takes: those of its containers and its sidecars.

    API servers write the container ports of pods with `hostNetwork` as host ports, so that field is not read.
    """
    sidecars = (each for each in spec.init_containers or () if is_sidecar(each))
    return frozenset(
        HostPort(port.host_ip or _EVERY_IP, port.protocol or _TCP, port.host_port)
        for container in (*spec.containers, *sidecars)
        for port in container.ports or ()
        if port.host_port > 0
    )


def taken_port(wanted: Set[HostPort], taken: Set[HostPort]) -> HostPort | None:
    """Return the least of the wanted ports that is taken; None if a pod can have all of them."""
    if not wanted or not taken:
        return None
    return min((port for port in wanted if any(_conflicts(port, other) for other in taken)), default=None)


def _conflicts(port: HostPort, other: HostPort) -> bool:
    is_one_address = port.ip == other.ip or _EVERY_IP in (port.ip, other.ip)
    return is_one_address and (port.protocol, port.port) == (other.protocol, other.port)
