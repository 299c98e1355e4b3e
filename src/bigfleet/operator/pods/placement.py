"""Maps the rules between pods: affinity, anti-affinity, topology spreads and host ports.

A CapacityRequest knows one co-location, one exclusion on a machine and spreads without selectors
(docs/spec/operator.md §11). What goes beyond that is reported.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from bigfleet.model.shapes import LIMIT_MAX
from bigfleet.operator.kubernetes.api import Json
from bigfleet.operator.kubernetes.objects import (
    LabelSelectorObject,
    LabelSelectorRequirement,
    PodAffinity,
    PodAffinityTerm,
    PodObject,
    PodSpec,
    TopologySpreadConstraint,
)
from bigfleet.operator.kubernetes.resources import HOSTNAME, LABEL_ALIASES
from bigfleet.operator.kubernetes.scheduling_rules import host_ports, selects, with_label_keys
from bigfleet.operator.pods.findings import Inexpressible, InexpressibleReason
from bigfleet.operator.pods.selectors import canonical_selector, selector_json
from bigfleet.operator.requests import HOST_PORT_GROUP

#: The schema of CapacityRequest allows no more of them.
SPREADS_MAX: Final = 8
GROUP_CHARACTERS_MAX: Final = 512

_SELECTOR_OPERATORS = frozenset({"In", "NotIn", "Exists", "DoesNotExist"})
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_DO_NOT_SCHEDULE = "DoNotSchedule"


@dataclass(frozen=True, slots=True)
class _Exclusion:
    """Pods of one group of which a machine hosts only so many, and where the pod says so."""

    group: str
    per_machine_max: int
    place: str
    reason: InexpressibleReason


@dataclass(slots=True)
class PodPlacement:
    """What a request says of other pods."""

    co_location: dict[str, Json] | None = None
    exclusion: dict[str, Json] | None = None
    spreads: list[Json] = field(default_factory=list)
    findings: list[Inexpressible] = field(default_factory=list)


def place_pod(pod: PodObject) -> PodPlacement:
    """Return the rules about other pods in the pod's request."""
    placed = PodPlacement()
    exclusions: list[_Exclusion] = []
    affinity = pod.spec.affinity
    if affinity is not None:
        _co_locate(pod, affinity.pod_affinity, placed)
        exclusions.extend(_anti_affinity(pod, affinity.pod_anti_affinity, placed))
    exclusions.extend(_spread(pod, placed))
    exclusions.extend(_host_ports(pod.spec))
    _exclude(exclusions, placed)
    return placed


def _of_machines(topology_key: str) -> str:
    """Return the key that machines have for the topology of a key of nodes."""
    return LABEL_ALIASES.get(topology_key, topology_key)


def _labels(pod: PodObject) -> dict[str, str]:
    return pod.metadata.labels or {}


def _terms(affinity: PodAffinity | None) -> list[PodAffinityTerm]:
    return (affinity.required_during_scheduling_ignored_during_execution or []) if affinity is not None else []


def _merged(term: PodAffinityTerm, pod: PodObject) -> LabelSelectorObject | None:
    return with_label_keys(term.label_selector, _labels(pod), term.match_label_keys, term.mismatch_label_keys)


def _expressions(term: PodAffinityTerm) -> list[LabelSelectorRequirement]:
    return (term.label_selector.match_expressions or []) if term.label_selector is not None else []


def _names_own_namespace_alone(term: PodAffinityTerm, namespace: str) -> bool:
    return term.namespace_selector is None and set(term.namespaces or [namespace]) == {namespace}


def _co_locate(pod: PodObject, affinity: PodAffinity | None, placed: PodPlacement) -> None:
    """Take the first term that names a domain of machines and pods of the pod's own namespace."""
    reason = InexpressibleReason.UNSUPPORTED_POD_AFFINITY
    for position, term in enumerate(_terms(affinity)):
        place = f"spec.affinity.podAffinity.{_REQUIRED}[{position}]"
        if placed.co_location is not None:
            fault = "a request has one co-location; capacity is requested without this term"
        elif term.topology_key == HOSTNAME:
            fault = f"machines have no {HOSTNAME} to share; capacity is requested without this term"
        elif not _names_own_namespace_alone(term, pod.metadata.namespace):
            fault = "it names pods of other namespaces; capacity is requested without this term"
        elif not all(each.key and each.operator in _SELECTOR_OPERATORS for each in _expressions(term)):
            fault = "its selector has an expression that is none; capacity is requested without this term"
        else:
            selector = _merged(term, pod)
            placed.co_location = {"topologyKey": _of_machines(term.topology_key)}
            if selector is not None:
                placed.co_location["labelSelector"] = selector_json(selector)
            if selects(selector, _labels(pod)):
                continue
            fault = (
                f"it does not select this pod itself; capacity is requested in one {term.topology_key} for the pods"
                " that have this term, wherever the pods are that it selects"
            )
        placed.findings.append(Inexpressible(reason, f"{place}: {fault}"))


