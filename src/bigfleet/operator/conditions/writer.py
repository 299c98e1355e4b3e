"""Writes the status of CapacityRequests: phase before conditions, only what changed (docs/spec/operator.md §5).

A patch is computed when it is written, so a backlog has keys only and coalesces. A failed write never ends the flow: an
object that is gone is forgotten, conflicts and unavailable servers are retried, other errors are logged and retried
with the next change or sweep.
"""

import asyncio
from collections import OrderedDict
from typing import Final, Protocol

import structlog

from bigfleet.model.clock import Clock
from bigfleet.model.ids import Rng
from bigfleet.operator.backoff import retry_delay_seconds
from bigfleet.operator.conditions import wording
from bigfleet.operator.conditions.patches import ConditionChange, StatusChange, status_change
from bigfleet.operator.conditions.verdicts import RequestVerdicts, UnschedulablePodSource, Urgency
from bigfleet.operator.conditions.wording import ConditionValue
from bigfleet.operator.demand.demand import DemandView
from bigfleet.operator.demand.entries import ObjectKey, RequestEntry
from bigfleet.operator.kubernetes.api import ApiError, KubernetesApi
from bigfleet.operator.kubernetes.events import EventSeverity, reference_to
from bigfleet.operator.kubernetes.objects import CapacityRequestObject, ObjectReference
from bigfleet.operator.kubernetes.resources import CAPACITY_REQUESTS, PODS
from bigfleet.operator.kubernetes.timestamps import rfc3339
from bigfleet.operator.kubernetes.views import ObjectView
from bigfleet.operator.work_queue import KeyQueue

log = structlog.get_logger(__name__)

WORKERS: Final = 16
TICK_SECONDS: Final = 1.0
#: Every status is compared again so often: repairs what could not be written.
SWEEP_SECONDS: Final = 600.0
#: What was forbidden is tried again so often.
FORBIDDEN_RETRY_SECONDS: Final = 30.0
#: At most one Event per request.
EVENT_SECONDS: Final = 600.0
BACKOFF_FIRST_SECONDS: Final = 0.5
BACKOFF_SECONDS_MAX: Final = 30.0
#: Keys that need no write and are looked at before other tasks run.
_LOOKS_AT_ONCE_MAX: Final = 200
_LOG_SECONDS: Final = 60.0


class EventSink(Protocol):
    """Takes Events; `bigfleet.operator.kubernetes.events.EventRecorder` is one."""

    def record(self, about: ObjectReference, severity: EventSeverity, reason: str, message: str) -> bool:
        """Note an Event to be written; say whether it will be."""
        ...


class StatusWriteListener(Protocol):
    """Hears of writes, for metrics."""

    def phase_written(self, phase: str, seconds: float) -> None:
        """Hear of a phase, and how long ago the request's generation was first seen."""
        ...

    def write_ended(self, written: str, outcome: str) -> None:
        """Hear how the write of a phase or of a condition ended.

        `written` is `Phase` or the type of a condition; `outcome` is `success`, `conflict` or `error`.
        """
        ...


class NoStatusWriteListener:
    """Hears and forgets."""

    def phase_written(self, phase: str, seconds: float) -> None:
        """Do nothing."""

    def write_ended(self, written: str, outcome: str) -> None:
        """Do nothing."""


