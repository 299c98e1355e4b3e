"""Puts the rows of many clusters in columns, without an object for each row or group of pods.

The result equals `fleet.rows_of` for clusters whose rows have shapes and are neither gangs nor spread. Placing pods is
left to `credit`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import Final

import numpy as np
import numpy.typing as npt

from bigfleet.engine.shapes.columns.rows import NO_LIMIT, Bools, Rows, RowsInColumns, firsts
from bigfleet.engine.shapes.columns.sorting import stable_order
from bigfleet.engine.shapes.fleet import DecisionState
from bigfleet.engine.shapes.state import ClusterState
from bigfleet.model.need import Need
from bigfleet.model.penalty import bucket_upper_dollars
from bigfleet.model.profile import Profile

Floats = npt.NDArray[np.float64]

#: Pods of a cluster up to which the columns hold every sum.
PODS_MAX: Final = 1 << 40


@dataclass(frozen=True, slots=True)
class Access:
    """Which machines rows may use."""

    matching: frozenset[int]
    is_pinned: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Profiles:
    """What the profiles of a demand say of access and of precedence, by the number of the profile."""

    #: The different accesses, and which of them each profile has; -1 for gangs and spreads.
    accesses: Sequence[Access]
    access: Rows
    #: The rank of each profile's precedence; the lowest rank is served first.
    rank: Rows

    @classmethod
    def of(cls, fleet: DecisionState, profiles: Sequence[Profile]) -> "_Profiles":
        """Look at each profile once."""
        numbers: dict[Access, int] = {}
        access = [
            -1 if _is_bound(profile) else numbers.setdefault(_access_of(fleet, profile), len(numbers))
            for profile in profiles
        ]
        precedences = [profile.precedence for profile in profiles]
        ranks = {each: rank for rank, each in enumerate(sorted(set(precedences), reverse=True))}
        rank = np.array([ranks[each] for each in precedences], np.int64)
        return cls(list(numbers), np.array(access, np.int64), rank)


def _is_bound(profile: Profile) -> bool:
    """Return whether where one pod of a row runs limits where its others may."""
    return profile.same_key is not None or bool(profile.spreads and profile.strict_spread is not None)


def _access_of(fleet: DecisionState, profile: Profile) -> Access:
    is_pinned = bucket_upper_dollars(profile.interruption_bucket) == float("inf")
    return Access(fleet.machines.matching(profile), is_pinned)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DemandColumns:
    """Rows by cluster, then in processing order; groups of pods by row, then in canonical order.

    Groups of which no known machine can host one pod are left out.
    """

    #: Those with the most groups first.
    clusters: Sequence[ClusterState]
    #: Whether groups of the cluster were left out.
    has_impossible: Bools
    #: Each row's place in the demand, and in `needs`.
    positions: Rows
    places: Rows
    #: Rows of the demand, these among them.
    needs: Sequence[Need]
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
    #: The whole demand of each cluster by dimension, as 64-bit sums and as about the same sums of any size, where they
    #: are known.
    sums: tuple[Rows, Floats] | None = None

    @property
    def first(self) -> Rows:
        """Where the groups of each cluster begin, and where the last ones end."""
        return self.first_group[self.first_row]

    def wanted(self) -> Floats:
        """Return the whole demand of each cluster by dimension, each sum rounded once."""
        first, (sums, about) = self.first, self._sums() if self.sums is None else self.sums
        found: Floats = sums.astype(np.float64)
        for c, d in zip(*(places.tolist() for places in np.nonzero(about >= NO_LIMIT)), strict=True):
            here = slice(*first[c : c + 2].tolist())
            found[c, d] = sum(map(mul, self.counts[here].tolist(), self.requests[self.number[here], d].tolist()))
        return found

    def _sums(self) -> tuple[Rows, Floats]:
        first, sizes = self.first, np.diff(self.first)
        amounts = self.counts[:, None] * self.requests[self.number]
        # Sums that leave 64 bits on their way come back, because only their differences are read.
        sums = np.concatenate((np.zeros((1, amounts.shape[1]), np.int64), np.cumsum(amounts, axis=0)))
        cluster, sizes_of = np.repeat(np.arange(len(sizes)), sizes), self.requests.astype(np.float64)[self.number]
        about = [np.bincount(cluster, self.counts * each, len(sizes)) for each in sizes_of.T]
        return sums[first[1:]] - sums[first[:-1]], np.stack(about, axis=1)


def demand_columns(fleet: DecisionState, rows: RowsInColumns) -> tuple[DemandColumns, list[ClusterState]]:
    """Return the demand of the clusters that can be credited on columns, and the other clusters."""
    profiles = _Profiles.of(fleet, rows.profiles)
    is_plain = rows.has_pods & (profiles.access >= 0)[rows.profile]
    if fleet.orphans:
        keys = fleet.orphans.keys()
        asked = [rows.needs[place] for place in rows.places.tolist()]
        is_plain &= np.array([(need.fingerprint, need.group) not in keys for need in asked], np.bool_)
    pods = np.diff(firsts(rows.counts)[rows.first])
    not_plain = np.bincount(rows.cluster[~is_plain], minlength=len(rows.clusters)) > 0
    not_plain |= np.bincount(rows.cluster, pods, len(rows.clusters)) >= PODS_MAX
    found: list[ClusterState] = []
    others: list[ClusterState] = []
    of_cluster = np.full(len(rows.clusters), -1, np.int64)
    for number, (name, is_left_out) in enumerate(zip(rows.clusters, not_plain.tolist(), strict=True)):
        cluster = fleet.clusters.get(name)
        if cluster is None:
            continue
        if is_left_out or name in fleet.options.targets:
            others.append(cluster)
        else:
            of_cluster[number] = len(found)
            found.append(cluster)
    if fleet.loops is not None:
        return _columns_in_loops(fleet, rows, profiles, found, of_cluster), others
    return _columns(fleet, rows, profiles, found, of_cluster), others


def _columns(
    fleet: DecisionState,
    rows: RowsInColumns,
    profiles: _Profiles,
    clusters: Sequence[ClusterState],
    of_cluster: Rows,
) -> DemandColumns:
    """Return the demand of some clusters; `of_cluster` has their places by the number of the cluster, -1 for others."""
    cluster = of_cluster[rows.cluster]
    given = np.flatnonzero(cluster >= 0)
    cluster, profile = cluster[given], rows.profile[given]
    sizes = np.diff(rows.first)[given]
    row = np.repeat(np.arange(len(given)), sizes)
    index = np.arange(len(row)) - (np.cumsum(sizes) - sizes)[row]
    shape = rows.first[given][row] + index
    number, requests, size = _requests(fleet, rows, rows.number[shape])
    number = number[rows.number[shape]]
    access = profiles.access[profile]
    can_host = _can_host(fleet, clusters, profiles.accesses, (cluster[row], access[row], number), requests)
    groups = np.bincount(cluster[row[can_host]], minlength=len(clusters))
    place = np.argsort(-groups, kind="stable")
    rank = np.zeros(len(clusters), np.int64)
    rank[place] = np.arange(len(clusters))
    # Rows of a cluster stand in list order, which decides between those of equal precedence.
    order = stable_order(profiles.rank[profile], rank[cluster])
    new = np.zeros(len(given), np.int64)
    new[order] = np.arange(len(given))
    kept = np.flatnonzero(can_host)
    # Those of equal size stay in the order of their index.
    by_size = np.unique(-size, return_inverse=True)[1]
    kept = kept[stable_order(by_size[number[kept]], new[row[kept]])]
    of_kept = shape[kept]
    left_out = np.bincount(cluster[row[~can_host]], minlength=len(clusters)) > 0
    return DemandColumns(
        clusters=[clusters[c] for c in place.tolist()],
        has_impossible=left_out[place],
        positions=rows.positions[given[order]],
        places=rows.places[given[order]],
        needs=rows.needs,
        first_row=firsts(np.bincount(rank[cluster], minlength=len(clusters))),
        first_group=firsts(np.bincount(new[row[kept]], minlength=len(given))),
        index=index[kept],
        counts=rows.counts[of_kept],
        limits=rows.limits[of_kept],
        is_waiting=(index >= rows.running[given][row])[kept],
        access=access[row[kept]],
        accesses=profiles.accesses,
        number=number[kept],
        requests=requests,
    )


def _columns_in_loops(
    fleet: DecisionState,
    rows: RowsInColumns,
    profiles: _Profiles,
    clusters: Sequence[ClusterState],
    of_cluster: Rows,
) -> DemandColumns:
    """Return what `_columns` does, clusters in the order given."""
    assert fleet.loops is not None, "the caller has looked"
    cluster, access = of_cluster[rows.cluster], profiles.access[rows.profile]
    given = np.flatnonzero(cluster >= 0)
    # Rows of a cluster stand in list order, which decides between those of equal precedence.
    order = given[stable_order(profiles.rank[rows.profile[given]], cluster[given])]
    first_row = firsts(np.bincount(cluster[given], minlength=len(clusters)))
    numbers, requests, size_of = _requests(fleet, rows, rows.number)
    pair, first_room, rooms = _rooms(fleet, clusters, profiles.accesses, (cluster, access), given)
    first_group = np.zeros(len(given) + 1, np.int64)
    shape, number = np.zeros((2, len(rows.number)), np.int64)
    left_out, sums = np.zeros(len(clusters), np.uint8), np.zeros((len(clusters), requests.shape[1]), np.int64)
    about = np.zeros(sums.shape)
    size = fleet.loops.arrange_groups(
        *(order, first_row, rows.first, rows.number, rows.counts, numbers, requests, size_of),
        *(first_room, rooms, pair, first_group, shape, number, left_out, sums, about),
    )
    shape, number, sizes = shape[:size], number[:size], np.diff(first_group)
    index = shape - np.repeat(rows.first[order], sizes)
    return DemandColumns(
        clusters=clusters,
        has_impossible=left_out.view(np.bool_),
        positions=rows.positions[order],
        places=rows.places[order],
        needs=rows.needs,
        first_row=first_row,
        first_group=first_group,
        index=index,
        counts=rows.counts[shape],
        limits=rows.limits[shape],
        is_waiting=index >= np.repeat(rows.running[order], sizes),
        access=np.repeat(access[order], sizes),
        accesses=profiles.accesses,
        number=number,
        requests=requests,
        sums=(sums, about),
    )


def _rooms(
    fleet: DecisionState,
    clusters: Sequence[ClusterState],
    accesses: Sequence[Access],
    columns: tuple[Rows, Rows],
    given: Rows,
) -> tuple[Rows, Rows, Rows]:
    """Return a number for each row, and by number where its rooms of known machines begin, and these rooms.

    `columns` are clusters and accesses; rows that are not `given` have no meaning.
    """
    overheads, width = fleet.options.overheads, max(1, len(accesses))
    own = np.array([place + 1 if c.id in overheads else 0 for place, c in enumerate(clusters)], np.int64)
    cluster, access = columns
    asked, pair = np.zeros((len(clusters) + 1) * width, np.bool_), np.zeros(len(cluster), np.int64)
    pair[given] = own[cluster[given]] * width + access[given]
    asked[pair[given]] = True
    found: list[list[int]] = []
    first = [0]
    for each in np.flatnonzero(asked).tolist():
        name = clusters[each // width - 1].id if each >= width else ""
        # The largest ones first, because one that holds a pod is enough.
        known = sorted(fleet.rooms.known(name, accesses[each % width].matching)[0], reverse=True)
        found += [[min(milli, NO_LIMIT) for milli in room] for room in known]
        first.append(len(found))
    rooms = np.array(found, np.int64).reshape(len(found), len(fleet.dimensions.names))
    return (np.cumsum(asked) - 1)[pair], np.array(first, np.int64), rooms


def _requests(fleet: DecisionState, rows: RowsInColumns, number: Rows) -> tuple[Rows, Rows, Floats]:
    """Return numbers by place in the resources of the rows, and by number what a pod requests, and its size.

    `number` has the places that occur; others get no number.
    """
    is_there = np.zeros(len(rows.resources), np.bool_)
    is_there[number] = True
    known = np.flatnonzero(is_there)
    requests, sizes = np.zeros((len(known), len(fleet.dimensions.names)), np.int64), np.zeros(len(known))
    for place, each in enumerate(known.tolist()):
        request, sizes[place] = fleet.rooms.pod(rows.resources[each])
        for d, milli in request:
            requests[place, d] = milli
    return np.cumsum(is_there) - 1, requests, sizes


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
