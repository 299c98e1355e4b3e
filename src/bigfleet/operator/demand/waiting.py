"""Decides which pods are requested once more: unschedulable for a minute although the shard calls their row met.

The scheduler decides what fits (docs/spec/operator.md §3). A pod counts only while its message names capacity. If it
still waits 5 min after a suitable machine became Ready, it is no longer requested until its spec or the reasons in its
message change: a pod that can never run must not hold a machine forever. A pod is never requested once more while its
row is unmet or the row's machines are still coming, because the row's own demand requests it already; nor while a
machine that came cannot run it yet (`bigfleet.operator.demand.joined_nodes`). The nodes are searched for a bounded time
in each pass; what there was no time for stays as it is until a later one.
"""

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Final, NamedTuple, Protocol

import msgspec

from bigfleet.model.clock import Clock
from bigfleet.model.frames import NeedStatusUpdate, UnmetReason
from bigfleet.model.vector import Vector
from bigfleet.operator.demand.entries import ObjectKey, PodKey, RequestEntry, RowId, pod_key
from bigfleet.operator.demand.joined_nodes import JOINING_SECONDS, KEY_FIELDS, scheduling_key
from bigfleet.operator.demand.scheduling_messages import reasons_of, waits_for_capacity
from bigfleet.operator.demand.too_large import Largest, exceeds, largest_named
from bigfleet.operator.kubernetes.objects import PodObject
from bigfleet.operator.kubernetes.views import ObjectView

#: How long a pod must be unschedulable, and its row be called met, before it is asked for.
WAITING_SECONDS: Final = 60.0
#: How long a machine that could have taken it is Ready before a pod is no longer asked for.
GIVEN_UP_SECONDS: Final = 300.0
#: How often the nodes are searched for one that came for a pod.
LOOK_SECONDS: Final = 30.0
#: How long they are searched in one pass before the rest waits for the next: thousands of pods of hundreds of kinds may
#: wait beside thousands of new nodes, and sessions and the Lease must have their turn.
SEARCH_SECONDS: Final = 0.02
_FAILING_SECONDS_MAX: Final = 60.0


class PodWait(Enum):
    """What is done about a pod that the scheduler cannot place."""

    #: Nothing beyond its request.
    REQUESTED = "requested"
    #: It is asked for once more.
    ASKED_FOR = "asked_for"
    #: It is no longer asked for: capacity is not what it waits for.
    NOT_FOR_WANT_OF_CAPACITY = "not_for_want_of_capacity"


class WaitingPod(NamedTuple):
    """One unschedulable pod, for conditions and Events."""

    namespace: str
    name: str
    uid: str
    wait: PodWait
    #: The scheduler's.
    message: str


class RequestsOfPods(Protocol):
    """Finds the request that stands for a pod, and what it asks for."""

    def entry_of_pod(self, pod: PodKey) -> RequestEntry | None:
        """Return the entry of the pod's CapacityRequest, by namespace and uid; None without one."""
        ...

    def vector(self, key: ObjectKey) -> Vector | None:
        """Return what a request asks for, milli-units; None for one that is not counted."""
        ...


class ServingNodes(Protocol):
    """Says whether a pod could run on a machine that came while it waited."""

    def could_have_run(self, pod: PodObject, *, after_seconds: float, before_seconds: float) -> bool:
        """Return whether a node that became Ready between two moments, and is since, could have taken the pod.

        Times are monotonic seconds.
        """
        ...

    def is_coming(self, pod: PodObject) -> bool:
        """Return whether a machine that was Configured lately can take the pod as soon as its node is complete."""
        ...


class WaitingListener(Protocol):
    """Hears when the state of an unschedulable pod changes; called on the event loop, never waits."""

    def waiting_changed(self, key: ObjectKey) -> None:
        """Hear that another state or message holds for the pod of a request."""
        ...


class _Pod:
    """One pod that the scheduler calls unschedulable."""

    __slots__ = ("asked_seconds", "awaits_node", "given_up_for", "looked_seconds", "message", "pod", "since_seconds")

    def __init__(self, pod: PodObject, message: str) -> None:
        self.pod = pod
        self.message = message
        #: Since when it waits for capacity; None while it waits for something else.
        self.since_seconds: float | None = None
        self.asked_seconds: float | None = None
        #: When the nodes were last searched for it.
        self.looked_seconds = float("-inf")
        #: Whether a machine that cannot run the pod yet was found then, before the pod is asked for.
        self.awaits_node = False
        #: The reasons and the spec with which it was given up; None while it was not.
        self.given_up_for: tuple[str, bytes] | None = None

    @property
    def wait(self) -> PodWait:
        if self.given_up_for is not None:
            return PodWait.NOT_FOR_WANT_OF_CAPACITY
        return PodWait.REQUESTED if self.asked_seconds is None else PodWait.ASKED_FOR

    def circumstances(self) -> tuple[str, bytes]:
        return reasons_of(self.message), msgspec.msgpack.encode(self.pod.spec)


