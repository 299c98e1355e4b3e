"""Implements the six calls of a provider, each checked in the order of docs/spec/provider.md §3.

A mutating call waits for the machine's turn. Its acceptance, its mark and its effects are one commit; the work begins
after it (`bigfleet.provider.operations.operation_runner`). A refused call must leave the record exactly as it was.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import structlog

from bigfleet.model.clock import NANOS_PER_SECOND, Clock
from bigfleet.model.ids import IdSource, Rng
from bigfleet.model.states import MachineState
from bigfleet.provider.backend import Backend, ConfigureWaits, KnownMachine, MachineView, Ready, Refusal, Slot
from bigfleet.provider.inventory.offers import Offers
from bigfleet.provider.inventory.push_updates import CoreFeed
from bigfleet.provider.inventory.reconcile import InventoryReconciler
from bigfleet.provider.kit.administration import Administration
from bigfleet.provider.kit.options import CoreOptions
from bigfleet.provider.metrics import ProviderMetrics
from bigfleet.provider.operations.admission import Admissions
from bigfleet.provider.operations.invoke import BackendAdapter, Threads
from bigfleet.provider.operations.operation_runner import OperationRunner
from bigfleet.provider.operations.recovery import Recovery
from bigfleet.provider.operations.restart import Restart
from bigfleet.provider.records.calls import Call, argument_fault, shown
from bigfleet.provider.records.fence import NO_TOKEN, SHARDS_PER_MACHINE_MAX, Mark, Token
from bigfleet.provider.records.kinds import EDGES, Kind
from bigfleet.provider.records.lifecycle import accepted
from bigfleet.provider.records.quarantine import FactsQuarantine
from bigfleet.provider.records.record import Operation, Record
from bigfleet.provider.records.refusal import Code, NotReady, Refused, StoreDown
from bigfleet.provider.records.reset import reuse_fault
from bigfleet.provider.storage.blob_encryption import BlobKey
from bigfleet.provider.storage.ledger import Change, Encode, Ledger
from bigfleet.provider.storage.machines_by_host import shared_text
from bigfleet.provider.storage.store import Store
from bigfleet.provider.storage.view import ListAnswer

_log = structlog.get_logger("bigfleet.provider.kit.core")

#: Above this size an answer of List is made off the loop.
_LIST_INLINE_MAX = 5_000
_STOP_SECONDS_MAX = 30.0


@dataclass(frozen=True, slots=True)
class AcceptedCall:
    """An accepted or repeated call; the record is as of now, normally in a transitional state."""

    operation_id: str
    record: Record


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
        self._threads = None if options.is_inline else Threads(backend.limits.threads_max)
        self._committing = None if options.is_inline else ThreadPoolExecutor(1, "store")
        self._clock = clock
        self._ids = ids
        self._is_inline = options.is_inline
        self.metrics = metrics
        self._blob_key = None if options.intent_key is None else BlobKey(options.intent_key, rng)
        self._adapter = BackendAdapter(
            backend, readiness, self._threads, provider=options.provider, on_stray_ended=self._stray_ended
        )
        self._ledger = Ledger(
            store,
            clock=clock,
            ids=ids,
            rng=rng,
            encode=encode,
            metrics=metrics,
            committing=self._committing,
            is_serial=self._adapter.admits is not None,
            host_scope=self._adapter.host_scope,
            on_health=self._report_health,
        )
        self.quarantine = FactsQuarantine(metrics)
        self._is_open = False
        self._is_stopping = False
        #: Calls in their turn; they end even if the caller went away.
        self._calls: set[asyncio.Task[AcceptedCall]] = set()
        self._background: list[asyncio.Task[None]] = []
        self._listeners: list[Callable[[bool], None]] = []
        self._build(options, rng)
        if self._adapter.consults is not None:
            self._adapter.consults.consult(self.known)
        if self._adapter.consults_hosts is not None:
            self._adapter.consults_hosts.consult_hosts(self.hosts)
        metrics.failed_oldest_seconds.set_function(self._failed_oldest_seconds)

    def _build(self, options: CoreOptions, rng: Rng) -> None:
        """Build what works on the ledger."""
        ledger, adapter, clock, metrics = self._ledger, self._adapter, self._clock, self.metrics
        self._admissions = Admissions(ledger=ledger, adapter=adapter, quarantine=self.quarantine, clock=clock)
        self._work = OperationRunner(
            ledger=ledger,
            adapter=adapter,
            clock=clock,
            rng=rng,
            metrics=metrics,
            admissions=self._admissions,
            transition_timeout_seconds=options.transition_timeout_seconds,
        )
        self._restart = Restart(
            ledger=ledger,
            adapter=adapter,
            work=self._work,
            admissions=self._admissions,
            blob_key=self._blob_key,
            clock=clock,
        )
        self._reconciler = InventoryReconciler(
            ledger=ledger,
            adapter=adapter,
            admissions=self._admissions,
            quarantine=self.quarantine,
            clock=clock,
            rng=rng,
            metrics=metrics,
            interval_seconds=options.reconcile_interval_seconds,
            offers=options.offers,
            is_inline=options.is_inline,
        )
        self._recovery = Recovery(
            ledger=ledger,
            adapter=adapter,
            work=self._work,
            admissions=self._admissions,
            clock=clock,
            ids=self._ids,
            metrics=metrics,
            hold_seconds=options.failed_hold_seconds,
            is_offered=self._reconciler.is_offered,
        )
        self.feed = CoreFeed(
            ledger=ledger,
            work=self._work,
            admissions=self._admissions,
            quarantine=self.quarantine,
            clock=clock,
            metrics=metrics,
        )
        self.administration = Administration(
            ledger=ledger,
            work=self._work,
            admissions=self._admissions,
            reconciler=self._reconciler,
            quarantine=self.quarantine,
            clock=clock,
            metrics=metrics,
            adapter=adapter,
            recovery=self._recovery,
        )

    # ---- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the store, take up interrupted work, and begin to read the inventory. Raises StartRefused.

        With a loaded store it serves at once; with an empty one after the first complete inventory, see `loaded`.
        """
        await self._ledger.open()
        if self._adapter.identifies is not None:
            await self._ledger.store_identity(self._adapter.identifies.identify(self._ledger.identity))
        await self._reconciler.open()
        await self._restart.take_up_all()
        self.feed.bind(asyncio.get_running_loop())
        self._is_open = True
        self._background.append(asyncio.create_task(self._reconciler.run(self._report_health)))
        self._background.append(asyncio.create_task(self._recovery.run()))
        if self._adapter.feeds is not None:
            self._background.append(asyncio.create_task(self._run_feed()))
        self._report_health()

    async def loaded(self) -> None:
        """Return once there is an inventory to serve. Raises StartRefused when the first one is unusable."""
        await self._reconciler.loaded()

    async def stop(self) -> None:
        """Refuse new calls, let those in their turn finish, and close the store. Background work is let go."""
        self._is_stopping = True
        self._report_health()
        if self._calls:
            await asyncio.wait(self._calls, timeout=_STOP_SECONDS_MAX)
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._work.stop()
        await self._ledger.close()
        for pool in (self._threads, self._committing):
            if pool is not None:
                pool.shutdown()

    @property
    def is_ready(self) -> bool:
        """Return whether a mutating call would pass step 2."""
        return not self.why_waiting

    @property
    def why_waiting(self) -> str:
        """Why a mutating call would not pass step 2, "" if it would."""
        if self._is_stopping:
            return "the provider is stopping"
        if not (self._is_open and self._reconciler.is_loaded):
            return "waiting for the backend's first inventory; see reconcile.failed in the log"
        return "" if self._ledger.is_up else "the state cannot be written; see store.commit_failed in the log"

    def on_ready_change(self, listener: Callable[[bool], None]) -> None:
        """Call the listener with `is_ready` now and whenever it may have changed."""
        self._listeners.append(listener)
        listener(self.is_ready)

    @property
    def offered(self) -> list[Slot]:
        """Return the slots that the offers offer now."""
        return self._reconciler.offered()

    async def replace_offers(self, offers: Offers) -> None:
        """Take other offers while serving: new slots appear at once, what vanished follows the inventory's rules."""
        await self._reconciler.replace_offers(offers)

    def _stray_ended(self, machine_id: str) -> None:
        self._work.release_places(machine_id)

    def _report_health(self) -> None:
        for listener in self._listeners:
            listener(self.is_ready)

    async def _run_feed(self) -> None:
        assert self._adapter.feeds is not None, "only a backend that feeds is run"
        await self._reconciler.loaded()
        try:
            await self._adapter.feeds.feed(self.feed)
        except Exception as error:  # pushes end, inventory goes on; a provider without pushes is slower, not wrong
            _log.error("backend.push_ended", exc_info=error)

    def _failed_oldest_seconds(self) -> float:
        since = [record.state_since_unix_nanos for record in self._ledger.view.of_state(MachineState.FAILED)]
        return (self._clock.unix_nanos() - min(since)) / NANOS_PER_SECOND if since else 0.0

    def known(self, machine_id: str) -> KnownMachine | None:
        """Return what the state says of a machine, None for an unknown one."""
        record = self._ledger.view.get(machine_id)
        if record is None:
            return None
        return KnownMachine(
            machine=record.machine, operation_id="" if record.operation is None else record.operation.id
        )

    def hosts(self) -> list[MachineView]:
        """Return the machines that have a host, as the state has them."""
        states = [state for state in MachineState if state is not MachineState.SPECULATIVE]
        records = (record for state in states for record in self._ledger.view.of_state(state))
        return [record.machine for record in records if record.machine.host.ref]

    # ---- reads ---------------------------------------------------------------------------------------------------

    async def get(self, machine_id: str) -> Record:
        """Return a machine's record. Raises Refused."""
        if not machine_id:
            raise Refused(Code.INVALID_ARGUMENT, "id is empty")
        self._check_loaded()
        record = self._ledger.view.get(machine_id)
        if record is None:
            raise Refused(Code.NOT_FOUND, f"no machine {shown(machine_id)}")
        return record

    async def list(self, states: Iterable[MachineState] = (), results_max: int = 0, since: bytes = b"") -> ListAnswer:
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

    async def create(self, machine_id: str, *, token: Token = NO_TOKEN) -> AcceptedCall:
        """Give a slot a host. Raises Refused."""
        return await self._mutate(Call(kind=Kind.CREATE, machine_id=machine_id, token=token))

    async def configure(
        self, machine_id: str, cluster: str, blob: bytes, metadata: Mapping[str, str], *, token: Token = NO_TOKEN
    ) -> AcceptedCall:
        """Bind an idle machine to a cluster. Raises Refused."""
        call = Call(
            kind=Kind.CONFIGURE,
            machine_id=machine_id,
            token=token,
            cluster=cluster,
            metadata=dict(metadata),
            blob=blob,
        )
        return await self._mutate(call)

    async def drain(self, machine_id: str, grace_seconds: int, *, token: Token = NO_TOKEN) -> AcceptedCall:
        """Take a machine out of its cluster. Raises Refused."""
        call = Call(kind=Kind.DRAIN, machine_id=machine_id, token=token, grace_seconds=grace_seconds)
        return await self._mutate(call)

    async def delete(self, machine_id: str, *, token: Token = NO_TOKEN) -> AcceptedCall:
        """Give a host back. Raises Refused."""
        return await self._mutate(Call(kind=Kind.DELETE, machine_id=machine_id, token=token))

    async def _mutate(self, call: Call) -> AcceptedCall:
        if not self.is_ready:
            raise NotReady("not ready: starting, stopping, or the store does not take commits")
        fault = argument_fault(call)
        if fault is not None:
            raise Refused(Code.INVALID_ARGUMENT, fault)
        if call.kind is Kind.DELETE and self._adapter.deletes is None:
            raise Refused(Code.UNIMPLEMENTED, "this provider deletes no hosts")
        # The turn goes on when the caller hangs up: what was committed must also be begun.
        return await asyncio.shield(self._spawn(self._in_turn(call)))

    def _spawn(self, turn: Coroutine[Any, Any, AcceptedCall]) -> asyncio.Task[AcceptedCall]:
        task = asyncio.create_task(turn)
        self._calls.add(task)

        def ended(done: asyncio.Task[AcceptedCall]) -> None:
            self._calls.discard(done)
            if not done.cancelled():
                done.exception()

        task.add_done_callback(ended)
        return task

    async def _in_turn(self, call: Call) -> AcceptedCall:
        async with self._ledger.turn(call.machine_id) as record:
            if not self._ledger.fence.passes(call.machine_id, call.token):
                self.metrics.fence_rejections.labels(call.kind.method).inc()
                _log.warning(
                    "fence.rejected",
                    machine=shown(call.machine_id),
                    kind=call.kind.value,
                    shard=shown(call.token.shard_id),
                    epoch=call.token.epoch,
                    sequence=call.token.sequence,
                )
                raise Refused(Code.FAILED_PRECONDITION, "stale token: a newer one of this shard was accepted")
            if not self._ledger.has_room_for(call.machine_id, call.token):
                _log.warning("fence.full", machine=shown(call.machine_id), shard=shown(call.token.shard_id))
                text = f"{SHARDS_PER_MACHINE_MAX} other shards have called for this machine lately"
                raise Refused(Code.RESOURCE_EXHAUSTED, text)
            mark = self._ledger.mark_of(call.machine_id, call.token)
            try:
                try:
                    decided = self._decide(call, record)
                except Exception:
                    # A token that passed has moved its mark, whatever became of the call.
                    if mark is not None:
                        await self._ledger.commit(Change(mark=mark))
                    raise
                if isinstance(decided, AcceptedCall):
                    if mark is not None:
                        await self._ledger.commit(Change(mark=mark))
                    return decided
                assert record is not None, "only a machine that exists is accepted for"
                return await self._accept(call, record, decided, mark)
            except StoreDown as error:
                raise NotReady("the store did not take the commit; nothing happened") from error

    async def _accept(self, call: Call, record: Record, change: Change, mark: Mark | None) -> AcceptedCall:
        """Commit the change of an accepted call and begin its work. Raises StoreDown, and then nothing happened."""
        change = replace(change, mark=mark)
        assert change.record is not None, "an accepted call changes its machine"
        operation = change.record.operation
        assert operation is not None, "an accepted call begins an operation"
        # Counted as waiting from here on, so that acceptances in one commit do not overfill the queue together.
        waiting = self._work.dispatch[call.kind].waiting
        waiting.add(operation.id)
        try:
            committed = await self._ledger.commit(change)
        except BaseException:
            waiting.discard(operation.id)
            self._admissions.withdrawn(record)
            raise
        assert committed is not None, "a change with a record gives it back"
        self._admissions.committed(change)
        self._work.start(committed, call.blob)
        _log.info(
            "operation.accepted",
            machine=committed.id,
            operation_id=operation.id,
            kind=call.kind.value,
            state_from=record.state.name,
            state_to=committed.state.name,
            **({"note": change.note} if change.note else {}),
        )
        return AcceptedCall(operation.id, committed)

    def _decide(self, call: Call, record: Record | None) -> AcceptedCall | Change:
        """Apply steps 7 to 11: return the repeat, or what to commit. Raises Refused."""
        if record is None:
            raise Refused(Code.NOT_FOUND, f"no machine {shown(call.machine_id)}")
        edge = EDGES[call.kind]
        latest = record.operation
        if latest is not None and latest.kind is call.kind and record.state in (edge.transitional, edge.target):
            self._check_same_binding(call, record)
            return AcceptedCall(latest.id, record)
        if record.state is not edge.source:
            message = f"out of position: {call.kind.method} needs {edge.source.name}, "
            raise Refused(Code.ABORTED, f"{message}{record.id} is {record.state.name}")
        if call.kind is Kind.DELETE and record.slot.fixed:
            raise Refused(Code.UNIMPLEMENTED, f"{record.id} is fixed capacity: it cannot be deleted")
        others = self._ledger.view.hosts.others(record.id, record.machine.host.ref)
        if others:
            raise Refused(Code.ABORTED, f"{record.id}: {shared_text(record.machine.host.ref, others)}")
        fault = reuse_fault(record, call.cluster) if call.kind is Kind.CONFIGURE else ""
        if fault:
            raise Refused(Code.ABORTED, fault)
        return self._admitted(call, record)

    def _admitted(self, call: Call, record: Record) -> Change:
        """Return what to commit, with what the backend adds to it. Raises Refused without room (steps 10 and 10')."""
        dispatch = self._work.dispatch[call.kind]
        if not dispatch.has_room:
            raise Refused(Code.RESOURCE_EXHAUSTED, f"the queue of {call.kind.value} operations is full; try later")
        admission = self._admissions.admit(record, call.kind)
        if isinstance(admission, Refusal):
            raise Refused(Code.RESOURCE_EXHAUSTED, admission.text)
        if call.kind is Kind.CREATE and dispatch.breaker.refuses_new_work:
            self._admissions.withdrawn(record)
            raise Refused(Code.UNAVAILABLE, "the substrate fails every create now; the slot stays for later")
        operation = Operation(
            id=f"op-{self._ids.new_id()}",
            kind=call.kind,
            accepted_unix_nanos=self._clock.unix_nanos(),
            grace_seconds=call.grace_seconds,
        )
        sealed = None
        if call.kind is Kind.CONFIGURE and self._blob_key is not None:
            sealed = self._blob_key.seal(call.blob, record.id, operation.id)
        entered = accepted(record, operation, cluster=call.cluster, metadata=call.metadata)
        return self._admissions.joined(Change(record=entered, sealed=sealed, note=admission.note), admission)

    def _check_same_binding(self, call: Call, record: Record) -> None:
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
