"""Picks the next machine under a strict topology spread (docs/spec/aggregates.md §5.5, §6.3).

Pure: the callers bring candidates that are free, fit and carry the key, in their own order of preference, and claim
what is picked. The minimum runs over every domain of the round, also over one that has run dry or never had a
candidate: that is what keeps a fleet from piling up where machines happen to be.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bigfleet.model import vector
from bigfleet.model.machine import Machine
from bigfleet.model.profile import TopologySpread
from bigfleet.model.vector import Vector


@dataclass(frozen=True, slots=True)
class SpreadPick:
    """One machine picked, and why its domain was open."""

    machine: Machine
    domain: str
    #: Machines that the row held in the domain before this one.
    count: int
    #: The smallest count over all domains of the round at that moment.
    minimum: int


Preference = tuple[float, str] | tuple[int, str]


def spread_picks(
    candidates: Iterable[Machine],
    *,
    spread: TopologySpread,
    held: Iterable[Machine],
    remaining: Vector,
    preference: Callable[[Machine, str], Preference],
) -> list[SpreadPick]:
    """Pick machines until nothing remains or no domain is open.

    A domain offers its first candidate that is still useful; of the open domains the one whose offer has the smallest
    `preference(machine, domain)` is taken. Held machines without the key count nowhere.
    """
    key = spread.topology_key
    queues: defaultdict[str, deque[Machine]] = defaultdict(deque)
    for machine in candidates:
        value = machine.attribute(key)
        if value is not None and vector.is_useful(machine.supply, remaining):
            queues[value].append(machine)
    held_values = (machine.attribute(key) for machine in held)
    counts = Counter(value for value in held_values if value is not None)
    counts.update(dict.fromkeys(queues, 0))

    picks: list[SpreadPick] = []
    while remaining:
        for queue in queues.values():
            # What no longer helps will not help later either: what remains only shrinks.
            while queue and not vector.is_useful(queue[0].supply, remaining):
                queue.popleft()
        minimum = min(counts.values(), default=0)
        open_domains = [d for d, queue in queues.items() if queue and counts[d] <= minimum + spread.skew_max - 1]
        if not open_domains:
            break
        domain = min(open_domains, key=lambda d: preference(queues[d][0], d))
        machine = queues[domain].popleft()
        picks.append(SpreadPick(machine, domain, counts[domain], minimum))
        counts[domain] += 1
        remaining = vector.subtract(remaining, machine.supply)
    return picks
