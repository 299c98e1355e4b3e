"""Implements what an administrator may do to a running provider: inspect, recover failed machines, accept losses.

docs/spec/provider.md §13, §14. Each change is one audit line: who, what, before, after. Only the rules named here can
be bypassed. Stopping a machine that may serve always needs a second confirmation.
"""

from collections.abc import Mapping
from typing import Any

import structlog

from bigfleet.model.clock import NANOS_PER_SECOND, Clock
from bigfleet.model.states import MachineState
from bigfleet.provider.backend import Host
from bigfleet.provider.inventory.reconcile import InventoryReconciler
from bigfleet.provider.metrics import ProviderMetrics
from bigfleet.provider.operations.admission import Admissions
from bigfleet.provider.operations.invoke import BackendAdapter, DeadlinePassed, within
from bigfleet.provider.operations.operation_runner import OperationRunner
from bigfleet.provider.operations.recovery import Recovery
from bigfleet.provider.records.lifecycle import recovered_serving, recovered_slot, recovered_with_host
from bigfleet.provider.records.quarantine import FactsQuarantine
from bigfleet.provider.records.record import Record
from bigfleet.provider.records.reset import unbound
from bigfleet.provider.storage.ledger import Change, Ledger

_log = structlog.get_logger("bigfleet.provider.kit.administration")

#: Machines and ids that one answer names; the counts beside them are whole.
LISTED_MAX = 1000
#: Of the backend's part in a recovery: the command waits 30 s for its answer.
MARK_SECONDS_MAX = 20.0
TARGETS = {
    "speculative": MachineState.SPECULATIVE,
    "idle": MachineState.IDLE,
    "configured": MachineState.CONFIGURED,
}


class AdminRefused(Exception):
    """The command is rejected; the text gives the reason and the remedy."""


