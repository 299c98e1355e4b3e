"""Maintains exactly one CapacityRequest for each pod that needs capacity, for the pod's whole life.

docs/spec/operator.md §11. Each change of a pod queues it again; what is written depends on the newest state only. The
request of a pod that is gone is deleted only if both caches have been read completely, the pods' cache follows the
server, and the server itself has confirmed that the pod is gone. The same holds for pods on Nodes that BigFleet did not
provide (`bigfleet.operator.pods.unmanaged_nodes`).
"""

import asyncio
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

import structlog

from bigfleet.model.clock import Clock
from bigfleet.model.ids import Rng
from bigfleet.operator.backoff import retry_delay_seconds
from bigfleet.operator.kubernetes.api import ApiError, JsonObject, KubernetesApi, PatchKind
from bigfleet.operator.kubernetes.objects import (
    CapacityRequestObject,
    NodeObject,
    PersistentVolume,
    PersistentVolumeClaim,
    PodObject,
    UpcomingNode,
)
from bigfleet.operator.kubernetes.resources import CAPACITY_REQUESTS, POD_CONTROLLER_FIELD_MANAGER, PODS
from bigfleet.operator.kubernetes.views import ObjectView
from bigfleet.operator.pods.comparison import has_metadata_of, has_spec
from bigfleet.operator.pods.defaults import PenaltyDefaults
from bigfleet.operator.pods.findings import Inexpressible
from bigfleet.operator.pods.index import PodIndex
from bigfleet.operator.pods.mapping import PodStanding, map_pod, request_body, request_name, standing_of
from bigfleet.operator.pods.unmanaged_nodes import UnmanagedNodes
from bigfleet.operator.work_queue import KeyQueue

#: A request whose pod is gone is left to the garbage collector of the cluster for this long.
ORPHAN_SECONDS: Final = 5.0
#: Pods on a younger Node count in any case: it may be a machine that nothing names as one yet.
UNMANAGED_AFTER_SECONDS: Final = 600.0
#: In a cluster with unmanaged Nodes the scheduler has this long to place a pod there before capacity is requested.
SCHEDULING_SECONDS: Final = 2.0
#: A request on an unmanaged Node that cannot be deleted safely is looked at again after this long.
_UNCERTAIN_SECONDS: Final = 10.0
#: All pods are looked at again after this long, whether they changed or not.
RESYNC_SECONDS: Final = 600.0
_SYNC_POLL_SECONDS: Final = 0.1
_BACKOFF_FIRST_SECONDS: Final = 0.5
_BACKOFF_SECONDS_MAX: Final = 60.0
#: For requests that the API server refuses: they succeed only once something changes.
_REFUSED_BACKOFF_SECONDS_MAX: Final = 300.0
_LOG_PAUSE_SECONDS: Final = 5.0
#: Reason of the Event when the API server does not accept the request of a pod.
REFUSED_REASON: Final = "CapacityRequestRefused"
_INVALID = (400, 422)

_log = structlog.get_logger(__name__)


class ReconcileOutcome(Enum):
    """How one look at a pod ended; the values are labels of a metric (docs/spec/operator.md §13)."""

    CR_CREATED = "cr_created"
    CR_EXISTS = "cr_exists"
    CR_UPDATED = "cr_updated"
    CR_DELETED = "cr_deleted"
    POD_GONE = "pod_gone"
    POD_TERMINAL = "pod_terminal"
    EXCLUDED = "excluded"
    UNSUPPORTED = "unsupported"
    ERROR = "error"


class PodEvents(Protocol):
    """Writes Events on pods; never waits."""

    def warn(self, pod: PodObject, reason: str, message: str) -> bool:
        """Write a Warning Event; say whether it will be written, or must be offered again later."""
        ...


class SilentPodEvents:
    """Writes no Events."""

    def warn(self, pod: PodObject, reason: str, message: str) -> bool:
        """Return True."""
        return True


class ReconcileListener(Protocol):
    """Counts for metrics."""

    def on_reconcile(self, outcome: ReconcileOutcome) -> None:
        """Hear how one look at a pod ended."""
        ...


