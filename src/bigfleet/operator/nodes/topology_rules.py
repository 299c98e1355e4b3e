"""Evaluates a pod's rules about other pods: required affinity and anti-affinity, and spreads with DoNotSchedule.

Built for one kind of pod from the pods that stay where they are, then updated with each pod that is placed. Pods that
are alike are one group, and a rule is evaluated once for each group. Terms that select namespaces by label are rounded
to the safe side, because the operator does not read namespaces: they match all namespaces where that forbids more, and
none where it would allow more.
"""

from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from bigfleet.operator.kubernetes.objects import (
    LabelSelectorObject,
    NodeObject,
    PodAffinityTerm,
    PodObject,
    TopologySpreadConstraint,
)
from bigfleet.operator.kubernetes.scheduling_rules import admits, selects, with_label_keys

_FORBIDS: Final = "DoNotSchedule"
#: Pods or nodes that are read between two pauses: some milliseconds.
READ_A_STEP: Final = 1_000

Located = tuple[PodObject, NodeObject]


def anti_affinity_terms(pod: PodObject) -> Sequence[PodAffinityTerm]:
    """Return the required terms that keep other pods away."""
    affinity = pod.spec.affinity
    rules = affinity.pod_anti_affinity if affinity is not None else None
    return (rules.required_during_scheduling_ignored_during_execution or ()) if rules is not None else ()


def affinity_terms(pod: PodObject) -> Sequence[PodAffinityTerm]:
    """Return the required terms that ask for other pods nearby."""
    affinity = pod.spec.affinity
    rules = affinity.pod_affinity if affinity is not None else None
    return (rules.required_during_scheduling_ignored_during_execution or ()) if rules is not None else ()


def forbidding_spreads(pod: PodObject) -> list[TopologySpreadConstraint]:
    """Return the spreads that must hold."""
    return [spread for spread in pod.spec.topology_spread_constraints or () if spread.when_unsatisfiable == _FORBIDS]


def domain_of(node: NodeObject, topology_key: str) -> str | None:
    """Return the node's value of a topology key, None when it has none."""
    return (node.metadata.labels or {}).get(topology_key)


@dataclass(frozen=True, slots=True)
class _Term:
    """A term of affinity as seen from its pod."""

    owner: PodObject
    topology_key: str
    selector: LabelSelectorObject | None
    namespaces: frozenset[str]
    any_namespace: bool

    @classmethod
    def of(cls, owner: PodObject, term: PodAffinityTerm, *, forbids: bool) -> "_Term":
        namespaces = frozenset(term.namespaces or ())
        selector = term.namespace_selector
        any_namespace = False
        if selector is not None:
            is_empty = not selector.match_labels and not selector.match_expressions
            any_namespace = is_empty or forbids
        elif not namespaces:
            namespaces = frozenset({owner.metadata.namespace})
        own = owner.metadata.labels
        selector = with_label_keys(term.label_selector, own, term.match_label_keys, term.mismatch_label_keys)
        return cls(owner, term.topology_key, selector, namespaces, any_namespace)

    def matches(self, pod: PodObject) -> bool:
        in_reach = self.any_namespace or pod.metadata.namespace in self.namespaces
        return in_reach and selects(self.selector, pod.metadata.labels)


@dataclass(slots=True)
class ReplicaGroup:
    """Pods that are alike to the rules of other pods."""

    #: One of them.
    pod: PodObject
    #: The node of each.
    nodes: list[NodeObject]
    #: Their anti-affinity.
    keeps_away: tuple[_Term, ...]

    @classmethod
    def of(cls, pod: PodObject, node: NodeObject) -> "ReplicaGroup":
        """Return the group of one pod."""
        return cls(pod, [node], tuple(_Term.of(pod, term, forbids=True) for term in anti_affinity_terms(pod)))


