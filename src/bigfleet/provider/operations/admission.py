"""Requests admission from backends whose slots share capacity, and adds the answer to the change.

docs/spec/provider.md §3 step 10, §16. The ledger gives such a backend one turn at a time, so an answer is committed to
the view that it was computed from. An answer must never touch a machine that is in use.
"""

import dataclasses

import structlog

from bigfleet.model.clock import Clock
from bigfleet.model.states import MachineState
from bigfleet.provider.backend import Admission, Refusal
from bigfleet.provider.operations.invoke import BackendAdapter
from bigfleet.provider.records.kinds import Kind
from bigfleet.provider.records.lifecycle import new_record
from bigfleet.provider.records.quarantine import FactsQuarantine
from bigfleet.provider.records.record import Record
from bigfleet.provider.records.reset import with_label
from bigfleet.provider.records.validate import facts_fault, id_of, type_fault
from bigfleet.provider.storage.ledger import Change, Ledger

_log = structlog.get_logger("bigfleet.provider.operations.admission")

_NOTHING = Admission()


class Admissions:
    """The backend's say in acceptances and settlements; without `admit` everything is admitted."""

    def __init__(self, *, ledger: Ledger, adapter: BackendAdapter, quarantine: FactsQuarantine, clock: Clock) -> None:
        self._ledger = ledger
        self._adapter = adapter
        self._quarantine = quarantine
        self._clock = clock
        #: What steps without a commit of their own left to be done, by id: a slot to add, or None to remove.
        self._owed: dict[str, Record | None] = {}

    def admit(self, record: Record, kind: Kind) -> Admission | Refusal:
        """Return what the backend says; the caller reports whatever it raises as an internal error."""
        if self._adapter.admits is None:
            return _NOTHING
        answer = self._adapter.admits.admit(record.machine, kind)
        if not isinstance(answer, Admission | Refusal):
            raise TypeError(f"admit returned {type(answer).__name__}, neither Admission nor Refusal")
        return answer

    def joined(self, change: Change, admission: Admission) -> Change:
        """Return the change with the slots of an admission, and with what is owed."""
        if self._adapter.admits is None:
            return change
        wanted = {**self._owed, **self._wanted(admission)}
        if change.record is not None and change.record.id in wanted:
            is_dropped = wanted.pop(change.record.id) is None
            if is_dropped and change.record.state is MachineState.SPECULATIVE:
                # It arrived as a slot for which there is no room any more.
                change = dataclasses.replace(change, record=None, removed_id=change.record.id)
        wanted.pop(change.removed_id or "", None)
        view = self._ledger.view
        return dataclasses.replace(
            change,
            added=tuple(slot for machine_id, slot in wanted.items() if slot is not None and machine_id not in view),
            removed_ids=tuple(
                machine_id
                for machine_id, slot in wanted.items()
                if slot is None and (known := view.get(machine_id)) and known.state is MachineState.SPECULATIVE
            ),
        )

    def settled(self, change: Change, record: Record, reached: MachineState) -> Change:
        """Return the change with what the backend adds on hearing where the machine arrived."""
        return self.joined(change, self._settle(record, reached))

    def withdrawn(self, record: Record) -> None:
        """Notify the backend that a machine stayed where it is: the commit of its acceptance failed."""
        if self._adapter.admits is not None:
            self._owed.update(self._wanted(self._settle(record, record.state)))

    def committed(self, change: Change) -> None:
        """Forget what was owed and is done now."""
        for machine_id in (*(record.id for record in change.added), *change.removed_ids):
            self._owed.pop(machine_id, None)

    def _settle(self, record: Record, reached: MachineState) -> Admission:
        if self._adapter.admits is None:
            return _NOTHING
        try:
            answer = self._adapter.admits.settle(record.machine, reached)
        except Exception as error:  # the machine arrived whatever the author's code makes of it
            _log.error("admission.settle_failed", machine=record.id, reached=reached.name, exc_info=error)
            return _NOTHING
        return answer if isinstance(answer, Admission) else _NOTHING

    def _wanted(self, admission: Admission) -> dict[str, Record | None]:
        wanted: dict[str, Record | None] = dict.fromkeys(admission.remove)
        now = self._clock.unix_nanos()
        for added in admission.add:
            named = id_of(added)
            if named is None:
                _log.error("admission.slot_rejected", error=f"{added!r:.260} is no Slot with a text as its id")
                continue
            fault = type_fault(added) or facts_fault(added)
            if fault is not None:
                self._quarantine.put(named, fault)
            else:
                slot = with_label(added, self._adapter.reset)
                wanted[slot.id] = new_record(slot, self._adapter.provider, now)
        return wanted
