"""The provider's answers: the six calls, each checked in the one order of docs/spec/provider.md §3.

A mutating call takes the machine's turn, and its acceptance, its mark and its effects are one commit; the work begins
after it (`bigfleet.provider.work`). A refused call must leave the record exactly as it was.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from bigfleet.model.clock import NANOS_PER_SECOND, Clock
from bigfleet.model.ids import IDENTIFIER_BYTES_MAX, IdSource, Rng
from bigfleet.model.states import MachineState
from bigfleet.provider.backend import Backend, ConfigureWaits, Ready
from bigfleet.provider.feed import CoreFeed
from bigfleet.provider.fence import NO_TOKEN, Token
from bigfleet.provider.invoke import Author
from bigfleet.provider.kinds import EDGES, KIND_IN_FLIGHT, Kind
from bigfleet.provider.ledger import Change, Encode, Ledger
from bigfleet.provider.lifecycle import accepted, failed
from bigfleet.provider.metrics import ProviderMetrics
from bigfleet.provider.options import CoreOptions
from bigfleet.provider.quarantine import Quarantine
from bigfleet.provider.reconcile import Reconciler
from bigfleet.provider.record import NO_METADATA, ErrorCode, Operation, Record
from bigfleet.provider.recovery import Recovery
from bigfleet.provider.refusal import Code, Refused, StoreDown
from bigfleet.provider.store import Store
from bigfleet.provider.view import Listing
from bigfleet.provider.work import Work

_log = structlog.get_logger("bigfleet.provider.core")

METADATA_BYTES_MAX = 64 * 1024
BLOB_BYTES_MAX = 1024 * 1024
#: How often one operation is driven over restarts.
ATTEMPTS_MAX = 3
#: Above this size an answer of List is made off the loop.
_LIST_INLINE_MAX = 5_000
_STOP_SECONDS_MAX = 30.0


@dataclass(frozen=True, slots=True)
class Ack:
    """An accepted or repeated call; the record is as of now, normally in a transitional state."""

    operation_id: str
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    kind: Kind
    machine_id: str
    token: Token
    cluster: str = ""
    metadata: Mapping[str, str] = field(default_factory=lambda: NO_METADATA)
    blob: bytes = b""
    grace_seconds: int = 0


class CapacityCore:
    """One provider. `start` it, then call; `stop` it before the loop ends."""

    def __init__(
        self,
        backend: Backend,
        *,
        readiness: Ready | ConfigureWaits,
        store: Store,
        clock: Clock,
        ids: IdSource,
        rng: Rng,
        encode: Encode,
        metrics: ProviderMetrics,
        options: CoreOptions | None = None,
    ) -> None:
        """Check the backend and build the parts. Raises TypeError for a backend that cannot be called."""
        options = options or CoreOptions()
        threads = None
        committing = None
        if not options.is_inline:
            threads = ThreadPoolExecutor(backend.limits.threads_max, "backend")
            committing = ThreadPoolExecutor(1, "store")
        self._pools = tuple(pool for pool in (threads, committing) if pool is not None)
        self._clock = clock
        self._ids = ids
        self._is_inline = options.is_inline
        self.metrics = metrics
        self._author = Author(backend, readiness, threads)
        self._ledger = Ledger(
            store, clock=clock, ids=ids, rng=rng, encode=encode, metrics=metrics, committing=committing
        )
        self._work = Work(
            ledger=self._ledger,
            author=self._author,
            clock=clock,
            rng=rng,
            metrics=metrics,
            transition_timeout_seconds=options.transition_timeout_seconds,
        )
        self.quarantine = Quarantine(metrics)
        self._reconciler = Reconciler(
            ledger=self._ledger,
            author=self._author,
            quarantine=self.quarantine,
            clock=clock,
            rng=rng,
            metrics=metrics,
            interval_seconds=options.reconcile_interval_seconds,
        )
        self._recovery = Recovery(
            ledger=self._ledger,
            author=self._author,
            work=self._work,
            clock=clock,
            ids=ids,
            metrics=metrics,
            hold_seconds=options.failed_hold_seconds,
        )
        self.feed = CoreFeed(
            ledger=self._ledger, work=self._work, quarantine=self.quarantine, clock=clock, metrics=metrics
        )
        self._is_open = False
        self._is_stopping = False
        #: Calls in their turn; they end even if the caller went away.
        self._calls: set[asyncio.Task[Ack]] = set()
        self._background: list[asyncio.Task[None]] = []
        self._listeners: list[Callable[[bool], None]] = []
        metrics.failed_oldest_seconds.set_function(self._failed_oldest_seconds)

    # ---- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the store, take up interrupted work, and begin to read the inventory. Raises StartRefused.

        With a loaded store it serves at once; with an empty one after the first complete inventory, see `loaded`.
        """
        await self._ledger.open()
        self._ledger.on_health = self._tell_health
        await self._take_up_work()
        self._is_open = True
        self._background.append(asyncio.create_task(self._reconciler.run(self._tell_health)))
        self._background.append(asyncio.create_task(self._recovery.run()))
        if self._author.feeds is not None:
            self._background.append(asyncio.create_task(self._run_feed()))
        self._tell_health()

    async def loaded(self) -> None:
        """Return once there is an inventory to serve. Raises StartRefused when the first one is unusable."""
        await self._reconciler.loaded()

    async def stop(self) -> None:
        """Refuse new calls, let those in their turn finish, and close the store. Background work is let go."""
        self._is_stopping = True
        self._tell_health()
        if self._calls:
            await asyncio.wait(self._calls, timeout=_STOP_SECONDS_MAX)
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._work.stop()
        await self._ledger.close()
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)

    @property
    def is_ready(self) -> bool:
        """Say whether a mutating call would pass step 2."""
        return self._is_open and self._reconciler.is_loaded and self._ledger.is_up and not self._is_stopping

    def on_ready_change(self, listener: Callable[[bool], None]) -> None:
        """Call the listener with `is_ready` now and whenever it may have changed."""
        self._listeners.append(listener)
        listener(self.is_ready)

    def _tell_health(self) -> None:
        for listener in self._listeners:
            listener(self.is_ready)

    async def _run_feed(self) -> None:
        assert self._author.feeds is not None, "only a backend that feeds is run"
        await self._reconciler.loaded()
        try:
            await self._author.feeds.feed(self.feed)
        except Exception as error:  # pushes end, inventory goes on; a provider without pushes is slower, not wrong
            _log.error("feed.ended", exc_info=error)

    async def _take_up_work(self) -> None:
        """Drive interrupted operations again where the backend allows it; fail the others."""
        for state, kind in KIND_IN_FLIGHT.items():
            for record in self._ledger.view.of_state(state):
                await self._take_up(record, kind)

    async def _take_up(self, record: Record, kind: Kind) -> None:
        operation = record.operation
        assert operation is not None, f"{record.id} is {record.state.name} without an operation"
        is_checker_only = kind is Kind.CONFIGURE
        can_check = not isinstance(self._author.readiness, ConfigureWaits)
        may_resume = can_check if is_checker_only else kind in self._author.backend.limits.resumable
        if may_resume and operation.attempt < ATTEMPTS_MAX:
            resumed = replace(record, operation=replace(operation, attempt=operation.attempt + 1))
            committed = await self._ledger.commit_until_done(lambda: Change(record=resumed))
            assert committed is not None, "a change with a record gives it back"
            self._work.start(committed, is_checker_only=is_checker_only)
            _log.info(
                "operation.resumed",
                machine_id=record.id,
                operation_id=operation.id,
                kind=kind.value,
                attempt=operation.attempt + 1,
            )
            return
        why = "it was driven too often" if may_resume else "it cannot be taken up again"
        text = f"the provider restarted during {kind.value}; {why}"
        lost = failed(record, ErrorCode.RESTARTED, text, self._clock.unix_nanos())
        await self._ledger.commit_until_done(lambda: Change(record=lost))
        _log.warning("operation.interrupted", machine_id=record.id, operation_id=operation.id, kind=kind.value)

    def _failed_oldest_seconds(self) -> float:
        since = [record.state_since_unix_nanos for record in self._ledger.view.of_state(MachineState.FAILED)]
        return (self._clock.unix_nanos() - min(since)) / NANOS_PER_SECOND if since else 0.0

    # ---- reads ---------------------------------------------------------------------------------------------------

    async def get(self, machine_id: str) -> Record:
        """Return a machine's record. Raises Refused."""
        if not machine_id:
            raise Refused(Code.INVALID_ARGUMENT, "id is empty")
        self._check_loaded()
        record = self._ledger.view.get(machine_id)
        if record is None:
            raise Refused(Code.NOT_FOUND, f"no machine {_shown(machine_id)}")
        return record

    async def list(self, states: Iterable[MachineState] = (), results_max: int = 0, since: bytes = b"") -> Listing:
        """Answer List. No state is any state; at most 0 results is no cap. Raises Refused only before an inventory."""
        self._check_loaded()
        wanted = frozenset(states)
        answer = self._ledger.view.list(wanted or None, results_max, since)
        if self._is_inline or len(self._ledger.view) <= _LIST_INLINE_MAX:
            listing = answer()
        else:
            listing = await asyncio.get_running_loop().run_in_executor(None, answer)
        self.metrics.list_requests.labels(listing.kind.value).inc()
        if listing.rejection is not None:
            self.metrics.cursor_rejections.labels(listing.rejection.value).inc()
        return listing

    def _check_loaded(self) -> None:
        if not (self._is_open and self._reconciler.is_loaded):
            raise Refused(Code.UNAVAILABLE, "the inventory was not loaded yet")

    # ---- mutating calls ------------------------------------------------------------------------------------------

    async def create(self, machine_id: str, *, token: Token = NO_TOKEN) -> Ack:
        """Give a slot a host. Raises Refused."""
        return await self._mutate(_Call(kind=Kind.CREATE, machine_id=machine_id, token=token))

    async def configure(
        self, machine_id: str, cluster: str, blob: bytes, metadata: Mapping[str, str], *, token: Token = NO_TOKEN
    ) -> Ack:
        """Bind an idle machine to a cluster. Raises Refused."""
        call = _Call(
            kind=Kind.CONFIGURE,
            machine_id=machine_id,
            token=token,
            cluster=cluster,
            metadata=dict(metadata),
            blob=blob,
        )
        return await self._mutate(call)

    async def drain(self, machine_id: str, grace_seconds: int, *, token: Token = NO_TOKEN) -> Ack:
        """Take a machine out of its cluster. Raises Refused."""
        call = _Call(kind=Kind.DRAIN, machine_id=machine_id, token=token, grace_seconds=grace_seconds)
        return await self._mutate(call)

    async def delete(self, machine_id: str, *, token: Token = NO_TOKEN) -> Ack:
        """Give a host back. Raises Refused."""
        return await self._mutate(_Call(kind=Kind.DELETE, machine_id=machine_id, token=token))

    async def _mutate(self, call: _Call) -> Ack:
        if not self.is_ready:
            raise Refused(Code.UNAVAILABLE, "not ready: starting, stopping, or the store does not take commits")
        fault = _argument_fault(call)
        if fault is not None:
            raise Refused(Code.INVALID_ARGUMENT, fault)
        if call.kind is Kind.DELETE and self._author.deletes is None:
            raise Refused(Code.UNIMPLEMENTED, "this provider deletes no hosts")
        # The turn goes on when the caller hangs up: what was committed must also be begun.
        return await asyncio.shield(self._spawn(self._in_turn(call)))

    def _spawn(self, turn: Coroutine[Any, Any, Ack]) -> asyncio.Task[Ack]:
        task = asyncio.create_task(turn)
        self._calls.add(task)

        def ended(done: asyncio.Task[Ack]) -> None:
            self._calls.discard(done)
            if not done.cancelled():
                done.exception()

        task.add_done_callback(ended)
        return task

    async def _in_turn(self, call: _Call) -> Ack:
        async with self._ledger.turn(call.machine_id) as record:
            if not self._ledger.fence.passes(call.machine_id, call.token):
                self.metrics.fence_rejections.labels(call.kind.method).inc()
                _log.warning(
                    "fence.rejected",
                    machine_id=_shown(call.machine_id),
                    kind=call.kind.value,
                    shard_id=_shown(call.token.shard_id),
                    epoch=call.token.epoch,
                    sequence=call.token.sequence,
                )
                raise Refused(Code.FAILED_PRECONDITION, "stale token: a newer one of this shard was accepted")
            mark = self._ledger.mark_of(call.machine_id, call.token)
            try:
                try:
                    repeated, next_record = self._decide(call, record)
                except Refused:
                    if mark is not None:
                        await self._ledger.commit(Change(mark=mark))
                    raise
                if repeated is not None:
                    if mark is not None:
                        await self._ledger.commit(Change(mark=mark))
                    return repeated
                assert next_record is not None, "a call that is neither refused nor a repeat is accepted"
                committed = await self._ledger.commit(Change(record=next_record, mark=mark))
            except StoreDown as error:
                raise Refused(Code.UNAVAILABLE, "the store did not take the commit; nothing happened") from error
            assert committed is not None, "a change with a record gives it back"
            assert committed.operation is not None, "an acceptance has an operation"
            self._work.start(committed, call.blob)
            _log.info(
                "operation.accepted",
                machine_id=committed.id,
                operation_id=committed.operation.id,
                kind=call.kind.value,
                state_from=EDGES[call.kind].source.name,
                state_to=committed.state.name,
            )
            return Ack(committed.operation.id, committed)

    def _decide(self, call: _Call, record: Record | None) -> tuple[Ack | None, Record | None]:
        """Apply steps 7 to 11: return the repeat, or the record to commit. Raises Refused."""
        if record is None:
            raise Refused(Code.NOT_FOUND, f"no machine {_shown(call.machine_id)}")
        edge = EDGES[call.kind]
        latest = record.operation
        if latest is not None and latest.kind is call.kind and record.state in (edge.transitional, edge.target):
            self._check_same_binding(call, record)
            return Ack(latest.id, record), None
        if record.state is not edge.source:
            message = f"out of position: {call.kind.method} needs {edge.source.name}, "
            raise Refused(Code.ABORTED, f"{message}{record.id} is {record.state.name}")
        if call.kind is Kind.DELETE and record.slot.fixed:
            raise Refused(Code.UNIMPLEMENTED, f"{record.id} is fixed capacity: it cannot be deleted")
        if not self._work.has_room(call.kind):
            raise Refused(Code.RESOURCE_EXHAUSTED, f"the queue of {call.kind.value} operations is full; try later")
        operation = Operation(
            id=f"op-{self._ids.new_id()}",
            kind=call.kind,
            accepted_unix_nanos=self._clock.unix_nanos(),
            grace_seconds=call.grace_seconds,
        )
        return None, accepted(record, operation, cluster=call.cluster, metadata=call.metadata)

    def _check_same_binding(self, call: _Call, record: Record) -> None:
        result, differs = "same", ""
        if call.kind is Kind.CONFIGURE:
            if call.cluster != record.machine.cluster:
                differs = "cluster_id"
            elif dict(call.metadata) != dict(record.metadata):
                differs = "shard_metadata"
            result = "conflict" if differs else "same"
        self.metrics.repeats.labels(call.kind.method, result).inc()
        if differs:
            raise Refused(Code.ALREADY_EXISTS, f"{record.id} is bound otherwise: {differs} differs")


