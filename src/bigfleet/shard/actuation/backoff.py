"""Backs off from machines that their provider keeps rejecting, and from rows and operators that do not answer.

docs/spec/shard.md §9.2 and §9.6. Everything is bounded: a machine's back-off doubles up to a day, a row's up to ten
minutes, and both expire. A row whose fingerprint no machine can store is left out until it leaves the demand. This
module does not remove a machine or a row.
"""

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

import structlog

from bigfleet.engine.decision import Action
from bigfleet.model.clock import Clock
from bigfleet.model.metadata import fingerprint_fault
from bigfleet.model.need import RowKey
from bigfleet.model.states import MachineState
from bigfleet.shard.outcomes import ActionOutcome, ActionRecord
from bigfleet.shard.safety_limits import row_served_by

_log = structlog.get_logger("bigfleet.shard.actuation.backoff")

REFUSALS_MAX = 3
HOLD_FIRST_SECONDS = 1_800.0
HOLD_MAX_SECONDS = 86_400.0
ROW_BACKOFF_FIRST_SECONDS = 30.0
ROW_BACKOFF_MAX_SECONDS = 600.0
UNANSWERED_MAX = 3


@dataclass(slots=True)
class _Hold:
    until_seconds: float
    #: What the provider said of the machine when the hold began.
    provider_state: MachineState | None


