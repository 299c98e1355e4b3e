"""Decides the desired status of each CapacityRequest (docs/spec/operator.md §5).

A state machine without I/O. Its inputs are acks, need statuses, the session and waiting pods; it returns the desired
status of a request on demand. Requests of one row share its verdict, and a need status touches only the rows whose
verdict has changed. The figures in a message change at most once a minute. It must never call a generation acknowledged
that no roll-up in force has contained.
"""

from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Final, NamedTuple, Protocol

from bigfleet.model import frames
from bigfleet.model.clock import Clock
from bigfleet.operator.conditions import wording
from bigfleet.operator.conditions.acknowledgement import FirstReports, SentRollUps
from bigfleet.operator.conditions.wording import ConditionValue, RowVerdict
from bigfleet.operator.demand.demand import DemandView
from bigfleet.operator.demand.entries import ObjectKey, PodKey, RequestEntry, RowId
from bigfleet.operator.demand.scheduling_messages import reasons_of
from bigfleet.operator.demand.too_large import exceeds
from bigfleet.operator.demand.waiting import PodWait, WaitingPod

#: Without a session for longer, requests show that they are not reported.
SILENCE_SECONDS: Final = 60.0
#: Least time between two messages that differ in their figures alone.
MESSAGE_SECONDS: Final = 60.0
#: Requests that are gone are forgotten when there are twice as many as those that are there, and so many more.
_STALE_SLACK: Final = 1_000


class Urgency(IntEnum):
    """How soon a status is to be written; smaller comes first."""

    PHASE = 0
    CONDITION = 1
    MESSAGE = 2


class DesiredStatus(NamedTuple):
    """The desired status of one request; None leaves a condition as it is."""

    generation: int
    is_acknowledged: bool
    accepted: ConditionValue | None
    satisfied: ConditionValue | None
    shortfall: ConditionValue | None
    #: Satisfied and Shortfall say something for a while only: not worth a write of its own.
    is_passing: bool


class UnschedulablePodSource(Protocol):
    """Provides what is known of an unschedulable pod."""

    def get(self, pod: PodKey) -> WaitingPod | None:
        """Return an unschedulable pod by its namespace and uid; None for any other pod."""
        ...


class _Published(NamedTuple):
    verdict: RowVerdict
    at_seconds: float