def grouped(pods: Iterable[Located]) -> Generator[None, None, list[ReplicaGroup]]:
    """Group pods, of which replicas share labels and affinity as objects (`bigfleet.operator.pod_reduction`).

    Pauses every `READ_A_STEP` pods; no group has more.
    """
    groups: list[ReplicaGroup] = []
    open_groups: dict[tuple[str, int, int, bool], ReplicaGroup] = {}
    for position, (pod, node) in enumerate(pods, 1):
        metadata = pod.metadata
        # The first pod of a group keeps both objects, so that no other object has their ids.
        key = (metadata.namespace, id(metadata.labels), id(pod.spec.affinity), pod.is_terminating)
        group = open_groups.get(key)
        if group is not None and len(group.nodes) < READ_A_STEP:
            group.nodes.append(node)
        else:
            group = open_groups[key] = ReplicaGroup.of(pod, node)
            groups.append(group)
        if position % READ_A_STEP == 0:
            yield
    return groups


class SpreadDomains:
    """The domains of spreads on some nodes; kinds of pods that may use the same nodes share them."""

    def __init__(self, nodes: Sequence[NodeObject]) -> None:
        """`nodes` are all that stay, schedulable or not."""
        self._nodes = nodes
        #: By what decides which nodes count: sets of domains by topology key.
        self._known: dict[bytes, Mapping[str, set[str]]] = {}

    def of(self, kind: PodObject, keys: Sequence[str]) -> Generator[None, None, Mapping[str, set[str]]]:
        """Return the domains of nodes that count for a kind, by topology key; pauses every `READ_A_STEP` nodes."""
        affinity = kind.spec.affinity
        rules = affinity.node_affinity if affinity is not None else None
        text = msgspec.json.encode((keys, kind.spec.node_selector, rules))
        found = self._known.get(text)
        if found is None:
            domains: dict[str, set[str]] = {key: set() for key in keys}
            for position, node in enumerate(self._nodes, 1):
                if _counts(node, kind, keys):
                    for key, values in domains.items():
                        values.add((node.metadata.labels or {})[key])
                if position % READ_A_STEP == 0:
                    yield
            found = self._known[text] = domains
        return found


def _counts(node: NodeObject, kind: PodObject, keys: Iterable[str]) -> bool:
    """Return whether a node's pods count for spreads: it has every topology key, and the kind may use it at all."""
    labels = node.metadata.labels or {}
    return all(key in labels for key in keys) and admits(node, kind.spec)


@dataclass(slots=True)
class _Spread:
    constraint: TopologySpreadConstraint
    selector: LabelSelectorObject | None
    #: Whether the kind's own pods match.
    counts_itself: bool
    #: Matching pods by domain, for the domains of nodes that the pod may use at all.
    counts: Counter[str]
    #: The least of the counts; None until it is asked for.
    least: int | None = None


