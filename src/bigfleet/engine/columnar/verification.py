"""Holds a decision that was built on earlier ones against one that was made from nothing.

Whoever runs in production can have every so many decisions checked; what differs is told in words and figures. Nothing
here may change a decision.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from bigfleet.engine.columnar.answer import ActionColumns, Answer, RowColumns
from bigfleet.engine.columnar.likeness import are_alike
from bigfleet.engine.decision import Decision

#: Differing entries that are told.
SAMPLE_MAX = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """An incremental decision that was not what a full one is; the full one was used."""

    #: Decisions that the engine had made, this one included.
    decisions: int
    #: One line: where the first difference is.
    difference: str
    #: What differed, ready for JSON: counts of actions on both sides and the first differing entries.
    evidence: Mapping[str, object]


def divergence(kept: Decision, full: Decision, decisions: int) -> Divergence | None:
    """Return what differs between the two decisions, None when nothing does.

    Where the columns of both say the same, no action and no row is made; to tell a difference, every one may be.
    """
    mine, theirs = _answer_of(kept), _answer_of(full)
    if mine is not None and theirs is not None and are_alike(mine, theirs):
        return None
    actions = _differing(kept.actions, full.actions)
    rows = _differing(kept.rows, full.rows)
    if not actions and not rows:
        return None
    place, kept_text, full_text = (actions or rows)[0]
    kind = "action" if actions else "row"
    return Divergence(
        decisions=decisions,
        difference=f"{kind} {place}: kept {kept_text}, full {full_text}",
        evidence={
            "actions_kept": len(kept.actions),
            "actions_full": len(full.actions),
            "rows_kept": len(kept.rows),
            "rows_full": len(full.rows),
            "actions": [_entry(*entry) for entry in actions],
            "rows": [_entry(*entry) for entry in rows],
        },
    )


def _answer_of(decision: Decision) -> Answer | None:
    """Return the one answer that both actions and rows are made of, if they are."""
    actions, rows = decision.actions, decision.rows
    if isinstance(actions, ActionColumns) and isinstance(rows, RowColumns) and actions.answer is rows.answer:
        return rows.answer
    return None


def _differing(kept: Sequence[object], full: Sequence[object]) -> list[tuple[int, str, str]]:
    found = []
    for place, (mine, theirs) in enumerate(zip_longest(kept, full)):
        if mine != theirs:
            found.append((place, repr(mine), repr(theirs)))
            if len(found) == SAMPLE_MAX:
                break
    return found


def _entry(place: int, kept: str, full: str) -> dict[str, object]:
    return {"place": place, "kept": kept, "full": full}