class _Searches:
    """The searches of one pass: pods that are alike share one, and none begins once `SEARCH_SECONDS` are over."""

    def __init__(self, nodes: ServingNodes, clock: Clock) -> None:
        self._nodes = nodes
        self._clock = clock
        self._until_seconds = clock.monotonic_seconds() + SEARCH_SECONDS
        self._found: dict[tuple[bytes, float | None], bool] = {}
        #: By the objects that replicas share (`bigfleet.operator.pod_reduction`).
        self._keys: dict[tuple[int, ...], bytes] = {}

    def is_coming(self, known: _Pod) -> bool | None:
        """Return what `ServingNodes.is_coming` returns; None if there is no time left."""
        return self._find(known, None, lambda: self._nodes.is_coming(known.pod))

    def could_have_run(self, known: _Pod, after_seconds: float, before_seconds: float) -> bool | None:
        """Return what `ServingNodes.could_have_run` returns; None if there is no time left.

        `before_seconds` is the same throughout a pass.
        """
        return self._find(
            known,
            after_seconds,
            lambda: self._nodes.could_have_run(known.pod, after_seconds=after_seconds, before_seconds=before_seconds),
        )

    def _find(self, known: _Pod, after_seconds: float | None, search: Callable[[], bool]) -> bool | None:
        spec = known.pod.spec
        shared = tuple([id(getattr(spec, field)) for field in KEY_FIELDS])
        key = self._keys.get(shared)
        has_time = self._clock.monotonic_seconds() < self._until_seconds
        if key is None and has_time:
            key = self._keys[shared] = scheduling_key(spec)
        if key is None:
            return None
        found = self._found.get((key, after_seconds))
        if found is None and has_time:
            found = self._found[key, after_seconds] = search()
        return found


