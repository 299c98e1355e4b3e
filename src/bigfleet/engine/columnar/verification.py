"""Verifies an incremental decision against a decision computed from scratch, and replaces one that cannot be made.

An operator of a fleet can have every so many decisions checked; what differs is reported in words and figures.
"""

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol

from bigfleet.engine.columnar.answer import ActionColumns, ColumnarAnswer, RowColumns
from bigfleet.engine.columnar.comparison import are_alike
from bigfleet.engine.columns.store import ColumnSnapshot
from bigfleet.engine.decision import Decision, Options, PhaseListener
from bigfleet.model.need import Need

#: Differing entries that are reported.
SAMPLE_MAX = 5
#: Frames of a failure that are reported, the innermost ones.
_FRAMES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """An incremental decision that was not what a full one is, or that failed; another one was used."""

    #: Decisions that the engine had made, this one included.
    decisions: int
    #: One line: where the first difference is.
    difference: str
    #: What differed, ready for JSON: counts of actions on both sides and the first differing entries.
    evidence: Mapping[str, object]


class Remembering(Protocol):
    """Decides with what it remembers of earlier decisions."""

    def decide(
        self, view: ColumnSnapshot, demand: Sequence[Need], options: Options, *, on_phase: PhaseListener
    ) -> Decision:
        """Decide one cycle: equal to what one that remembers nothing decides."""
        ...


class Verified:
    """Decides with what it remembers, and a second time without it: every so often, and when the first time fails."""

    def __init__(
        self,
        make: Callable[[], Remembering],
        *,
        plainly: Callable[[ColumnSnapshot, Sequence[Need], Options, PhaseListener], Decision],
        every_cycles: int,
        on_divergence: Callable[[Divergence], None] | None,
    ) -> None:
        """`make` returns one that remembers nothing. With `every_cycles` 0 no decision is made twice.

        If the two decisions differ, `on_divergence` is called, the second is the answer, and what the first was built
        on is forgotten. If making one raises, `plainly` makes it in its place, slower; without `on_divergence`, what
        was raised is raised.
        """
        self._make = make
        self._plainly = plainly
        self._every_cycles = every_cycles
        self._on_divergence = on_divergence
        self._decisions = 0
        self._known = make()

    def decide(
        self, view: ColumnSnapshot, demand: Sequence[Need], options: Options, *, on_phase: PhaseListener
    ) -> Decision:
        """Decide one cycle."""
        self._decisions += 1
        try:
            decision = self._known.decide(view, demand, options, on_phase=on_phase)
        except Exception as error:
            if self._on_divergence is None:
                raise
            # The row of one cluster must not keep all others from their machines.
            self._known = self._make()
            decision = self._plainly(view, demand, options, on_phase)
            self._on_divergence(_failure(error, self._decisions))
            return decision
        if not self._every_cycles or self._decisions % self._every_cycles:
            return decision
        fresh = self._make()
        full = fresh.decide(view, demand, options, on_phase=on_phase)
        difference = divergence(decision, full, self._decisions)
        if difference is None:
            return decision
        self._known = fresh
        if self._on_divergence is not None:
            self._on_divergence(difference)
        return full


def _failure(error: Exception, decisions: int) -> Divergence:
    """Return what an engine that failed shows, the innermost frames last."""
    frames = traceback.extract_tb(error.__traceback__)
    return Divergence(
        decisions=decisions,
        difference=f"the compiled engine failed: {type(error).__name__}: {error}",
        evidence={"frames": [f"{frame.name} line {frame.lineno}" for frame in frames[-_FRAMES:]]},
    )


def divergence(incremental: Decision, full: Decision, decisions: int) -> Divergence | None:
    """Return what differs between the two decisions, None when nothing does.

    Where the columns of both say the same, no action and no row is made; to report a difference, every one may be.
    """
    mine, theirs = _answer_of(incremental), _answer_of(full)
    if mine is not None and theirs is not None and are_alike(mine, theirs):
        return None
    actions = _differing(incremental.actions, full.actions)
    rows = _differing(incremental.rows, full.rows)
    if not actions and not rows:
        return None
    place, incremental_text, full_text = (actions or rows)[0]
    kind = "action" if actions else "row"
    return Divergence(
        decisions=decisions,
        difference=f"{kind} {place}: kept {incremental_text}, full {full_text}",
        evidence={
            "actions_kept": len(incremental.actions),
            "actions_full": len(full.actions),
            "rows_kept": len(incremental.rows),
            "rows_full": len(full.rows),
            "actions": [_entry(*entry) for entry in actions],
            "rows": [_entry(*entry) for entry in rows],
        },
    )


def _answer_of(decision: Decision) -> ColumnarAnswer | None:
    """Return the one answer that both actions and rows are made of, if they are."""
    actions, rows = decision.actions, decision.rows
    if isinstance(actions, ActionColumns) and isinstance(rows, RowColumns) and actions.answer is rows.answer:
        return rows.answer
    return None


def _differing(incremental: Sequence[object], full: Sequence[object]) -> list[tuple[int, str, str]]:
    found = []
    for place, (mine, theirs) in enumerate(zip_longest(incremental, full)):
        if mine != theirs:
            found.append((place, repr(mine), repr(theirs)))
            if len(found) == SAMPLE_MAX:
                break
    return found


def _entry(place: int, incremental: str, full: str) -> dict[str, object]:
    return {"place": place, "kept": incremental, "full": full}
