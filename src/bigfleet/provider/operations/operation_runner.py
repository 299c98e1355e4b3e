"""Runs accepted operations: waits for a dispatch slot, calls the backend with retries, checks readiness, settles.

docs/spec/provider.md §6, §7, §15. Started by `bigfleet.provider.kit.core` after the commit of an acceptance. An
operation ends in exactly one verdict, in time, with any behaviour of the backend. A result that comes after its verdict
must never change a record.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import structlog
import tenacity

from bigfleet.model.clock import NANOS_PER_SECOND, Clock
from bigfleet.model.ids import Rng
from bigfleet.model.machine import Machine
from bigfleet.provider.backend import ConfigureWaits, Host, LateResult, Op, Ready, Stockout, Transient
from bigfleet.provider.metrics import ProviderMetrics
from bigfleet.provider.operations.admission import Admissions
from bigfleet.provider.operations.dispatch import Breaker, Dispatch
from bigfleet.provider.operations.invoke import BackendAdapter, DeadlinePassed, within
from bigfleet.provider.records.kinds import EDGES, Kind, timeout_seconds
from bigfleet.provider.records.lifecycle import completed, failed
from bigfleet.provider.records.record import ErrorCode, Operation, Record
from bigfleet.provider.records.refusal import StoreDown
from bigfleet.provider.records.reset import drained, host_with_label
from bigfleet.provider.records.validate import host_fault, is_number, is_text
from bigfleet.provider.storage.ledger import Change, Ledger
from bigfleet.provider.storage.machines_by_host import shared_text

_log = structlog.get_logger("bigfleet.provider.operations.operation_runner")

_RETRY_SECONDS_MIN = 1.0
_RETRY_SECONDS_MAX = 30.0
_COMMIT_RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class OperationDone:
    """The operation succeeded; the result is the backend's."""

    result: Host | str | None


@dataclass(frozen=True, slots=True)
class Failed:
    """The operation failed for good."""

    code: ErrorCode
    text: str
    hold_seconds: float | None = None


Verdict = OperationDone | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    machine: Machine
    operation: Operation
    blob: bytes
    #: After a restart without the blob: only the readiness checker is left to ask.
    is_checker_only: bool
    seconds: float


