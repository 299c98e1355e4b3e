"""Queues decided actions and runs a bounded number of them at the same time.

docs/spec/shard.md §8. The cycle never waits for it: an action that finds no room is dropped, and the next cycle decides
it again. `action_ledger` tracks which machine has an action, `action_slots` limits how many run, `executors` has their
steps.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import structlog
from prometheus_client import Counter as PrometheusCounter

from bigfleet.engine.decision import Action
from bigfleet.model.clock import Clock
from bigfleet.model.ids import MachineId
from bigfleet.model.validation import ensure
from bigfleet.shard.actuation.action_ledger import ActionLedger
from bigfleet.shard.actuation.action_slots import ActionSlots
from bigfleet.shard.actuation.action_states import REQUIRED_STATE
from bigfleet.shard.inventory.inventory import Inventory, InventoryRefusal
from bigfleet.shard.metrics import ShardMetrics
from bigfleet.shard.outcomes import REDRIVE_LABEL, ActionOutcome, ActionRecord
from bigfleet.shard.ports import ShardSettings
from bigfleet.shard.safety_limits import Disposition

_log = structlog.get_logger("bigfleet.shard.actuation.action_queue")

#: Seconds that running provider calls get when the process stops.
STOP_GRACE_SECONDS = 10.0
#: Suppressed actions that are audited before other tasks get their turn, some milliseconds of work.
SUPPRESSED_PER_TURN_MAX = 200

Executor = Callable[[ActionRecord], Awaitable[ActionOutcome]]


@dataclass(slots=True)
class EnqueueCounts:
    """What became of one cycle's actions."""

    enqueued: int = 0
    deduped: int = 0
    dropped: int = 0
    refused: int = 0


class Actuator:
    """Carries out actions, each in its own task, each in a slot.

    Invariant: what is queued is in the ledger.
    """

    def __init__(
        self,
        *,
        settings: ShardSettings,
        inventory: Inventory,
        metrics: ShardMetrics,
        clock: Clock,
        ledger: ActionLedger,
        slots: ActionSlots,
        execute: Executor,
        is_backed_off: Callable[[Action], bool],
    ) -> None:
        self._settings = settings
        self._inventory = inventory
        self._metrics = metrics
        self._clock = clock
        self._ledger = ledger
        self._slots = slots
        self._execute = execute
        self._is_backed_off = is_backed_off
        self._queue: deque[ActionRecord] = deque()
        self._queue_max = 2 * settings.execute_concurrency_max
        #: As many actions as are worth handing to `enqueue`: some may have become moot since they were decided.
        self.candidates_max = 4 * self._queue_max
        self._arrived = asyncio.Event()
        self._running: dict[asyncio.Task[None], MachineId] = {}

    # ---- decided actions ----------------------------------------------------------------------------------------

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
        noted = actions if self._ledger.is_audited else actions[-self._settings.action_history_max :]
        for position, action in enumerate(noted):
            if position and position % SUPPRESSED_PER_TURN_MAX == 0:
                await self._clock.sleep(0)
            self._ledger.set_aside(self._ledger.record(action, cycle), disposition)

    def _suppressed_counter(self, disposition: Disposition) -> PrometheusCounter:
        metrics = self._metrics
        return metrics.actions_suppressed if disposition is Disposition.SUPPRESSED else metrics.actions_dry_run

    def redrive(self, action: Action, cycle: int, disposition: Disposition) -> ActionRecord | None:
        """Queue an action as a re-drive of the transition that it names, or set it aside; None when there is no room.

        docs/spec/shard.md §9.5. The machine must not be pending.
        """
        assert not self._ledger.is_pending(action.machine_id), "a machine has at most one action in flight"
        executes = disposition is Disposition.EXECUTE
        if executes and len(self._queue) >= self._queue_max:
            return None
        record = self._ledger.record(action, cycle)
        record.is_redrive = True
        if not executes:
            self._suppressed_counter(disposition).labels(REDRIVE_LABEL).inc()
            self._ledger.set_aside(record, disposition)
            return record
        self._put(record)
        self._metrics.redrives.labels(action.kind.label).inc()
        self._metrics.queue_depth.set(len(self._queue))
        self._arrived.set()
        return record

    def _put(self, record: ActionRecord) -> None:
        self._ledger.put(record)
        self._queue.append(record)

    def enqueue(self, actions: tuple[Action, ...], cycle: int) -> EnqueueCounts:
        """Queue what is still applicable; never waits (docs/spec/shard.md §8)."""
        counts = EnqueueCounts()
        for position, action in enumerate(actions):
            if len(self._queue) >= self._queue_max:
                # Of what finds no room it does not matter whether it would have been applicable.
                counts.dropped = len(actions) - position
                break
            if self._ledger.is_pending(action.machine_id) or not self._is_applicable(action):
                counts.deduped += 1
            elif self._is_backed_off(action):
                counts.refused += 1
            else:
                self._put(self._ledger.record(action, cycle))
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
                    self._slots.give_back()
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

    async def _run_in_slot(self, record: ActionRecord) -> None:
        machine_id = record.action.machine_id
        self._slots.hold(machine_id)
        self._ledger.start(record)
        outcome, message = ActionOutcome.TRANSITION_ERROR, ""
        try:
            outcome = await self._execute(record)
        except asyncio.CancelledError:
            outcome = ActionOutcome.CTX_CANCELED
            raise
        except InventoryRefusal as refusal:
            message = str(refusal)
        except Exception as error:  # one action's defect must not end the others
            message = f"{type(error).__name__}: {error}"
            _log.exception("action.failed", kind=record.kind_label, machine=machine_id)
        finally:
            last = self._ledger.take_out(record)
            last.message = message or last.message
            self._slots.release(machine_id)
            self._ledger.conclude(last, outcome)

    def validate(self) -> None:
        """Compare the ledger with the queue and the slots. Raises InvariantBroken."""
        pending, queued = self._ledger.pending_actions.keys(), [record.action.machine_id for record in self._queue]
        ensure(len(queued) == len(set(queued)), "action queue: two actions of one machine")
        ensure(pending >= set(queued), "action queue: a queued action is not in the ledger")
        ensure(pending >= self._slots.held, "action queue: a machine holds a slot without an action")
        self._ledger.validate()

    async def _stop(self) -> None:
        calling = [task for task, machine_id in self._running.items() if machine_id in self._slots.held]
        waiting = [task for task in self._running if task not in calling]
        # Who waits for an operator, or for a slot with its answer, makes no call any more.
        for task in waiting:
            task.cancel()
        if calling:
            _done, late = await asyncio.wait(calling, timeout=STOP_GRACE_SECONDS)
            for task in late:
                task.cancel()
        await asyncio.gather(*waiting, *calling, return_exceptions=True)
