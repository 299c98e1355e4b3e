"""Adapts a running shard to the handover: reads inventory, starts drains, inserts and removes machines.

docs/spec/coordinator.md §9.3, H2 to H4 and H7; the Protocol is `bigfleet.shard.ownership.handover.HandoverHost`.
Candidates are found by shape, so the cost of a query grows with the machines that match and not with the fleet. Nothing
here decides which shard owns a machine.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence, Set
from typing import TypeVar

import numpy as np

from bigfleet.engine.columns.store import REMOVED, ColumnSnapshot
from bigfleet.engine.decision import RECLAIM_GRACE_SECONDS, Action, ActionKind
from bigfleet.model.clock import Clock
from bigfleet.model.ids import ClusterId, IdSource, MachineId
from bigfleet.model.instructions import Selector
from bigfleet.model.machine import Machine
from bigfleet.model.ownership import Domain
from bigfleet.model.states import MachineState
from bigfleet.shard.actuation.action_ledger import ActionLedger
from bigfleet.shard.actuation.action_queue import Actuator
from bigfleet.shard.audit.log import Audit
from bigfleet.shard.inventory.ingest import Ingest
from bigfleet.shard.inventory.inventory import Inventory
from bigfleet.shard.inventory.machine_shapes import MachineRows
from bigfleet.shard.outcomes import COORDINATOR_REASON, REFUSAL_OUTCOMES, ActionOutcome, ActionRecord
from bigfleet.shard.ownership.donor_selection import DonorCandidate, matches
from bigfleet.shard.ports import ListedMachine, Provider, ProviderRefusal, RefusalKind, ShardSettings, TokenSource

T = TypeVar("T")


class ShardHandoverHost:
    """The parts of one shard that a handover works on."""

    def __init__(
        self,
        *,
        settings: ShardSettings,
        inventory: Inventory,
        ingest: Ingest,
        ledger: ActionLedger,
        actuator: Actuator,
        provider: Provider,
        tokens: TokenSource,
        audit: Audit,
        clock: Clock,
        ids: IdSource,
        is_ready: Callable[[], bool],
        claimed: Callable[[], Set[MachineId]],
        unjoined: Callable[[], Set[str]],
        widened: Callable[[], None],
    ) -> None:
        """`tokens` are those of all calls of this process. `claimed`: what the last decision took for a row."""
        self._settings = settings
        self._inventory = inventory
        self._ingest = ingest
        self._ledger = ledger
        self._actuator = actuator
        self._provider = provider
        self._tokens = tokens
        self._audit = audit
        self._clock = clock
        self._ids = ids
        self._is_ready = is_ready
        self._claimed = claimed
        self._unjoined = unjoined
        self._widened = widened

    @property
    def pause(self) -> str:
        """Why no call may be made now; empty when calls are made."""
        if self._settings.actuation_paused:
            return "actuation is paused"
        if self._settings.dry_run:
            return "this is a dry run"
        return "" if self._is_ready() else "the inventory was not read yet"

    def machine(self, machine_id: MachineId) -> Machine | None:
        """Return a machine of the inventory."""
        return self._inventory.get(machine_id)

    def is_busy(self, machine_id: MachineId) -> bool:
        """Return whether an action of the machine waits or runs."""
        return self._ledger.is_pending(machine_id)

    def giveable(self, state: MachineState, selector: Selector) -> Sequence[DonorCandidate]:
        """Return what a selector means of the unbound machines of a state, without busy ones and claimed ones."""
        claimed = self._claimed()
        return [
            DonorCandidate(machine, self._inventory.idle_since_seconds(machine.id) or 0.0)
            for machine in self._fitting(state, lambda machine: matches(selector, machine))
            if not machine.cluster and machine.id not in claimed
        ]

    def drainable(self, selector: Selector) -> Sequence[Machine]:
        """Return what a selector means of the Configured machines that have joined and are not busy."""
        unjoined = self._unjoined()
        return [
            machine
            for machine in self._fitting(MachineState.CONFIGURED, lambda machine: matches(selector, machine))
            if machine.id not in unjoined
        ]

    def lying_in(self, domain: Domain) -> Sequence[MachineId]:
        """Return the machines of the inventory whose attribute has the domain's value."""
        view = self._inventory.snapshot()
        rows = np.flatnonzero(view.columns.state != REMOVED)
        key, value = domain
        return [view.ids[row] for row in self._of_shapes(view, rows, lambda machine: machine.attribute(key) == value)]

    def has_none_in(self, domain: Domain) -> bool:
        """Return whether the inventory has machines, and none with the domain's value."""
        return len(self._inventory) > 0 and not self.lying_in(domain)

    def _fitting(self, state: MachineState, fits: Callable[[Machine], bool]) -> Iterable[Machine]:
        """Yield the machines of a state whose shape fits, those without an action, by id."""
        view = self._inventory.snapshot()
        for row in self._of_shapes(view, np.flatnonzero(view.columns.state == state), fits):
            machine_id = view.ids[row]
            machine = None if self._ledger.is_pending(machine_id) else self._inventory.get(machine_id)
            if machine is not None:
                yield machine

    def _of_shapes(self, view: ColumnSnapshot, rows: MachineRows, fits: Callable[[Machine], bool]) -> list[int]:
        """Return those of some rows whose shape fits; one machine of each shape is asked."""
        shapes, firsts = np.unique(view.columns.shape[rows], return_index=True)
        fitting = [
            int(shape)
            for shape, first in zip(shapes, firsts, strict=True)
            if (machine := self._inventory.get(view.ids[int(rows[first])])) is not None and fits(machine)
        ]
        return [int(row) for row in rows[np.isin(view.columns.shape[rows], fitting)]]

    async def fence_machine(self, machine_id: MachineId, instruction_id: str) -> None:
        """Move the provider's mark of this machine past every token of an older process. Raises ProviderRefusal."""
        token = self._tokens.next()
        action = Action(
            kind=ActionKind.RECLAIM,
            machine_id=machine_id,
            cluster=ClusterId(""),
            reason=COORDINATOR_REASON + instruction_id,
            grace_seconds=RECLAIM_GRACE_SECONDS,
        )
        record = ActionRecord(
            action_id=self._ids.new_id(),
            action=action,
            decided_cycle=self._ledger.cycle,
            decided_unix_nanos=self._clock.unix_nanos(),
            is_fence_touch=True,
            token_sequence=token.sequence,
            started_seconds=self._clock.monotonic_seconds(),
            outcome=ActionOutcome.CTX_CANCELED,
        )
        try:
            ack = await self._answered(self._provider.drain(machine_id, RECLAIM_GRACE_SECONDS, token))
            record.outcome, record.operation_id = ActionOutcome.SUCCESS, ack.operation_id
        except ProviderRefusal as refusal:
            # That it does not apply is what it is for.
            record.outcome, record.message = REFUSAL_OUTCOMES.get(refusal.kind, ActionOutcome.NOOP), str(refusal)
            raise
        finally:
            record.finished_unix_nanos = self._clock.unix_nanos()
            record.seconds = self._clock.monotonic_seconds() - record.started_seconds
            self._audit.note(record)

    async def get(self, machine_id: MachineId) -> ListedMachine:
        """Return the provider's word on a machine. Raises ProviderRefusal."""
        return await self._answered(self._provider.get(machine_id))

    async def _answered(self, call: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._settings.execute_timeout_seconds):
                return await call
        except TimeoutError:
            text = f"no answer within {self._settings.execute_timeout_seconds:g} s"
            raise ProviderRefusal(RefusalKind.UNKNOWN_OUTCOME, text) from None

    def preempt(self, actions: Sequence[Action]) -> None:
        """Queue drains; what finds no room is not busy afterwards."""
        self._actuator.enqueue(tuple(actions), self._ledger.cycle)

    def remove(self, machine_ids: Iterable[MachineId]) -> None:
        """Take machines out of the inventory; they are not gone, they are no longer ours."""
        for machine_id in machine_ids:
            if machine_id in self._inventory:
                self._ingest.drop(machine_id)

    def add(self, machines: Iterable[Machine]) -> None:
        """Put machines into the inventory, those that are not known there and pass its screen."""
        for machine in machines:
            if machine.id not in self._inventory and machine.state in (MachineState.IDLE, MachineState.SPECULATIVE):
                self._ingest.observe(ListedMachine(machine, {}))

    def widened(self) -> None:
        """Read the whole inventory in the next cycle, and start that cycle soon: more is ours than before."""
        self._widened()
