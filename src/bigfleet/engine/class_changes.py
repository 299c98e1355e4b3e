"""Applies changes of machine class to a target composition.

A Create may refine a machine (docs/spec/provider.md §2), so that it is another class than its composition names. All
changes are applied in one pass over the claims, and claims that are alike on consecutive machines are joined:
otherwise the claims would grow with each machine that is created. This module does not find the machines that changed.
"""

from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from bigfleet.engine.targets import ClassKey, Target, TargetClaim
from bigfleet.model.need import RowKey

#: Claims on one machine, by place in the composition, ascending.
_Content = tuple[int, ...]
#: Where a claim is written: after those with lower ranks.
_Rank = tuple[int, int]


def with_classes_changed(target: Target, changes: Iterable[tuple[ClassKey, ClassKey]]) -> Target:
    """Return the composition with machines in other classes, one after the other, with what is planned on them.

    A change (before, after) is about the last machine of the class on which something is planned, else any. It gets the
    next number of its new class. A change has no effect if the composition has no machine of the class; without effect
    the composition itself is returned. Claims on the classes that changed may be joined and split: each machine has the
    same claims in the same order. Cost: one pass over the claims, and constant time for each change.
    """
    pairs = [(before, after) for before, after in changes if before != after]
    if not pairs:
        return target
    touched = {key: _ClassMachines() for pair in pairs for key in pair}
    rest = _sorted_out(target.claims, touched)
    for key, machines in touched.items():
        machines.fill(target.counts.get(key, 0))
    counts = dict(target.counts)
    is_changed = False
    for before, after in pairs:
        if counts.get(before, 0) <= 0:
            continue
        is_changed = True
        counts[before] -= 1
        counts[after] = counts.get(after, 0) + 1
        touched[after].put(touched[before].take())
    if not is_changed:
        return target
    for key, machines in touched.items():
        rest += machines.claims(key, target.claims)
    rest.sort(key=lambda ranked: ranked[0])
    return replace(
        target,
        counts={key: count for key, count in counts.items() if count},
        claims=tuple([claim for _rank, claim in rest]),
    )


def _sorted_out(
    claims: Sequence[TargetClaim], touched: "Mapping[ClassKey, _ClassMachines]"
) -> list[tuple[_Rank, TargetClaim]]:
    """Give the claims on these classes to their machines; return the others, each with its place."""
    rest: list[tuple[_Rank, TargetClaim]] = []
    for place, claim in enumerate(claims):
        machines = touched.get(claim.machine_class)
        if machines is None:
            rest.append(((place, 0), claim))
        else:
            machines.add(place, claim)
    return rest


@dataclass(slots=True)
class _Run:
    """Consecutive machines with the same claims."""

    content: _Content
    machines: int


@dataclass(slots=True)
class _Open:
    """A claim that is being written: it ends before the next machine."""

    rank: _Rank
    first: int
    machines: int


class _ClassMachines:
    """The machines of one class, in order of their numbers."""

    def __init__(self) -> None:
        #: No two neighbours have the same content.
        self._runs: list[_Run] = []
        #: Number, whether a claim begins there, its place. Empty after `fill`.
        self._ends: list[tuple[int, bool, int]] = []

    def add(self, place: int, claim: TargetClaim) -> None:
        """Take a claim on machines of the class."""
        if claim.machines > 0:
            self._ends += [(claim.first, True, place), (claim.first + claim.machines, False, place)]

    def fill(self, count: int) -> None:
        """Number the machines, so many in all, with the claims that were added."""
        active: list[int] = []
        number = 0
        for end, begins, place in sorted(self._ends):
            self._extend(tuple(active), end - number)
            number = end
            if begins:
                insort(active, place)
            else:
                active.remove(place)
        self._extend((), count - number)
        self._ends.clear()

    def put(self, content: _Content) -> None:
        """Add one machine, which gets the next number."""
        self._extend(content, 1)

    def take(self) -> _Content:
        """Remove the last machine with a claim, else any; return its claims. There must be a machine."""
        runs = self._runs
        at = len(runs) - 1
        if at > 0 and not runs[at].content:
            at -= 1
        run = runs[at]
        run.machines -= 1
        if not run.machines:
            del runs[at]
            if 0 < at < len(runs) and runs[at - 1].content == runs[at].content:
                runs[at - 1].machines += runs.pop(at).machines
        return run.content

    def claims(self, key: ClassKey, known: Sequence[TargetClaim]) -> list[tuple[_Rank, TargetClaim]]:
        """Return the claims, each with its rank. The claims on one machine are in order of their ranks."""
        found: list[tuple[TargetClaim, _Open]] = []
        opened: dict[tuple[RowKey, int, int], list[_Open]] = {}
        number = 0
        for run in self._runs:
            still: dict[tuple[RowKey, int, int], list[_Open]] = {}
            rank = (-1, 0)
            for place in run.content:
                claim = known[place]
                kind = (claim.row, claim.shape, claim.count)
                entry = next((one for one in opened.get(kind, ()) if one.rank > rank), None)
                if entry is None:
                    entry = _Open(max((place, 0), (rank[0], rank[1] + 1)), number, 0)
                    found.append((claim, entry))
                entry.machines += run.machines
                rank = entry.rank
                still.setdefault(kind, []).append(entry)
            opened = still
            number += run.machines
        return [
            (one.rank, replace(claim, machine_class=key, first=one.first, machines=one.machines))
            for claim, one in found
        ]

    def _extend(self, content: _Content, machines: int) -> None:
        if machines <= 0:
            return
        if self._runs and self._runs[-1].content == content:
            self._runs[-1].machines += machines
        else:
            self._runs.append(_Run(content, machines))