@dataclass(slots=True)
class PodRules:
    """The rules about other pods that bind one kind of pod. Pods of a kind have equal labels and equal terms."""

    kind: PodObject
    #: Domains by topology key in which some pod keeps this kind away, or this kind keeps away from some pod.
    _blocked: dict[str, set[str]] = field(default_factory=dict)
    _own_anti: list[_Term] = field(default_factory=list)
    #: Each required affinity with the domains that have a matching pod.
    _wanted: list[tuple[_Term, set[str]]] = field(default_factory=list)
    _spreads: list[_Spread] = field(default_factory=list)

    @classmethod
    def steps(
        cls,
        kind: PodObject,
        residents: Iterable[ReplicaGroup],
        anti_affine: Iterable[ReplicaGroup],
        domains: SpreadDomains,
    ) -> Generator[None, None, "PodRules"]:
        """Return the rules of a kind; pauses every `READ_A_STEP` pods or nodes.

        `residents` are the pods that stay, read only if the kind `asks_for_others`; `anti_affine` are those of them
        with anti-affinity.
        """
        rules = cls(kind)
        own = kind.metadata.labels
        rules._own_anti = [_Term.of(kind, term, forbids=True) for term in anti_affinity_terms(kind)]
        rules._wanted = [(_Term.of(kind, term, forbids=False), set()) for term in affinity_terms(kind)]
        spreads = forbidding_spreads(kind)
        if spreads:
            found = yield from domains.of(kind, [spread.topology_key for spread in spreads])
            for spread in spreads:
                selector = with_label_keys(spread.label_selector, own, spread.match_label_keys)
                counts = Counter(dict.fromkeys(found[spread.topology_key], 0))
                rules._spreads.append(_Spread(spread, selector, selects(selector, own), counts))
        read = 0
        for groups, take in ((residents, rules._see), (anti_affine, rules._keep_away)):
            for group in groups:
                take(group)
                read += len(group.nodes)
                if read >= READ_A_STEP:
                    read = 0
                    yield
        return rules

    @property
    def only_get_stricter(self) -> bool:
        """Return whether a node that is refused once stays refused, however many pods are placed."""
        return not self._wanted and not self._spreads

    def place(self, pods: ReplicaGroup) -> None:
        """Note that pods are placed on nodes."""
        self._see(pods)
        self._keep_away(pods)

    def fault(self, node: NodeObject) -> str | None:
        """Say which rule forbids the node, None when none does."""
        labels = node.metadata.labels or {}
        if any(labels.get(key) in values for key, values in self._blocked.items()):
            return "excluded by anti-affinity"
        if self._wanted:
            # The first pod of a group has no pod to join; it may start anywhere.
            may_start = not any(domains for _, domains in self._wanted) and self._joins(self.kind)
            for term, domains in self._wanted:
                domain = labels.get(term.topology_key)
                if domain is None or (domain not in domains and not may_start):
                    return "away from the pods of its affinity"
        for spread in self._spreads:
            domain = labels.get(spread.constraint.topology_key)
            if domain is None or domain not in spread.counts or self._skew(spread, domain) > spread.constraint.max_skew:
                return "excluded by a topology spread"
        return None

    def _skew(self, spread: _Spread, domain: str) -> int:
        if spread.least is None:
            spread.least = min(spread.counts.values())
        least = spread.least
        if spread.constraint.min_domains is not None and len(spread.counts) < spread.constraint.min_domains:
            least = 0
        return spread.counts[domain] + spread.counts_itself - least

    def _see(self, pods: ReplicaGroup) -> None:
        pod = pods.pod
        for term in self._own_anti:
            if term.matches(pod):
                self._block(term.topology_key, pods.nodes)
        if self._wanted and self._joins(pod):
            for term, domains in self._wanted:
                domains.update(_domains_of(pods.nodes, term.topology_key))
        # Spreads count pods of their own namespace.
        if not self._spreads or pod.metadata.namespace != self.kind.metadata.namespace or pod.is_terminating:
            return
        keys = [spread.constraint.topology_key for spread in self._spreads]
        for spread in self._spreads:
            if selects(spread.selector, pod.metadata.labels):
                for node in pods.nodes:
                    domain = domain_of(node, spread.constraint.topology_key)
                    if domain is not None and domain in spread.counts and _counts(node, self.kind, keys):
                        spread.counts[domain] += 1
                spread.least = None

    def _joins(self, pod: PodObject) -> bool:
        """Return whether a pod satisfies every term of the kind's affinity; satisfying some of them does not count."""
        return all(term.matches(pod) for term, _domains in self._wanted)

    def _keep_away(self, pods: ReplicaGroup) -> None:
        """Note where pods keep this kind away."""
        for term in pods.keeps_away:
            if term.matches(self.kind):
                self._block(term.topology_key, pods.nodes)

    def _block(self, topology_key: str, nodes: Iterable[NodeObject]) -> None:
        domains = _domains_of(nodes, topology_key)
        if domains:
            self._blocked.setdefault(topology_key, set()).update(domains)


def _domains_of(nodes: Iterable[NodeObject], topology_key: str) -> set[str]:
    found = (domain_of(node, topology_key) for node in nodes)
    return {domain for domain in found if domain is not None}


def asks_for_others(pod: PodObject) -> bool:
    """Return whether the pod has rules of its own about where other pods are."""
    return bool(anti_affinity_terms(pod)) or depends_on_others(pod)


def depends_on_others(pod: PodObject) -> bool:
    """Return whether a node that suits the pod may cease to when other pods leave or are placed elsewhere."""
    return bool(affinity_terms(pod) or forbidding_spreads(pod))
