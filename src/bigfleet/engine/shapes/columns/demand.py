"""Puts the rows of many clusters in columns, without an object for each row or group of pods.

The result equals `fleet.rows_of` for clusters whose rows have shapes and are neither gangs nor spread. Placing pods is
left to `credit`.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from operator import mul
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bigfleet.engine.shapes.columns.order import NO_LIMIT, Bools, Floats, Rows
from bigfleet.engine.shapes.fleet import DecisionState, has_pods
from bigfleet.engine.shapes.machines import OrphanKey
from bigfleet.engine.shapes.state import ClusterState
from bigfleet.model.need import Need
from bigfleet.model.penalty import bucket_upper_dollars
from bigfleet.model.profile import Profile

#: Pods of a cluster up to which the columns hold every sum.
PODS_MAX: Final = 1 << 40


@dataclass(frozen=True, slots=True)
class Access:
    """Which machines rows may use."""

    matching: frozenset[int]
    is_pinned: bool


class Profiles:
    """Numbers what profiles say of access and of precedence; each profile is looked at once."""

    def __init__(self, fleet: DecisionState) -> None:
        self._fleet = fleet
        self._known: dict[str, tuple[int, int] | None] = {}
        self.access: dict[Access, int] = {}
        self._precedences: dict[tuple[int, int, int], int] = {}

    def numbers(self, profile: Profile) -> tuple[int, int] | None:
        """Return the numbers of the profile's access and precedence; None for gangs and spreads."""
        fingerprint = profile.fingerprint
        if fingerprint not in self._known:
            self._known[fingerprint] = self._numbers(profile)
        return self._known[fingerprint]

    def _numbers(self, profile: Profile) -> tuple[int, int] | None:
        if profile.same_key is not None or (profile.spreads and profile.strict_spread is not None):
            return None
        is_pinned = bucket_upper_dollars(profile.interruption_bucket) == float("inf")
        access = Access(self._fleet.machines.matching(profile), is_pinned)
        return (
            self.access.setdefault(access, len(self.access)),
            self._precedences.setdefault(profile.precedence, len(self._precedences)),
        )

    def ranks(self) -> Rows:
        """Return the rank of each number of a precedence; the lowest rank is served first."""
        order = sorted(self._precedences.items(), reverse=True)
        ranks = np.zeros(len(order), np.int64)
        ranks[[number for _, number in order]] = np.arange(len(order))
        return ranks


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DemandColumns:
    """Rows by cluster, then in processing order; groups of pods by row, then in canonical order.

    Groups of which no known machine can host one pod are left out.
    """

    #: Those with the most groups first.
    clusters: Sequence[ClusterState]
    #: Whether groups of the cluster were left out.
    has_impossible: Bools
    #: Each row with its place in the demand.
    needs: Sequence[tuple[int, Need]]
    #: Where the rows of each cluster begin, and where the last ones end.
    first_row: Rows
    #: Where the groups of each row begin, and where the last ones end.
    first_group: Rows
    #: Of each group: its place in the shapes of its row, its pods, and the most of them on one machine.
    index: Rows
    counts: Rows
    limits: Rows
    #: Of each group: whether it consists of waiting pods, and which machines it may use, as a place in `accesses`.
    is_waiting: Bools
    access: Rows
    accesses: Sequence[Access]
    #: What one pod of each group requests, as a place in `requests`.
    number: Rows
    #: The different requests: (request, dimension).
    requests: Rows

    @property
    def first(self) -> Rows:
        """Where the groups of each cluster begin, and where the last ones end."""
        return self.first_group[self.first_row]

    def wanted(self) -> Floats:
        """Return the whole demand of each cluster by dimension, each sum rounded once."""
        first, clusters = self.first, range(len(self.clusters))
        found = np.zeros((len(clusters), self.requests.shape[1]))
        for c in clusters:
            here = slice(*first[c : c + 2])
            requests, counts = self.requests[self.number[here]], self.counts[here]
            found[c] = counts @ requests
            if (counts.astype(np.float64) @ requests).max(initial=0.0) >= NO_LIMIT:
                found[c] = [sum(map(mul, counts.tolist(), column)) for column in requests.T.tolist()]
        return found

    def least_from(self) -> Rows:
        """Return the least request of each group and those after it in its cluster: (group, dimension)."""
        found, first = self.requests[self.number], self.first
        sizes = np.diff(first)
        for step in range(int(sizes.max(initial=0)) - 2, -1, -1):
            groups = first[:-1][sizes > step + 1] + step
            found[groups] = np.minimum(found[groups], found[groups + 1])
        return found


def demand_columns(fleet: DecisionState) -> tuple[DemandColumns, list[ClusterState]]:
    """Return the demand of the clusters that can be credited on columns, and the other clusters."""
    profiles, orphans = Profiles(fleet), fleet.orphans.keys()
    found: list[ClusterState] = []
    others: list[ClusterState] = []
    for cluster in fleet.clusters.values():
        is_plain = cluster.id not in fleet.options.targets and _is_plain(cluster, profiles, orphans)
        (found if is_plain else others).append(cluster)
    return _columns(fleet, found, profiles), others


