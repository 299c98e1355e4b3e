"""Sums up what DaemonSets request on every matching node, for the roll-up (docs/spec/operator.md §3).

Rules that the wire cannot express are rounded up: alternatives of a node affinity become what they have in common, and
operators that machines do not support are left out. A machine that does not say its architecture counts for each, and
tolerations are ignored, because overheads on the wire have none. Where pods of a DaemonSet request more than its
template, that counts. The overhead of a machine is therefore never less than what its DaemonSets request, except of
those pinned to nodes by name.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

import structlog

from bigfleet.model import labels
from bigfleet.model.ids import control_character_in
from bigfleet.model.profile import Operator, Requirement
from bigfleet.model.shapes import OVERHEADS_MAX, Overhead, canonical_overheads
from bigfleet.model.vector import Vector, add, vector_key
from bigfleet.operator.demand.capacity_requests import REQUIREMENTS_MAX, STRING_BYTES_MAX, VALUES_MAX
from bigfleet.operator.demand.daemon_pods import DaemonPods
from bigfleet.operator.demand.entries import ObjectKey
from bigfleet.operator.demand.joined_nodes import PODS
from bigfleet.operator.kubernetes.objects import DaemonSet, NodeSelectorTerm, PodSpec
from bigfleet.operator.kubernetes.pod_requests import UnreadableRequest, pod_requests
from bigfleet.operator.kubernetes.resources import HOSTNAME
from bigfleet.operator.kubernetes.scheduling_rules import excludes_machines, machine_requirement, node_terms
from bigfleet.operator.kubernetes.views import ObjectView
from bigfleet.operator.resource_names import within_bound

log = structlog.get_logger(__name__)

_OPERATORS: Final[Mapping[str, Operator]] = {
    operator.label: operator for operator in (Operator.IN, Operator.NOT_IN, Operator.EXISTS, Operator.DOES_NOT_EXIST)
}
#: Characters of the requirements of an overhead: a roll-up has 64 of them, and a shard bounds its bytes.
_REQUIREMENTS_CHARACTERS_MAX: Final = 8 * 1024
#: Of what is left out, so much is logged.
_LOGGED_MAX: Final = 10
_ONE_POD: Final[Vector] = {PODS: 1000}
#: All that Kubernetes is built for, and the former 386.
_ARCHITECTURES: Final = frozenset({"386", "amd64", "arm", "arm64", "ppc64le", "riscv64", "s390x"})

_Requirements = frozenset[Requirement]


class NodeOverheads:
    """What the DaemonSets of a cluster take. An ObjectListener of DaemonSets, and an OverheadSource.

    `pods` is an ObjectListener of pods.
    """

    def __init__(self, daemon_sets: ObjectView[DaemonSet]) -> None:
        self._view = daemon_sets
        self.pods = DaemonPods(self._pods_changed)
        #: The UID of each DaemonSet.
        self._uids: dict[ObjectKey, str] = {}
        #: By DaemonSet; those without an overhead are absent.
        self._overheads: dict[ObjectKey, Overhead] = {}
        #: The answer; None after a change.
        self._canonical: tuple[Overhead, ...] | None = None

    @property
    def is_synced(self) -> bool:
        """Return whether all DaemonSets have been read since the process started."""
        return self._view.is_synced

    def put(self, stored: DaemonSet, former: DaemonSet | None) -> None:
        """Follow one DaemonSet."""
        key = stored.metadata.key
        try:
            overhead = overhead_of(stored) if stored.metadata.deletion_timestamp is None else None
        except UnreadableRequest as error:
            log.warning("operator.overhead_left_out", daemon_set="/".join(key), error=str(error))
            overhead = None
        is_same_set = self._uids.get(key) == stored.metadata.uid
        self._uids[key] = stored.metadata.uid
        if is_same_set and overhead == self._overheads.get(key):
            return
        self._canonical = None
        if overhead is None:
            self._overheads.pop(key, None)
        else:
            self._overheads[key] = overhead

    def remove(self, former: DaemonSet) -> None:
        """Forget one DaemonSet."""
        self._uids.pop(former.metadata.key, None)
        if self._overheads.pop(former.metadata.key, None) is not None:
            self._canonical = None

    def overheads(self) -> tuple[Overhead, ...]:
        """Return at most `OVERHEADS_MAX` overheads in canonical order, each with at most 32 resource names."""
        if self._canonical is None:
            each_set = {key: self._with_pods(key, overhead) for key, overhead in self._overheads.items()}
            fewer = fewer_overheads(canonical_overheads(each_set.values()))
            found = canonical_overheads([_shortened(each) for each in fewer])
            parts = [each.resources for each in each_set.values()]
            self._canonical = tuple(replace(each, resources=within_bound(each.resources, parts)) for each in found)
            self._note_left_out(each_set, found, self._canonical)
        return self._canonical

    def _with_pods(self, key: ObjectKey, overhead: Overhead) -> Overhead:
        """Return the overhead of a template, or more where pods of the DaemonSet request more."""
        resources = dict(overhead.resources)
        for name, milli in self.pods.largest(self._uids[key]).items():
            if milli > resources.get(name, 0) and not _is_refused(name):
                resources[name] = milli
        return replace(overhead, resources=resources)

    def _pods_changed(self) -> None:
        self._canonical = None

    def _note_left_out(
        self, each_set: Mapping[ObjectKey, Overhead], found: tuple[Overhead, ...], bounded: tuple[Overhead, ...]
    ) -> None:
        left_out: set[str] = set()
        for each, shorter in zip(found, bounded, strict=True):
            left_out |= each.resources.keys() - shorter.resources.keys()
        if not left_out:
            return
        keys = [key for key, overhead in each_set.items() if not left_out.isdisjoint(overhead.resources)]
        log.warning(
            "operator.overhead_resources_left_out",
            count=len(left_out),
            resources=sorted(left_out)[:_LOGGED_MAX],
            daemon_sets=["/".join(key) for key in sorted(keys)[:_LOGGED_MAX]],
            advice="the shard takes 32 resources of an overhead: remove some from these DaemonSets",
        )


def overhead_of(daemon_set: DaemonSet) -> Overhead | None:
    """Return what one pod of the DaemonSet takes of which machines; None if it can only run on nodes given by name.

    Raises UnreadableRequest.
    """
    spec = daemon_set.spec.template.spec
    requirements = _requirements_of(spec)
    if requirements is None:
        return None
    requests = pod_requests(spec)
    for name in requests:
        if _is_refused(name):
            # The shard would refuse the roll-up, and with it the demand of everybody in the cluster.
            raise UnreadableRequest(f"the resource name {name[:64]!r} is too long or has a control character")
    return Overhead(tuple(requirements), add(requests, _ONE_POD))


def _is_refused(resource_name: str) -> bool:
    return bool(control_character_in(resource_name)) or len(resource_name.encode()) > STRING_BYTES_MAX


def _requirements_of(spec: PodSpec) -> _Requirements | None:
    selected = {
        requirement
        for key, value in (spec.node_selector or {}).items()
        for requirement in _requirement(key, "In", (value,))
    }
    terms = node_terms(spec)
    if terms is None:
        return frozenset(selected)
    alternatives = [_requirements_of_term(term) for term in terms if _may_hold(term)]
    return frozenset(selected | in_common(alternatives)) if alternatives else None


def _may_hold(term: NodeSelectorTerm) -> bool:
    """Return whether the nodes of some machines may match a term."""
    expressions = term.match_expressions or ()
    excludes = any(excludes_machines(each.key, each.operator) for each in expressions)
    return bool(expressions) and not term.match_fields and not excludes


def _requirements_of_term(term: NodeSelectorTerm) -> _Requirements:
    found: set[Requirement] = set()
    for each in term.match_expressions or ():
        found |= _requirement(each.key, each.operator, tuple(each.values or ()))
    return frozenset(found)


def _requirement(key: str, operator_name: str, values: tuple[str, ...]) -> set[Requirement]:
    """Return the requirement on machines; none for what every node has, and for what machines cannot be asked."""
    found = machine_requirement(key, operator_name, values) if operator_name in _OPERATORS else None
    if found is None or found[0] == HOSTNAME:
        return set()
    key, operator, values = found[0], _OPERATORS[found[1]], found[2]
    if key == labels.ARCH and operator is Operator.IN:
        # Every node says its architecture, a machine only if its provider does.
        operator, values = Operator.NOT_IN, tuple(_ARCHITECTURES.difference(values))
        if not values:
            return set()
    texts = (key, *values)
    if len(values) > VALUES_MAX or any(len(t.encode()) > STRING_BYTES_MAX or control_character_in(t) for t in texts):
        return set()
    return {Requirement(key, operator, values)}


def in_common(terms: Iterable[_Requirements]) -> _Requirements:
    """Return requirements that every machine satisfies that satisfies one of the terms: as many as can be found.

    Besides those of all terms: a key that each term restricts to some values is restricted to any of these, and values
    that each term excludes are excluded.
    """
    alternatives = list(terms)
    if not alternatives:
        return frozenset()
    common = frozenset.intersection(*alternatives)
    restricted = [_values_by_key(term, Operator.IN) for term in alternatives]
    for key in set.intersection(*(set(each) for each in restricted)):
        values = {value for each in restricted for value in each[key]}
        if len(values) <= VALUES_MAX and not any(r.key == key and r.operator is Operator.IN for r in common):
            common |= {Requirement(key, Operator.IN, tuple(values))}
    excluded = [_values_by_key(term, Operator.NOT_IN) for term in alternatives]
    for key in set.intersection(*(set(each) for each in excluded)):
        values = set.intersection(*(set(each[key]) for each in excluded))
        if values and not any(r.key == key and r.operator is Operator.NOT_IN for r in common):
            common |= {Requirement(key, Operator.NOT_IN, tuple(values))}
    return common


def _values_by_key(term: _Requirements, operator: Operator) -> dict[str, tuple[str, ...]]:
    return {each.key: each.values for each in term if each.operator is operator}


def fewer_overheads(overheads: tuple[Overhead, ...], overheads_max: int = OVERHEADS_MAX) -> tuple[Overhead, ...]:
    """Return at most so many overheads, such that each machine has at least what it had.

    The smallest are joined with those that they share most requirements with. Requirements beyond `REQUIREMENTS_MAX`
    are left out, the last ones first.
    """
    left = [Overhead(each.requirements[:REQUIREMENTS_MAX], each.resources) for each in overheads]
    left.sort(key=lambda each: (_size(each), each.requirements))
    while len(left) > overheads_max:
        smallest = left.pop(0)
        wanted = set(smallest.requirements)
        place = max(range(len(left)), key=lambda place: (len(wanted.intersection(left[place].requirements)), -place))
        other = left[place]
        joined = in_common([frozenset(smallest.requirements), frozenset(other.requirements)])
        left[place] = Overhead(tuple(joined), add(smallest.resources, other.resources))
    return canonical_overheads(left)


def _shortened(overhead: Overhead) -> Overhead:
    """Return the overhead for more machines, without its longest requirements, if they are too long together."""
    left = sorted(overhead.requirements, key=_characters)
    while sum(map(_characters, left)) > _REQUIREMENTS_CHARACTERS_MAX:
        left.pop()
    return overhead if len(left) == len(overhead.requirements) else Overhead(tuple(left), overhead.resources)


def _characters(requirement: Requirement) -> int:
    return len(requirement.key) + sum(map(len, requirement.values)) + len(requirement.values)


def _size(overhead: Overhead) -> tuple[int, int, tuple[tuple[str, int], ...]]:
    resources = overhead.resources
    return (resources.get("cpu", 0), resources.get("memory", 0), vector_key(resources))