class SilentReconcileListener:
    """Counts nothing."""

    def on_reconcile(self, outcome: ReconcileOutcome) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterViews:
    """The caches that the controller reads; their listeners are those of its index."""

    pods: ObjectView[PodObject]
    #: The CapacityRequests that carry the label `OWNED_BY_POD`.
    requests: ObjectView[CapacityRequestObject]
    claims: ObjectView[PersistentVolumeClaim]
    volumes: ObjectView[PersistentVolume]
    nodes: ObjectView[NodeObject]
    upcoming_nodes: ObjectView[UpcomingNode]

    @property
    def are_synced(self) -> bool:
        """Return whether all of them have been read completely."""
        views = (self.pods, self.requests, self.claims, self.volumes, self.nodes, self.upcoming_nodes)
        return all(view.is_synced for view in views)

    @property
    def are_nodes_certain(self) -> bool:
        """Return whether Nodes and UpcomingNodes are known as they are now."""
        return all(view.is_synced and view.failing_seconds() == 0 for view in (self.nodes, self.upcoming_nodes))


class _NotYetError(Exception):
    """The pod must be looked at again after a while."""

    def __init__(self, delay_seconds: float) -> None:
        super().__init__(f"again in {delay_seconds} s")
        self.delay_seconds = delay_seconds


