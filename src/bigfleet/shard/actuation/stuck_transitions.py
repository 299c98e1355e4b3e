"""Detects transitions that never finish, re-drives each once, and then reports it as stuck.

docs/spec/shard.md §9.5. Checked on timer cycles. The age is measured on the monotonic clock from when this process
first saw the machine in its state. A machine stays in its state until its provider reports another one; its row is
served by others meanwhile (docs/adr/0249-rows-are-not-held-by-stuck-machines.md).
"""

from collections import Counter
from dataclasses import dataclass
from typing import Final

import numpy as np
import structlog

from bigfleet.engine.columns.store import ColumnSnapshot
from bigfleet.engine.decision import RECLAIM_GRACE_SECONDS, Action, ActionKind, Preemptor
from bigfleet.model.clock import Clock
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.states import TRANSITIONAL_STATES, MachineState
from bigfleet.shard import safety_limits
from bigfleet.shard.actuation.action_ledger import ActionLedger
from bigfleet.shard.actuation.action_queue import Actuator
from bigfleet.shard.actuation.stockouts import Stockouts
from bigfleet.shard.inventory.fleet_queries import MachineQuery, find
from bigfleet.shard.inventory.inventory import Inventory
from bigfleet.shard.outcomes import ActionOutcome, ActionRecord
from bigfleet.shard.ports import ShardSettings
from bigfleet.shard.sessions.registry import Sessions

REDRIVE_REASON = "shard.redrive"
#: Most machines that others replace at a time: a share of the Configured ones, and at least so many. When a provider
#: ends nothing at all, it gets no second order for everything.
REPLACED_FRACTION: Final = 0.05
REPLACED_MIN: Final = 10
_ON_THE_WAY = MachineQuery(states=frozenset(state.value for state in TRANSITIONAL_STATES))
_KINDS = {
    MachineState.CREATING: ActionKind.PROVISION,
    MachineState.CONFIGURING: ActionKind.BOOTSTRAP,
    MachineState.DRAINING: ActionKind.RECLAIM,
    MachineState.DELETING: ActionKind.DELETE,
}

_log = structlog.get_logger("bigfleet.shard.actuation.stuck_transitions")


@dataclass(slots=True)
class _Stay:
    """One stay of a machine in a transitional state."""

    state: MachineState
    #: Distinguishes this stay from an earlier one in the same state.
    entered_unix_nanos: int
    seen_seconds: float
    #: Its one re-drive; None before it, and after one for which the provider took no calls.
    redrive: ActionRecord | None = None
    #: Its re-drive is over and changed nothing.
    is_stuck: bool = False
    #: It is Creating or Configuring, and not for want of an operator: another machine would come sooner.
    is_no_supply: bool = False


