"""Holds back preemptions for rows that do not take what was preempted for them (safety limit 7).

docs/spec/shard.md §6. A decision preempts a machine because a row needs it, and the next decisions should give it to
that row. If they give it to another cluster again and again, pods are drained for nothing. This module does not change
a decision, and it does not know why a row took nothing.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import structlog

from bigfleet.engine.decision import Action, ActionKind
from bigfleet.model.clock import Clock
from bigfleet.model.ids import MachineId
from bigfleet.model.need import RowKey

_log = structlog.get_logger("bigfleet.shard.cycle.vain_preemptions")

#: Rounds in vain, one after the other, from which on preemptions are held back; one may be a change of demand.
VAIN_ROUNDS_MIN: Final = 2
HOLD_FIRST_SECONDS: Final = 600.0
HOLD_MAX_SECONDS: Final = 86_400.0


@dataclass(slots=True)
class _Vain:
    """What is known of a row that did not take what was preempted for it."""

    #: Rounds in vain since it last took a machine that was preempted for it.
    rounds: int = 0
    #: Until when its preemptions are held back, on the monotonic clock.
    until_seconds: float = 0.0


@dataclass(slots=True)
class _Round:
    """What one decision preempts for a row."""

    row: RowKey
    #: Whether one of its machines was bound again; only the first cycle that binds one counts.
    has_bound: bool = False


class VainPreemptions:
    """The machines that were preempted for each row, and the rows that did not take theirs. Kept in memory."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        #: Machines that were preempted and not bound again yet.
        self._preempted: dict[MachineId, _Round] = {}
        self._vain: dict[RowKey, _Vain] = {}

    def held(self) -> frozenset[RowKey]:
        """Return the rows of which preemptions must be left out for now."""
        now_seconds = self._clock.monotonic_seconds()
        return frozenset(row for row, vain in self._vain.items() if now_seconds < vain.until_seconds)

    def follow(self, actions: Iterable[Action]) -> int:
        """Take in the actions that one cycle carries out; return for how many rows preemptions were in vain.

        What one decision preempts for a row is one round. It is in vain if other clusters get all of its machines that
        are bound in the first cycle that binds one.
        """
        useful: set[RowKey] = set()
        vain: dict[RowKey, Action] = {}
        begun: dict[RowKey, _Round] = {}
        for action in actions:
            if action.kind is ActionKind.PREEMPT and (wanting := action.preemptor) is not None:
                self._preempted[action.machine_id] = begun.setdefault(wanting, _Round(wanting))
            elif one := self._preempted.pop(action.machine_id, None):
                if action.cluster == one.row[0]:
                    useful.add(one.row)
                    one.has_bound = True
                elif action.kind in (ActionKind.BOOTSTRAP, ActionKind.PROVISION) and not one.has_bound:
                    vain.setdefault(one.row, action)
                    one.has_bound = True
        for row in useful:
            self._vain.pop(row, None)
        rows = vain.keys() - useful
        for row in sorted(rows):
            self._count(row, vain[row])
        return len(rows)

    def keep_only(self, is_wanted: Callable[[RowKey], bool]) -> None:
        """Forget rows that left the demand, and what was preempted for them."""
        for row in [row for row in self._vain if not is_wanted(row)]:
            del self._vain[row]
        for machine_id in [each for each, one in self._preempted.items() if not is_wanted(one.row)]:
            del self._preempted[machine_id]

    def _count(self, row: RowKey, taken: Action) -> None:
        vain = self._vain.setdefault(row, _Vain())
        vain.rounds += 1
        if vain.rounds < VAIN_ROUNDS_MIN:
            return
        seconds = min(HOLD_FIRST_SECONDS * 2 ** min(vain.rounds - VAIN_ROUNDS_MIN, 8), HOLD_MAX_SECONDS)
        vain.until_seconds = self._clock.monotonic_seconds() + seconds
        cluster, fingerprint, group = row
        _log.warning(
            "action.preempted_in_vain",
            cluster=cluster,
            fingerprint=fingerprint,
            group=group,
            machine=taken.machine_id,
            taken_by=taken.cluster,
            rounds=vain.rounds,
            held_seconds=seconds,
            advice="the row preempts nothing for this time; report it with a recording of the shard",
        )
