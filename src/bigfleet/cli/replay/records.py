"""Holds a replayed cycle as one record, for the table and for JSON alike. This module does not decide or compare."""

from typing import Any

from bigfleet.cli.get.records import time_text
from bigfleet.cli.plan.document import plain
from bigfleet.cli.replay.replaying import Replayed, cost_usd_per_hour, counts_of, machines_of
from bigfleet.recording.digest import digest_text
from bigfleet.recording.values import RecordedOutcome

Record = dict[str, Any]


def cycle_record(replayed: Replayed) -> Record:
    """Return what a table or a document shows of one cycle."""
    recorded, then = replayed.recorded, replayed.recorded.outcome
    record: Record = {
        "cycle": recorded.cycle,
        "time": time_text(recorded.at_unix_nanos),
        "epoch": recorded.head.epoch,
        "timer": recorded.is_timer,
        "not_recorded_before": recorded.missed,
        "rows": len(recorded.demand),
        "machines": machines_of(recorded.view),
        "actions": None if then is None else _counts(then),
        "short": None if then is None else then.short,
        "digest": None if then is None else digest_text(then),
        "verdict": replayed.verdict.value,
        "difference": replayed.difference or None,
    }
    changed, outcome = replayed.changed, replayed.outcome
    if changed is not None and outcome is not None:
        record["what_if"] = {
            "actions": _counts(changed.outcome),
            "short": changed.outcome.short,
            "actions_added": changed.added,
            "actions_dropped": changed.dropped,
            "cost_before_usd_per_hour": plain(cost_usd_per_hour(recorded.view)),
            "cost_after_usd_per_hour": plain(cost_usd_per_hour(recorded.view, outcome)),
            "changed_cost_after_usd_per_hour": plain(cost_usd_per_hour(recorded.view, changed.outcome)),
        }
    return record


def _counts(outcome: RecordedOutcome) -> dict[str, int]:
    return {kind.name.lower(): count for kind, count in counts_of(outcome).items()}