class MachineBackoff:
    """Refusals in a row per machine, and the machines that this shard set to Failed because of them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._refusals: dict[str, int] = {}
        self._holds: dict[str, _Hold] = {}
        self._hold_seconds: dict[str, float] = {}

    def __len__(self) -> int:
        """Number of held machines."""
        return len(self._holds)

    def accepted(self, machine_id: str) -> None:
        """A call was accepted: the count starts again."""
        self._refusals.pop(machine_id, None)
        self._hold_seconds.pop(machine_id, None)

    def refused(self, machine_id: str) -> bool:
        """Count a refusal; return True for the one that makes the machine held."""
        self._refusals[machine_id] = self._refusals.get(machine_id, 0) + 1
        return self._refusals[machine_id] >= REFUSALS_MAX

    def hold(self, machine_id: str, provider_state: MachineState | None, *, until_restart: bool) -> None:
        """Keep a machine Failed: 30 min, doubled each time to 24 h, or for the life of the process."""
        seconds = self._hold_seconds.get(machine_id, HOLD_FIRST_SECONDS)
        self._hold_seconds[machine_id] = min(2 * seconds, HOLD_MAX_SECONDS)
        until = float("inf") if until_restart else self._clock.monotonic_seconds() + seconds
        self._holds[machine_id] = _Hold(until, provider_state)
        self._refusals.pop(machine_id, None)

    def is_held(self, machine_id: str) -> bool:
        """Return whether the machine is held."""
        return machine_id in self._holds

    def held(self) -> Set[str]:
        """Return the held machines; a live view."""
        return self._holds.keys()

    def expired(self) -> list[str]:
        """Return the held machines whose time is up, ids ascending; `keeps` lets go of each when it is read again."""
        now_seconds = self._clock.monotonic_seconds()
        return sorted(machine_id for machine_id, hold in self._holds.items() if now_seconds >= hold.until_seconds)

    def holds(self, machine_id: str, provider_state: MachineState) -> bool:
        """Return whether a provider's record must still be left aside; a hold that is over is forgotten.

        It ends when its time is up, or when the provider reports a state other than the one at its start.
        """
        hold = self._holds.get(machine_id)
        if hold is None:
            return False
        if self._clock.monotonic_seconds() < hold.until_seconds and provider_state == hold.provider_state:
            return True
        del self._holds[machine_id]
        return False

    def forget(self, machine_id: str) -> None:
        """The machine is gone."""
        for memory in (self._refusals, self._holds, self._hold_seconds):
            memory.pop(machine_id, None)


@dataclass(slots=True)
class _RowBackoff:
    #: Infinity for a row that no machine can store.
    until_seconds: float
    next_seconds: float
    #: The operator's last word, or what is wrong with the row itself.
    text: str


@dataclass(slots=True)
class _SessionBackoff:
    until_seconds: float
    next_seconds: float
    #: Bootstraps that were tried since the last one that was recorded.
    unrecorded: int = 0


class DemandBackoff:
    """Rows whose operator rejects them, operators that answer nothing, and clusters that have none."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rows: dict[RowKey, _RowBackoff] = {}
        self._unanswered: dict[str, int] = {}
        self._probing: set[str] = set()
        #: Clusters without a session for which a machine was to be bootstrapped.
        self._sessionless: dict[str, _SessionBackoff] = {}

    def refuse(self, cluster: str, fingerprint: str, group: str, text: str = "") -> None:
        """Back the row off: 30 s, doubled to 10 min; `text` is what the operator said.

        Answers that come while the row is backed off belong to requests of the same round and double nothing.
        """
        key = (cluster, fingerprint, group)
        now_seconds = self._clock.monotonic_seconds()
        known = self._rows.get(key)
        if known is not None and now_seconds < known.until_seconds:
            known.text = text
            return
        seconds = known.next_seconds if known is not None else ROW_BACKOFF_FIRST_SECONDS
        self._rows[key] = _RowBackoff(now_seconds + seconds, min(2 * seconds, ROW_BACKOFF_MAX_SECONDS), text)

    def refuse_oversized(self, record: ActionRecord) -> bool:
        """Refuse the row of a Bootstrap or Provision for good if no machine can store it; return whether that is so.

        The provider would reject the Configure of each machine that the row is given, and the machines would be held.
        """
        key = row_served_by(record.action)
        fault = fingerprint_fault(key[1]) if key is not None else ""
        if key is None or not fault:
            return False
        if key not in self._rows:
            _log.warning("action.row_refused", cluster=key[0], error=fault)
        record.message = fault
        self._rows[key] = _RowBackoff(math.inf, ROW_BACKOFF_MAX_SECONDS, fault)
        return True

    def is_backed_off(self, action: Action) -> bool:
        """Return whether a Bootstrap or Provision must be left out for now."""
        key = row_served_by(action)
        known = self._rows.get(key) if key is not None else None
        return known is not None and self._clock.monotonic_seconds() < known.until_seconds

    def succeeded(self, cluster: str, fingerprint: str, group: str) -> None:
        """The row was bootstrapped: its back-off is over."""
        self._rows.pop((cluster, fingerprint, group), None)

    def session_opened(self, cluster: str) -> None:
        """A new session of the cluster: everything held against it is forgotten, but for rows that are too long."""
        for key in [key for key, row in self._rows.items() if key[0] == cluster and math.isfinite(row.until_seconds)]:
            del self._rows[key]
        self._unanswered.pop(cluster, None)
        self._probing.discard(cluster)
        awaited = self._sessionless.pop(cluster, None)
        if awaited is not None:
            _log.info("action.backoff_ended", cluster=cluster, unrecorded=awaited.unrecorded)

    def forget(self, cluster: str) -> None:
        """Forget a cluster that is gone; its rows left with its demand."""
        self._unanswered.pop(cluster, None)
        self._probing.discard(cluster)
        self._sessionless.pop(cluster, None)

    def keep_only(self, is_wanted: Callable[[RowKey], bool]) -> None:
        """Forget rows that left the demand; `is_wanted` is asked about the rows that are refused alone."""
        for key in [key for key in self._rows if not is_wanted(key)]:
            del self._rows[key]

    def backed_off(self) -> frozenset[RowKey]:
        """Return the rows of which a Bootstrap or Provision must be left out for now."""
        now_seconds = self._clock.monotonic_seconds()
        return frozenset(key for key, row in self._rows.items() if now_seconds < row.until_seconds)

    def refused(self) -> frozenset[RowKey]:
        """Return the rows that are too long, or about which the operator's last word was an error."""
        return frozenset(self._rows)

    def texts(self) -> Mapping[RowKey, str]:
        """Return what is wrong with each row that is refused."""
        return {key: row.text for key, row in self._rows.items()}

    # ---- clusters without a session ------------------------------------------------------------------------------

    def without_session(self) -> frozenset[str]:
        """Return the clusters of which a Bootstrap must be left out for now, because they have no session."""
        now_seconds = self._clock.monotonic_seconds()
        gone = [
            cluster
            for cluster, awaited in self._sessionless.items()
            if now_seconds >= awaited.until_seconds + 2 * ROW_BACKOFF_MAX_SECONDS
        ]
        for cluster in gone:
            del self._sessionless[cluster]
        return frozenset(
            cluster for cluster, awaited in self._sessionless.items() if now_seconds < awaited.until_seconds
        )

    def no_session(self, record: ActionRecord) -> ActionOutcome:
        """Back off the cluster of a Bootstrap that found no session: 30 s, doubled to 10 min, until one opens.

        An attempt within the back-off has no audit record: the next record counts it.
        """
        cluster = record.action.cluster
        now_seconds = self._clock.monotonic_seconds()
        known = self._sessionless.get(cluster)
        if known is not None and now_seconds < known.until_seconds:
            known.unrecorded += 1
            record.is_counted_only = True
            return ActionOutcome.NO_SESSION
        seconds, unrecorded = ROW_BACKOFF_FIRST_SECONDS, 0
        if known is not None:
            seconds, unrecorded = known.next_seconds, known.unrecorded
        self._sessionless[cluster] = _SessionBackoff(now_seconds + seconds, min(2 * seconds, ROW_BACKOFF_MAX_SECONDS))
        record.message = f"no operator session; attempts since the last record: {unrecorded + 1}"
        return ActionOutcome.NO_SESSION

    # ---- the blob breaker: three unanswered requests in a row let one through at a time --------------------------

    def may_ask(self, cluster: str) -> bool:
        """Return whether the cluster's operator may be asked for a blob now."""
        return self._unanswered.get(cluster, 0) < UNANSWERED_MAX or cluster not in self._probing

    def asked(self, cluster: str) -> None:
        """A request goes out; with the breaker open it is the probe."""
        if self._unanswered.get(cluster, 0) >= UNANSWERED_MAX:
            self._probing.add(cluster)

    def unanswered(self, cluster: str) -> None:
        """A request got no answer."""
        self._unanswered[cluster] = self._unanswered.get(cluster, 0) + 1
        self._probing.discard(cluster)

    def answered(self, cluster: str) -> None:
        """A request was answered: the breaker closes."""
        self._unanswered.pop(cluster, None)
        self._probing.discard(cluster)
