"""Decides which pods are requested once more: unschedulable for a minute although the shard calls their row met.

The scheduler decides what fits (docs/spec/operator.md §3.1). A pod is requested once more only while its message names
capacity, and never while its row is unmet or the row's machines are still coming, because the row's own demand requests
it already; nor while a machine that came cannot run it yet (`bigfleet.operator.demand.joined_nodes`).

A pod that can never run must not hold a machine forever. It is given up, and its request left out of the demand, if it
still waits 5 min after a machine that came for it became Ready; or if it has waited 15 min for something that no node
can change, or for a scheduler of which nothing was seen. It counts again when its spec changes or a reason of its own
vanishes, and one pod of each row is tried again from time to time. Reasons about nodes do not matter: they change with
the machines that go because the pod was given up. The nodes are searched for a bounded time in each pass; what there
was no time for stays as it is until a later one.
"""

from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping
from enum import Enum
from typing import Final, NamedTuple, Protocol

import msgspec

from bigfleet.model.clock import Clock
from bigfleet.model.frames import NeedStatusUpdate, UnmetReason
from bigfleet.model.vector import Vector
from bigfleet.operator.demand.entries import ObjectKey, PodKey, RequestEntry, RowId, pod_key
from bigfleet.operator.demand.joined_nodes import JOINING_SECONDS, KEY_FIELDS, scheduling_key
from bigfleet.operator.demand.scheduling_messages import pod_reasons_of, waits_for_capacity, waits_for_no_node
from bigfleet.operator.demand.too_large import Largest, exceeds, largest_named
from bigfleet.operator.kubernetes.objects import PodObject
from bigfleet.operator.kubernetes.views import ObjectView

#: How long a pod must be unschedulable, and its row be called met, before it is asked for.
WAITING_SECONDS: Final = 60.0
#: How long a machine that could have taken it is Ready before a pod is no longer asked for.
GIVEN_UP_SECONDS: Final = 300.0
#: How long a pod waits for what no node can change, or for a scheduler of which nothing was seen, before the same.
HELPLESS_SECONDS: Final = 900.0
#: When one of the pods of a row that were given up is tried again; doubled after each time up to the second value.
RETRY_SECONDS: Final = 3600.0
RETRY_SECONDS_MAX: Final = 6 * 3600.0
#: How often the nodes are searched for one that came for a pod.
LOOK_SECONDS: Final = 30.0
#: How long they are searched in one pass before the rest waits for the next: thousands of pods of hundreds of kinds may
#: wait beside thousands of new nodes, and sessions and the Lease must have their turn.
SEARCH_SECONDS: Final = 0.02
_FAILING_SECONDS_MAX: Final = 60.0
#: Its pods have a verdict as soon as it runs.
_DEFAULT_SCHEDULER: Final = "default-scheduler"
#: Names of schedulers that are remembered; a pod may name any.
_SCHEDULERS_MAX: Final = 1_024


