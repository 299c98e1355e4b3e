"""Records where the pods of each gang run, so that the rest of the gang gets machines in the same domain.

The scheduler puts the first pod of a gang wherever there is room, and the others must follow it (docs/spec/operator.md
§3). Only pods with required pod affinity are recorded. This module does not choose a domain.

A pod's request outlives the pod by some seconds. Therefore the last domain of a gang is stored until a pod waits again.
Without it, the remaining requests of a gang that ends would accept any domain, and would get machines there.
"""

from collections.abc import Iterable
from typing import Final

from bigfleet.operator.demand.entries import PodKey, pod_key
from bigfleet.operator.kubernetes.objects import NodeObject, PodObject
from bigfleet.operator.kubernetes.views import ObjectView

#: Pods whose requests may outlive them; the oldest are forgotten first.
_ENDED_MAX: Final = 16_384


class GangDomains:
    """The nodes of bound gang pods. An ObjectListener of pods; it looks nodes up when it is asked."""

    def __init__(self, nodes: ObjectView[NodeObject]) -> None:
        self._nodes = nodes
        #: Node name by pod, "" while unbound: all and only the pods with required pod affinity that neither end nor
        #: have ended.
        self._node_of: dict[PodKey, str] = {}
        #: Node name by pod: those that end or have ended, the latest last.
        self._ended_on: dict[PodKey, str] = {}

    def put(self, stored: PodObject, former: PodObject | None) -> None:
        """Follow one pod."""
        if stored.is_terminating or stored.is_finished:
            self._end(pod_key(stored.metadata))
        elif _is_gang_pod(stored):
            self._node_of[pod_key(stored.metadata)] = stored.spec.node_name

    def remove(self, former: PodObject) -> None:
        """Take note that a pod is gone."""
        self._end(pod_key(former.metadata))

    def domains(self, topology_key: str, pods: Iterable[PodKey]) -> tuple[str, ...]:
        """Return the values of a node label where some of these pods run, in order; none while no pod is bound.

        If none of them lives, return those where they ran.
        """
        keys = set(pods)
        living = keys & self._node_of.keys()
        names = {self._node_of[key] for key in living} if living else {self._ended_on.get(key, "") for key in keys}
        nodes = (self._nodes.get(name, "") for name in names - {""})
        values = {(node.metadata.labels or {}).get(topology_key, "") for node in nodes if node is not None}
        return tuple(sorted(values - {""}))

    def _end(self, key: PodKey) -> None:
        name = self._node_of.pop(key, "")
        if name:
            self._ended_on[key] = name
            while len(self._ended_on) > _ENDED_MAX:
                del self._ended_on[next(iter(self._ended_on))]


def _is_gang_pod(pod: PodObject) -> bool:
    affinity = pod.spec.affinity.pod_affinity if pod.spec.affinity is not None else None
    return affinity is not None and bool(affinity.required_during_scheduling_ignored_during_execution)
