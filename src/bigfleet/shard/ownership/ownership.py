"""Connects the ownership file, the handover and the reconciliation of a running shard.

docs/spec/coordinator.md §9. The link passes instructions to `handover`. The cycle reads the reservations and reports
each successful reconcile. A shard decides in the same way with and without instructions.
"""

from collections.abc import Set
from typing import Final

import numpy as np
import structlog

from bigfleet.engine.columns.store import ColumnSnapshot
from bigfleet.model.clock import Clock
from bigfleet.model.ids import MachineId, ShardId
from bigfleet.model.ownership import Base, RowKind
from bigfleet.shard.inventory.machine_shapes import MachineRows
from bigfleet.shard.metrics import ShardMetrics
from bigfleet.shard.ownership.handover import Handover, HandoverHost
from bigfleet.shard.ownership.ownership_file import OwnershipFile, OwnershipNotWritten
from bigfleet.shard.reconcile.reconciler import ReconcileResult

#: Full Lists in a row that do not name an adopted machine, after which its row goes (§9.3).
UNNAMED_LISTS_MAX: Final = 3

_log = structlog.get_logger("bigfleet.shard.ownership.ownership")


class Ownership:
    """What one shard process owns, and how that changes."""

    def __init__(
        self,
        *,
        me: ShardId,
        file: OwnershipFile,
        handover_host: HandoverHost,
        metrics: ShardMetrics,
        clock: Clock,
        report_interval_seconds: float,
    ) -> None:
        #: What is owned, reserved and accepted, as it is on disk.
        self.file = file
        #: What carries instructions out.
        self.handover = Handover(
            me=me, file=file, handover_host=handover_host, clock=clock, report_interval_seconds=report_interval_seconds
        )
        self._metrics = metrics
        #: How many full Lists in a row have not named an adopted machine.
        self._unnamed_lists: dict[MachineId, int] = {}
        self._has_logged_foreign = False

    def reconciled(self, result: ReconcileResult) -> None:
        """Look after reservations, leaving domains and adopted rows; only after a reconcile that succeeded."""
        self.handover.tend()
        if result.unnamed is not None:
            self._prune(result.unnamed)
        kinds = [row.kind for row in self.file.owned.rows.values()]
        for kind in RowKind:
            self._metrics.ownership_machines.labels(kind.value).set(kinds.count(kind))
        if result.foreign is not None:
            self._metrics.ownership_machines.labels("foreign").set(result.foreign)
            self._log_foreign(result.foreign)
        self._metrics.machines_reserved.set(len(self.file.reservations))

    def _log_foreign(self, foreign: int) -> None:
        """Warn once when a shard that owns everything is shown machines that others have bound."""
        if foreign and self.file.owned.base is Base.ALL and not self._has_logged_foreign:
            self._has_logged_foreign = True
            _log.warning(
                "ownership.foreign_machines_found",
                machines=foreign,
                advice="they are not touched; --inherits adopts the machines of a shard that was removed",
            )

    def _prune(self, unnamed: Set[MachineId]) -> None:
        """Let go of the rows of adopted machines that the provider has not named for long: there are none."""
        self._unnamed_lists = {machine_id: self._unnamed_lists.get(machine_id, 0) + 1 for machine_id in unnamed}
        rows = self.file.owned.rows
        gone = [
            machine_id
            for machine_id, lists in self._unnamed_lists.items()
            if lists >= UNNAMED_LISTS_MAX and machine_id in rows and rows[machine_id].kind is RowKind.ADOPTED
        ]
        if not gone:
            return
        try:
            self.file.commit(self.file.owned.without(gone))
        except OwnershipNotWritten as error:
            _log.error("ownership.write_failed", error=str(error), advice="retried later; check the disk of shard.db")
            return
        _log.warning("ownership.rows_pruned", machines=len(gone), sample=[str(each) for each in sorted(gone)[:10]])


def rows_with(view: ColumnSnapshot, taken: MachineRows, more: Set[MachineId]) -> MachineRows:
    """Return rows of a snapshot with those of more machines, as far as it has them."""
    others = sorted(row for row in map(view.rows.get, more) if row is not None)
    return np.concatenate([taken, np.array(others, np.int64)])