class PodWait(Enum):
    """What is done about a pod that the scheduler cannot place."""

    #: Nothing beyond its request.
    REQUESTED = "requested"
    #: It is asked for once more.
    ASKED_FOR = "asked_for"
    #: It is given up, and its request is not part of the demand: capacity is not what it waits for.
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

    def came_in_vain(self, pod: PodObject, *, after_seconds: float, before_seconds: float) -> bool:
        """Return whether the node of a machine that suits the pod as far as the shard knows became Ready between two
        moments, is empty since, and does not suit the pod.

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


class _GivenUp(NamedTuple):
    """The circumstances in which a pod was given up."""

    #: Those of the pod itself.
    reasons: frozenset[str]
    #: The pod's, encoded.
    spec: bytes
    at_seconds: float


class _Pod:
    """One pod that a scheduler calls unschedulable, or that names a scheduler of which nothing was seen."""

    __slots__ = (
        "asked_seconds",
        "awaits_node",
        "given_up",
        "helpless_seconds",
        "is_tried_again",
        "looked_seconds",
        "message",
        "pod",
        "since_seconds",
    )

    def __init__(self, pod: PodObject, message: str) -> None:
        self.pod = pod
        self.message = message
        #: Since when it waits for capacity; None while it waits for something else.
        self.since_seconds: float | None = None
        #: Since when it waits for something that no node can change; None while it does not.
        self.helpless_seconds: float | None = None
        self.asked_seconds: float | None = None
        #: When the nodes were last searched for it.
        self.looked_seconds = float("-inf")
        #: Whether a machine that cannot run the pod yet was found then, before the pod is asked for.
        self.awaits_node = False
        #: None while it is not given up.
        self.given_up: _GivenUp | None = None
        #: Whether it counts again because time has passed, for all that were given up in its row.
        self.is_tried_again = False

    @property
    def wait(self) -> PodWait:
        if self.given_up is not None:
            return PodWait.NOT_FOR_WANT_OF_CAPACITY
        return PodWait.REQUESTED if self.asked_seconds is None else PodWait.ASKED_FOR

    def follow(self, pod: PodObject, message: str, now_seconds: float, *, is_silent: bool) -> None:
        """Take the pod as it is now; `is_silent` says that no scheduler says the message."""
        self.pod, self.message = pod, message
        waits_for_capacity_now = not is_silent and waits_for_capacity(message)
        if not waits_for_capacity_now:
            self.since_seconds = self.asked_seconds = None
        elif self.since_seconds is None:
            self.since_seconds = now_seconds
        if not (is_silent or waits_for_no_node(message)):
            self.helpless_seconds = None
        elif self.helpless_seconds is None:
            self.helpless_seconds = now_seconds
        given_up = self.given_up
        if given_up is not None and (self._spec() != given_up.spec or given_up.reasons - pod_reasons_of(message)):
            self.count_again(now_seconds)

    def give_up(self, now_seconds: float) -> None:
        self.given_up = _GivenUp(pod_reasons_of(self.message), self._spec(), now_seconds)
        self.is_tried_again = False

    def count_again(self, now_seconds: float) -> None:
        """Begin again as if it began to wait now."""
        self.given_up = self.asked_seconds = None
        self.is_tried_again = False
        if self.since_seconds is not None:
            self.since_seconds = now_seconds
        if self.helpless_seconds is not None:
            self.helpless_seconds = now_seconds

    def _spec(self) -> bytes:
        return msgspec.msgpack.encode(self.pod.spec)


class _Retry:
    """When one of the pods of a row that were given up is tried again."""

    __slots__ = ("at_seconds", "wait_seconds")

    def __init__(self, now_seconds: float) -> None:
        self.wait_seconds = RETRY_SECONDS
        self.at_seconds = now_seconds + RETRY_SECONDS

    def postpone(self, now_seconds: float) -> None:
        self.wait_seconds = min(2 * self.wait_seconds, RETRY_SECONDS_MAX)
        self.at_seconds = now_seconds + self.wait_seconds


class _Searches:
    """The searches of one pass: pods that are alike share one, and none begins once `SEARCH_SECONDS` are over."""

    def __init__(self, nodes: ServingNodes, clock: Clock) -> None:
        self._nodes = nodes
        self._clock = clock
        self._until_seconds = clock.monotonic_seconds() + SEARCH_SECONDS
        self._found: dict[tuple[bytes, str, float | None], bool] = {}
        #: By the objects that replicas share (`bigfleet.operator.pod_reduction`).
        self._keys: dict[tuple[int, ...], bytes] = {}

    def is_coming(self, known: _Pod) -> bool | None:
        """Return what `ServingNodes.is_coming` returns; None if there is no time left."""
        return self._find(known, "is_coming", None, lambda: self._nodes.is_coming(known.pod))

    def could_have_run(self, known: _Pod, after_seconds: float, before_seconds: float) -> bool | None:
        """Return what `ServingNodes.could_have_run` returns; None if there is no time left.

        `before_seconds` is the same throughout a pass.
        """
        return self._find(
            known,
            "could_have_run",
            after_seconds,
            lambda: self._nodes.could_have_run(known.pod, after_seconds=after_seconds, before_seconds=before_seconds),
        )

    def came_in_vain(self, known: _Pod, after_seconds: float, before_seconds: float) -> bool | None:
        """Return what `ServingNodes.came_in_vain` returns, as `could_have_run` does."""
        return self._find(
            known,
            "came_in_vain",
            after_seconds,
            lambda: self._nodes.came_in_vain(known.pod, after_seconds=after_seconds, before_seconds=before_seconds),
        )

    def _find(self, known: _Pod, what: str, after_seconds: float | None, search: Callable[[], bool]) -> bool | None:
        spec = known.pod.spec
        shared = tuple([id(getattr(spec, field)) for field in KEY_FIELDS])
        key = self._keys.get(shared)
        has_time = self._clock.monotonic_seconds() < self._until_seconds
        if key is None and has_time:
            key = self._keys[shared] = scheduling_key(spec)
        if key is None:
            return None
        found = self._found.get((key, what, after_seconds))
        if found is None and has_time:
            found = self._found[key, what, after_seconds] = search()
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
        #: All and only the pods that are unschedulable or wait for an unseen scheduler, by namespace and uid.
        self._pods: dict[PodKey, _Pod] = {}
        #: Since when each row of these pods has been called met without interruption.
        self._met_since_seconds: dict[RowId, float] = {}
        self._judged_stamp_nanos = 0
        #: Rows of pods that were given up since they began to wait.
        self._retries: dict[RowId, _Retry] = {}
        #: Schedulers other than the default one that have placed or judged a pod.
        self._schedulers: set[str] = set()
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
        self._see_scheduler(stored, has_verdict=message is not None)
        text = unseen_scheduler_message(stored, self._schedulers) if message is None else message
        if text is None:
            self._note_placed(stored)
            self.remove(stored)
            return
        key = pod_key(stored.metadata)
        known = self._pods.get(key)
        before = (known.wait, known.message) if known is not None else None
        if known is None:
            known = self._pods[key] = _Pod(stored, text)
        known.follow(stored, text, self._clock.monotonic_seconds(), is_silent=message is None)
        if before != (known.wait, known.message):
            self._notify(key)

    def _see_scheduler(self, stored: PodObject, *, has_verdict: bool) -> None:
        """Remember that a scheduler works; pods that waited for it to be seen do so no longer."""
        name = stored.spec.scheduler_name
        if name in ("", _DEFAULT_SCHEDULER) or name in self._schedulers or not (has_verdict or stored.spec.node_name):
            return
        if len(self._schedulers) >= _SCHEDULERS_MAX:
            self._schedulers.clear()
        self._schedulers.add(name)
        for known in list(self._pods.values()):
            if known.pod.spec.scheduler_name == name and unschedulable_message(known.pod) is None:
                self.remove(known.pod)

    def _note_placed(self, stored: PodObject) -> None:
        """Count all pods of a row again that were given up, if the one of them that was tried again is placed."""
        known = self._pods.get(pod_key(stored.metadata))
        if known is None or not known.is_tried_again or not stored.spec.node_name:
            return
        entry = self._requests.entry_of_pod(pod_key(stored.metadata))
        if entry is None or entry.row is None:
            return
        now_seconds = self._clock.monotonic_seconds()
        self._retries.pop(entry.row.id, None)
        for other, its_entry in self._counted():
            if its_entry.row is entry.row and other.given_up is not None:
                other.count_again(now_seconds)
                self._notify(its_entry.pod)

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
        """Begin and cease to ask for pods as time says; return the requests whose pods are asked for once more.

        After this, `given_up_requests` returns those that were given up.
        """
        is_current = self._view.failing_seconds() <= _FAILING_SECONDS_MAX
        searches = _Searches(self._nodes, self._clock)
        now_seconds = self._clock.monotonic_seconds()
        asked, given_up = [], defaultdict(list)
        rows: set[RowId] = set()
        # Those for which the nodes were searched least lately come first: each has its turn in some pass.
        for known, entry in sorted(self._counted(), key=lambda pair: pair[0].looked_seconds):
            before = known.wait
            if is_current:
                self._judge(known, entry, searches, now_seconds)
            if known.wait is not before:
                self._notify(entry.pod)
            if entry.row is None:
                continue
            rows.add(entry.row.id)
            if known.wait is PodWait.ASKED_FOR:
                asked.append(entry.key)
            elif known.given_up is not None:
                given_up[entry.row.id].append((known.given_up.at_seconds, entry.key, known))
        self._retries = {row_id: retry for row_id, retry in self._retries.items() if row_id in rows}
        if is_current:
            self._try_again(given_up, now_seconds)
        return asked

    def given_up_requests(self) -> list[ObjectKey]:
        """Return the requests whose pods are given up, which are no part of the demand."""
        return [entry.key for known, entry in self._counted() if known.given_up is not None and entry.row is not None]

    def _try_again(self, given_up: Mapping[RowId, list[tuple[float, ObjectKey, _Pod]]], now_seconds: float) -> None:
        """Count the pod of each row again that was given up first, when it is time for that."""
        for row_id, pods in given_up.items():
            retry = self._retries.get(row_id)
            if retry is None:
                retry = self._retries[row_id] = _Retry(now_seconds)
            if now_seconds < retry.at_seconds:
                continue
            retry.postpone(now_seconds)
            _at_seconds, _key, known = min(pods, key=lambda each: each[:2])
            known.count_again(now_seconds)
            known.is_tried_again = True
            self._notify(pod_key(known.pod.metadata))

    def _counted(self) -> Iterator[tuple[_Pod, RequestEntry]]:
        for key, known in self._pods.items():
            entry = self._requests.entry_of_pod(key)
            if entry is not None:
                yield known, entry

    def _judge(self, known: _Pod, entry: RequestEntry, searches: _Searches, now_seconds: float) -> None:
        if known.given_up is not None or entry.row is None:
            return
        met_since_seconds = self._met_since_seconds.get(entry.row.id)
        is_judged = 0 < entry.first_stamp_nanos <= self._judged_stamp_nanos
        is_met = met_since_seconds is not None and is_judged
        if known.helpless_seconds is not None:
            if is_met and now_seconds - known.helpless_seconds >= HELPLESS_SECONDS:
                known.give_up(now_seconds)
        elif known.since_seconds is None:
            return
        elif known.asked_seconds is not None:
            self._judge_asked(known, known.asked_seconds, searches, now_seconds, is_met=is_met)
        elif met_since_seconds is not None and is_met and not self._is_too_large(entry, entry.row.id):
            waited_seconds = now_seconds - max(met_since_seconds, known.since_seconds)
            if waited_seconds < WAITING_SECONDS:
                return
            if waited_seconds >= JOINING_SECONDS or not self._awaits_node(known, searches, now_seconds):
                known.asked_seconds = now_seconds

    def _judge_asked(
        self, known: _Pod, asked_seconds: float, searches: _Searches, now_seconds: float, *, is_met: bool
    ) -> None:
        """Give a pod up if a machine that came for it has not helped it."""
        ready_seconds = now_seconds - GIVEN_UP_SECONDS
        if ready_seconds < asked_seconds or now_seconds - known.looked_seconds < LOOK_SECONDS:
            return
        found = searches.could_have_run(known, asked_seconds, ready_seconds)
        if found is False and is_met:
            # While its row is met no machine comes for it that might suit it.
            found = searches.came_in_vain(known, asked_seconds, ready_seconds)
        if found is not None:
            known.looked_seconds = now_seconds
        if found:
            known.give_up(now_seconds)

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


def unseen_scheduler_message(pod: PodObject, seen: Container[str]) -> str | None:
    """Return what to say of a pod that waits for a scheduler other than the default one, of which nothing was seen."""
    name = pod.spec.scheduler_name
    if name in ("", _DEFAULT_SCHEDULER) or name in seen or pod.spec.node_name or pod.is_terminating:
        return None
    has_verdict = any(condition.type == "PodScheduled" for condition in pod.status.conditions or ())
    if has_verdict or pod.status.phase != "Pending":
        return None
    return f"the pod names the scheduler {name}, which has placed no pod"
