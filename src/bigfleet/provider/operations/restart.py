"""Resolves operations that a restart interrupted: resumes, checks or fails them.

docs/spec/provider.md §12. Runs once, before anything is served. No machine may be left in a transitional state without
an operation that ends it.
"""

from dataclasses import replace

import structlog

from bigfleet.model.clock import Clock
from bigfleet.provider.backend import ConfigureWaits
from bigfleet.provider.operations.admission import Admissions
from bigfleet.provider.operations.invoke import BackendAdapter
from bigfleet.provider.operations.operation_runner import OperationRunner
from bigfleet.provider.records.kinds import KIND_IN_FLIGHT, Kind
from bigfleet.provider.records.lifecycle import failed
from bigfleet.provider.records.record import ErrorCode, Operation, Record
from bigfleet.provider.storage.blob_encryption import BlobKey
from bigfleet.provider.storage.ledger import Change, Ledger

_log = structlog.get_logger("bigfleet.provider.operations.restart")

#: How often one operation is driven over restarts.
ATTEMPTS_MAX = 3


class Restart:
    """Takes up interrupted operations."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        adapter: BackendAdapter,
        work: OperationRunner,
        admissions: Admissions,
        blob_key: BlobKey | None,
        clock: Clock,
    ) -> None:
        self._ledger = ledger
        self._adapter = adapter
        self._work = work
        self._admissions = admissions
        self._blob_key = blob_key
        self._clock = clock

    async def take_up_all(self) -> None:
        """Drive interrupted operations again where that is possible; fail the others."""
        for state, kind in KIND_IN_FLIGHT.items():
            for record in self._ledger.view.of_state(state):
                await self._take_up(record, kind)

    async def _take_up(self, record: Record, kind: Kind) -> None:
        operation = record.operation
        assert operation is not None, f"{record.id} is {record.state.name} without an operation"
        is_resumable = kind in self._adapter.backend.limits.resumable
        blob = self._stored_blob(record) if is_resumable and kind is Kind.CONFIGURE else None
        is_checker_only = kind is Kind.CONFIGURE and blob is None
        can_check = not isinstance(self._adapter.readiness, ConfigureWaits)
        if not (can_check if is_checker_only else is_resumable):
            await self._fail(record, operation, "it cannot be taken up again")
        elif operation.attempt >= ATTEMPTS_MAX:
            await self._fail(record, operation, "it was driven too often")
        else:
            resumed = replace(record, operation=replace(operation, attempt=operation.attempt + 1))
            committed = await self._ledger.commit_until_done(lambda: Change(record=resumed))
            assert committed is not None, "a change with a record gives it back"
            self._work.start(committed, blob or b"", is_checker_only=is_checker_only)
            _log.info(
                "operation.resumed",
                machine=record.id,
                operation_id=operation.id,
                kind=kind.value,
                attempt=operation.attempt + 1,
                with_backend=not is_checker_only,
            )

    def _stored_blob(self, record: Record) -> bytes | None:
        sealed = self._ledger.sealed_of(record)
        if sealed is None:
            return None
        blob = None if self._blob_key is None else self._blob_key.open(sealed)
        if blob is None:
            why = "no --intent-key was given" if self._blob_key is None else "it does not open with this --intent-key"
            _log.error("operation.blob_rejected", machine=record.id, operation_id=sealed.operation_id, error=why)
        return blob

    async def _fail(self, record: Record, operation: Operation, why: str) -> None:
        text = f"the provider restarted during {operation.kind.value}; {why}"
        lost = failed(record, ErrorCode.RESTARTED, text, self._clock.unix_nanos())
        change = self._admissions.settled(Change(record=lost), record, lost.state)
        await self._ledger.commit_until_done(lambda: change)
        self._admissions.committed(change)
        _log.warning(
            "operation.interrupted",
            machine=record.id,
            operation_id=operation.id,
            kind=operation.kind.value,
            state_from=record.state.name,
            state_to=lost.state.name,
        )
