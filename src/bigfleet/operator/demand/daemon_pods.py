"""Records what the pods of each DaemonSet request, which may be more than its template says.

Admission changes pods, not templates: a LimitRange fills in requests, a RuntimeClass adds an overhead, injectors add
containers, and a vertical autoscaler raises requests. This module must never count a pod that ends.
"""

from collections import Counter
from collections.abc import Callable, Mapping

from bigfleet.operator.kubernetes.objects import PodObject
from bigfleet.operator.kubernetes.pod_requests import requested_by

_PodKey = tuple[str, str]
#: Requests by resource, sorted, as a key.
_Amounts = tuple[tuple[str, int], ...]


class DaemonPods:
    """An ObjectListener of pods. Calls `changed` when the largest request of a DaemonSet may have changed."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        #: The UID of its DaemonSet and its requests, by pod.
        self._pods: dict[_PodKey, tuple[str, _Amounts]] = {}
        #: How many pods request the same, by the UID of the DaemonSet; never 0.
        self._counts: dict[str, Counter[_Amounts]] = {}

    def put(self, stored: PodObject, former: PodObject | None) -> None:
        """Follow one pod."""
        key = stored.metadata.key
        uid = "" if stored.is_terminating or stored.is_finished else _daemon_set_of(stored)
        found = (uid, tuple(sorted(requested_by(stored.spec).items()))) if uid else None
        if found == self._pods.get(key):
            return
        self._drop(key)
        if found is None:
            return
        self._pods[key] = found
        counts = self._counts.setdefault(uid, Counter())
        counts[found[1]] += 1
        if counts[found[1]] == 1:
            self._changed()

    def remove(self, former: PodObject) -> None:
        """Forget one pod."""
        self._drop(former.metadata.key)

    def largest(self, uid: str) -> Mapping[str, int]:
        """Return the most that a pod of the DaemonSet with this UID requests of each resource, milli-units."""
        found: dict[str, int] = {}
        for amounts in self._counts.get(uid, ()):
            for name, milli in amounts:
                found[name] = max(found.get(name, 0), milli)
        return found

    def _drop(self, key: _PodKey) -> None:
        known = self._pods.pop(key, None)
        if known is None:
            return
        uid, amounts = known
        counts = self._counts[uid]
        counts[amounts] -= 1
        if counts[amounts]:
            return
        del counts[amounts]
        if not counts:
            del self._counts[uid]
        self._changed()


def _daemon_set_of(pod: PodObject) -> str:
    """Return the UID of the DaemonSet that made the pod, "" for other pods."""
    owners = pod.metadata.owner_references or ()
    return next((each.uid for each in owners if each.controller and each.kind == "DaemonSet"), "")
