"""Finds the priority that protects a machine which a target composition retains without a claim.

The claims fit without such a machine. The scheduler of the cluster may not find that packing, and then leaves pods
without a place: those of the lowest priority, because it preempts lower pods for higher ones. So the machine protects
the lowest pods that together make room for the higher ones that it could host, and no higher ones.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property

from bigfleet.engine.shapes.hosting import fitting
from bigfleet.engine.shapes.state import HostState, Room, RowState

#: By dimension.
Amounts = Counter[int]


class SlackPriorities:
    """Finds the priorities for the machines of one cluster; its claims may not change as long as this is used."""

    def __init__(self, rows: Sequence[RowState], hosts: Sequence[HostState]) -> None:
        self._rows = rows
        self._hosts = hosts
        self._by_shape: dict[int, int | None] = {}

    def of(self, host: HostState) -> int | None:
        """Return the highest priority of rows that may not preempt the machine; None if all may.

        Pods that wait show that the scheduler uses it: then its stamp counts.
        """
        if any(group.is_waiting for row in self._rows for group in row.groups):
            return host.machine.assigned_priority
        if host.shape not in self._by_shape:
            lowest = self._lowest_that_yields(host)
            # A row of the same priority has pods without a place, and those that the machine protects may have one.
            yielding = [] if lowest is None else [lowest - 1]
            self._by_shape[host.shape] = max([*yielding, *self._short(host)], default=None)
        return self._by_shape[host.shape]

    def _short(self, host: HostState) -> list[int]:
        """Return the priorities of short rows of the cluster that may acquire the machine when it is Idle.

        A gang may choose another domain then.
        """
        return [
            row.need.profile.priority
            for row in self._rows
            if row.has_left
            and row.may_preempt
            and (row.same_key is not None or row.may_use(host.machine, host.shape))
            and any(group.left and fitting(host.total, group.request, 1) for group in row.groups)
        ]

    @cached_property
    def _claims(self) -> Mapping[RowState, Amounts]:
        """What the pods of each row claim."""
        claims: defaultdict[RowState, Amounts] = defaultdict(Counter)
        for host in self._hosts:
            for group, count in host.claims.items():
                for d, milli in group.request:
                    claims[group.row][d] += milli * count
        return claims

    def _lowest_that_yields(self, host: HostState) -> int | None:
        """Return the least priority up to which pods make room for those above it that the machine could host."""
        by_priority: defaultdict[int, list[RowState]] = defaultdict(list)
        for row in self._claims:
            if row.may_use(host.machine, host.shape):
                by_priority[row.need.profile.priority].append(row)
        below: Amounts = Counter()
        above: Amounts = Counter()
        for rows in by_priority.values():
            for row in rows:
                above.update(self._claims[row])
        # The last dimension, the number of pods, does not count: a large pod makes room for many small ones.
        dimensions = [d for d, milli in enumerate(host.total[:-1]) if milli]
        for priority, rows in sorted(by_priority.items()):
            for row in rows:
                below.update(self._claims[row])
                above.subtract(self._claims[row])
            if _make_room(below, above, host.total, dimensions):
                return priority
        return None


def _make_room(below: Amounts, above: Amounts, total: Room, dimensions: Sequence[int]) -> bool:
    """Return whether `below` has as much as the machine could host of `above`: all, or what fills one dimension."""
    room, amount = 1, 1
    for d in dimensions:
        if above[d] * room > total[d] * amount:
            room, amount = total[d], above[d]
    return all(below[d] * amount >= above[d] * room for d in dimensions)
