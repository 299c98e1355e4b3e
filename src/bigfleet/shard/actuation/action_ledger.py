"""Records actions: assigns ids, tracks which machine has a queued or running action, and audits how each ended.

docs/spec/shard.md §8. A machine has at most one action in flight. Every part that acts on a machine checks here first.
It never begins or ends an action by itself.
"""

from collections import deque
from collections.abc import Mapping

import structlog

from bigfleet.engine.decision import Action
from bigfleet.model.clock import Clock
from bigfleet.model.ids import IdSource, MachineId
from bigfleet.model.validation import ensure
from bigfleet.shard.audit.log import Audit
from bigfleet.shard.inventory.inventory import Inventory
from bigfleet.shard.metrics import ShardMetrics
from bigfleet.shard.outcomes import ActionOutcome, ActionRecord
from bigfleet.shard.ports import ShardSettings
from bigfleet.shard.safety_limits import Disposition

_log = structlog.get_logger("bigfleet.shard.actuation.action_ledger")


class ActionLedger:
    """The actions of one shard process.

    Invariants: `pending_actions` are all and only those that wait or run; `history` holds the newest records.
    """

    def __init__(
        self,
        *,
        inventory: Inventory,
        metrics: ShardMetrics,
        clock: Clock,
        ids: IdSource,
        audit: Audit,
        settings: ShardSettings,
    ) -> None:
        self._inventory = inventory
        self._metrics = metrics
        self._clock = clock
        self._ids = ids
        self._audit = audit
        self._pending: dict[MachineId, ActionRecord] = {}
        #: The pending machines are always among them.
        self._touched: set[MachineId] = set()
        #: The cycle in which actions that start now are executed.
        self.cycle = 0
        #: Newest last, running ones included.
        self.history: deque[ActionRecord] = deque(maxlen=settings.action_history_max)

    # ---- what waits or runs -------------------------------------------------------------------------------------

    @property
    def pending_actions(self) -> Mapping[MachineId, ActionRecord]:
        """The actions that wait or run, by machine; a live view."""
        return self._pending

    def is_pending(self, machine_id: str) -> bool:
        """Return whether an action of this machine waits or runs."""
        return machine_id in self._pending

    def pending(self, machine_id: str) -> ActionRecord | None:
        """Return the action of this machine that waits or runs, or None."""
        return self._pending.get(MachineId(machine_id))

    def in_flight(self) -> frozenset[MachineId]:
        """Return the machines whose action waits or runs."""
        return frozenset(self._pending)

    def begin_view(self) -> None:
        """Remember from now on which machines are pending at any time: a List is about to be sent."""
        self._touched = set(self._pending)

    def touched(self) -> frozenset[MachineId]:
        """Return the machines that are pending or were at any time since `begin_view`."""
        return frozenset(self._touched)

    def was_pending_since_view(self, machine_id: str) -> bool:
        """Return whether the machine was pending at any time since `begin_view`; such a view may predate the call."""
        return machine_id in self._touched

    # ---- the course of one action -------------------------------------------------------------------------------

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

    @property
    def is_audited(self) -> bool:
        """Whether there is an audit log."""
        return self._audit.is_on

    def set_aside(self, record: ActionRecord, disposition: Disposition) -> None:
        """Audit an action that a pause or a dry run suppresses."""
        record.disposition = disposition.value
        record.finished_unix_nanos = record.decided_unix_nanos
        self._audit.note(record)

    def put(self, record: ActionRecord) -> None:
        """Let an action wait: its machine is pending from here on."""
        machine_id = record.action.machine_id
        self._pending[machine_id] = record
        self._touched.add(machine_id)

    def start(self, record: ActionRecord) -> None:
        """Note that an action begins to be executed."""
        record.executed_cycle = self.cycle
        record.started_seconds = self._clock.monotonic_seconds()

    def follow_up(self, record: ActionRecord, action: Action) -> ActionRecord:
        """Let an action that has succeeded go on as another one: same machine, ledger entry and slot, own record."""
        assert action.machine_id == record.action.machine_id, "a ledger entry is about one machine"
        following = self.record(action, record.decided_cycle)
        self.start(following)
        self._pending[action.machine_id] = following
        self._metrics.actions.labels(action.kind.label).inc()
        self.conclude(record, ActionOutcome.SUCCESS)
        return following

    def take_out(self, record: ActionRecord) -> ActionRecord:
        """End a machine's entry; return the action that it names, which is another one after a follow-up."""
        return self._pending.pop(record.action.machine_id, record)

    def conclude(self, record: ActionRecord, outcome: ActionOutcome) -> None:
        """Note how an action ended; count and audit it."""
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
        """Compare the entries with each other. Raises InvariantBroken."""
        pending = self._pending
        ensure(pending.keys() <= self._touched, "action ledger: a pending machine is not among the touched")
        ensure(all(record.action.machine_id == of for of, record in pending.items()), "action ledger: another's record")
        ensure(all(record.outcome is None for record in pending.values()), "action ledger: a pending action has ended")