def _anti_affinity(pod: PodObject, affinity: PodAffinity | None, placed: PodPlacement) -> Iterator[_Exclusion]:
    reason = InexpressibleReason.UNSUPPORTED_ANTI_AFFINITY
    namespace = pod.metadata.namespace
    for position, term in enumerate(_terms(affinity)):
        place = f"spec.affinity.podAntiAffinity.{_REQUIRED}[{position}]"
        selector = _merged(term, pod)
        if selector is None:
            # It selects no pods at all and so excludes none.
            continue
        names_all = term.namespace_selector is not None and not (
            term.namespace_selector.match_labels or term.namespace_selector.match_expressions
        )
        names_own = names_all or namespace in (
            term.namespaces or ([] if term.namespace_selector is not None else [namespace])
        )
        fault = None
        if term.topology_key != HOSTNAME:
            fault = f"the topology key {term.topology_key} is not {HOSTNAME}; capacity is requested without this term"
        elif not selects(selector, _labels(pod)):
            fault = "it does not select this pod itself; capacity is requested without this term"
        elif not names_own:
            fault = "it names pods of other namespaces; capacity is requested without this term"
        else:
            yield _Exclusion(_group_of(selector), 1, place, reason)
            if not _names_own_namespace_alone(term, namespace):
                fault = "it names pods of other namespaces, too; only pods of this namespace exclude each other"
        if fault is not None:
            placed.findings.append(Inexpressible(reason, f"{place}: {fault}"))


def _spread(pod: PodObject, placed: PodPlacement) -> Iterator[_Exclusion]:
    """Fill in the spreads; yield those over host names, which limit the pods of a machine."""
    reason = InexpressibleReason.UNSUPPORTED_TOPOLOGY_SPREAD
    strict: list[Json] = []
    loose: list[Json] = []
    for position, spread in enumerate(pod.spec.topology_spread_constraints or ()):
        place = f"spec.topologySpreadConstraints[{position}]"
        skew = max(1, spread.max_skew)
        body: Json = {
            "maxSkew": skew,
            "topologyKey": _of_machines(spread.topology_key),
            "whenUnsatisfiable": spread.when_unsatisfiable,
        }
        if spread.when_unsatisfiable != _DO_NOT_SCHEDULE:
            # Roll-ups leave it out; it is written so that the request shows what the pod asks for.
            loose.append(body)
            continue
        selector = with_label_keys(spread.label_selector, _labels(pod), spread.match_label_keys)
        fault = _spread_fault(spread, selects(selector, _labels(pod)))
        if spread.topology_key != HOSTNAME:
            if len(strict) == SPREADS_MAX:
                fault = f"a request has at most {SPREADS_MAX} spreads; capacity is requested without this one"
            else:
                strict.append(body)
        elif fault is None and selector is not None and skew <= LIMIT_MAX:
            yield _Exclusion(_group_of(selector), skew, place, reason)
        if fault is not None:
            placed.findings.append(Inexpressible(reason, f"{place}: {fault}"))
    placed.spreads = [*strict, *loose[: SPREADS_MAX - len(strict)]]


def _spread_fault(spread: TopologySpreadConstraint, selects_itself: bool) -> str | None:
    """Say what of a strict spread is not expressed."""
    if not selects_itself:
        if spread.topology_key == HOSTNAME:
            return "it does not select this pod itself; capacity is requested without this spread"
        return "it does not select this pod itself; capacity is spread over the pods that request the same instead"
    if (spread.min_domains or 1) > 1 and spread.topology_key != HOSTNAME:
        return f"minDomains {spread.min_domains} is not expressed; capacity is spread over the domains that there are"
    return None


def _group_of(selector: LabelSelectorObject) -> str:
    """Return the canonical text of a selector, or its hash where the text is too long for a group."""
    text = canonical_selector(selector).text
    return text if len(text) <= GROUP_CHARACTERS_MAX else f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _host_ports(spec: PodSpec) -> Iterator[_Exclusion]:
    """Yield the exclusion of pods that want the same ports of a host."""
    ports = {(port.protocol, port.port) for port in host_ports(spec)}
    if ports:
        group = HOST_PORT_GROUP + ",".join(f"{protocol}/{port}" for protocol, port in sorted(ports))
        if len(group) > GROUP_CHARACTERS_MAX:
            group = f"{HOST_PORT_GROUP}sha256:{hashlib.sha256(group.encode()).hexdigest()}"
        yield _Exclusion(group, 1, "spec.containers[].ports[].hostPort", InexpressibleReason.UNSUPPORTED_HOST_PORTS)


def _exclude(exclusions: list[_Exclusion], placed: PodPlacement) -> None:
    """Take the exclusion with the lowest limit, the first of several; report the other groups."""
    tightest: dict[str, _Exclusion] = {}
    for exclusion in exclusions:
        known = tightest.get(exclusion.group)
        if known is None or exclusion.per_machine_max < known.per_machine_max:
            tightest[exclusion.group] = exclusion
    ordered = sorted(tightest.values(), key=lambda each: each.per_machine_max)
    for position, exclusion in enumerate(ordered):
        if position == 0:
            placed.exclusion = {"group": exclusion.group, "maxPerMachine": exclusion.per_machine_max}
            continue
        message = (
            f"{exclusion.place}: a request has one exclusion, and {ordered[0].place} is the tighter one;"
            f" capacity is requested without this limit of {exclusion.per_machine_max} a machine"
        )
        placed.findings.append(Inexpressible(exclusion.reason, message))
