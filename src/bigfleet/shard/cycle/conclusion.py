"""Computes what follows from a decision: the ages of shortfalls, and the effects to publish."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bigfleet.engine.decision import Decision, RowResult
from bigfleet.shard.cycle.shortfall_ages import ShortfallAges, next_ages, short_of_cycle
from bigfleet.shard.status.cycle_publisher import CycleEffects
from bigfleet.shard.status.views import ViewContext

#: Works out the effects of a decision from its short rows and their ages.
EffectsOf = Callable[[Decision, Sequence[RowResult], ViewContext], CycleEffects]


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleConclusion:
    """What one cycle hands to the next one, to views and to subscribers."""

    ages: ShortfallAges
    #: With the ages after the decision.
    context: ViewContext
    effects: CycleEffects


def conclude(
    ages: ShortfallAges, decision: Decision, context: ViewContext, effects_of: EffectsOf, *, is_timer: bool
) -> CycleConclusion:
    """Return what follows from a decision; `ages` are those before it. May run off the loop."""
    refused, failing = context.refused, context.failing
    short = short_of_cycle(decision.rows, refused, failing)
    awaiting = context.options.awaiting_plan
    # A cluster that waits for its composition acquires nothing yet: only what was short before is short now.
    judged = short
    if awaiting:
        judged = [row for row in short if row.need.cluster not in awaiting or row.need.key in ages.rows]
    after = next_ages(ages, judged, snapshot=context.snapshot, refused=refused, failing=failing, advance=is_timer)
    aged = replace(context, parking_ages=after.parking, row_ages=after.rows)
    return CycleConclusion(ages=after, context=aged, effects=effects_of(decision, short, aged))
