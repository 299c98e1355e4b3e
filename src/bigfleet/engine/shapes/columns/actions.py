"""Stores the actions of a decision over pods, and makes those of excess machines when they are looked at.

They equal the tuple of the plain decision. A caller that counts, or asks for machines, makes none.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import accumulate, chain

import numpy as np

from bigfleet.engine.columns.store import ColumnSnapshot
from bigfleet.engine.decision import Action, ActionKind
from bigfleet.engine.deferred import LazySequence
from bigfleet.engine.shapes.columns.machines import MachineIds, Rows
from bigfleet.engine.shapes.reclaim import Reclaimed, reclaim, reclaims
from bigfleet.model.ids import MachineId


class PodActions(LazySequence[Action]):
    """The actions of one decision: Phases 1 and 2, then the Reclaims, then the releases."""

    def __init__(
        self,
        view: ColumnSnapshot,
        first: Sequence[Action],
        reclaimed: Sequence[Reclaimed],
        released: Sequence[Action],
        unjoined: Set[str],
    ) -> None:
        """Make no action."""
        self._view, self._first, self._reclaimed, self._released = view, first, reclaimed, released
        self._unjoined = unjoined
        #: The place of the first Reclaim of each cluster, and of the first release.
        self._starts = list(accumulate((len(ids) for _, ids in reclaimed), initial=len(first)))
        super().__init__(self._starts[-1] + len(released), self._action)

    def _action(self, place: int) -> Action:
        if place < len(self._first):
            return self._first[place]
        if place >= self._starts[-1]:
            return self._released[place - self._starts[-1]]
        number = bisect_right(self._starts, place) - 1
        cluster, ids = self._reclaimed[number]
        return reclaim(cluster, ids[place - self._starts[number]], self._unjoined)

    def __iter__(self) -> Iterator[Action]:
        return chain(self._first, reclaims(self._reclaimed, self._unjoined), self._released)

    def machines(self) -> Rows:
        """Return the row of each action's machine in the view, in emission order, without making any action."""
        rows = self._view.rows
        parts = [np.array([rows[action.machine_id] for action in self._first], np.int64)]
        for _, ids in self._reclaimed:
            if isinstance(ids, MachineIds):
                parts.append(ids.rows)
            else:
                parts.append(np.array([rows[machine_id] for machine_id in ids], np.int64))
        parts.append(np.array([rows[action.machine_id] for action in self._released], np.int64))
        return np.concatenate(parts)

    def excess(self) -> Sequence[MachineId]:
        """Return the machines that are reclaimed because nothing claims them, in emission order."""
        found = (machine_id for _, ids in self._reclaimed for machine_id in ids)
        unjoined = self._unjoined
        return [machine_id for machine_id in found if machine_id not in unjoined] if unjoined else list(found)

    def counts(self) -> Mapping[ActionKind, int]:
        """Return how many actions there are of each kind, without making any."""
        counts = Counter(action.kind for action in self._first)
        counts[ActionKind.RECLAIM] = self._starts[-1] - len(self._first)
        counts[ActionKind.DELETE] = len(self._released)
        return {kind: counts[kind] for kind in ActionKind}