def _argument_fault(call: _Call) -> str | None:
    """Return what is wrong with the arguments of a call (steps 3 and 4), or None."""
    return (
        _identifier_fault("machine_id", call.machine_id)
        or (_identifier_fault("cluster_id", call.cluster) if call.kind is Kind.CONFIGURE else None)
        or _token_fault(call.token)
        or _size_fault(call)
    )


def _identifier_fault(field: str, text: str) -> str | None:
    if not text:
        return f"{field} is empty"
    size_bytes = len(text.encode("utf-8", "surrogatepass"))
    if size_bytes > IDENTIFIER_BYTES_MAX:
        return f"{field} has {size_bytes} bytes, at most {IDENTIFIER_BYTES_MAX} are allowed"
    return None


def _token_fault(token: Token) -> str | None:
    if token.shard_id:
        return _identifier_fault("shard_id", token.shard_id)
    if token.epoch or token.sequence:
        return "shard_id is empty, but shard_epoch or sequence_number is set"
    return None


def _size_fault(call: _Call) -> str | None:
    if call.grace_seconds < 0:
        return f"grace_period_seconds is {call.grace_seconds}, it must not be negative"
    if call.metadata:
        size_bytes = sum(len(k.encode()) + len(v.encode()) for k, v in call.metadata.items())
        if size_bytes > METADATA_BYTES_MAX:
            return f"shard_metadata has {size_bytes} bytes, at most {METADATA_BYTES_MAX} are allowed"
    if len(call.blob) > BLOB_BYTES_MAX:
        return f"bootstrap_blob has {len(call.blob)} bytes, at most {BLOB_BYTES_MAX} are allowed"
    return None


def _shown(text: str) -> str:
    """Return an id as it may be printed: quoted, escaped, short."""
    return repr(text if len(text) <= IDENTIFIER_BYTES_MAX else text[:IDENTIFIER_BYTES_MAX] + "…")
