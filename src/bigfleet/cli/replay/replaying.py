"""Decides a recorded cycle again, compares the result with the recorded one, and reports the first difference.

docs/adr/0134-a-recording-is-what-the-engine-saw.md. Recording and replay may come from different engines; neither
engine knows the other. With changed settings the cycle is decided a third time, and the new differences are attributed
to the settings. No change is carried over to the next cycle.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

import numpy as np
import numpy.typing as npt

from bigfleet.cli.plan.planning import SERVING_STATES, STATE_AFTER
from bigfleet.engine import plain_engine
from bigfleet.engine.columns.objects import snapshot_of
from bigfleet.engine.columns.store import REMOVED, ColumnSnapshot
from bigfleet.engine.decision import ActionKind, Decision, Options
from bigfleet.engine.fleet_engine import FleetEngine
from bigfleet.model.need import Need
from bigfleet.model.states import MachineState
from bigfleet.recording.digest import NO_ROW, PARTS, Digester
from bigfleet.recording.reader import RecordedCycle
from bigfleet.recording.values import RecordedOutcome, rows_of

Decide = Callable[[ColumnSnapshot, Sequence[Need], Options], Decision]
Change = Callable[[Options], Options]

#: What is said of the parts of a decision beside its actions.
_WORDS: Final[Mapping[str, str]] = {
    "rows": "which rows were folded or parked, or how many machines they hold",
    "claims": "which machines rows hold",
    "domains": "which domains gangs chose",
    "victims": "who is preempted for whom",
}


class ReplayVerdict(Enum):
    """Whether a cycle was decided again as it was recorded."""

    SAME = "same"
    DIFFERENT = "different"
    #: The engine failed then and fails now.
    FAILS = "fails"


def new_engine(name: str) -> Decide:
    """Return an engine by its name: columnar, as a shard runs it but without its stored state, or reference."""
    if name == "reference":
        return lambda view, demand, options: plain_engine.decide(snapshot_of(view), demand, options)
    engine = FleetEngine(is_incremental=False)
    return lambda view, demand, options: engine.decide(view, demand, options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """What changed settings make of a cycle."""

    outcome: RecordedOutcome
    #: Actions that are decided only with the settings, and only without them.
    added: int
    dropped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """One recorded cycle, decided again."""

    recorded: RecordedCycle
    verdict: ReplayVerdict
    #: One sentence about the first difference, "" for none.
    difference: str
    #: None when the engine fails now, as `error` says.
    decision: Decision | None
    outcome: RecordedOutcome | None
    error: str
    changed: Changed | None

    @property
    def is_same(self) -> bool:
        """Return whether the decision equals the recorded one."""
        return self.verdict is not ReplayVerdict.DIFFERENT


class Replayer:
    """Decides cycle after cycle of one recording."""

    def __init__(self, engine: str, change: Change | None = None) -> None:
        """Make a replayer; with `change` it decides every cycle with changed options as well."""
        self._decide = new_engine(engine)
        # An engine of its own: each follows the cycles as it has decided them.
        self._decide_changed = new_engine(engine)
        self._change = change
        self._digester = Digester()

    def replay(self, recorded: RecordedCycle) -> Replayed:
        """Decide one cycle again. Raises what the engine raises on changed settings alone."""
        decision: Decision | None = None
        outcome: RecordedOutcome | None = None
        error = ""
        try:
            decision = self._decide(recorded.view, recorded.demand, recorded.options)
            outcome = self._digester.outcome(decision, recorded.view, recorded.demand)
        except Exception as fault:  # the cycle may have been recorded because of it
            error = f"{type(fault).__name__}: {fault}"
        verdict, difference = _compared(recorded, decision, outcome, error)
        return Replayed(
            recorded=recorded,
            verdict=verdict,
            difference=difference,
            decision=decision,
            outcome=outcome,
            error=error,
            changed=None if self._change is None or outcome is None else self._changed(recorded, self._change, outcome),
        )

    def _changed(self, recorded: RecordedCycle, change: Change, base: RecordedOutcome) -> Changed:
        decision = self._decide_changed(recorded.view, recorded.demand, change(recorded.options))
        outcome = self._digester.outcome(decision, recorded.view, recorded.demand)
        mine, theirs = _keys(outcome), _keys(base)
        return Changed(
            outcome=outcome,
            added=int((~np.isin(mine, theirs)).sum()),
            dropped=int((~np.isin(theirs, mine)).sum()),
        )


# ---- comparing ---------------------------------------------------------------------------------------------------


def _compared(
    recorded: RecordedCycle, decision: Decision | None, outcome: RecordedOutcome | None, error: str
) -> tuple[ReplayVerdict, str]:
    then = recorded.outcome
    if decision is None or outcome is None:
        if then is None:
            return ReplayVerdict.FAILS, ""
        return ReplayVerdict.DIFFERENT, f"the engine decided then and fails now ({error})"
    if then is None:
        return ReplayVerdict.DIFFERENT, "the engine failed then and decides now"
    if then == outcome:
        return ReplayVerdict.SAME, ""
    place = _first_difference(then, outcome)
    if place is not None:
        before, now = (_action_text(_actions(one), place, recorded, decision) for one in (then, outcome))
        return ReplayVerdict.DIFFERENT, f"action {place + 1}: recorded {before}; now {now}"
    if len(then.digests) != len(PARTS):
        return ReplayVerdict.DIFFERENT, "the digests are of other parts than this version's"
    named = zip(PARTS, then.digests, outcome.digests, strict=True)
    parts = [_WORDS[part] for part, before_digest, digest in named if before_digest != digest and part in _WORDS]
    if not parts:
        return (
            ReplayVerdict.DIFFERENT,
            f"the actions are the same; {then.short} rows were short then, {outcome.short} now",
        )
    return ReplayVerdict.DIFFERENT, f"the actions are the same; not the same is {', '.join(parts)}"


def differing_actions(replayed: Replayed) -> tuple[list[str], list[str]]:
    """Return the actions that were recorded and are not decided now, and those of now that were not recorded."""
    then, now, decision = replayed.recorded.outcome, replayed.outcome, replayed.decision
    if then is None or now is None or decision is None:
        return [], []
    mine, theirs = _keys(then), _keys(now)

    def texts(outcome: RecordedOutcome, differs: npt.NDArray[np.bool_]) -> list[str]:
        actions, places = _actions(outcome), np.flatnonzero(differs).tolist()
        return [_action_text(actions, place, replayed.recorded, decision) for place in places]

    return texts(then, ~np.isin(mine, theirs)), texts(now, ~np.isin(theirs, mine))


def _first_difference(left: RecordedOutcome, right: RecordedOutcome) -> int | None:
    """Return the place of the first action that differs, None when all are the same."""
    if (left.kinds, left.machines, left.places) == (right.kinds, right.machines, right.places):
        return None
    mine, theirs = _actions(left), _actions(right)
    shared = min(mine.shape[1], theirs.shape[1])
    differing = np.flatnonzero((mine[:, :shared] != theirs[:, :shared]).any(axis=0))
    return int(differing[0]) if len(differing) else shared


def _actions(outcome: RecordedOutcome) -> npt.NDArray[np.int64]:
    """Return kind, machine and row of demand of every action, one action a column."""
    kinds = np.frombuffer(outcome.kinds, np.uint8).astype(np.int64)
    return np.stack([kinds, rows_of(outcome.machines), rows_of(outcome.places)])


def _keys(outcome: RecordedOutcome) -> npt.NDArray[np.int64]:
    """Return a number per action: equal for the same kind, machine and row of demand."""
    kinds, machines, places = _actions(outcome)
    keys: npt.NDArray[np.int64] = (kinds << 60) | (machines << 30) | (places + 1)
    return keys


def _action_text(actions: npt.NDArray[np.int64], place: int, recorded: RecordedCycle, decision: Decision) -> str:
    if place >= actions.shape[1]:
        return "no such action"
    kind, machine, row = actions[:, place].tolist()
    view = recorded.view
    if not 0 <= machine < len(view.ids):
        return f"{ActionKind(kind).label} of a machine that it does not know"
    cluster = view.vocabulary.clusters[view.columns.cluster[machine]]
    if row != NO_ROW and row < len(decision.rows):
        need = decision.rows[row].need
        taken = f", taken from {cluster}" if cluster else ""
        return f"{ActionKind(kind).label} {view.ids[machine]} for {need.cluster}, row {row + 1}{taken}"
    return f"{ActionKind(kind).label} {view.ids[machine]}" + (f" of {cluster}" if cluster else "")


# ---- figures -----------------------------------------------------------------------------------------------------


def counts_of(outcome: RecordedOutcome) -> dict[ActionKind, int]:
    """Return how many actions there are of each kind."""
    counts = np.bincount(np.frombuffer(outcome.kinds, np.uint8), minlength=max(ActionKind) + 1)
    return {kind: int(counts[kind]) for kind in ActionKind}


def machines_of(view: ColumnSnapshot) -> int:
    """Return how many machines there are."""
    return int((view.columns.state != REMOVED).sum())


def cost_usd_per_hour(view: ColumnSnapshot, outcome: RecordedOutcome | None = None) -> float:
    """Return what machines cost by the hour, once the actions of an outcome are done where one is given.

    As a plan counts: Speculative, Deleting and Failed machines cost nothing.
    """
    columns = view.columns
    states = columns.state
    if outcome is not None:
        kinds, machines, _places = _actions(outcome)
        after = np.zeros(max(ActionKind) + 1, states.dtype)
        for kind, state in STATE_AFTER.items():
            after[kind] = int(state)
        states = states.copy()
        states[machines] = after[kinds]
    costs = np.isin(states, [int(state) for state in (*SERVING_STATES, MachineState.IDLE)])
    prices = np.array([offer.price_usd_per_hour for offer in view.vocabulary.offers])
    counts = np.bincount(columns.offer[costs], minlength=len(prices))
    used = counts > 0
    return float((prices[: len(counts)][used] * counts[used]).sum())


def with_machines(recorded: RecordedCycle) -> RecordedCycle:
    """Return the cycle with its machines as objects too, so that they are made once: some ten microseconds each."""
    return replace(recorded, view=replace(recorded.view, source=snapshot_of(recorded.view)))
