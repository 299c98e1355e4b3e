"""Knows where the pods of each gang run already, so that the rest of it gets machines there and nowhere else.

The scheduler puts the first pod of a gang wherever there is room, and the others must follow it (docs/spec/operator.md
§3). Only pods with required pod affinity are remembered. Nothing here chooses a domain.
"""

from collections.abc import Iterable

from bigfleet.operator.kubernetes.objects import NodeObject, PodObject
from bigfleet.operator.kubernetes.views import ObjectView


class GangDomains:
    """The nodes of bound gang pods. An ObjectListener of pods; it looks nodes up when it is asked."""

    def __init__(self, nodes: ObjectView[NodeObject]) -> None:
        self._nodes = nodes
        #: Node name by pod UID: all and only the bound pods with required pod affinity that neither end nor have ended.
        self._node_of: dict[str, str] = {}

    def put(self, stored: PodObject, former: PodObject | None) -> None:
        """Follow one pod."""
        if _is_bound_gang_pod(stored):
            self._node_of[stored.metadata.uid] = stored.spec.node_name
        else:
            self._node_of.pop(stored.metadata.uid, None)

    def remove(self, former: PodObject) -> None:
        """Forget one pod."""
        self._node_of.pop(former.metadata.uid, None)

    def domains(self, topology_key: str, pod_uids: Iterable[str]) -> tuple[str, ...]:
        """Return the values of a node label where some of these pods run, in order; none while no pod is bound."""
        names = {self._node_of[uid] for uid in pod_uids if uid in self._node_of}
        nodes = (self._nodes.get(name, "") for name in names)
        values = {(node.metadata.labels or {}).get(topology_key, "") for node in nodes if node is not None}
        return tuple(sorted(values - {""}))


def _is_bound_gang_pod(pod: PodObject) -> bool:
    if not pod.spec.node_name or pod.is_terminating or pod.is_finished:
        return False
    affinity = pod.spec.affinity.pod_affinity if pod.spec.affinity is not None else None
    return affinity is not None and bool(affinity.required_during_scheduling_ignored_during_execution)