class OperationRunner:
    """The operations in the background."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        adapter: BackendAdapter,
        clock: Clock,
        rng: Rng,
        metrics: ProviderMetrics,
        admissions: Admissions,
        transition_timeout_seconds: float | None,
    ) -> None:
        self._ledger = ledger
        self._adapter = adapter
        self._admissions = admissions
        self._clock = clock
        self._rng = rng
        self._metrics = metrics
        self._timeout_seconds = transition_timeout_seconds
        #: Every kind's way to the backend.
        self.dispatch = {
            kind: Dispatch(adapter.lane(kind), clock, metrics.breaker_state.labels(kind.value).set) for kind in Kind
        }
        #: Places that are given back once no call of the machine runs any more, abandoned ones included.
        self._owed_places: dict[str, list[Kind]] = {}
        #: The flow of each machine in a transitional state.
        self._flows: dict[str, asyncio.Task[None]] = {}
        #: Calls that were left behind and still run, by machine.
        self._abandoned: Counter[str] = Counter()
        self._chores: set[asyncio.Task[None]] = set()
        self._is_stopped = False

    # ---- what the core asks --------------------------------------------------------------------------------------

    def is_busy(self, machine_id: str) -> bool:
        """Return whether a backend call of this machine is in flight, abandoned ones included."""
        return machine_id in self._flows or self._is_running(machine_id)

    def _is_running(self, machine_id: str) -> bool:
        return self._abandoned[machine_id] > 0 or self._adapter.has_stray(machine_id)

    @contextmanager
    def busy(self, machine_id: str) -> Iterator[None]:
        """Count a backend call that belongs to no operation, while the context lasts, as one in flight."""
        self._abandoned[machine_id] += 1
        try:
            yield
        finally:
            self._less_abandoned(machine_id)

    def base_seconds(self, kind: Kind) -> float:
        """Return T of a kind."""
        return self._timeout_seconds or self._adapter.limits(kind).timeout_seconds

    def start(self, record: Record, blob: bytes = b"", *, is_checker_only: bool = False) -> None:
        """Begin to drive the operation of a record that was committed in its transitional state."""
        operation = record.operation
        assert operation is not None, "there is an operation to drive"
        assert record.state is EDGES[operation.kind].transitional, "the record is in flight"
        job = _Job(
            machine=record.machine,
            operation=operation,
            blob=blob,
            is_checker_only=is_checker_only,
            seconds=timeout_seconds(operation.kind, self.base_seconds(operation.kind), operation.grace_seconds),
        )
        self.dispatch[operation.kind].waiting.add(operation.id)
        task = asyncio.create_task(self._flow(job))
        self._flows[record.id] = task
        task.add_done_callback(lambda done: self._ended(job, done))

    def _ended(self, job: _Job, task: asyncio.Task[None]) -> None:
        machine_id, dispatch = job.machine.id, self.dispatch[job.operation.kind]
        if self._flows.get(machine_id) is task:
            del self._flows[machine_id]
        # For a flow that was cancelled before it took its first step, or that was about to probe.
        dispatch.waiting.discard(job.operation.id)
        if task.cancelled():
            dispatch.breaker.ended_without_word()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("operation.flow_failed", machine=machine_id, exc_info=error)

    def cancel(self, machine_id: str) -> None:
        """Stop driving a machine whose turn the caller holds; a result that still comes is late."""
        task = self._flows.pop(machine_id, None)
        if task is not None:
            task.cancel()

    async def stop(self) -> None:
        """Let go of everything; the next start takes it up. A result that still comes is counted and logged."""
        self._is_stopped = True
        tasks = [*self._flows.values(), *self._chores]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- one operation -------------------------------------------------------------------------------------------

    async def _flow(self, job: _Job) -> None:
        kind = job.operation.kind
        if not await self._take_place(job):
            await self._settle(job, _never_called(job))
            return
        deadline_seconds = self._clock.monotonic_seconds() + job.seconds
        op = Op(
            id=job.operation.id,
            kind=kind,
            attempt=job.operation.attempt,
            deadline_monotonic_seconds=deadline_seconds,
        )
        verdict: Verdict = OperationDone(None)
        self._metrics.in_flight.labels(kind.value).inc()
        try:
            if not job.is_checker_only:
                verdict = await self._actuate(job, op)
        finally:
            self._metrics.in_flight.labels(kind.value).dec()
            self._owed_places.setdefault(job.machine.id, []).append(kind)
            self.release_places(job.machine.id)
        if isinstance(verdict, OperationDone) and kind is Kind.CONFIGURE:
            verdict = await self._await_readiness(job, op, verdict)
        await self._settle(job, verdict)

    async def _take_place(self, job: _Job) -> bool:
        kind = job.operation.kind
        dispatch = self.dispatch[kind]
        started_seconds = self._clock.monotonic_seconds()
        self._metrics.queued.labels(kind.value).inc()
        try:
            async with asyncio.timeout(job.seconds):
                await dispatch.enter()
        except TimeoutError:
            return False
        finally:
            dispatch.waiting.discard(job.operation.id)
            self._metrics.queued.labels(kind.value).dec()
        self._metrics.queue_wait_seconds.labels(kind.value).observe(self._clock.monotonic_seconds() - started_seconds)
        return True

    def release_places(self, machine_id: str) -> None:
        """Give back the places of calls that have really ended: an overrun still loads the substrate."""
        if not self._is_running(machine_id):
            for kind in self._owed_places.pop(machine_id, ()):
                self.dispatch[kind].leave()

    def _shared_host(self, owner: Record | Machine, ref: str) -> str:
        """Return the sentence about a host that is another machine's already, "" for one that is not."""
        others = self._ledger.view.hosts.others(owner.id, ref)
        return shared_text(ref, others) if others else ""

    async def _actuate(self, job: _Job, op: Op) -> Verdict:
        kind = job.operation.kind
        # An operation that a restart resumes; no new one is accepted.
        shared = self._shared_host(job.machine, job.machine.host.ref)
        if shared:
            self.dispatch[kind].breaker.ended_without_word()
            return Failed(ErrorCode.BACKEND, f"the backend was not called: {shared}")
        started_seconds = self._clock.monotonic_seconds()
        outcome = "final"
        try:
            result = await within(self._attempts(job, op), job.seconds, lambda task: self._abandon(job, op, task))
            outcome = "ok"
        except DeadlinePassed:
            outcome = "timeout"
            self.dispatch[kind].breaker.ended_without_word()
            return Failed(ErrorCode.TIMEOUT, f"timeout: {kind.value} did not end in {job.seconds:g} s")
        except Stockout as stockout:
            return Failed(ErrorCode.STOCKOUT, str(stockout), _hold_of(stockout))
        except Exception as error:  # whatever an author raises is that operation's failure, never the kit's
            return Failed(ErrorCode.BACKEND, f"{type(error).__name__}: {error}")
        finally:
            self._metrics.backend_calls.labels(kind.value, outcome).inc()
            self._metrics.backend_seconds.labels(kind.value).observe(self._clock.monotonic_seconds() - started_seconds)
        return self._checked(job, result)

    def _checked(self, job: _Job, result: object) -> Verdict:
        if job.operation.kind is Kind.CREATE:
            if not isinstance(result, Host):
                return Failed(ErrorCode.BACKEND, f"create returned {type(result).__name__}, not a Host")
            return OperationDone(result)
        if job.operation.kind is Kind.CONFIGURE and isinstance(result, str) and not is_text(result):
            return Failed(ErrorCode.BACKEND, f"configure returned the node name {result!r:.64}, which is no Unicode")
        return OperationDone(result if isinstance(result, str) else None)

    async def _attempts(self, job: _Job, op: Op) -> Any:
        """Call the backend, again after each transient error; the deadline around it ends that."""
        retrying = tenacity.AsyncRetrying(
            retry=_may_retry,
            wait=self._retry_seconds,
            sleep=self._clock.sleep,
            before_sleep=lambda _state: self._count_retry(op.kind),
            stop=tenacity.stop_never,
            reraise=True,
        )
        dispatch = self.dispatch[op.kind]
        async for attempt in retrying:
            if attempt.retry_state.attempt_number > 1:
                await dispatch.pass_again()
            with attempt:
                return await self._watched_call(job, op, dispatch.breaker)
        raise AssertionError("a retry that never stops ends with a result or an error")

    async def _watched_call(self, job: _Job, op: Op, breaker: Breaker) -> Any:
        """Call the backend once and report its outcome to the circuit breaker."""
        try:
            result = await self._call_backend(job, op)
        except Transient:
            breaker.failed()
            raise
        except asyncio.CancelledError:
            breaker.ended_without_word()
            raise
        except Exception:
            breaker.succeeded()
            raise
        breaker.succeeded()
        return result

    def _count_retry(self, kind: Kind) -> None:
        self._metrics.retries.labels(kind.value).inc()
        self._metrics.backend_calls.labels(kind.value, "transient").inc()

    def _retry_seconds(self, state: tenacity.RetryCallState) -> float:
        """Return the next wait: what the substrate asked for, else 1 s doubled to 30 s, drawn between 0 and that."""
        error = state.outcome.exception() if state.outcome is not None else None
        if isinstance(error, Transient) and error.retry_after_seconds is not None:
            return max(0.0, error.retry_after_seconds)
        doublings = min(state.attempt_number - 1, 10)
        return self._rng.uniform(0.0, min(_RETRY_SECONDS_MAX, _RETRY_SECONDS_MIN * 2**doublings))

    async def _call_backend(self, job: _Job, op: Op) -> Any:
        backend, machine, call = self._adapter.backend, job.machine, self._adapter.call

        def late(result: object) -> None:
            self._take_late(job, op, result)

        match op.kind:
            case Kind.CREATE:
                return await call(backend.create, machine, op, on_late=late, kind=op.kind)
            case Kind.CONFIGURE:
                return await call(backend.configure, machine, machine.cluster, job.blob, op, on_late=late, kind=op.kind)
            case Kind.DRAIN:
                grace_seconds = job.operation.grace_seconds
                return await call(backend.drain, machine, grace_seconds, op, on_late=late, kind=op.kind)
            case Kind.DELETE:
                assert self._adapter.deletes is not None, "step 5 refuses Delete without a delete"
                return await call(self._adapter.deletes.delete, machine, op, on_late=late, kind=op.kind)

    # ---- readiness -----------------------------------------------------------------------------------------------

    async def _await_readiness(self, job: _Job, op: Op, done: OperationDone) -> Verdict:
        readiness = self._adapter.readiness
        if isinstance(readiness, ConfigureWaits):
            return done
        started_seconds = self._clock.monotonic_seconds()
        left_seconds = op.deadline_monotonic_seconds - started_seconds
        try:
            await within(self._until_ready(readiness, job, op), left_seconds, self.watch_abandoned(job.machine.id))
        except DeadlinePassed:
            return Failed(ErrorCode.NOT_READY, f"timeout: the node was not Ready in {job.seconds:g} s")
        except Exception as error:  # a checker that breaks is that Configure's failure
            return Failed(ErrorCode.NOT_READY, f"the readiness check broke: {type(error).__name__}: {error}")
        self._metrics.readiness_wait_seconds.observe(self._clock.monotonic_seconds() - started_seconds)
        return done

    async def _until_ready(self, readiness: Ready, job: _Job, op: Op) -> None:
        while True:
            try:
                answer = await self._adapter.call(
                    readiness.ready, job.machine, job.machine.cluster, op, on_late=lambda _answer: None
                )
            except Transient:
                answer = False
            if answer:
                return
            await self._clock.sleep(readiness.interval_seconds)

    # ---- verdicts ------------------------------------------------------------------------------------------------

    async def _settle(self, job: _Job, verdict: Verdict) -> None:
        """Make the verdict durable; while the store is down readers see the transitional state."""
        while True:
            try:
                is_settled = await self._try_settle(job, verdict)
                break
            except StoreDown:
                await self._clock.sleep(_COMMIT_RETRY_SECONDS)
            except Exception as error:  # a result that cannot be used is that operation's failure; nothing may be stuck
                if isinstance(verdict, Failed):
                    raise
                _log.error("operation.result_rejected", machine=job.machine.id, exc_info=error)
                text = f"what {job.operation.kind.value} returned cannot be used: {type(error).__name__}: {error}"
                verdict = Failed(ErrorCode.BACKEND, text)
        if not is_settled and isinstance(verdict, OperationDone):
            op = Op(
                id=job.operation.id,
                kind=job.operation.kind,
                attempt=job.operation.attempt,
                deadline_monotonic_seconds=self._clock.monotonic_seconds(),
            )
            self._take_late(job, op, verdict.result)

    async def _try_settle(self, job: _Job, verdict: Verdict) -> bool:
        kind = job.operation.kind
        async with self._ledger.turn(job.machine.id) as record:
            if record is None or not _is_in_flight(record, job.operation):
                return False
            now = self._clock.unix_nanos()
            if isinstance(verdict, OperationDone) and isinstance(verdict.result, Host):
                fault = host_fault(record, verdict.result)
                text = self._shared_host(record, verdict.result.ref) if fault is None else fault.text
                if text:
                    verdict = Failed(ErrorCode.BACKEND, f"create returned a bad host: {text}")
            if isinstance(verdict, OperationDone):
                result, reset = verdict.result, self._adapter.reset
                if isinstance(result, Host):
                    result = host_with_label(result, record.machine.labels)
                settled, outcome = completed(record, result, self._adapter.provider, now), "ok"
                if kind is Kind.DRAIN:
                    settled = drained(record, settled, reset)
            else:
                secrets = (job.blob.decode("utf-8", "replace"),)
                settled = failed(
                    record, verdict.code, verdict.text, now, secrets=secrets, hold_seconds=verdict.hold_seconds
                )
                outcome = verdict.code.value
            change = self._admissions.settled(Change(record=settled), record, settled.state)
            await self._ledger.commit(change)
            self._admissions.committed(change)
        seconds = (now - job.operation.accepted_unix_nanos) / NANOS_PER_SECOND
        self._metrics.transition_seconds.labels(kind.value, outcome).observe(max(0.0, seconds))
        _log.info(
            "operation.settled",
            machine=settled.id,
            operation_id=job.operation.id,
            kind=kind.value,
            state_from=record.state.name,
            state_to=settled.state.name,
            code=outcome,
            seconds=round(seconds, 3),
            error=settled.machine.last_error,
        )
        return True

    # ---- what comes too late -------------------------------------------------------------------------------------

    def watch_abandoned(self, machine_id: str) -> Callable[[asyncio.Task[Any]], None]:
        """Return a callback for a call that was left behind: the machine is busy until it ended."""

        def ended(task: asyncio.Task[Any]) -> None:
            self._less_abandoned(machine_id)
            if not task.cancelled():
                task.exception()

        def watch(task: asyncio.Task[Any]) -> None:
            self._abandoned[machine_id] += 1
            task.add_done_callback(ended)

        return watch

    def _less_abandoned(self, machine_id: str) -> None:
        self._abandoned[machine_id] -= 1
        if self._abandoned[machine_id] <= 0:
            del self._abandoned[machine_id]
        self.release_places(machine_id)

    def _abandon(self, job: _Job, op: Op, task: asyncio.Task[Any]) -> None:
        self.watch_abandoned(job.machine.id)(task)

        def ended(done: asyncio.Task[Any]) -> None:
            if not done.cancelled() and done.exception() is None:
                self._take_late(job, op, done.result())

        task.add_done_callback(ended)

    def _take_late(self, job: _Job, op: Op, result: object) -> None:
        if self._is_stopped:
            # No task may begin: the next start takes the operation up, and finds a host that no record shows.
            self._note_late(job, op, is_compensated=False)
            return
        task = asyncio.ensure_future(self._handle_late(job, op, result))
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)

    async def _handle_late(self, job: _Job, op: Op, result: object) -> None:
        """Undo an effect that no record shows."""
        host = result if isinstance(result, Host) else None
        is_compensated = False
        try:
            with self.busy(job.machine.id):
                is_compensated = await self._compensate(job, op, host)
        except Exception as error:  # the effect stays for the orphan rule; nothing else can be done about it
            _log.error("operation.compensation_failed", machine=job.machine.id, operation_id=op.id, error=str(error))
        self._note_late(job, op, is_compensated=is_compensated)

    def _note_late(self, job: _Job, op: Op, *, is_compensated: bool) -> None:
        self._metrics.backend_calls.labels(op.kind.value, "late").inc()
        self._metrics.late_results.labels(op.kind.value, "yes" if is_compensated else "no").inc()
        _log.warning(
            "operation.finished_late",
            machine=job.machine.id,
            operation_id=op.id,
            kind=op.kind.value,
            compensated=is_compensated,
        )

    async def _compensate(self, job: _Job, op: Op, host: Host | None) -> bool:
        adapter = self._adapter
        record = self._ledger.view.get(job.machine.id)
        machine = job.machine if record is None else record.machine
        shared = "" if host is None else self._shared_host(machine, host.ref)
        if shared:
            _log.error("operation.compensation_skipped", machine=machine.id, operation_id=op.id, error=shared)
            return False
        if adapter.compensates is not None:
            call = adapter.call(
                adapter.compensates.compensate, machine, LateResult(op=op, host=host), on_late=lambda _result: None
            )
        elif host is not None and adapter.deletes is not None and machine.host.ref != host.ref:
            call = adapter.call(adapter.deletes.delete, machine, op, on_late=lambda _result: None)
        else:
            return False
        await within(call, self.base_seconds(op.kind), self.watch_abandoned(job.machine.id))
        return True


def _may_retry(state: tenacity.RetryCallState) -> bool:
    """Return whether an attempt may be repeated: its error is transient, and the operation was not abandoned."""
    task = asyncio.current_task()
    is_transient = state.outcome is not None and isinstance(state.outcome.exception(), Transient)
    return is_transient and (task is None or not task.cancelling())


def _hold_of(stockout: Stockout) -> float | None:
    """Return the hold that a stockout asks for, None for what is no number of seconds."""
    seconds = stockout.retry_after_seconds
    return seconds if is_number(seconds) and seconds is not None and math.isfinite(seconds) else None


def _never_called(job: _Job) -> Failed:
    """Return the verdict on an operation that got no place; only a first attempt is known to have touched nothing."""
    text = f"no dispatch slot in {job.seconds:g} s"
    if job.operation.attempt == 1:
        return Failed(ErrorCode.QUEUE_TIMEOUT, f"{text}; the backend was never called")
    return Failed(ErrorCode.RESTARTED, f"the provider restarted during {job.operation.kind.value}; {text}")


def _is_in_flight(record: Record, operation: Operation) -> bool:
    return (
        record.operation is not None
        and record.operation.id == operation.id
        and record.state is EDGES[operation.kind].transitional
    )