class UnschedulablePods:
    """The pods that the scheduler cannot place. An ObjectListener of Pods."""

    def __init__(
        self, *, pods: ObjectView[PodObject], requests: RequestsOfPods, nodes: ServingNodes, clock: Clock
    ) -> None:
        self._view = pods
        self._requests = requests
        self._nodes = nodes
        self._clock = clock
        self._listeners: list[WaitingListener] = []
        #: All and only the pods that are unschedulable, by namespace and uid.
        self._pods: dict[PodKey, _Pod] = {}
        #: Since when each row of these pods has been called met without interruption.
        self._met_since_seconds: dict[RowId, float] = {}
        self._judged_stamp_nanos = 0
        #: Of rows of which only what no machine can hold is short: the largest amounts that machines have.
        self._too_large: dict[RowId, Largest] = {}

    def __len__(self) -> int:
        """Return how many pods are unschedulable."""
        return len(self._pods)

    def add_listener(self, listener: WaitingListener) -> None:
        """Have a listener called from now on."""
        self._listeners.append(listener)

    def get(self, pod: PodKey) -> WaitingPod | None:
        """Return what is known of an unschedulable pod, by namespace and uid; None for any other pod."""
        known = self._pods.get(pod)
        if known is None:
            return None
        metadata = known.pod.metadata
        return WaitingPod(metadata.namespace, metadata.name, metadata.uid, known.wait, known.message)

    # ---- what is heard ------------------------------------------------------------------------------------------

    def put(self, stored: PodObject, former: PodObject | None) -> None:
        """Follow one pod."""
        if former is not None and former.metadata.uid != stored.metadata.uid:
            self.remove(former)
        message = unschedulable_message(stored)
        if message is None:
            self.remove(stored)
            return
        key = pod_key(stored.metadata)
        known = self._pods.get(key)
        before = (known.wait, known.message) if known is not None else None
        if known is None:
            known = self._pods[key] = _Pod(stored, message)
        known.pod, known.message = stored, message
        if not waits_for_capacity(message):
            known.since_seconds = known.asked_seconds = None
        elif known.since_seconds is None:
            known.since_seconds = self._clock.monotonic_seconds()
        if known.given_up_for is not None and known.given_up_for != known.circumstances():
            # It counts again, from the beginning.
            known.given_up_for = known.asked_seconds = None
            if known.since_seconds is not None:
                known.since_seconds = self._clock.monotonic_seconds()
        if before != (known.wait, known.message):
            self._notify(key)

    def remove(self, former: PodObject) -> None:
        """Forget one pod."""
        if self._pods.pop(pod_key(former.metadata), None) is not None:
            self._notify(pod_key(former.metadata))

    def need_status(self, update: NeedStatusUpdate) -> None:
        """Take the shard's verdict: rows that it lists neither as unmet nor as coming are met, unless it is truncated.

        A row that lacks only what no machine can hold is met for its other pods.
        """
        others = {
            (row.fingerprint, row.group) for row in update.rows if row.reason is not UnmetReason.REQUEST_TOO_LARGE
        }
        others.update(update.coming)
        self._too_large = {
            (row.fingerprint, row.group): largest_named(row.message)
            for row in update.rows
            if row.reason is UnmetReason.REQUEST_TOO_LARGE
        }
        known = {entry.row.id for _pod, entry in self._counted() if entry.row is not None}
        now_seconds = self._clock.monotonic_seconds()
        self._met_since_seconds = {
            row_id: self._met_since_seconds.get(row_id, now_seconds)
            for row_id in (() if update.truncated else known - others)
        }
        self._judged_stamp_nanos = update.rollup_timestamp_unix_nanos

    # ---- what is asked ------------------------------------------------------------------------------------------

    def waiting_requests(self) -> list[ObjectKey]:
        """Begin and cease to ask for pods as time says; return the requests whose pods are asked for once more."""
        is_current = self._view.failing_seconds() <= _FAILING_SECONDS_MAX
        searches = _Searches(self._nodes, self._clock)
        now_seconds = self._clock.monotonic_seconds()
        asked = []
        # Those for which the nodes were searched least lately come first: each has its turn in some pass.
        for known, entry in sorted(self._counted(), key=lambda pair: pair[0].looked_seconds):
            before = known.wait
            if is_current:
                self._judge(known, entry, searches, now_seconds)
            if known.wait is not before:
                self._notify(entry.pod)
            if known.wait is PodWait.ASKED_FOR and entry.row is not None:
                asked.append(entry.key)
        return asked

    def _counted(self) -> Iterator[tuple[_Pod, RequestEntry]]:
        for key, known in self._pods.items():
            entry = self._requests.entry_of_pod(key)
            if entry is not None:
                yield known, entry

    def _judge(self, known: _Pod, entry: RequestEntry, searches: _Searches, now_seconds: float) -> None:
        if known.since_seconds is None or known.given_up_for is not None or entry.row is None:
            return
        if known.asked_seconds is None:
            met_since_seconds = self._met_since_seconds.get(entry.row.id)
            is_judged = 0 < entry.first_stamp_nanos <= self._judged_stamp_nanos
            if met_since_seconds is None or not is_judged or self._is_too_large(entry, entry.row.id):
                return
            waited_seconds = now_seconds - max(met_since_seconds, known.since_seconds)
            if waited_seconds < WAITING_SECONDS:
                return
            if waited_seconds >= JOINING_SECONDS or not self._awaits_node(known, searches, now_seconds):
                known.asked_seconds = now_seconds
            return
        ready_seconds = now_seconds - GIVEN_UP_SECONDS
        if ready_seconds < known.asked_seconds or now_seconds - known.looked_seconds < LOOK_SECONDS:
            return
        found = searches.could_have_run(known, known.asked_seconds, ready_seconds)
        if found is not None:
            known.looked_seconds = now_seconds
        if found:
            known.given_up_for = known.circumstances()

    def _awaits_node(self, known: _Pod, searches: _Searches, now_seconds: float) -> bool:
        """Return whether a machine that came for the row cannot run the pod yet, or whether that is not known yet."""
        if now_seconds - known.looked_seconds >= LOOK_SECONDS:
            found = searches.is_coming(known)
            if found is None:
                return True
            known.looked_seconds = now_seconds
            known.awaits_node = found
        return known.awaits_node

    def _is_too_large(self, entry: RequestEntry, row_id: RowId) -> bool:
        largest = self._too_large.get(row_id)
        return bool(largest) and exceeds(self._requests.vector(entry.key) or {}, largest or ())

    def _notify(self, key: PodKey) -> None:
        entry = self._requests.entry_of_pod(key)
        if entry is not None:
            for listener in self._listeners:
                listener.waiting_changed(entry.key)


def unschedulable_message(pod: PodObject) -> str | None:
    """Return what the scheduler says of a pod that it could not place; None for every other pod."""
    if pod.spec.node_name or pod.is_terminating:
        return None
    for condition in pod.status.conditions or ():
        if condition.type == "PodScheduled":
            is_unschedulable = condition.status == "False" and condition.reason == "Unschedulable"
            return condition.message if is_unschedulable else None
    return None
