"""Judges whether a node may host a pod, by the scheduler's rules on labels and taints.

Kubernetes' node selectors, node affinity, taints and label selectors, without resources and other pods: those are in
`bigfleet.operator.nodes.placement`. What cannot be judged from what the operator reads counts as no match.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from bigfleet.operator.kubernetes.objects import (
    LabelSelectorObject,
    LabelSelectorRequirement,
    NodeObject,
    NodeSelectorTerm,
    NodeTaint,
    PodSpec,
    Toleration,
)

_NO_LABELS: Final[Mapping[str, str]] = {}
#: Taints that keep new pods away; PreferNoSchedule does not.
_KEEPING_EFFECTS: Final = frozenset({"NoSchedule", "NoExecute"})
#: The only field that a node selector may name.
_NAME_FIELD: Final = "metadata.name"


def is_selected(selector: LabelSelectorObject | None, labels: Mapping[str, str] | None) -> bool:
    """Say whether a label selector matches; None matches nothing, an empty one everything."""
    if selector is None:
        return False
    have = labels or _NO_LABELS
    return all(have.get(key) == value for key, value in (selector.match_labels or _NO_LABELS).items()) and all(
        _holds(requirement, have.get(requirement.key)) for requirement in selector.match_expressions or ()
    )


def admits(node: NodeObject, spec: PodSpec) -> bool:
    """Say whether the node has what the pod's node selector and its required node affinity ask for."""
    labels = node.metadata.labels or _NO_LABELS
    if any(labels.get(key) != value for key, value in (spec.node_selector or _NO_LABELS).items()):
        return False
    node_affinity = spec.affinity.node_affinity if spec.affinity is not None else None
    required = node_affinity.required_during_scheduling_ignored_during_execution if node_affinity is not None else None
    if required is None:
        return True
    return any(_matches_term(term, node, labels) for term in required.node_selector_terms or ())


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
    return all(_holds(r, labels.get(r.key)) for r in term.match_expressions or ()) and all(
        r.key == _NAME_FIELD and _holds(r, node.metadata.name) for r in term.match_fields or ()
    )


def _holds(requirement: LabelSelectorRequirement, value: str | None) -> bool:
    values = requirement.values or ()
    match requirement.operator:
        case "In":
            return value is not None and value in values
        case "NotIn":
            return value is None or value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt":
            return _compares(requirement.operator, value, values)
        case _:
            return False


def _compares(operator: str, value: str | None, values: Iterable[str]) -> bool:
    bounds = tuple(values)
    if value is None or len(bounds) != 1:
        return False
    try:
        have, bound = int(value), int(bounds[0])
    except ValueError:
        return False
    return have > bound if operator == "Gt" else have < bound


def _tolerates(toleration: Toleration, taint: NodeTaint) -> bool:
    if toleration.effect and toleration.effect != taint.effect:
        return False
    if toleration.key and toleration.key != taint.key:
        return False
    if toleration.operator == "Exists":
        return True
    # An empty key means every key, but only with Exists.
    return bool(toleration.key) and toleration.operator in ("", "Equal") and toleration.value == taint.value
