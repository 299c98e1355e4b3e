"""Indexes the pods of a cluster by node, with running sums of their requests.

A change of a pod costs one update and no scan. A pod that has finished requests nothing and is absent. A pod whose
requests cannot be read counts as a pod without requests: the sums are used for reports and forecasts, never to decide
on a drain.
"""

from collections.abc import Iterable, Iterator, Mapping, Set
from types import MappingProxyType
from typing import Final

from bigfleet.operator.kubernetes.objects import PodObject
from bigfleet.operator.kubernetes.pod_requests import requested_by
from bigfleet.operator.kubernetes.scheduling_rules import HostPort, host_ports

PodKey = tuple[str, str]

_NOTHING: Final[Mapping[str, int]] = MappingProxyType({})
_NO_PODS: Final[Mapping[PodKey, PodObject]] = MappingProxyType({})


def moves_in_a_drain(pod: PodObject) -> bool:
    """Return whether a drain must remove the pod: not one of a DaemonSet, no mirror pod, and not finished."""
    return not (pod.is_finished or pod.is_mirror or pod.is_of_daemon_set)


def is_healthy(pod: PodObject) -> bool:
    """Return whether a disruption budget counts the pod: it is Ready and not being deleted."""
    conditions = pod.status.conditions or ()
    return not pod.is_terminating and any(each.type == "Ready" and each.status == "True" for each in conditions)


def has_required_anti_affinity(pod: PodObject) -> bool:
    """Return whether the pod keeps other pods away from where it is."""
    affinity = pod.spec.affinity
    anti_affinity = affinity.pod_anti_affinity if affinity is not None else None
    return anti_affinity is not None and bool(anti_affinity.required_during_scheduling_ignored_during_execution)


class PodsOnNode:
    """The pods of one node that have not finished, and what they request in sum."""

    def __init__(self) -> None:
        self.pods: dict[PodKey, PodObject] = {}
        self.requests: dict[PodKey, Mapping[str, int]] = {}
        #: Milli-units by resource, zero included.
        self.requested: dict[str, int] = {}
        #: Of the pods that take any.
        self._ports: dict[PodKey, Set[HostPort]] = {}

    @property
    def ports(self) -> set[HostPort]:
        """The ports of the node that its pods take."""
        return {port for ports in self._ports.values() for port in ports}

    def _put(self, pod: PodObject, requests: Mapping[str, int]) -> bool:
        """Store the pod; return whether sums or the number of pods changed."""
        key = pod.metadata.key
        former = self.requests.get(key)
        self.pods[key] = pod
        ports = host_ports(pod.spec)
        if ports:
            self._ports[key] = ports
        else:
            self._ports.pop(key, None)
        if former is not None and (former is requests or former == requests):
            return False
        self.requests[key] = requests
        for name, milli in requests.items():
            self.requested[name] = self.requested.get(name, 0) + milli
        for name, milli in (former or _NOTHING).items():
            self.requested[name] -= milli
        return True

    def _pop(self, key: PodKey) -> bool:
        if self.pods.pop(key, None) is None:
            return False
        self._ports.pop(key, None)
        for name, milli in self.requests.pop(key).items():
            self.requested[name] -= milli
        return True


def leaving_pods(node: PodsOnNode) -> list[PodObject]:
    """Return the pods that a drain of a node which has not begun would evict."""
    return [pod for pod in node.pods.values() if moves_in_a_drain(pod) and not pod.is_terminating]


_EMPTY_NODE: Final = PodsOnNode()


class PodsByNode:
    """An ObjectListener of pods. `changed` holds the nodes whose sums have changed until it is taken."""

    def __init__(self) -> None:
        self._nodes: dict[str, PodsOnNode] = {}
        #: Those that a budget counts, by namespace.
        self._healthy: dict[str, dict[PodKey, PodObject]] = {}
        #: Pods with a node that keep other pods away, by pod.
        self._anti_affine: dict[PodKey, PodObject] = {}
        self._changed: set[str] = set()

    def put(self, stored: PodObject, former: PodObject | None) -> None:
        """Follow one pod."""
        node = stored.spec.node_name
        if former is not None and former.spec.node_name and former.spec.node_name != node:
            self.remove(former)
        if not node:
            return
        if stored.is_finished:
            self.remove(stored)
            return
        known = self._nodes.get(node)
        if known is None:
            known = self._nodes[node] = PodsOnNode()
        if known._put(stored, requested_by(stored.spec)):
            self._changed.add(node)
        if is_healthy(stored):
            self._healthy.setdefault(stored.metadata.namespace, {})[stored.metadata.key] = stored
        else:
            self._drop_healthy(stored)
        if has_required_anti_affinity(stored):
            self._anti_affine[stored.metadata.key] = stored
        else:
            self._anti_affine.pop(stored.metadata.key, None)

    def remove(self, former: PodObject) -> None:
        """Forget one pod."""
        node = former.spec.node_name
        known = self._nodes.get(node)
        if known is None:
            return
        if known._pop(former.metadata.key):
            self._changed.add(node)
            self._anti_affine.pop(former.metadata.key, None)
            self._drop_healthy(former)
        if not known.pods:
            del self._nodes[node]

    def _drop_healthy(self, pod: PodObject) -> None:
        known = self._healthy.get(pod.metadata.namespace)
        if known is not None and known.pop(pod.metadata.key, None) is not None and not known:
            del self._healthy[pod.metadata.namespace]

    def on(self, node: str) -> PodsOnNode:
        """Return the pods of a node; an empty one when it has none. The caller changes nothing."""
        return self._nodes.get(node, _EMPTY_NODE)

    def bound(self) -> Iterator[PodObject]:
        """Iterate over all pods that have a node and have not finished."""
        for known in self._nodes.values():
            yield from known.pods.values()

    def healthy_in(self, namespace: str) -> Iterable[PodObject]:
        """Return the pods of a namespace that a disruption budget counts, if it selects them."""
        return self._healthy.get(namespace, _NO_PODS).values()

    def is_healthy(self, pod: PodObject) -> bool:
        """Return whether this very pod is here and counts for a disruption budget."""
        known = self._healthy.get(pod.metadata.namespace, _NO_PODS).get(pod.metadata.key)
        return known is not None and known.metadata.uid == pod.metadata.uid

    def anti_affine(self) -> Iterable[PodObject]:
        """Return the pods that have a node and keep other pods away from it."""
        return self._anti_affine.values()

    def take_changed(self) -> set[str]:
        """Return the nodes whose sums or number of pods changed since the last call."""
        changed, self._changed = self._changed, set()
        return changed
