"""Maps node affinity, node selectors and the node affinity of volumes to requirements on machines.

Kubernetes takes alternatives (several terms); a CapacityRequest is one conjunction. The first term whose operators are
all supported is used and the others are reported (docs/spec/operator.md §11).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from bigfleet.model import labels
from bigfleet.operator.kubernetes.api import Json
from bigfleet.operator.kubernetes.objects import LabelSelectorRequirement, NodeSelectorTerm, PodSpec
from bigfleet.operator.kubernetes.resources import HOSTNAME, LABEL_ALIASES
from bigfleet.operator.kubernetes.scheduling_rules import node_terms
from bigfleet.operator.pods.findings import Inexpressible, InexpressibleReason

#: The schema of CapacityRequest allows no more.
REQUIREMENTS_MAX: Final = 64
VALUES_MAX: Final = 1000

_WITH_VALUES = frozenset({"In", "NotIn"})
_WITHOUT_VALUES = frozenset({"Exists", "DoesNotExist"})

#: Key, operator in Kubernetes spelling, sorted values.
NodeRequirement = tuple[str, str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class ChosenTerm:
    """What is used of several alternative terms."""

    #: None when no term can be used.
    requirements: tuple[NodeRequirement, ...] | None
    #: Why the other terms are not used; one text for each, with its position.
    others: tuple[str, ...]


def choose_term(terms: Iterable[NodeSelectorTerm]) -> ChosenTerm:
    """Return the first term that can be expressed; terms without any part match no node, and are no alternatives."""
    chosen: tuple[NodeRequirement, ...] | None = None
    others = []
    for position, term in enumerate(terms):
        if not term.match_expressions and not term.match_fields:
            continue
        fault = _term_fault(term)
        if fault is None and chosen is None:
            chosen = tuple(_requirement(e) for e in term.match_expressions or ())
        else:
            others.append(f"[{position}] {fault or 'is a further alternative'}")
    return ChosenTerm(chosen, tuple(others))


def _term_fault(term: NodeSelectorTerm) -> str | None:
    """Say why a term cannot be expressed."""
    if term.match_fields:
        return "has matchFields"
    for expression in term.match_expressions or ():
        operator, values = expression.operator, expression.values or ()
        if operator not in _WITH_VALUES | _WITHOUT_VALUES:
            return f"has operator {operator} on {expression.key}"
        if not expression.key or (operator in _WITH_VALUES) != bool(values):
            return f"has an expression on {expression.key!r} whose values do not suit {operator}"
        if len(values) > VALUES_MAX:
            return f"has {len(values):,} values on {expression.key}, more than {VALUES_MAX:,}"
    return None


def _requirement(expression: LabelSelectorRequirement) -> NodeRequirement:
    key = LABEL_ALIASES.get(expression.key, expression.key)
    return (key, expression.operator, tuple(sorted(set(expression.values or ()))))


def node_requirements(spec: PodSpec) -> tuple[list[NodeRequirement] | None, list[Inexpressible]]:
    """Return the requirements of node selector and node affinity, and what they do not say of the pod.

    None when the affinity has no term that can be expressed: no capacity can be requested for the pod.
    """
    found: list[NodeRequirement] = [
        (LABEL_ALIASES.get(key, key), "In", (value,)) for key, value in (spec.node_selector or {}).items()
    ]
    terms = node_terms(spec)
    if terms is None:
        return found, []
    place = "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms"
    chosen = choose_term(terms)
    reasons = "; ".join(chosen.others) or "no term matches any node"
    if chosen.requirements is None:
        message = f"{place}: {reasons}; no capacity is requested for this pod"
        return None, [Inexpressible(InexpressibleReason.UNSUPPORTED_AFFINITY, message)]
    findings = []
    if chosen.others:
        message = f"{place}: {reasons}; capacity is requested for one term alone"
        findings.append(Inexpressible(InexpressibleReason.UNSUPPORTED_AFFINITY, message))
    return [*found, *chosen.requirements], findings


def settle_hostnames(
    requirements: Iterable[NodeRequirement], *, is_bound: bool
) -> tuple[list[NodeRequirement], list[Inexpressible]]:
    """Return the requirements without those on host names that every node, or the pod's own, satisfies already.

    Machines have no host name before they join. A pod that waits for one named node keeps its requirement, which only
    machines whose provider sets the label satisfy, and this is reported.
    """
    left, findings = [], []
    for requirement in requirements:
        key, operator, values = requirement
        if key == HOSTNAME and (operator == "Exists" or (operator == "In" and is_bound)):
            continue
        if key == HOSTNAME and operator == "In":
            message = (
                f"the pod waits for the node {', '.join(values[:3])}{' …' if len(values) > 3 else ''}: only a machine"
                f" whose provider sets the label {HOSTNAME} can satisfy the request until the pod is bound"
            )
            findings.append(Inexpressible(InexpressibleReason.HOSTNAME_REQUIREMENT, message))
        left.append(requirement)
    return left, findings


def requirements_json(requirements: Iterable[NodeRequirement]) -> list[Json]:
    """Return the requirements sorted and without repetitions; for none, the one that every machine satisfies."""
    distinct = sorted(set(requirements)) or [(labels.INSTANCE_TYPE, "Exists", ())]
    return [
        {"key": key, "operator": operator} | ({"values": list(values)} if values else {})
        for key, operator, values in distinct
    ]