class Administration:
    """One provider's admin commands. Call it on the core's loop."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        work: OperationRunner,
        admissions: Admissions,
        reconciler: InventoryReconciler,
        quarantine: FactsQuarantine,
        clock: Clock,
        metrics: ProviderMetrics,
        adapter: BackendAdapter,
        recovery: Recovery,
    ) -> None:
        self._ledger = ledger
        self._work = work
        self._admissions = admissions
        self._reconciler = reconciler
        self._quarantine = quarantine
        self._clock = clock
        self._metrics = metrics
        self._adapter = adapter
        self._recovery = recovery

    def status(self, who: str) -> dict[str, Any]:
        """Return counts by state, the failed machines with age and error, the brake with its ids, the store."""
        view, braked = self._ledger.view, self._reconciler.braked
        now = self._clock.unix_nanos()
        failed = sorted(view.of_state(MachineState.FAILED), key=lambda r: (r.state_since_unix_nanos, r.id))
        _audit(who, "status", None, None)
        return {
            "machines": {
                state.name: total
                for state in MachineState
                if (total := sum(n for (s, _type), n in view.counts.items() if s is state))
            },
            "failed": [
                {
                    "machine_id": record.id,
                    "cluster": record.machine.cluster,
                    "host": record.machine.host.ref,
                    "seconds": (now - record.state_since_unix_nanos) // NANOS_PER_SECOND,
                    "error": record.machine.last_error,
                    "recovery": self._recovery.failing(record.id),
                }
                for record in failed[:LISTED_MAX]
            ],
            "brake": {
                "engaged": braked is not None,
                "held": len(braked.effects) if braked else 0,
                "losses": [
                    {"machine_id": machine_id, "effect": effect.value}
                    for machine_id, effect in list(braked.effects.items() if braked else ())[:LISTED_MAX]
                ],
            },
            "quarantined": len(self._quarantine.faults),
            "store": {
                "is_up": self._ledger.is_up,
                "bytes": self._ledger.size_bytes(),
                "revision": view.head,
                "tombstones": view.tombstone_count,
                "incarnation": view.incarnation.hex(),
            },
        }

    def quarantine(self, who: str) -> list[dict[str, str]]:
        """Return the refused facts, by id."""
        _audit(who, "quarantine", None, None)
        return [
            {"id": machine_id, "reason": fault.reason.value, "text": fault.text}
            for machine_id, fault in sorted(self._quarantine.faults.items())[:LISTED_MAX]
        ]

    def accept_losses(self, who: str) -> list[str]:
        """Apply the losses that the brake holds back; return their ids. Raises AdminRefused without a brake."""
        machine_ids = self._reconciler.accept_losses()
        if not machine_ids:
            raise AdminRefused("the brake is not engaged: there are no losses to accept")
        _audit(who, "accept-losses", {"held": len(machine_ids)}, {"held": 0})
        return list(machine_ids)

    async def reset_cursors(self, who: str) -> dict[str, str]:
        """Give the store a new incarnation, so that every reader starts again. Raises StoreDown."""
        before = self._ledger.view.incarnation.hex()
        await self._ledger.reset_cursors()
        after = self._ledger.view.incarnation.hex()
        _audit(who, "reset-cursors", {"incarnation": before}, {"incarnation": after})
        return {"before": before, "after": after}

    async def recover(self, who: str, machine_id: str, target: str, *, is_out_of_service: bool) -> dict[str, str]:
        """Bring a FAILED machine to a resting state, on a person's word for what is there.

        `is_out_of_service` gives up a binding: the backend marks the host as out of service first. Raises AdminRefused,
        and StoreDown when nothing was committed.
        """
        state = TARGETS.get(target)
        if state is None:
            raise AdminRefused(f"{target!r} is no state to recover to; choose {', '.join(TARGETS)}")
        # Before the turn: with some backends all machines share one, and the backend may take seconds.
        marked = self._checked(
            self._ledger.view.get(machine_id), machine_id, state, is_out_of_service=is_out_of_service
        )
        if is_out_of_service and state is not MachineState.CONFIGURED:
            await self._mark_out_of_service(marked)
        async with self._ledger.turn(machine_id) as current:
            record = self._checked(current, machine_id, state, is_out_of_service=is_out_of_service)
            if record.state_revision != marked.state_revision:
                raise AdminRefused(f"{machine_id} changed during the command; check it, then repeat the command")
            recovered = self._recovered(record, state)
            change = self._admissions.settled(Change(record=recovered), record, recovered.state)
            committed = await self._ledger.commit(change)
            self._admissions.committed(change)
        self._metrics.recoveries.labels("admin", target).inc()
        after = "removed" if committed is None else _shown(committed)
        _audit(who, "recover", _shown(record), after, machine_id=machine_id)
        return {"machine_id": machine_id, "before": record.state.name, "after": state.name}

    async def _mark_out_of_service(self, record: Record) -> None:
        """Let the backend remove its own mark that the host serves a cluster. Raises AdminRefused if it does not."""
        machine, marks = record.machine, self._adapter.marks
        if marks is None or not machine.host.is_present:
            return
        if self._ledger.view.hosts.others(record.id, machine.host.ref):
            # The mark is that of the other machine, which may serve.
            return
        call = self._adapter.call(marks.mark_out_of_service, machine, on_late=lambda _result: None)
        try:
            # A second removal could meet the mark of the next Configure.
            with self._work.busy(record.id):
                await within(call, MARK_SECONDS_MAX, self._work.watch_abandoned(record.id))
        except Exception as error:  # the inventory would show the host in its cluster again
            is_late = isinstance(error, DeadlinePassed)
            cause = f"no answer in {MARK_SECONDS_MAX:g} s" if is_late else f"{type(error).__name__}: {error}"
            raise AdminRefused(
                f"the backend did not mark host {machine.host.ref} of {record.id} as out of service: {cause}; "
                "the machine is still FAILED, repeat the command"
            ) from error

    def _checked(
        self, record: Record | None, machine_id: str, state: MachineState, *, is_out_of_service: bool
    ) -> Record:
        """Return the record of a machine that may be recovered. Raises AdminRefused."""
        if record is None:
            raise AdminRefused(f"no machine {machine_id!r}")
        fault = self._fault(record, state, is_out_of_service=is_out_of_service)
        if fault is not None:
            raise AdminRefused(fault)
        return record

    def _fault(self, record: Record, state: MachineState, *, is_out_of_service: bool) -> str | None:
        machine = record.machine
        if record.state is not MachineState.FAILED:
            return f"{record.id} is {record.state.name}: only a FAILED machine is recovered"
        if self._work.is_busy(record.id):
            return f"a backend call for {record.id} is still under way; try again when it ended"
        if state is MachineState.CONFIGURED and not machine.cluster:
            return f"{record.id} is bound to no cluster: it cannot become CONFIGURED"
        if state is not MachineState.SPECULATIVE and not machine.host.is_present:
            return f"{record.id} has no host: it can become speculative only"
        if machine.cluster and state is not MachineState.CONFIGURED and not is_out_of_service:
            return (
                f"{record.id} is bound to cluster {machine.cluster} and may run pods there; "
                "make sure that it does not, then add --confirm-out-of-service"
            )
        return None

    def _recovered(self, record: Record, state: MachineState) -> Record:
        now = self._clock.unix_nanos()
        if state is MachineState.SPECULATIVE:
            return recovered_slot(record, now)
        ref, provider = record.machine.host.ref, record.machine.host.provider
        if state is MachineState.IDLE:
            host = Host(ref=ref, node_name=record.host_node_name, price_usd_per_hour=record.declared_price_usd_per_hour)
            return unbound(record, recovered_with_host(record, host, provider, now), self._adapter.reset)
        return recovered_serving(record, Host(ref=ref), provider, now)


def _shown(record: Record) -> dict[str, str]:
    machine = record.machine
    return {
        "state": record.state.name,
        "host": machine.host.ref,
        "cluster": machine.cluster,
        "error": machine.last_error,
    }


def _audit(
    who: str,
    what: str,
    before: Mapping[str, object] | str | None,
    after: Mapping[str, object] | str | None,
    *,
    machine_id: str | None = None,
) -> None:
    named = {} if machine_id is None else {"machine_id": machine_id}
    _log.info("admin.command_executed", who=who, what=what, before=before, after=after, **named)