def _is_plain(cluster: ClusterState, profiles: Profiles, orphans: Set[OrphanKey]) -> bool:
    pods = 0
    for _, need in cluster.needs:
        if not has_pods(need) or profiles.numbers(need.profile) is None:
            return False
        if orphans and (need.fingerprint, need.group) in orphans:
            return False
        for shape in need.shapes:
            pods += shape.count
        for shape in need.waiting:
            pods += shape.count
    return pods < PODS_MAX


def _columns(fleet: DecisionState, clusters: Sequence[ClusterState], profiles: Profiles) -> DemandColumns:
    given = [row for cluster in clusters for row in cluster.needs]
    shapes = [shape for _, need in given for shape in ((*need.shapes, *need.waiting) if need.waiting else need.shapes)]
    running = np.array([len(need.shapes) for _, need in given], np.int64)
    sizes = running + np.array([len(need.waiting) for _, need in given], np.int64)
    row = np.repeat(np.arange(len(given)), sizes)
    index = np.arange(len(row)) - (np.cumsum(sizes) - sizes)[row]
    number, requests, size = _requests(fleet, [tuple(shape.resources.items()) for shape in shapes])
    said = np.array([profiles.numbers(need.profile) for _, need in given], np.int64).reshape(len(given), 2)
    cluster = np.repeat(np.arange(len(clusters)), [len(c.needs) for c in clusters])
    accesses = list(profiles.access)
    can_host = _can_host(fleet, clusters, accesses, (cluster[row], said[row, 0], number), requests)
    groups = np.bincount(cluster[row[can_host]], minlength=len(clusters))
    place = np.argsort(-groups, kind="stable")
    rank = np.zeros(len(clusters), np.int64)
    rank[place] = np.arange(len(clusters))
    # Rows of a cluster stand in list order, which decides between those of equal precedence.
    order = np.lexsort((profiles.ranks()[said[:, 1]], rank[cluster]))
    new = np.zeros(len(given), np.int64)
    new[order] = np.arange(len(given))
    kept = np.flatnonzero(can_host)
    # Those of equal size stay in the order of their index.
    kept = kept[np.lexsort((-size[number[kept]], new[row[kept]]))]
    counts = np.array([shape.count for shape in shapes], np.int64)
    limits = np.array([shape.max_per_machine or NO_LIMIT for shape in shapes], np.int64)
    left_out = np.bincount(cluster[row[~can_host]], minlength=len(clusters)) > 0
    return DemandColumns(
        clusters=[clusters[c] for c in place.tolist()],
        has_impossible=left_out[place],
        needs=[given[at] for at in order.tolist()],
        first_row=firsts(np.bincount(rank[cluster], minlength=len(clusters))),
        first_group=firsts(np.bincount(new[row[kept]], minlength=len(given))),
        index=index[kept],
        counts=counts[kept],
        limits=limits[kept],
        is_waiting=(index >= running[row])[kept],
        access=said[row[kept], 0],
        accesses=accesses,
        number=number[kept],
        requests=requests,
    )


def firsts(sizes: npt.NDArray[Any]) -> Rows:
    """Return where each of some consecutive runs begins, and where the last one ends."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)))


def _requests(fleet: DecisionState, resources: Sequence[tuple[tuple[str, int], ...]]) -> tuple[Rows, Rows, Floats]:
    """Return the number of each request, and by number what one pod requests of each dimension, and its size."""
    known = {each: number for number, each in enumerate(dict.fromkeys(resources))}
    requests, sizes = np.zeros((len(known), len(fleet.dimensions.names)), np.int64), np.zeros(len(known))
    for number, each in enumerate(known):
        request, sizes[number] = fleet.rooms.pod(dict(each))
        for d, milli in request:
            requests[number, d] = milli
    return np.array([known[each] for each in resources], np.int64), requests, sizes


def _can_host(
    fleet: DecisionState,
    clusters: Sequence[ClusterState],
    accesses: Sequence[Access],
    groups: tuple[Rows, Rows, Rows],
    requests: Rows,
) -> Bools:
    """Return for each group, of which cluster, access and request are given, whether a known machine hosts a pod."""
    cluster, access, number = groups
    overheads = fleet.options.overheads
    own = np.array([place + 1 if c.id in overheads else 0 for place, c in enumerate(clusters)], np.int64)
    asked, first, question = np.unique(
        (own[cluster] * max(1, len(accesses)) + access) * max(1, len(requests)) + number,
        return_index=True,
        return_inverse=True,
    )
    answers = np.zeros(len(asked), np.bool_)
    pods = [tuple((d, milli) for d, milli in enumerate(request) if milli) for request in requests.tolist()]
    columns = (column[first].tolist() for column in groups)
    for place, (of_cluster, of_access, of_number) in enumerate(zip(*columns, strict=True)):
        hostable = fleet.rooms.hostable(clusters[of_cluster].id, accesses[of_access].matching)
        answers[place] = hostable[pods[of_number]]
    found: Bools = answers[question]
    return found
