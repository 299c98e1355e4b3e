"""Queues decided actions and runs a bounded number of them at the same time.

docs/spec/shard.md §8. Nothing here ever blocks the cycle: what finds no room is dropped and derived again. A machine
has at most one action in flight, with every outcome, and each end is audited. An action that waits for an operator
holds no slot.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog
from prometheus_client import Counter as PrometheusCounter

from bigfleet.engine.decision import Action, ActionKind
from bigfleet.model.clock import Clock
from bigfleet.model.ids import IdSource, MachineId
from bigfleet.model.states import MachineState
from bigfleet.model.validation import ensure
from bigfleet.shard.audit.log import Audit
from bigfleet.shard.inventory.inventory import Inventory, InventoryRefusal
from bigfleet.shard.metrics import ShardMetrics
from bigfleet.shard.outcomes import REDRIVE_LABEL, ActionOutcome, ActionRecord
from bigfleet.shard.ports import ShardSettings
from bigfleet.shard.safety_limits import Disposition

_log = structlog.get_logger("bigfleet.shard.actuation.action_queue")

#: The state that a machine must still be in when its action is enqueued, and again when it starts.
REQUIRED_STATE = {
    ActionKind.BOOTSTRAP: MachineState.IDLE,
    ActionKind.PROVISION: MachineState.SPECULATIVE,
    ActionKind.RECLAIM: MachineState.CONFIGURED,
    ActionKind.PREEMPT: MachineState.CONFIGURED,
    ActionKind.DELETE: MachineState.IDLE,
}
#: Where an action leads; a machine that is there already needs nothing. A Bootstrap's goal depends on its row (B1).
GOAL_STATE = {
    ActionKind.RECLAIM: MachineState.IDLE,
    ActionKind.PREEMPT: MachineState.IDLE,
    ActionKind.DELETE: MachineState.SPECULATIVE,
}
#: The transition that a re-drive of each kind is about; a Preempt drains like a Reclaim.
REDRIVEN_STATE = {
    ActionKind.PROVISION: MachineState.CREATING,
    ActionKind.BOOTSTRAP: MachineState.CONFIGURING,
    ActionKind.RECLAIM: MachineState.DRAINING,
    ActionKind.PREEMPT: MachineState.DRAINING,
    ActionKind.DELETE: MachineState.DELETING,
}
#: Seconds that running provider calls get when the process stops.
STOP_GRACE_SECONDS = 10.0
#: Suppressed actions that are audited before other tasks get their turn, some milliseconds of work.
SUPPRESSED_PER_TURN_MAX = 200

Executor = Callable[[ActionRecord, "Actuator"], Awaitable[ActionOutcome]]


@dataclass(slots=True)
class EnqueueCounts:
    """What became of one cycle's actions."""

    enqueued: int = 0
    deduped: int = 0
    dropped: int = 0
    refused: int = 0


