"""Maps node affinity, node selectors and the node affinity of volumes to requirements on machines.

Kubernetes takes alternatives (several terms); a CapacityRequest is one conjunction. While a pod waits, the first term
whose operators are all supported is used and the others are reported. Once the pod has its node, what all terms have in
common is used: which of them the node satisfies is not known here (docs/spec/operator.md §11).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from bigfleet.model import labels
from bigfleet.operator.kubernetes.api import Json
from bigfleet.operator.kubernetes.objects import LabelSelectorRequirement, NodeSelectorTerm, PodSpec
from bigfleet.operator.kubernetes.resources import HOSTNAME
from bigfleet.operator.kubernetes.scheduling_rules import (
    MachineRequirement,
    excludes_machines,
    machine_requirement,
    node_terms,
)
from bigfleet.operator.pods.findings import Inexpressible, InexpressibleReason

#: The schema of CapacityRequest allows no more.
REQUIREMENTS_MAX: Final = 64
VALUES_MAX: Final = 1000

_WITH_VALUES = frozenset({"In", "NotIn"})
_WITHOUT_VALUES = frozenset({"Exists", "DoesNotExist"})

#: Key, operator in Kubernetes spelling, sorted values.
NodeRequirement = MachineRequirement


@dataclass(frozen=True, slots=True)
class ChosenTerm:
    """What is used of several alternative terms."""

    #: None when no term can be used.
    requirements: tuple[NodeRequirement, ...] | None
    #: Why the other terms are not used; one text for each, with its position.
    others: tuple[str, ...]


def choose_term(terms: Iterable[NodeSelectorTerm], *, is_bound: bool) -> ChosenTerm:
    """Return the first term that can be expressed, or of a bound pod what all terms have in common.

    Terms without any part match no node, and are no alternatives.
    """
    chosen: tuple[NodeRequirement, ...] | None = None
    others = []
    alternatives = []
    for position, term in enumerate(terms):
        if not term.match_expressions and not term.match_fields:
            continue
        expressed = _expressed(term)
        alternatives.append(expressed)
        fault = _term_fault(term)
        if fault is None and chosen is None:
            chosen = expressed
        else:
            others.append(f"[{position}] {fault or 'is a further alternative'}")
    if is_bound and chosen is not None:
        # Its node may satisfy any of them. A request for another one would leave the machine of the pod unused.
        return ChosenTerm(_in_common(alternatives), ())
    return ChosenTerm(chosen, tuple(others))


def _term_fault(term: NodeSelectorTerm) -> str | None:
    """Say why a term cannot be expressed."""
    if term.match_fields:
        return "has matchFields"
    faults = (_expression_fault(expression) for expression in term.match_expressions or ())
    return next((fault for fault in faults if fault is not None), None)


def _expression_fault(expression: LabelSelectorRequirement) -> str | None:
    operator, values = expression.operator, expression.values or ()
    if operator not in _WITH_VALUES | _WITHOUT_VALUES:
        return f"has operator {operator} on {expression.key}"
    if not expression.key or (operator in _WITH_VALUES) != bool(values):
        return f"has an expression on {expression.key!r} whose values do not suit {operator}"
    if excludes_machines(expression.key, operator):
        return f"requires a node without {expression.key}, which every node of BigFleet has"
    if len(values) > VALUES_MAX:
        return f"has {len(values):,} values on {expression.key}, more than {VALUES_MAX:,}"
    return None


def _expressed(term: NodeSelectorTerm) -> tuple[NodeRequirement, ...]:
    """Return the requirements of those expressions of a term that can be expressed."""
    found = (
        machine_requirement(each.key, each.operator, each.values or ())
        for each in term.match_expressions or ()
        if _expression_fault(each) is None
    )
    return tuple(requirement for requirement in found if requirement is not None)


def _in_common(terms: Sequence[tuple[NodeRequirement, ...]]) -> tuple[NodeRequirement, ...]:
    """Return requirements that every machine satisfies that satisfies one of the terms.

    Those of all terms, and for a key that each term restricts to some values, any of these values.
    """
    first, *rest = terms
    common = [requirement for requirement in first if all(requirement in term for term in rest)]
    restricted = {key for key, operator, _ in common if operator == "In"}
    by_key = [{key: values for key, operator, values in term if operator == "In"} for term in terms]
    for key in by_key[0]:
        if key in restricted or not all(key in each for each in by_key):
            continue
        values = sorted({value for each in by_key for value in each[key]})
        if len(values) <= VALUES_MAX:
            common.append((key, "In", tuple(values)))
    return tuple(common)


def node_requirements(spec: PodSpec) -> tuple[list[NodeRequirement] | None, list[Inexpressible]]:
    """Return the requirements of node selector and node affinity, and what they do not say of the pod.

    None when the affinity has no term that can be expressed: no capacity can be requested for the pod.
    """
    selected = (machine_requirement(key, "In", (value,)) for key, value in (spec.node_selector or {}).items())
    found: list[NodeRequirement] = [requirement for requirement in selected if requirement is not None]
    terms = node_terms(spec)
    if terms is None:
        return found, []
    place = "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms"
    chosen = choose_term(terms, is_bound=bool(spec.node_name))
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
                f"the pod waits for the node {names_of(values)}: only a machine"
                f" whose provider sets the label {HOSTNAME} can satisfy the request until the pod is bound"
            )
            findings.append(Inexpressible(InexpressibleReason.HOSTNAME_REQUIREMENT, message))
        left.append(requirement)
    return left, findings


def names_of(values: Sequence[str]) -> str:
    """Return the first three values as text."""
    return f"{', '.join(values[:3])}{' …' if len(values) > 3 else ''}"


def requirements_json(requirements: Iterable[NodeRequirement]) -> list[Json]:
    """Return the requirements sorted and without repetitions; for none, the one that every machine satisfies."""
    distinct = sorted(set(requirements)) or [(labels.INSTANCE_TYPE, "Exists", ())]
    return [
        {"key": key, "operator": operator} | ({"values": list(values)} if values else {})
        for key, operator, values in distinct
    ]