class StuckTransitions:
    """Remembers how long machines have been on their way.

    Invariant: one stay of all and only the machines that were in a transitional state at the last look.
    """

    def __init__(
        self, settings: ShardSettings, inventory: Inventory, sessions: Sessions, stockouts: Stockouts, clock: Clock
    ) -> None:
        """`stockouts` hears of each machine that is no supply any more, once for each stay."""
        self._bound_seconds = {
            MachineState.CREATING: settings.stuck_creating_seconds,
            MachineState.CONFIGURING: settings.stuck_configuring_seconds,
            MachineState.DRAINING: settings.stuck_draining_margin_seconds,
            MachineState.DELETING: settings.stuck_deleting_seconds,
        }
        self._disposition = safety_limits.disposition(paused=settings.actuation_paused, dry_run=settings.dry_run)
        self._inventory = inventory
        self._sessions = sessions
        self._stockouts = stockouts
        self._clock = clock
        self._stays: dict[MachineId, _Stay] = {}
        #: The grace in seconds of each drain that this process began, while the machine is Draining.
        self._grace_seconds: dict[MachineId, int] = {}

    def note_drain(self, machine_id: MachineId, grace_seconds: int) -> None:
        """A drain began: its machine may take that much longer."""
        self._grace_seconds[machine_id] = grace_seconds

    def is_stuck(self, machine_id: MachineId) -> bool:
        """Return whether the machine was driven again and is still where it was."""
        stay = self._stays.get(machine_id)
        return stay is not None and stay.is_stuck and self._goes_on(machine_id, stay)

    def stuck(self) -> frozenset[MachineId]:
        """Return the machines that are stuck now."""
        return frozenset(machine_id for machine_id in self._stays if self.is_stuck(machine_id))

    def is_no_supply(self, machine_id: MachineId) -> bool:
        """Return whether its row has to be served by others: it is stuck on its way to its cluster."""
        stay = self._stays.get(machine_id)
        return stay is not None and stay.is_no_supply and self.is_stuck(machine_id)

    def no_supply(self) -> frozenset[MachineId]:
        """Return the machines whose rows have to be served by others."""
        return frozenset(machine_id for machine_id in self._stays if self.is_no_supply(machine_id))

    def look(
        self, snapshot: ColumnSnapshot, ledger: ActionLedger, actuator: Actuator, cycle: int, *, may_call: bool
    ) -> None:
        """Drive again what is over its bound: a timer cycle's business, on the snapshot that it has just taken.

        Without `may_call` the provider backs off: nothing is driven again before that is over.
        """
        now_seconds = self._clock.monotonic_seconds()
        stays: dict[MachineId, _Stay] = {}
        for row in find(snapshot, _ON_THE_WAY).tolist():
            machine = self._inventory.get(snapshot.ids[row])
            if machine is None or machine.state not in TRANSITIONAL_STATES:
                continue
            stay = stays[machine.id] = self._stay(machine, now_seconds)
            if ledger.is_pending(machine.id):
                continue
            if stay.redrive is not None and stay.redrive.outcome is ActionOutcome.REFUSED:
                stay.redrive = None
            if stay.redrive is None:
                if may_call and now_seconds - stay.seen_seconds > self._allowed_seconds(machine):
                    # Without room in the queue the next timer cycle tries.
                    stay.redrive = actuator.redrive(_again(machine), cycle, self._disposition)
            elif not stay.is_stuck:
                stay.is_stuck = True
                advice = "inspect it at the provider; its state changes only when the provider reports another one"
                _log.warning("machine.got_stuck", machine=machine.id, state=machine.state.label, advice=advice)
        self._stays = stays
        self._judge_supply(snapshot)
        self._grace_seconds = {
            machine_id: seconds
            for machine_id, seconds in self._grace_seconds.items()
            if machine_id in stays and stays[machine_id].state is MachineState.DRAINING
        }
        counts = Counter(stays[machine_id].state for machine_id in self.stuck())
        for state in TRANSITIONAL_STATES:
            self._stockouts.metrics.machines_stuck.labels(state.label).set(counts[state])

    def _judge_supply(self, snapshot: ColumnSnapshot) -> None:
        """Let others serve the rows of machines that are stuck on their way, within the limit."""
        stuck = [(stay.seen_seconds, machine_id) for machine_id, stay in self._stays.items() if stay.is_stuck]
        if not stuck:
            return
        serving = int(np.count_nonzero(snapshot.columns.state == MachineState.CONFIGURED))
        left = max(REPLACED_MIN, int(REPLACED_FRACTION * serving)) - len(self.no_supply())
        for _, machine_id in sorted(stuck):
            machine, stay = self._inventory.get(machine_id), self._stays[machine_id]
            if left <= 0 or machine is None or stay.is_no_supply:
                continue
            is_configuring = machine.state is MachineState.CONFIGURING
            if machine.state is MachineState.CREATING or (is_configuring and self._sessions.of(machine.cluster)):
                stay.is_no_supply = True
                left -= 1
                self._stockouts.stuck(machine)

    def _stay(self, machine: Machine, now_seconds: float) -> _Stay:
        stay = self._stays.get(machine.id)
        if stay is not None and self._goes_on(machine.id, stay):
            return stay
        return _Stay(machine.state, self._inventory.state_since_unix_nanos(machine.id), now_seconds)

    def _goes_on(self, machine_id: MachineId, stay: _Stay) -> bool:
        machine = self._inventory.get(machine_id)
        return (
            machine is not None
            and machine.state is stay.state
            and self._inventory.state_since_unix_nanos(machine_id) == stay.entered_unix_nanos
        )

    def _allowed_seconds(self, machine: Machine) -> float:
        seconds = self._bound_seconds[machine.state]
        if machine.state is MachineState.DRAINING:
            # A drain that another process began may have any grace; none is longer than a reclaim's.
            seconds += self._grace_seconds.get(machine.id, RECLAIM_GRACE_SECONDS)
        return seconds


def _again(machine: Machine) -> Action:
    """Return the action that a re-drive repeats."""
    preemptor = machine.preempted_for
    return Action(
        kind=ActionKind.PREEMPT if preemptor is not None else _KINDS[machine.state],
        machine_id=machine.id,
        cluster=machine.cluster or machine.intended_cluster,
        reason=REDRIVE_REASON,
        preemptor=Preemptor(*preemptor) if preemptor is not None else None,
    )