class Actuator:
    """Carries out actions, each in its own task, at most `execute_concurrency_max` of them holding a slot.

    Invariants: the ledger holds all and only machines whose action waits or runs; `history` holds the newest records.
    """

    def __init__(
        self,
        *,
        settings: ShardSettings,
        inventory: Inventory,
        metrics: ShardMetrics,
        clock: Clock,
        ids: IdSource,
        execute: Executor,
        is_backed_off: Callable[[Action], bool],
        audit: Audit,
        ledger: dict[MachineId, ActionRecord],
    ) -> None:
        """`ledger` is empty and is changed here alone: others may only look up a machine."""
        self._settings = settings
        self._inventory = inventory
        self._metrics = metrics
        self._clock = clock
        self._ids = ids
        self._execute = execute
        self._is_backed_off = is_backed_off
        self._audit = audit
        self._ledger = ledger
        #: The ledger's machines are always among them.
        self._touched: set[MachineId] = set()
        self._queue: deque[ActionRecord] = deque()
        self._queue_max = 2 * settings.execute_concurrency_max
        #: As many actions as are worth handing to `enqueue`: some may have become moot since they were decided.
        self.candidates_max = 4 * self._queue_max
        self._slots = asyncio.Semaphore(settings.execute_concurrency_max)
        self._arrived = asyncio.Event()
        self._running: dict[asyncio.Task[None], MachineId] = {}
        #: All and only the machines whose action holds a slot at this moment.
        self._in_slot: set[MachineId] = set()
        self._waiting = 0
        #: The cycle in which actions that start now are executed.
        self.cycle = 0
        #: Newest last, running ones included.
        self.history: deque[ActionRecord] = deque(maxlen=settings.action_history_max)

    # ---- the ledger ---------------------------------------------------------------------------------------------

    def is_pending(self, machine_id: str) -> bool:
        """Say whether an action of this machine waits or runs."""
        return machine_id in self._ledger

    def pending(self, machine_id: str) -> ActionRecord | None:
        """Return the action of this machine that waits or runs, or None."""
        return self._ledger.get(MachineId(machine_id))

    def begin_view(self) -> None:
        """Remember from now on which machines are pending at any time: a List is about to be sent."""
        self._touched = set(self._ledger)

    def touched(self) -> frozenset[MachineId]:
        """Return the machines that are pending or were at any time since `begin_view`."""
        return frozenset(self._touched)

    def was_pending_since_view(self, machine_id: str) -> bool:
        """Say whether the machine was pending at any time since `begin_view`; such a view may predate the call."""
        return machine_id in self._touched

    # ---- decided actions ----------------------------------------------------------------------------------------

    def record(self, action: Action, cycle: int) -> ActionRecord:
        """Give an action its id and note it in the history."""
        machine = self._inventory.get(action.machine_id)
        stamp, stamped_group = (machine.assigned_need_fingerprint, machine.assigned_group) if machine else ("", "")
        record = ActionRecord(
            action_id=self._ids.new_id(),
            action=action,
            decided_cycle=cycle,
            decided_unix_nanos=self._clock.unix_nanos(),
            need_fingerprint=action.profile.fingerprint if action.profile is not None else stamp,
            group=action.group if action.profile is not None else stamped_group,
        )
        self.history.append(record)
        return record

    async def suppress(self, actions: Sequence[Action], cycle: int, disposition: Disposition) -> None:
        """Count and audit actions that a pause or a dry run suppresses.

        Without an audit log only as many are noted as the history holds.
        """
        counter = self._suppressed_counter(disposition)
        for kind, number in Counter(action.kind for action in actions).items():
            counter.labels(kind.label).inc(number)
        if disposition is Disposition.DRY_RUN:
            for action in actions:
                _log.info(
                    "action.suppressed",
                    kind=action.kind.label,
                    machine=action.machine_id,
                    cluster=action.cluster,
                    reason="dry run",
                )
        noted = actions if self._audit.is_on else actions[-self._settings.action_history_max :]
        for position, action in enumerate(noted):
            if position and position % SUPPRESSED_PER_TURN_MAX == 0:
                await self._clock.sleep(0)
            self._set_aside(self.record(action, cycle), disposition)

    def _suppressed_counter(self, disposition: Disposition) -> PrometheusCounter:
        metrics = self._metrics
        return metrics.actions_suppressed if disposition is Disposition.SUPPRESSED else metrics.actions_dry_run

    def _set_aside(self, record: ActionRecord, disposition: Disposition) -> None:
        record.disposition = disposition.value
        record.finished_unix_nanos = record.decided_unix_nanos
        self._audit.note(record)

    def redrive(self, action: Action, cycle: int, disposition: Disposition) -> bool:
        """Queue an action as a re-drive of the transition that it names, or set it aside; False when there is no room.

        docs/spec/shard.md §9.5. The machine must not be pending.
        """
        assert action.machine_id not in self._ledger, "a machine has at most one action in flight"
        executes = disposition is Disposition.EXECUTE
        if executes and len(self._queue) >= self._queue_max:
            return False
        record = self.record(action, cycle)
        record.is_redrive = True
        if not executes:
            self._suppressed_counter(disposition).labels(REDRIVE_LABEL).inc()
            self._set_aside(record, disposition)
            return True
        self._put(record)
        self._metrics.redrives.labels(action.kind.label).inc()
        self._metrics.queue_depth.set(len(self._queue))
        self._arrived.set()
        return True

    def _put(self, record: ActionRecord) -> None:
        machine_id = record.action.machine_id
        self._ledger[machine_id] = record
        self._touched.add(machine_id)
        self._queue.append(record)

    def in_flight(self) -> frozenset[MachineId]:
        """Return the machines whose action waits or runs."""
        return frozenset(self._ledger)

    def enqueue(self, actions: tuple[Action, ...], cycle: int) -> EnqueueCounts:
        """Queue what is still applicable; never waits (docs/spec/shard.md §8)."""
        counts = EnqueueCounts()
        for position, action in enumerate(actions):
            if len(self._queue) >= self._queue_max:
                # Of what finds no room it does not matter whether it would have been applicable.
                counts.dropped = len(actions) - position
                break
            if action.machine_id in self._ledger or not self._is_applicable(action):
                counts.deduped += 1
            elif self._is_backed_off(action):
                counts.refused += 1
            else:
                self._put(self.record(action, cycle))
                self._metrics.actions.labels(action.kind.label).inc()
                counts.enqueued += 1
        self._metrics.actions_deduped.inc(counts.deduped)
        self._metrics.actions_refused.inc(counts.refused)
        self._metrics.actions_dropped.inc(counts.dropped)
        self._metrics.queue_depth.set(len(self._queue))
        self._arrived.set()
        return counts

    def _is_applicable(self, action: Action) -> bool:
        machine = self._inventory.get(action.machine_id)
        # A machine that cannot be looked up passes: its worker decides.
        return machine is None or machine.state is REQUIRED_STATE[action.kind]

    # ---- running ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work the queue off until cancelled; then give running calls `STOP_GRACE_SECONDS`."""
        try:
            while True:
                await self._arrived.wait()
                if not self._queue:
                    self._arrived.clear()
                    continue
                await self._slots.acquire()
                if not self._queue:
                    self._slots.release()
                    continue
                record = self._queue.popleft()
                self._metrics.queue_depth.set(len(self._queue))
                task = asyncio.create_task(self._run_in_slot(record), name=f"action-{record.action_id}")
                self._running[task] = record.action.machine_id
                task.add_done_callback(self._running.pop)
        finally:
            await self._stop()

    async def run_inline(self) -> None:
        """Carry out everything queued, in order, and return: for tests and the simulation."""
        while self._queue:
            await self._slots.acquire()
            await self._run_in_slot(self._queue.popleft())

    @asynccontextmanager
    async def waiting(self, machine_id: MachineId, waited_for: str) -> AsyncIterator[None]:
        """Give the slot back while an operator is asked; at `execute_waiting_max` further ones wait in their slot."""
        gives_back = self._waiting < self._settings.execute_waiting_max
        gauge = self._metrics.waiting.labels(waited_for)
        gauge.inc()
        if gives_back:
            self._waiting += 1
            self._note_slot(machine_id, held=False)
            self._slots.release()
        try:
            yield
        finally:
            gauge.dec()
            if gives_back:
                self._waiting -= 1
                await self._slots.acquire()
                self._note_slot(machine_id, held=True)

    def _note_slot(self, machine_id: MachineId, *, held: bool) -> None:
        if held:
            self._in_slot.add(machine_id)
        else:
            self._in_slot.discard(machine_id)
        self._metrics.inflight.set(len(self._in_slot))

    def follow_up(self, record: ActionRecord, action: Action) -> ActionRecord:
        """Let an action that has succeeded go on as another one: same machine, ledger entry and slot, own record."""
        assert action.machine_id == record.action.machine_id, "a ledger entry is about one machine"
        following = self.record(action, record.decided_cycle)
        following.executed_cycle = self.cycle
        following.started_seconds = self._clock.monotonic_seconds()
        self._ledger[action.machine_id] = following
        self._metrics.actions.labels(action.kind.label).inc()
        self._conclude(record, ActionOutcome.SUCCESS)
        return following

    async def _run_in_slot(self, record: ActionRecord) -> None:
        machine_id = record.action.machine_id
        self._note_slot(machine_id, held=True)
        record.executed_cycle = self.cycle
        record.started_seconds = self._clock.monotonic_seconds()
        outcome, message = ActionOutcome.TRANSITION_ERROR, ""
        try:
            outcome = await self._execute(record, self)
        except asyncio.CancelledError:
            outcome = ActionOutcome.CTX_CANCELED
            raise
        except InventoryRefusal as refusal:
            message = str(refusal)
        except Exception as error:  # one action's defect must not end the others
            message = f"{type(error).__name__}: {error}"
            _log.exception("action.failed", kind=record.kind_label, machine=machine_id)
        finally:
            # The entry names the action that ended, which is another one after a follow-up.
            last = self._ledger.pop(machine_id, record)
            last.message = message or last.message
            if machine_id in self._in_slot:  # not when it was cancelled on its way back into one
                self._note_slot(machine_id, held=False)
                self._slots.release()
            self._conclude(last, outcome)

    def _conclude(self, record: ActionRecord, outcome: ActionOutcome) -> None:
        action = record.action
        record.outcome = outcome
        record.finished_unix_nanos = self._clock.unix_nanos()
        record.seconds = self._clock.monotonic_seconds() - record.started_seconds
        self._metrics.outcomes.labels(record.kind_label, outcome.value).inc()
        if record.is_counted_only:
            return
        self._audit.note(record)
        _log.info(
            "action.finished",
            action_id=record.action_id,
            kind=record.kind_label,
            machine=action.machine_id,
            cluster=action.cluster,
            reason=action.reason,
            outcome=outcome.value,
            message=record.message,
            decided_cycle=record.decided_cycle,
            cycle=record.executed_cycle,
            operation_id=record.operation_id,
        )

    def validate(self) -> None:
        """Compare the ledger with the queue and the slots. Raises InvariantBroken."""
        ledger, queued = self._ledger, [record.action.machine_id for record in self._queue]
        ensure(len(queued) == len(set(queued)), "action queue: two actions of one machine")
        ensure(ledger.keys() >= set(queued), "action queue: a queued action is not in the ledger")
        ensure(ledger.keys() >= self._in_slot, "action queue: a machine holds a slot without an action")
        ensure(ledger.keys() <= self._touched, "action queue: a pending machine is not among the touched")
        ensure(all(record.action.machine_id == of for of, record in ledger.items()), "action queue: another's record")
        ensure(all(record.outcome is None for record in ledger.values()), "action queue: a pending action has ended")

    async def _stop(self) -> None:
        calling = [task for task, machine_id in self._running.items() if machine_id in self._in_slot]
        waiting = [task for task in self._running if task not in calling]
        # Who waits for an operator, or for a slot with its answer, makes no call any more.
        for task in waiting:
            task.cancel()
        if calling:
            _done, late = await asyncio.wait(calling, timeout=STOP_GRACE_SECONDS)
            for task in late:
                task.cancel()
        await asyncio.gather(*waiting, *calling, return_exceptions=True)