class PodController:
    """Follows the pods of one cluster. `index` and `unmanaged` have the listeners of the caches; `run` writes."""

    def __init__(
        self,
        api: KubernetesApi,
        views: ClusterViews,
        *,
        clock: Clock,
        rng: Rng,
        defaults: PenaltyDefaults | None = None,
        events: PodEvents | None = None,
        listener: ReconcileListener | None = None,
        workers: int = 16,
        unmanaged_after_seconds: float = UNMANAGED_AFTER_SECONDS,
    ) -> None:
        """`unmanaged_after_seconds`: pods on unmanaged Nodes count until the Node is so old.

        A machine may join before its UpcomingNode can be written and its label is there.
        """
        self._unmanaged_after_seconds = unmanaged_after_seconds
        self._api = api
        self._views = views
        self._clock = clock
        self._rng = rng
        self._defaults = defaults or PenaltyDefaults()
        self._events = events or SilentPodEvents()
        self._listener = listener or SilentReconcileListener()
        self._workers = workers
        self.index = PodIndex(self._changed, claims=views.claims, volumes=views.volumes)
        self.unmanaged = UnmanagedNodes(self.index.change_node, api=api, clock=clock)
        #: None while `run` does not run: a follower remembers nothing, and a new leader looks at all pods.
        self._queue: KeyQueue[str] | None = None
        self._is_stopping = False
        self._attempts: dict[str, int] = {}
        #: By the UID of the pod: since when it has been missed, and since when it has waited for the scheduler.
        self._orphan_since_seconds: dict[str, float] = {}
        self._unscheduled_since_seconds: dict[str, float] = {}
        self._announced: dict[str, dict[str, str]] = {}
        self._logged_seconds: float | None = None
        self._unlogged = 0

    @property
    def backlog(self) -> int:
        """How many pods are waiting to be looked at, or are being looked at."""
        return self._queue.backlog if self._queue is not None else 0

    def _changed(self, uid: str) -> None:
        if self._queue is not None:
            self._queue.put(uid)

    async def run(self) -> None:
        """Write until cancelled, or until `stop`; begins once the caches are synced. Can be run again."""
        self._is_stopping = False
        while not self._views.are_synced:
            await self._clock.sleep(_SYNC_POLL_SECONDS)
            if self._is_stopping:
                return
        queue = self._queue = KeyQueue(self._clock)
        try:
            async with asyncio.TaskGroup() as group:
                resync = group.create_task(self._resync(queue), name="pod resync")
                timer = group.create_task(queue.run_timer(), name="pod timer")
                workers = [
                    group.create_task(self._work(queue), name=f"pod worker {number}") for number in range(self._workers)
                ]
                await asyncio.wait(workers)
                resync.cancel()
                timer.cancel()
        finally:
            self._queue = None
            self._attempts.clear()
            self._orphan_since_seconds.clear()
            self._unscheduled_since_seconds.clear()
            self._announced.clear()

    def stop(self) -> None:
        """Begin no more writes; `run` returns once the running ones are finished."""
        self._is_stopping = True
        if self._queue is not None:
            self._queue.close()

    async def _resync(self, queue: KeyQueue[str]) -> None:
        while True:
            for uid in sorted(self.index.uids()):
                queue.put(uid)
            await self._clock.sleep(RESYNC_SECONDS)

    # ---- workers ------------------------------------------------------------------------------------------------

    async def _work(self, queue: KeyQueue[str]) -> None:
        while (taken := await queue.take()) is not None:
            uid, _urgency = taken
            try:
                delay_seconds = await self._look_at(uid)
            finally:
                queue.done(uid)
            if delay_seconds is not None:
                queue.put_later(uid, delay_seconds)
            # A pod that needs no writing is looked at without a pause; sessions and probes must be served meanwhile.
            await self._clock.sleep(0)

    async def _look_at(self, uid: str) -> float | None:
        """Bring the requests of one pod to what they should be; return after how many seconds to look again."""
        try:
            outcome = await self._reconcile(uid)
        except _NotYetError as later:
            return later.delay_seconds
        except ApiError as error:
            self._listener.on_reconcile(ReconcileOutcome.ERROR)
            return self._failed(uid, error)
        except Exception as error:
            # One pod that breaks the code must not end the work for all others.
            self._listener.on_reconcile(ReconcileOutcome.ERROR)
            _log.exception("operator.pod_reconcile_failed", pod_uid=uid, error=str(error))
            return self._backoff_seconds(uid, None, _REFUSED_BACKOFF_SECONDS_MAX)
        self._attempts.pop(uid, None)
        self._listener.on_reconcile(outcome)
        return None

    async def _reconcile(self, uid: str) -> ReconcileOutcome:
        pod = self.index.pod(uid)
        found = self.index.requests_of(uid)
        if pod is None:
            return await self._collect(uid, found)
        self._orphan_since_seconds.pop(uid, None)
        key = (pod.metadata.namespace, request_name(uid))
        own = None
        for each in found:
            if each.metadata.key == key:
                own = each
            else:
                # A copy under another name would count the pod twice.
                await self._delete(each)
        standing = standing_of(pod)
        if standing is PodStanding.UNREADABLE:
            # What it asks for is unknown, so the request that it has stays.
            advice = "its CapacityRequest, if it has one, stays as it is"
            _log.warning(
                "operator.pod_unreadable", pod=pod.metadata.name, namespace=pod.metadata.namespace, advice=advice
            )
            return ReconcileOutcome.ERROR
        if standing is PodStanding.LEAVING:
            return ReconcileOutcome.EXCLUDED
        if standing is not PodStanding.REQUESTS:
            is_terminal = standing is PodStanding.TERMINAL
            return await self._without(own, ReconcileOutcome.POD_TERMINAL if is_terminal else ReconcileOutcome.EXCLUDED)
        if await self._needs_nothing(pod, own):
            self._announced.pop(uid, None)
            self._unscheduled_since_seconds.pop(uid, None)
            return await self._without(own, ReconcileOutcome.EXCLUDED)
        self._wait_for_scheduler(pod, own)
        mapping = map_pod(pod, volumes=self.index, defaults=self._defaults)
        self._announce(pod, mapping.findings)
        if mapping.spec is None:
            return await self._without(own, ReconcileOutcome.UNSUPPORTED)
        return await self._with(pod, own, mapping.spec)

    async def _needs_nothing(self, pod: PodObject, own: CapacityRequestObject | None) -> bool:
        """Return whether the pod has its place on a Node that BigFleet did not provide.

        A request that is there stays until that is certain; the pod is then looked at again.
        """
        node_name = pod.spec.node_name
        if node_name not in self.unmanaged:
            return False
        left_seconds = self._unmanaged_after_seconds - self.unmanaged.age_seconds(node_name)
        if left_seconds > 0:
            if self._queue is not None:
                self._queue.put_later(pod.metadata.uid, left_seconds)
            return False
        if own is None:
            return True
        if self._views.are_nodes_certain and await self.unmanaged.confirm(node_name):
            return True
        if self._queue is not None:
            self._queue.put_later(pod.metadata.uid, _UNCERTAIN_SECONDS)
        return False

    def _wait_for_scheduler(self, pod: PodObject, own: CapacityRequestObject | None) -> None:
        """Let the scheduler use unmanaged Nodes first. Raises _NotYetError while it has not had the time."""
        uid = pod.metadata.uid
        if own is not None or pod.spec.node_name or not self.unmanaged:
            self._unscheduled_since_seconds.pop(uid, None)
            return
        now_seconds = self._clock.monotonic_seconds()
        left_seconds = self._unscheduled_since_seconds.setdefault(uid, now_seconds) + SCHEDULING_SECONDS - now_seconds
        if left_seconds > 0:
            raise _NotYetError(left_seconds)

    async def _without(self, own: CapacityRequestObject | None, outcome: ReconcileOutcome) -> ReconcileOutcome:
        """Delete the request of a pod that must have none."""
        if own is None:
            return outcome
        await self._delete(own)
        return ReconcileOutcome.CR_DELETED

    async def _with(self, pod: PodObject, own: CapacityRequestObject | None, spec: JsonObject) -> ReconcileOutcome:
        """Write the request of a pod, if it is absent or differs."""
        if own is not None and has_metadata_of(own, pod) and has_spec(own, spec):
            stored, outcome = own, ReconcileOutcome.CR_EXISTS
        else:
            stored = await self._apply(pod, spec)
            outcome = ReconcileOutcome.CR_CREATED if own is None else ReconcileOutcome.CR_UPDATED
        if not stored.status.phase:
            await self._set_pending(stored)
        return outcome

    async def _apply(self, pod: PodObject, spec: JsonObject) -> CapacityRequestObject:
        namespace, name = pod.metadata.namespace, request_name(pod.metadata.uid)
        try:
            stored = await self._api.apply(
                CAPACITY_REQUESTS,
                name,
                request_body(pod, spec),
                namespace=namespace,
                field_manager=POD_CONTROLLER_FIELD_MANAGER,
                force=True,
            )
            if not has_spec(stored, spec):
                # Another writer added fields, which an apply leaves alone; the request says what the pod says.
                stored = await self._api.patch(
                    CAPACITY_REQUESTS,
                    name,
                    [{"op": "replace", "path": "/spec", "value": spec}],
                    namespace=namespace,
                    kind=PatchKind.JSON,
                )
        except ApiError as error:
            if error.status in _INVALID:
                self._warn(pod, REFUSED_REASON, f"{error}; no capacity is requested for this pod")
            raise
        return stored

    async def _set_pending(self, stored: CapacityRequestObject) -> None:
        """Set the phase of a request that has none, unless somebody has written it meanwhile."""
        body: JsonObject = {
            "metadata": {"resourceVersion": stored.metadata.resource_version},
            "status": {"phase": "Pending"},
        }
        try:
            await self._api.patch(
                CAPACITY_REQUESTS.status, stored.metadata.name, body, namespace=stored.metadata.namespace
            )
        except ApiError as error:
            # Changed or deleted since: the change is on its way, and is looked at.
            if not (error.is_conflict or error.is_not_found):
                raise

    async def _delete(self, stored: CapacityRequestObject) -> None:
        metadata = stored.metadata
        try:
            await self._api.delete(CAPACITY_REQUESTS, metadata.name, namespace=metadata.namespace, uid=metadata.uid)
        except ApiError as error:
            if not (error.is_conflict or error.is_not_found):
                raise

    # ---- requests of pods that are gone -------------------------------------------------------------------------

    async def _collect(self, uid: str, found: list[CapacityRequestObject]) -> ReconcileOutcome:
        """Delete the requests of a pod that is not in the cache, once it is certain that the pod is gone."""
        self._announced.pop(uid, None)
        self._unscheduled_since_seconds.pop(uid, None)
        if not found:
            self._orphan_since_seconds.pop(uid, None)
            return ReconcileOutcome.POD_GONE
        now_seconds = self._clock.monotonic_seconds()
        since_seconds = self._orphan_since_seconds.setdefault(uid, now_seconds)
        if now_seconds - since_seconds < ORPHAN_SECONDS:
            raise _NotYetError(ORPHAN_SECONDS - (now_seconds - since_seconds))
        if not self._is_view_certain:
            raise _NotYetError(ORPHAN_SECONDS)
        for each in found:
            if await self._has_living_pod(each, uid):
                raise _NotYetError(ORPHAN_SECONDS)
            if not self._is_view_certain or self.index.pod(uid) is not None:
                raise _NotYetError(ORPHAN_SECONDS)
            await self._delete(each)
        self._orphan_since_seconds.pop(uid, None)
        return ReconcileOutcome.CR_DELETED

    @property
    def _is_view_certain(self) -> bool:
        pods, requests = self._views.pods, self._views.requests
        return pods.is_synced and requests.is_synced and pods.failing_seconds() == 0

    async def _has_living_pod(self, stored: CapacityRequestObject, uid: str) -> bool:
        """Ask the server for the pod that owns a request; the cache may be behind."""
        for owner in stored.metadata.owner_references or ():
            if owner.kind == PODS.kind and owner.uid == uid:
                try:
                    pod = await self._api.get(PODS, owner.name, namespace=stored.metadata.namespace)
                except ApiError as error:
                    if error.is_not_found:
                        continue
                    raise
                if pod.metadata.uid == uid:
                    return True
        return False

    # ---- Events and failures ------------------------------------------------------------------------------------

    def _announce(self, pod: PodObject, findings: tuple[Inexpressible, ...]) -> None:
        """Write one Event for each reason of the findings, unless the same has been written."""
        by_reason: dict[str, list[str]] = {}
        for finding in findings:
            by_reason.setdefault(finding.reason.value, []).append(finding.message)
        announced = self._announced.get(pod.metadata.uid)
        if announced is not None:
            for reason in announced.keys() - by_reason.keys() - {REFUSED_REASON}:
                del announced[reason]
        for reason, messages in by_reason.items():
            self._warn(pod, reason, "; ".join(messages))

    def _warn(self, pod: PodObject, reason: str, message: str) -> None:
        announced = self._announced.setdefault(pod.metadata.uid, {})
        if announced.get(reason) != message and self._events.warn(pod, reason, message):
            announced[reason] = message

    def _failed(self, uid: str, error: ApiError) -> float:
        """Log a failed request to the API server; return when to try again."""
        can_succeed = error.is_transient or error.is_conflict or error.is_forbidden
        limit_seconds = _BACKOFF_SECONDS_MAX if can_succeed else _REFUSED_BACKOFF_SECONDS_MAX
        delay_seconds = self._backoff_seconds(uid, error, limit_seconds)
        now_seconds = self._clock.monotonic_seconds()
        if self._logged_seconds is not None and now_seconds - self._logged_seconds < _LOG_PAUSE_SECONDS:
            self._unlogged += 1
        else:
            _log.warning(
                "operator.pod_request_failed",
                pod_uid=uid,
                error=str(error),
                retry_seconds=round(delay_seconds, 3),
                not_logged=self._unlogged,
            )
            self._logged_seconds, self._unlogged = now_seconds, 0
        return delay_seconds

    def _backoff_seconds(self, uid: str, error: ApiError | None, limit_seconds: float) -> float:
        attempt = self._attempts.get(uid, 0)
        self._attempts[uid] = attempt + 1
        return retry_delay_seconds(
            attempt, error, self._rng, first_seconds=_BACKOFF_FIRST_SECONDS, seconds_max=limit_seconds
        )
