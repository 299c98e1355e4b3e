"""Runs the engine as a shard does: from columns alone.

A quicker call would keep the snapshot that it was given and could answer from it; a check that compares engines must
not let it. This module does not decide.
"""

from collections.abc import Sequence

from bigfleet.engine.columnar.engine import ColumnarEngine
from bigfleet.engine.columns.store import ColumnStore
from bigfleet.engine.decision import Decision, Options
from bigfleet.engine.explain.records import Reporter
from bigfleet.engine.shapes.decide import says_pods
from bigfleet.engine.shapes.pod_engine import PodEngine
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model.need import Need


def decide_from_columns(
    snapshot: Snapshot, demand: Sequence[Need], options: Options, reporter: Reporter | None = None
) -> Decision:
    """Decide from the columns of a snapshot with a fresh engine; equal to `plain_engine.decide`."""
    view = ColumnStore.from_snapshot(snapshot).snapshot()
    if says_pods(demand):
        return PodEngine().decide(view, demand, options)
    return ColumnarEngine().decide(view, demand, options, reporter)
