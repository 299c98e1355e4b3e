"""Implements the reference engine, over aggregates and over pods; every faster engine must equal it."""

from collections.abc import Sequence

from bigfleet.engine.decision import Decision, Options
from bigfleet.engine.explain.records import Reporter
from bigfleet.engine.reference import decide as reference
from bigfleet.engine.shapes import decide as over_pods
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model.need import Need


def decide(snapshot: Snapshot, demand: Sequence[Need], options: Options, reporter: Reporter | None = None) -> Decision:
    """Return the decision of one cycle: over pods when any row says its pods, over aggregates otherwise.

    Only a decision over aggregates has records for a reporter.
    """
    if over_pods.says_pods(demand):
        return over_pods.decide(snapshot, demand, options)
    return reference.decide(snapshot, demand, options, reporter)
