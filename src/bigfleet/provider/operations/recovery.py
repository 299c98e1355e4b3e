"""Recovers FAILED machines: after a hold it asks the backend what is there (docs/spec/provider.md §14).

Only what is proven is acted on: a host that may run pods stays as it is. A machine with a backend call still in flight
must never be touched.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from bigfleet.model.clock import Clock
from bigfleet.model.ids import IdSource
from bigfleet.model.states import MachineState
from bigfleet.provider.backend import Found, FoundKind, Op, Transient
from bigfleet.provider.metrics import ProviderMetrics
from bigfleet.provider.operations.admission import Admissions
from bigfleet.provider.operations.invoke import BackendAdapter, within
from bigfleet.provider.operations.operation_runner import OperationRunner
from bigfleet.provider.records.kinds import Kind
from bigfleet.provider.records.lifecycle import (
    recovered_serving,
    recovered_slot,
    recovered_to_source,
    recovered_with_host,
)
from bigfleet.provider.records.record import ErrorCode, Record
from bigfleet.provider.records.reset import unbound
from bigfleet.provider.records.validate import host_fault
from bigfleet.provider.storage.ledger import Change, Ledger
from bigfleet.provider.storage.machines_by_host import shared_text

_log = structlog.get_logger("bigfleet.provider.operations.recovery")

HOLD_SECONDS_MAX = 3600.0
#: Errors after which the intervals grow, from a minute on.
TRIES_EAGER = 3
ADOPT_SECONDS_MAX = 60.0
#: After a transient error at least so long, also when a stockout asked for no hold.
_TRANSIENT_SECONDS_MIN = 60.0
#: How often the list of failed machines is looked through for new ones.
_SWEEP_SECONDS = 1.0


@dataclass(slots=True)
class _Patient:
    """A failed machine under its hold."""

    state_revision: int
    #: Looks that failed, those that may succeed later by themselves aside.
    tries: int = 0
    #: Why the last look failed.
    error: str = ""


class Recovery:
    """Looks after FAILED machines one at a time."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        adapter: BackendAdapter,
        work: OperationRunner,
        admissions: Admissions,
        clock: Clock,
        ids: IdSource,
        metrics: ProviderMetrics,
        hold_seconds: float,
        is_offered: Callable[[Record], bool],
    ) -> None:
        """`is_offered` says whether a machine without a host has a slot to be; without one it goes."""
        self._ledger = ledger
        self._adapter = adapter
        self._work = work
        self._admissions = admissions
        self._clock = clock
        self._ids = ids
        self._metrics = metrics
        self._hold_seconds = hold_seconds
        self._is_offered = is_offered
        self._patients: dict[str, _Patient] = {}
        #: (due on the monotonic clock, id); entries of machines that left FAILED are skipped when they come up.
        self._due: list[tuple[float, str]] = []

    async def run(self) -> None:
        """Work until cancelled; with a hold of 0 there is no automatic way out."""
        if self._hold_seconds <= 0:
            return
        while True:
            self._admit()
            now_seconds = self._clock.monotonic_seconds()
            while self._due and self._due[0][0] <= now_seconds:
                _, machine_id = heapq.heappop(self._due)
                await self._treat(machine_id)
            await self._clock.sleep(_SWEEP_SECONDS)

    def _admit(self) -> None:
        now_seconds = self._clock.monotonic_seconds()
        failed_ids = set()
        for record in self._ledger.view.of_state(MachineState.FAILED):
            failed_ids.add(record.id)
            patient = self._patients.get(record.id)
            if patient is None or patient.state_revision != record.state_revision:
                self._patients[record.id] = _Patient(record.state_revision)
                heapq.heappush(self._due, (now_seconds + self._hold(record), record.id))
        for machine_id in self._patients.keys() - failed_ids:
            del self._patients[machine_id]

    def _hold(self, record: Record) -> float:
        failure = record.failure
        if failure is not None and failure.hold_seconds is not None:
            return max(0.0, failure.hold_seconds)
        doublings = min(max(record.failures_in_row, 1) - 1, 10)
        return min(HOLD_SECONDS_MAX, self._hold_seconds * float(1 << doublings))

    async def _treat(self, machine_id: str) -> None:
        patient = self._patients.get(machine_id)
        record = self._ledger.view.get(machine_id)
        if patient is None or record is None or record.state is not MachineState.FAILED:
            return
        if record.state_revision != patient.state_revision:
            return
        was_never_called = record.failure is not None and record.failure.code is ErrorCode.QUEUE_TIMEOUT
        if was_never_called:
            await self._leave(record, None)
            return
        if self._adapter.adopts is None:
            return
        if self._work.is_busy(machine_id):
            heapq.heappush(self._due, (self._clock.monotonic_seconds() + _SWEEP_SECONDS, machine_id))
            return
        try:
            found = await self._look(record)
            if found is not None:
                await self._leave(record, found)
        except Exception as error:  # the author's code failed; the hold gives it time
            self._postpone(patient, record, error)

    def _postpone(self, patient: _Patient, record: Record, error: Exception) -> None:
        """Look again after the hold, and after three errors that are not transient at growing intervals.

        An outage must not leave machines to a person only because a program reports it with another exit code.
        """
        hold_seconds = self._hold(record)
        if isinstance(error, Transient):
            # The host or the substrate cannot be asked now, which says nothing about the machine.
            hold_seconds = min(HOLD_SECONDS_MAX, max(hold_seconds, _TRANSIENT_SECONDS_MIN))
        else:
            patient.tries += 1
            if patient.tries >= TRIES_EAGER:
                doublings = min(patient.tries - TRIES_EAGER + 1, 10)
                hold_seconds = min(HOLD_SECONDS_MAX, max(hold_seconds, _TRANSIENT_SECONDS_MIN) * (1 << doublings))
            if patient.tries == TRIES_EAGER:
                self._metrics.recoveries.labels("auto", "retried").inc()
        patient.error = f"{type(error).__name__}: {error}"
        _log.warning(
            "recovery.failed",
            machine=record.id,
            attempt=patient.tries,
            again_in_seconds=hold_seconds,
            error=patient.error,
        )
        heapq.heappush(self._due, (self._clock.monotonic_seconds() + hold_seconds, record.id))

    def failing(self, machine_id: str) -> str:
        """Return how often a failed machine could not be looked at and why, "" for one that could or was not yet."""
        patient = self._patients.get(machine_id)
        if patient is None or not patient.error:
            return ""
        tries = f"failed {patient.tries} times" if patient.tries != 1 else "failed once"
        return f"{tries if patient.tries else 'waits for the substrate'}; {patient.error}"

    async def _look(self, record: Record) -> Found | None:
        """Ask what is there, and give a host back that may not be reused; None leaves the machine FAILED."""
        adapter, machine = self._adapter, record.machine
        assert adapter.adopts is not None, "only backends that adopt are asked"
        call = adapter.call(adapter.adopts.adopt, machine, on_late=lambda _found: None)
        found = await within(call, ADOPT_SECONDS_MAX, self._work.watch_abandoned(record.id))
        if not isinstance(found, Found):
            raise TypeError(f"adopt returned {type(found).__name__}, not a Found")
        fault = None if found.host is None else host_fault(record, found.host)
        if fault is not None:
            raise ValueError(f"adopt found a bad host: {fault.text}")
        others = () if found.host is None else self._ledger.view.hosts.others(record.id, found.host.ref)
        if found.host is not None and others:
            raise ValueError(f"adopt found a bad host: {shared_text(found.host.ref, others)}")
        is_bound = bool(machine.cluster)
        if found.kind is FoundKind.SERVING and not is_bound:
            raise ValueError("adopt found an unbound machine serving a cluster")
        if found.kind is not FoundKind.DIRTY:
            return found
        if is_bound or adapter.deletes is None or record.slot.fixed:
            self._metrics.recoveries.labels("auto", "kept_failed").inc()
            advice = "check the host and the cluster, then run bigfleet provider admin recover"
            _log.warning("recovery.machine_left_failed", machine=record.id, found=found.kind.value, advice=advice)
            return None
        return await self._give_back(record, found)

    async def _give_back(self, record: Record, found: Found) -> Found:
        adapter = self._adapter
        assert adapter.deletes is not None, "only a backend that deletes is asked to"
        assert found.host is not None, "only a host is given back"
        seconds = self._work.base_seconds(Kind.DELETE)
        op = Op(
            id=f"op-{self._ids.new_id()}",
            kind=Kind.DELETE,
            attempt=1,
            deadline_monotonic_seconds=self._clock.monotonic_seconds() + seconds,
        )
        machine = replace(
            record.machine, host=record.machine.host._replace(provider=adapter.provider, ref=found.host.ref)
        )
        call = adapter.call(adapter.deletes.delete, machine, op, on_late=lambda _result: None)
        await within(call, seconds, self._work.watch_abandoned(record.id))
        return Found(kind=FoundKind.NO_HOST)

    async def _leave(self, record: Record, found: Found | None) -> None:
        """Commit the way out, if the machine is still in the same failure."""
        async with self._ledger.turn(record.id) as current:
            if current is None or current.state_revision != record.state_revision:
                return
            recovered = self._recovered(current, found)
            is_slot = found is not None and recovered.state is MachineState.SPECULATIVE
            is_gone = is_slot and not self._is_offered(current)
            reached = MachineState.UNSPECIFIED if is_gone else recovered.state
            left = Change(removed_id=record.id) if is_gone else Change(record=recovered)
            change = self._admissions.settled(left, current, reached)
            await self._ledger.commit_until_done(lambda: change)
            self._admissions.committed(change)
        result = "source" if found is None else found.kind.value
        self._metrics.recoveries.labels("auto", result).inc()
        state_to = None if is_gone else recovered.state.name
        _log.info("recovery.finished", machine=record.id, found=result, state_to=state_to)

    def _recovered(self, record: Record, found: Found | None) -> Record:
        now, provider = self._clock.unix_nanos(), self._adapter.provider
        if found is None:
            return recovered_to_source(record, now)
        if found.kind is FoundKind.NO_HOST:
            return recovered_slot(record, now)
        assert found.host is not None, "only NO_HOST has no host"
        if found.kind is FoundKind.SERVING:
            return recovered_serving(record, found.host, provider, now)
        return unbound(record, recovered_with_host(record, found.host, provider, now), self._adapter.reset)
