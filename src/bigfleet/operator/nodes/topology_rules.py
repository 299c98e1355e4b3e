"""Evaluates a pod's rules about other pods: required affinity and anti-affinity, and spreads with DoNotSchedule.

Built for one kind of pod from the pods that stay where they are, then updated with each pod that is placed. Terms that
select namespaces by label are rounded to the safe side, because the operator does not read namespaces: they match all
namespaces where that forbids more, and none where it would allow more.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from bigfleet.operator.kubernetes.objects import (
    LabelSelectorObject,
    NodeObject,
    PodAffinityTerm,
    PodObject,
    TopologySpreadConstraint,
)
from bigfleet.operator.kubernetes.scheduling_rules import admits, selects, with_label_keys

_FORBIDS: Final = "DoNotSchedule"

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
class _Spread:
    constraint: TopologySpreadConstraint
    selector: LabelSelectorObject | None
    #: Matching pods by domain, for the domains of nodes that the pod may use at all.
    counts: Counter[str]
    #: The least of the counts; None until it is asked for.
    least: int | None = None


@dataclass(slots=True)
class PodRules:
    """The rules about other pods that bind one kind of pod. Pods of a kind have equal labels and equal terms."""

    kind: PodObject
    #: Domains (topology key, value) in which some pod keeps this kind away, or this kind keeps away from some pod.
    _blocked: set[tuple[str, str]] = field(default_factory=set)
    _own_anti: list[_Term] = field(default_factory=list)
    #: Each required affinity with the domains that have a matching pod.
    _wanted: list[tuple[_Term, set[str]]] = field(default_factory=list)
    _spreads: list[_Spread] = field(default_factory=list)

    @classmethod
    def build(
        cls, kind: PodObject, residents: Iterable[Located], anti_affine: Iterable[Located], nodes: Iterable[NodeObject]
    ) -> "PodRules":
        """Return the rules of a kind.

        `residents` are the pods that stay, `anti_affine` those of them with anti-affinity, `nodes` all that stay.
        """
        rules = cls(kind)
        rules._own_anti = [_Term.of(kind, term, forbids=True) for term in anti_affinity_terms(kind)]
        rules._wanted = [(_Term.of(kind, term, forbids=False), set()) for term in affinity_terms(kind)]
        for spread in forbidding_spreads(kind):
            usable = (domain_of(node, spread.topology_key) for node in nodes if rules._is_counted(node))
            selector = with_label_keys(spread.label_selector, kind.metadata.labels, spread.match_label_keys)
            rules._spreads.append(_Spread(spread, selector, Counter({d: 0 for d in usable if d is not None})))
        if rules._own_anti or rules._wanted or rules._spreads:
            for pod, node in residents:
                rules._see(pod, node)
        for pod, node in anti_affine:
            rules._keep_away(pod, node)
        return rules

    @property
    def only_get_stricter(self) -> bool:
        """Return whether a node that is refused once stays refused, however many pods are placed."""
        return not self._wanted and not self._spreads

    def place(self, pod: PodObject, node: NodeObject) -> None:
        """Note that a pod is placed on a node."""
        self._see(pod, node)
        self._keep_away(pod, node)

    def fault(self, node: NodeObject) -> str | None:
        """Say which rule forbids the node, None when none does."""
        labels = node.metadata.labels or {}
        if any(labels.get(key) == value for key, value in self._blocked):
            return "excluded by anti-affinity"
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
        counts_itself = selects(spread.selector, self.kind.metadata.labels)
        return spread.counts[domain] + counts_itself - least

    def _see(self, pod: PodObject, node: NodeObject) -> None:
        for term in self._own_anti:
            domain = domain_of(node, term.topology_key)
            if domain is not None and term.matches(pod):
                self._blocked.add((term.topology_key, domain))
        if self._wanted and self._joins(pod):
            for term, domains in self._wanted:
                domain = domain_of(node, term.topology_key)
                if domain is not None:
                    domains.add(domain)
        for spread in self._spreads:
            domain = domain_of(node, spread.constraint.topology_key)
            if (
                domain is not None
                and domain in spread.counts
                and pod.metadata.namespace == self.kind.metadata.namespace
                and not pod.is_terminating
                and self._is_counted(node)
                and selects(spread.selector, pod.metadata.labels)
            ):
                spread.counts[domain] += 1
                spread.least = None

    def _joins(self, pod: PodObject) -> bool:
        """Return whether a pod satisfies every term of the kind's affinity; satisfying some of them does not count."""
        return all(term.matches(pod) for term, _domains in self._wanted)

    def _is_counted(self, node: NodeObject) -> bool:
        """Return whether a node's pods count for spreads: it has every topology key, and the kind may use it at all."""
        labels = node.metadata.labels or {}
        keys = [spread.topology_key for spread in forbidding_spreads(self.kind)]
        return all(key in labels for key in keys) and admits(node, self.kind.spec)

    def _keep_away(self, pod: PodObject, node: NodeObject) -> None:
        """Note where a pod keeps this kind away."""
        for term in anti_affinity_terms(pod):
            domain = domain_of(node, term.topology_key)
            if domain is not None and _Term.of(pod, term, forbids=True).matches(self.kind):
                self._blocked.add((term.topology_key, domain))


def depends_on_others(pod: PodObject) -> bool:
    """Return whether a node that suits the pod may cease to when other pods leave or are placed elsewhere."""
    return bool(affinity_terms(pod) or forbidding_spreads(pod))