class StatusWriter:
    """Brings the statuses whose keys are in `queue` to what `verdicts` says; `verdicts` puts them there."""

    def __init__(
        self,
        *,
        api: KubernetesApi,
        requests: ObjectView[CapacityRequestObject],
        demand: DemandView,
        verdicts: RequestVerdicts,
        queue: KeyQueue[ObjectKey],
        events: EventSink,
        clock: Clock,
        rng: Rng,
        pods: UnschedulablePodSource | None = None,
        workers: int = WORKERS,
        listener: StatusWriteListener | None = None,
    ) -> None:
        self._api = api
        self._requests = requests
        self._demand = demand
        self._verdicts = verdicts
        self._events = events
        self._clock = clock
        self._rng = rng
        self._pods = pods
        self._workers = workers
        self._listener = listener or NoStatusWriteListener()
        self._queue = queue
        #: Written objects that the view does not show yet.
        self._written: dict[ObjectKey, CapacityRequestObject] = {}
        #: To be put with the next tick: the view was behind.
        self._conflicting: dict[ObjectKey, int] = {}
        #: To be put again after a while: a right may be given back. They must not occupy the workers meanwhile.
        self._forbidden: dict[ObjectKey, int] = {}
        #: When the last Event of a request was recorded, oldest first, by uid and whether it was RequestTooLarge.
        self._reported_seconds: OrderedDict[tuple[str, bool], float] = OrderedDict()
        #: What the pods of requests are to get as an Event once the scheduler has called them unschedulable.
        self._pod_events: dict[ObjectKey, ConditionValue] = {}
        self._logged_seconds: float | None = None
        self.failures_total = 0

    @property
    def backlog(self) -> int:
        """How many requests wait to be looked at."""
        return len(self._queue) + len(self._conflicting)

    @property
    def is_idle(self) -> bool:
        """Return whether nothing waits to be looked at and nothing is being written."""
        return not self._queue.unfinished and not self._conflicting

    async def run(self) -> None:
        """Write until cancelled; only a leader does."""
        self._verdicts.started()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tick())
            for _ in range(self._workers):
                tasks.create_task(self._work())

    async def _tick(self) -> None:
        swept_seconds = retried_seconds = self._clock.monotonic_seconds()
        while True:
            self._verdicts.tick()
            conflicting, self._conflicting = self._conflicting, {}
            for key, urgency in conflicting.items():
                self._queue.put(key, urgency)
            if self._clock.monotonic_seconds() - retried_seconds >= FORBIDDEN_RETRY_SECONDS:
                retried_seconds = self._clock.monotonic_seconds()
                forbidden, self._forbidden = self._forbidden, {}
                for key, urgency in forbidden.items():
                    self._queue.put(key, urgency)
            if self._clock.monotonic_seconds() - swept_seconds >= SWEEP_SECONDS:
                swept_seconds = self._clock.monotonic_seconds()
                for entry in self._demand:
                    self._queue.put(entry.key, Urgency.MESSAGE)
            await self._clock.sleep(TICK_SECONDS)

    async def _work(self) -> None:
        failures = looks = 0
        while (taken := await self._queue.take()) is not None:
            key, urgency = taken
            error: ApiError | None = None
            try:
                is_written = await self._bring_up_to_date(key)
                looks = 0 if is_written else looks + 1
                failures = 0 if is_written else failures
            except ApiError as caught:
                error = caught
                self._failed(key, urgency, error)
            except Exception:
                # A fault of ours: one object must not take the others down with it.
                log.exception("operator.status_write_failed", request="/".join(key))
            finally:
                self._queue.done(key)
            if error is not None and error.is_transient:
                self._queue.put(key, urgency)
                delay_seconds = retry_delay_seconds(
                    failures, error, self._rng, first_seconds=BACKOFF_FIRST_SECONDS, seconds_max=BACKOFF_SECONDS_MAX
                )
                failures += 1
                await self._clock.sleep(delay_seconds)
            elif looks >= _LOOKS_AT_ONCE_MAX:
                looks = 0
                await self._clock.sleep(0)

    def _failed(self, key: ObjectKey, urgency: int, error: ApiError) -> None:
        if error.is_not_found:
            self._written.pop(key, None)
            return
        if error.is_conflict:
            # The view was behind; the change that it misses brings the key back as well.
            self._conflicting[key] = urgency
            return
        self.failures_total += 1
        if error.is_forbidden:
            self._forbidden[key] = urgency
        now_seconds = self._clock.monotonic_seconds()
        if self._logged_seconds is None or now_seconds - self._logged_seconds >= _LOG_SECONDS:
            self._logged_seconds = now_seconds
            report = log.warning if error.is_transient else log.error
            report(
                "operator.status_not_written",
                request="/".join(key),
                error=str(error),
                failures_total=self.failures_total,
                waiting=self.backlog,
                will_retry=error.is_transient or error.is_forbidden,
            )

    # ---- one request --------------------------------------------------------------------------------------------

    async def _bring_up_to_date(self, key: ObjectKey) -> bool:
        """Write what differs of one status; say whether there was anything. Raises ApiError."""
        entry = self._demand.get(key)
        stored = self._newest(key)
        if entry is None or stored is None or entry.uid != stored.metadata.uid:
            self._written.pop(key, None)
            self._pod_events.pop(key, None)
            return False
        if entry.generation != stored.metadata.generation:
            # The entry follows the view; what was written last is of another generation.
            return False
        change = status_change(stored, self._verdicts.desired(entry), rfc3339(self._clock.unix_nanos()))
        if change is None:
            self._report_to_pod(entry, stored)
            return False
        try:
            written = await self._api.patch(CAPACITY_REQUESTS.status, key[1], change.body, namespace=key[0])
        except ApiError as error:
            outcome = "conflict" if error.is_conflict else "error"
            for each in _parts(change):
                self._listener.write_ended(each, outcome)
            raise
        self._written[key] = written
        for each in _parts(change):
            self._listener.write_ended(each, "success")
        if change.phase:
            seconds = self._clock.monotonic_seconds() - entry.seen_seconds
            self._listener.phase_written(change.phase, seconds)
        self._report(entry, stored, change)
        self._report_to_pod(entry, written)
        return True

    def _newest(self, key: ObjectKey) -> CapacityRequestObject | None:
        """Return the stored object: the view's, or what was written last as long as the view does not show it."""
        stored, written = self._requests.get(key[1], key[0]), self._written.get(key)
        if written is None:
            return stored
        if stored is not None and _is_older(stored, written):
            return written
        del self._written[key]
        return stored

    # ---- Events -------------------------------------------------------------------------------------------------

    def _report(self, entry: RequestEntry, stored: CapacityRequestObject, change: StatusChange) -> None:
        """Record an Event for what turned bad, at most one per request in `EVENT_SECONDS`, and one RequestTooLarge."""
        bad = next((each.value for each in change.conditions if _turned_bad(each)), None)
        if bad is None or not self._may_report(entry.uid, bad.reason):
            return
        self._events.record(reference_to(CAPACITY_REQUESTS, stored), EventSeverity.WARNING, bad.reason, bad.message)
        if entry.pod_uid and bad.reason in (wording.REQUEST_TOO_LARGE, wording.NOT_FOR_WANT_OF_CAPACITY):
            self._pod_events[entry.key] = bad

    def _report_to_pod(self, entry: RequestEntry, stored: CapacityRequestObject) -> None:
        """Record the Event that the pod is to get, as soon as it is unschedulable and if that still holds.

        A shard may judge a request before the scheduler has looked at its pod.
        """
        bad = self._pod_events.get(entry.key)
        if bad is None or self._pods is None:
            return
        if all(each.reason != bad.reason for each in stored.status.conditions or ()):
            del self._pod_events[entry.key]
            return
        pod = self._pods.get(entry.pod)
        if pod is None:
            return
        del self._pod_events[entry.key]
        about = ObjectReference(
            api_version=PODS.api_version, kind=PODS.kind, name=pod.name, namespace=pod.namespace, uid=pod.uid
        )
        self._events.record(about, EventSeverity.WARNING, bad.reason, bad.message)

    def _may_report(self, uid: str, reason: str) -> bool:
        now_seconds = self._clock.monotonic_seconds()
        while self._reported_seconds:
            oldest, recorded_seconds = next(iter(self._reported_seconds.items()))
            if now_seconds - recorded_seconds < EVENT_SECONDS:
                break
            del self._reported_seconds[oldest]
        # That a pod can never run must not be hidden by an Event about what its row lacked before.
        key = uid, reason == wording.REQUEST_TOO_LARGE
        if key in self._reported_seconds:
            return False
        self._reported_seconds[key] = now_seconds
        return True


def _parts(change: StatusChange) -> list[str]:
    return [*(["Phase"] if change.phase else []), *(each.type for each in change.conditions)]


def _turned_bad(change: ConditionChange) -> bool:
    """Return whether a condition became one that deserves an Event."""
    value = change.value
    if change.type == wording.ACCEPTED:
        return value.status == wording.FALSE and change.former_status != wording.FALSE
    if change.type == wording.SHORTFALL:
        is_new = change.former_status != wording.TRUE
        is_now_too_large = value.reason == wording.REQUEST_TOO_LARGE != change.former_reason
        return value.status == wording.TRUE and (is_new or is_now_too_large)
    return value.reason == wording.NOT_FOR_WANT_OF_CAPACITY and change.former_reason != value.reason


def _is_older(stored: CapacityRequestObject, written: CapacityRequestObject) -> bool:
    """Return whether the view's object is the one before a write. Versions of API servers are ascending numbers."""
    if stored.metadata.uid != written.metadata.uid:
        return False
    try:
        return int(stored.metadata.resource_version) < int(written.metadata.resource_version)
    except ValueError:
        return False
