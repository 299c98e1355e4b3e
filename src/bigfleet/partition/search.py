"""Chooses the host, or the pair of hosts, on which an instance loses least, and counts why others were refused.

docs/spec/partition.md §5, §8 and §9. Candidates of one group come in the order of the message; the last of equals wins,
as it does in `hail`. Pairs are not enumerated: for a given primary the secondaries' costs are all shifted by the same
amounts, so one sorted list of secondaries serves every primary, except for hosts that keep memory for that primary
already. This module never changes a host.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from bigfleet.partition.hosts import PartitionedHost, as_primary, as_secondary
from bigfleet.partition.instance import Instance
from bigfleet.partition.metric import Key, Room, Vector, allocation_vector, both, lost_allocations
from bigfleet.partition.policy import Policy, PolicyRefusal


class PlacementChoice(NamedTuple):
    """Where an instance goes, what that costs, and the room that it leaves."""

    key: Key
    hosts: tuple[PartitionedHost, ...]
    rooms: tuple[Room, ...]


class SearchOutcome(NamedTuple):
    """What came of trying every candidate, or every ordered pair of them."""

    choice: PlacementChoice | None
    successes: int
    refusals: Counter[PolicyRefusal]


def choose_host(
    candidates: Sequence[PartitionedHost], instance: Instance, policy: Policy, *, force: bool = False
) -> SearchOutcome:
    """Return the cheapest host. Linear in the candidates. Raises UnlimitedSize where the metric has no value."""
    refusals: Counter[PolicyRefusal] = Counter()
    best: PlacementChoice | None = None
    successes = 0
    by_policy = _policy_refusals(policy, instance)
    for host in candidates:
        room = by_policy[host.is_exclusive] or as_primary(host, instance, force=force)
        if isinstance(room, PolicyRefusal):
            refusals[room] += 1
            continue
        successes += 1
        key = (_loss(host, room), room.disk_mib)
        if best is None or key <= best.key:
            best = PlacementChoice(key, (host,), (room,))
    return SearchOutcome(best, successes, refusals)


def _policy_refusals(policy: Policy, instance: Instance) -> tuple[PolicyRefusal | None, PolicyRefusal | None]:
    """Return what the policy says of the instance on hosts that share storage, and on exclusive ones."""
    return policy.refusal(instance, is_exclusive=False), policy.refusal(instance, is_exclusive=True)


def _loss(host: PartitionedHost, room: Room) -> Vector:
    return lost_allocations(host.allocation_vector(), allocation_vector(host.group.policy.sizes, room, host.limits))


class _Mirror(NamedTuple):
    """A host as secondary, ordered as it is chosen: what it loses, its disk left, the last one first."""

    loss: Vector
    disk_mib: int
    later: int
    room: Room


class _Secondaries:
    """Every candidate as secondary: for primaries that it knows nothing of, and for those that it does know."""

    def __init__(self, candidates: Sequence[PartitionedHost], instance: Instance) -> None:
        self._candidates = candidates
        self._instance = instance
        self.answers = [as_secondary(host, instance) for host in candidates]
        self.refusals = Counter(answer for answer in self.answers if isinstance(answer, PolicyRefusal))
        #: Candidates that keep memory for a primary host already, by that host's index: positions in order.
        self.knowing: defaultdict[int, list[int]] = defaultdict(list)
        for position, host in enumerate(candidates):
            for index in host.reserves_mib:
                if index != host.index:
                    self.knowing[index].append(position)
        self._sorted: list[_Mirror] | None = None

    def exceptions(self, primary: PartitionedHost) -> dict[int, Room | PolicyRefusal]:
        """Return the answers of the candidates that know the primary host, by their position."""
        return {
            position: as_secondary(
                self._candidates[position],
                self._instance,
                known_mib=self._candidates[position].reserves_mib[primary.index],
            )
            for position in self.knowing.get(primary.index, ())
        }

    def cheapest(self, own: int, exceptions: dict[int, Room | PolicyRefusal]) -> _Mirror | None:
        """Return the best secondary for the primary at a position: the first that is neither it nor an exception."""
        if self._sorted is None:
            self._sorted = sorted(
                self._mirror(position, answer)
                for position, answer in enumerate(self.answers)
                if not isinstance(answer, PolicyRefusal)
            )
        usual = next((each for each in self._sorted if -each.later != own and -each.later not in exceptions), None)
        special = [self._mirror(at, room) for at, room in exceptions.items() if not isinstance(room, PolicyRefusal)]
        return min([*special, usual] if usual is not None else special, default=None)

    def _mirror(self, position: int, room: Room) -> _Mirror:
        return _Mirror(_loss(self._candidates[position], room), room.disk_mib, -position, room)


def choose_pair(
    candidates: Sequence[PartitionedHost], instance: Instance, policy: Policy, *, force: bool = False
) -> SearchOutcome:
    """Return the cheapest ordered pair of different hosts, primary first.

    Of n candidates it looks at n primaries and n secondaries and sorts once, besides one look at each pair of hosts
    that knows each other. `force` is for the primary alone. Raises UnlimitedSize where the metric has no value.
    """
    refusals: Counter[PolicyRefusal] = Counter()
    firsts: list[tuple[int, PartitionedHost, Room]] = []
    by_policy = _policy_refusals(policy, instance)
    for position, host in enumerate(candidates):
        room = by_policy[host.is_exclusive] or as_primary(host, instance, force=force)
        if isinstance(room, PolicyRefusal):
            refusals[room] += len(candidates) - 1
        else:
            firsts.append((position, host, room))
    if not firsts:
        return SearchOutcome(None, 0, refusals)
    seconds = _Secondaries(candidates, instance)
    best: PlacementChoice | None = None
    for position, host, room in firsts:
        exceptions = seconds.exceptions(host)
        # What all secondaries answer, less what the primary and the exceptions would, plus what the latter do.
        for at in (position, *exceptions):
            answer = seconds.answers[at]
            if isinstance(answer, PolicyRefusal):
                refusals[answer] -= 1
        refusals.update(answer for answer in exceptions.values() if isinstance(answer, PolicyRefusal))
        mirror = seconds.cheapest(position, exceptions)
        if mirror is None:
            continue
        key = (both(_loss(host, room), mirror.loss), room.disk_mib + mirror.disk_mib)
        if best is None or key <= best.key:
            best = PlacementChoice(key, (host, candidates[-mirror.later]), (room, mirror.room))
    for refusal, count in seconds.refusals.items():
        refusals[refusal] += count * len(firsts)
    successes = len(candidates) * (len(candidates) - 1) - refusals.total()
    return SearchOutcome(best, successes, +refusals)
