"""Stores since when each machine has waited for its node to be Ready.

A first List brings hundreds of thousands of bound machines at once, whose nodes have not been seen yet. In a dictionary
each takes 50 bytes; here machines of one moment share one sorted list, with one byte each.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import compress
from operator import lt

from bigfleet.model.ids import MachineId
from bigfleet.model.validation import ensure


class _Together:
    """Machines that began to wait in the same second."""

    def __init__(self, since_seconds: float) -> None:
        self.since_seconds = since_seconds
        #: Ascending.
        self.ids: list[MachineId] = []
        #: Of each id, 1 as long as the machine waits.
        self._waits = bytearray()
        self.left = 0

    def add(self, ids: Sequence[MachineId]) -> None:
        """Add machines that do not wait here."""
        is_in_order = (not self.ids or self.ids[-1] < ids[0]) and all(map(lt, ids, ids[1:]))
        if not is_in_order:
            # One that waited here before may come again.
            self.ids[:] = compress(self.ids, self._waits)
            self._waits = bytearray((1,)) * len(self.ids)
        self.ids += ids
        self._waits += bytes((1,)) * len(ids)
        self.left += len(ids)
        if not is_in_order:
            self.ids.sort()

    def place(self, machine_id: MachineId) -> int:
        """Return the place of a machine that waits, -1 for any other."""
        place = bisect_left(self.ids, machine_id)
        is_here = place < len(self.ids) and self.ids[place] == machine_id and self._waits[place]
        return place if is_here else -1

    def end(self, place: int) -> None:
        """End the wait of a machine."""
        self._waits[place] = 0
        self.left -= 1


class MissingNodes:
    """Machines that wait for their nodes, each with the second since which it does."""

    def __init__(self) -> None:
        self._each: dict[MachineId, float] = {}
        #: None of their machines is in `_each`, and each waits in one at most.
        self._together: list[_Together] = []

    def __len__(self) -> int:
        return len(self._each) + sum(group.left for group in self._together)

    def __contains__(self, machine_id: object) -> bool:
        return isinstance(machine_id, str) and self.since_seconds(MachineId(machine_id)) is not None

    def since_seconds(self, machine_id: MachineId) -> float | None:
        """Return since when a machine waits, None when it does not."""
        since_seconds = self._each.get(machine_id)
        if since_seconds is not None:
            return since_seconds
        return next((group.since_seconds for group in self._together if group.place(machine_id) >= 0), None)

    def wait(self, machine_id: MachineId, since_seconds: float) -> None:
        """Let a machine wait from a second on, also when it has waited since another one."""
        if self._together:
            self.end(machine_id)
        self._each[machine_id] = since_seconds

    def wait_many(self, ids: Sequence[MachineId], since_seconds: float) -> list[MachineId]:
        """Let one machine or more wait that do not.

        Return all that came like this with the same second, more as they come; the waits of some may be over.
        """
        last = self._together[-1] if self._together else None
        if last is None or last.since_seconds != since_seconds:
            last = _Together(since_seconds)
            self._together.append(last)
        last.add(ids)
        return last.ids

    def end(self, machine_id: MachineId) -> bool:
        """End a machine's wait; return whether it waited."""
        if self._each.pop(machine_id, None) is not None:
            if not self._each:
                # A dictionary that was large stays so.
                self._each = {}
            return True
        for group in self._together:
            place = group.place(machine_id)
            if place >= 0:
                group.end(place)
                if not group.left:
                    self._together.remove(group)
                return True
        return False

    def validate(self) -> None:
        """Compare everything with the invariants. Raises InvariantBroken."""
        waiting = list(self._each)
        for group in self._together:
            members = [machine_id for machine_id in group.ids if group.place(machine_id) >= 0]
            ensure(0 < group.left == len(members), "missing nodes: a group is miscounted, or out of order")
            waiting += members
        ensure(len(waiting) == len(set(waiting)), "missing nodes: a machine waits twice")