class RequestVerdicts:
    """The state behind the statuses. A DemandListener and a WaitingListener; `changed` is called for each change."""

    def __init__(
        self,
        *,
        demand: DemandView,
        clock: Clock,
        changed: Callable[[ObjectKey, Urgency], None],
        pods: UnschedulablePodSource | None = None,
    ) -> None:
        self._demand = demand
        self._clock = clock
        self._pods = pods
        self._changed = changed
        self._sent = SentRollUps()
        self._unacknowledged = FirstReports()
        self._unjudged = FirstReports()
        #: Why the newest roll-up is not in force, and since when that is said; None while it is.
        self._blocked: tuple[ConditionValue, float] | None = None
        #: Verdicts of the rows that the last need status listed.
        self._verdicts: dict[RowId, _Published] = {}
        #: The verdict of all other rows.
        self._others = wording.NOT_JUDGED_YET
        self._unmet_since_seconds: dict[RowId, float] = {}
        self._judged_stamp_nanos = 0
        #: The session's shard reports verdicts; None before the first session.
        self._reports_verdicts: bool | None = None
        #: Since when there is no session; None while one stands.
        self._lost_seconds: float | None = clock.monotonic_seconds()
        self._is_silent = False
        self.acknowledged_count = 0

    @property
    def unacknowledged_count(self) -> int:
        """How many reported generations are remembered until they are acknowledged; some may be gone."""
        return len(self._unacknowledged)

    # ---- what is heard of requests and pods ---------------------------------------------------------------------

    def request_changed(self, entry: RequestEntry, former: RequestEntry | None) -> None:
        """Look at a request again; also at one whose status somebody else has changed."""
        if former is not None and former is not entry:
            self.acknowledged_count -= former.is_acknowledged
        is_new_generation = former is not None and former is not entry
        self._changed(entry.key, Urgency.PHASE if is_new_generation else Urgency.CONDITION)

    def request_removed(self, entry: RequestEntry) -> None:
        """Count it no longer."""
        self.acknowledged_count -= entry.is_acknowledged
        self._changed(entry.key, Urgency.MESSAGE)

    def rolled_up(self, stamp_nanos: int, entries: list[RequestEntry]) -> None:
        """Remember which entries a roll-up is the first to contain."""
        self._sent.add(stamp_nanos)
        for reports in (self._unacknowledged, self._unjudged):
            reports.add(stamp_nanos, entries)
            if len(reports) > 2 * len(self._demand) + _STALE_SLACK:
                reports.retain(self._is_current)

    def waiting_changed(self, key: ObjectKey) -> None:
        """Look at the request of an unschedulable pod again."""
        self._changed(key, Urgency.CONDITION)

    # ---- what is heard of the shard -----------------------------------------------------------------------------

    def session_opened(self, shard_capabilities: frozenset[str]) -> None:
        """Take the session as standing."""
        self._lost_seconds = None
        self._sent.session_opened()
        reports_verdicts = frames.CAPABILITY_NEED_STATUS in shard_capabilities
        if reports_verdicts is not self._reports_verdicts:
            self._reports_verdicts = reports_verdicts
            self._look_at(self._demand, Urgency.CONDITION)
        if self._is_silent:
            self._is_silent = False
            self._look_at(self._demand, Urgency.CONDITION)

    def started(self) -> None:
        """Count the time without a session from now on: a follower has none, and says nothing."""
        if self._lost_seconds is not None:
            self._lost_seconds = self._clock.monotonic_seconds()

    def session_closed(self) -> None:
        """Take the session as lost, unless it was already."""
        if self._lost_seconds is None:
            self._lost_seconds = self._clock.monotonic_seconds()

    def tick(self) -> None:
        """Say that nothing is reported once the session has been lost for `SILENCE_SECONDS`; call it every second."""
        if self._is_silent or self._lost_seconds is None:
            return
        if self._clock.monotonic_seconds() - self._lost_seconds > SILENCE_SECONDS:
            self._is_silent = True
            self._look_at(self._demand, Urgency.CONDITION)

    def acknowledged(self, ack: frames.Acknowledgement) -> None:
        """Take an ack of a roll-up: in force, held, or rejected."""
        now_seconds = self._clock.monotonic_seconds()
        if ack.echo == frames.ECHO_ROLLUP_REJECTED:
            self._block(wording.rejected(ack.error or "no reason given"), now_seconds)
        elif ack.held:
            self._block(wording.HELD, now_seconds)
        elif ack.echo == frames.ECHO_ROLLUP:
            self._blocked = None
            for entry in self._unacknowledged.take(self._sent.acknowledged(ack.rollup_timestamp_unix_nanos)):
                if self._is_current(entry):
                    # A gang whose pods have moved is reported once more under the same entries.
                    self.acknowledged_count += not entry.is_acknowledged
                    entry.is_acknowledged = True
                    self._changed(entry.key, Urgency.PHASE)

    def need_status(self, update: frames.NeedStatusUpdate) -> None:
        """Take the shard's verdict on the rows of one roll-up; a later one takes its place."""
        now_seconds = self._clock.monotonic_seconds()
        listed: dict[RowId, RowVerdict] = dict.fromkeys(update.coming, wording.COMING)
        since_seconds: dict[RowId, float] = {}
        for status in update.rows:
            row_id = (status.fingerprint, status.group)
            since_seconds[row_id] = self._unmet_since_seconds.get(row_id, now_seconds)
            row = self._demand.row(row_id)
            listed[row_id] = wording.unmet(
                status,
                requests=len(row.members) if row is not None else 0,
                age_seconds=now_seconds - since_seconds[row_id],
            )
        self._unmet_since_seconds = since_seconds
        others = wording.TRUNCATED if update.truncated else wording.MET
        former, former_others, self._others = self._verdicts, self._others, others
        self._verdicts = {row_id: self._publish(former.get(row_id), new) for row_id, new in listed.items()}
        if others is not former_others:
            self._look_at(self._demand, Urgency.CONDITION)
        else:
            for row_id in dict.fromkeys((*former, *self._verdicts)):
                self._compare(row_id, former.get(row_id), self._verdicts.get(row_id))
        if update.rollup_timestamp_unix_nanos > self._judged_stamp_nanos:
            self._judged_stamp_nanos = update.rollup_timestamp_unix_nanos
            self._look_at(self._unjudged.take(self._judged_stamp_nanos), Urgency.CONDITION)

    def _publish(self, former: _Published | None, new: RowVerdict) -> _Published:
        """Return what is said of a row from now on: the former message for a while, if only that differs."""
        now_seconds = self._clock.monotonic_seconds()
        if former is None or former.verdict.kind != new.kind:
            return _Published(new, now_seconds)
        if former.verdict == new or now_seconds - former.at_seconds < MESSAGE_SECONDS:
            return former
        return _Published(new, now_seconds)

    def _compare(self, row_id: RowId, former: _Published | None, new: _Published | None) -> None:
        """Look at the requests of a row if what is said of it has changed."""
        before = former.verdict if former is not None else self._others
        after = new.verdict if new is not None else self._others
        row = self._demand.row(row_id)
        if row is None or before is after:
            return
        urgency = Urgency.MESSAGE if before.kind == after.kind else Urgency.CONDITION
        for key in row.members:
            self._changed(key, urgency)

    def _block(self, value: ConditionValue, now_seconds: float) -> None:
        if self._blocked is not None:
            former, since_seconds = self._blocked
            is_same_kind = former[:2] == value[:2]
            if former == value or (is_same_kind and now_seconds - since_seconds < MESSAGE_SECONDS):
                return
        self._blocked = (value, now_seconds)
        self._look_at(self._unacknowledged, Urgency.CONDITION)

    def _look_at(self, entries: Iterable[RequestEntry], urgency: Urgency) -> None:
        for entry in entries:
            if self._is_current(entry) or entry.fault is not None:
                self._changed(entry.key, urgency)

    def _is_current(self, entry: RequestEntry) -> bool:
        """Return whether an entry is the one of its object's present generation, and counted."""
        return entry.row is not None and self._demand.get(entry.key) is entry

    # ---- what comes out -----------------------------------------------------------------------------------------

    def desired(self, entry: RequestEntry) -> DesiredStatus:
        """Return the desired status of a request now."""
        verdict, is_passing = self._verdict(entry)
        return DesiredStatus(
            generation=entry.generation,
            is_acknowledged=entry.is_acknowledged,
            accepted=self._accepted(entry),
            satisfied=verdict.satisfied if verdict is not None else None,
            shortfall=verdict.shortfall if verdict is not None else None,
            is_passing=is_passing,
        )

    def _accepted(self, entry: RequestEntry) -> ConditionValue | None:
        if entry.fault is not None:
            return wording.invalid(entry.fault.reason.value, entry.fault.message)
        if self._is_silent:
            return wording.NOT_REPORTED
        if entry.is_acknowledged:
            return wording.IN_ROLLUP
        if self._blocked is not None and entry.first_stamp_nanos:
            return self._blocked[0]
        return None

    def _verdict(self, entry: RequestEntry) -> tuple[RowVerdict | None, bool]:
        """Return the verdict of the request's need, and whether it will change by itself."""
        if entry.fault is not None or entry.row is None:
            return wording.NOT_COUNTED, False
        if self._reports_verdicts is False:
            return wording.NO_VERDICTS, False
        pod = self._pods.get(entry.pod) if self._pods is not None and entry.pod_uid else None
        if pod is not None and pod.wait is PodWait.NOT_FOR_WANT_OF_CAPACITY:
            # The request is not part of the demand, so no verdict of its row is about it.
            return wording.not_for_want_of_capacity(reasons_of(pod.message)), False
        if not 0 < entry.first_stamp_nanos <= self._judged_stamp_nanos:
            return wording.NOT_JUDGED_YET, True
        published = self._verdicts.get(entry.row.id)
        verdict = published.verdict if published is not None else self._others
        if verdict.largest and not self._is_too_large(entry, verdict):
            verdict = wording.MET
        if verdict.satisfied.reason == "Unmet":
            return verdict, False
        if self._pods is None or not entry.pod_uid:
            return verdict, False
        if pod is None:
            # It runs, or the scheduler has not tried it yet. Without this all requests of a row are written twice for
            # each machine that comes for one of them.
            return wording.MET if verdict.kind == wording.COMING.kind else verdict, False
        if pod.wait is PodWait.ASKED_FOR:
            return wording.waiting(reasons_of(pod.message)), False
        return verdict, False

    def _is_too_large(self, entry: RequestEntry, verdict: RowVerdict) -> bool:
        return exceeds(self._demand.vector(entry.key) or {}, verdict.largest)
