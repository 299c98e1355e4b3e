"""Turns rows of demand into integers, once per row object, and folds gangs (docs/spec/engine.md §1.8, §4).

A need is a frozen value, so what is worked out for one object holds for as long as the object does; a table that keeps
its rows between cycles pays for the changed ones alone. Folding asks per (cluster, folded profile, aggregate), not per
row. Nothing here may look at claims, prices or states beyond what folding asks.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from bigfleet.engine.columnar.arrays import (
    MODE_PLAIN,
    MODE_SAME,
    MODE_SPREAD,
    Bytes,
    Int32s,
    Int64s,
)
from bigfleet.engine.columnar.kernels import COVERAGE_MAX
from bigfleet.engine.columnar.tables import NOWHERE, Numbers, Tables
from bigfleet.engine.folding import folded_profile
from bigfleet.model.need import Need
from bigfleet.model.profile import Profile
from bigfleet.model.vector import Vector

#: A demand is stale when it knows this many needs more than twice the current ones.
STALE_NEEDS_MAX: Final = 1000


class ProfileColumns(NamedTuple):
    """One entry per profile."""

    precedence: Int64s
    priority: Int64s
    bucket: Int32s
    mode: Bytes
    #: Number of the topology key, -1 for plain profiles.
    key: Int32s
    skew: Int64s
    #: Number of the folded profile, the profile itself without Same.
    folded: Int32s


class NeedColumns(NamedTuple):
    """One entry per need."""

    cluster: Int32s
    profile: Int32s
    aggregate: Int32s
    min_unit: Int32s
    pair: Int32s
    parked: Bytes


class Vectors:
    """Distinct wanted vectors: scaled, with what comparing coverages takes."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._numbers: dict[frozenset[tuple[str, int]], int] = {}
        self.vectors: list[Vector] = []
        self._version = -1
        self.scaled: Int64s = np.zeros((0, 1), np.int64)
        self.mask: Int64s = np.zeros(0, np.int64)
        self.weight: Int64s = np.zeros((0, 1), np.int64)
        self.is_exact: Bytes = np.zeros(0, np.uint8)

    def number(self, vector: Vector) -> int:
        """Return the number of a vector."""
        number = self._numbers.setdefault(frozenset(vector.items()), len(self.vectors))
        if number == len(self.vectors):
            self.vectors.append(vector)
        return number

    def follow(self) -> None:
        """Work out what was added since, or everything when the scale changed."""
        tables = self._tables
        if self._version != tables.scale_version:
            self._version = tables.scale_version
            width = len(tables.scale)
            self.scaled = self.weight = np.zeros((0, width), np.int64)
            self.mask, self.is_exact = np.zeros(0, np.int64), np.zeros(0, np.uint8)
        added = self.vectors[len(self.scaled) :]
        if not added:
            return
        lines, weights, exact = [], [], []
        for vector in added:
            line, is_exact = tables.scaled(vector)
            weight, is_small = coverage_weights(line)
            lines.append(line)
            weights.append(weight)
            exact.append(is_exact and is_small)
        scaled = np.array(lines, np.int64)
        bits = np.arange(scaled.shape[1], dtype=np.int64)
        self.scaled = np.concatenate([self.scaled, scaled])
        self.mask = np.concatenate([self.mask, ((scaled > 0) << bits).sum(axis=1, dtype=np.int64)])
        self.weight = np.concatenate([self.weight, np.array(weights, np.int64)])
        self.is_exact = np.concatenate([self.is_exact, np.array(exact, np.uint8)])


def coverage_weights(line: list[int]) -> tuple[list[int], bool]:
    """Return common denominator ÷ wanted per dimension, and whether a coverage stays within the integers.

    What no machine has is covered by none and weighs nothing.
    """
    wanted = [milli for place, milli in enumerate(line) if milli and place != NOWHERE]
    denominator = math.lcm(*wanted)
    if denominator * len(line) >= COVERAGE_MAX:
        return [0] * len(line), False
    return [denominator // milli if milli and place != NOWHERE else 0 for place, milli in enumerate(line)], True


class Demand:
    """Every row object, profile and vector that recent calls have seen, in columns."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self.vectors = Vectors(tables)
        self._profile_numbers: dict[str, int] = {}
        self.profiles: list[Profile] = []
        self._profile_lists: tuple[list[int], ...] = tuple([] for _ in ProfileColumns._fields)
        self.profile_columns = self._profile_arrays()
        self._keys = Numbers()
        #: Topology keys in the order of their numbers.
        self.keys: list[str] = []
        self._needs: list[Need] = []
        #: The rows of the last call, in the order given.
        self.rows: list[Need] = []
        self._last_numbers: Int64s = np.zeros(0, np.int64)
        self._need_numbers: dict[int, int] = {}
        self._need_lists: tuple[list[int], ...] = tuple([] for _ in NeedColumns._fields)
        self.need_columns = self._need_arrays()

    def is_stale(self, rows: int) -> bool:
        """Say whether most of what is kept belongs to rows that are gone; then a new object is cheaper to keep."""
        return len(self._needs) > 2 * rows + STALE_NEEDS_MAX

    def numbers_of(self, demand: Sequence[Need]) -> Int64s:
        """Return the number of every need, in the order given."""
        if len(demand) == len(self.rows) and all(map(operator.is_, demand, self.rows)):
            self.vectors.follow()
            return self._last_numbers
        find = self._need_numbers.get
        found = list(map(find, map(id, demand)))
        if None in found:
            for place, number in enumerate(found):
                if number is None:
                    found[place] = self._add_need(demand[place])
            self.profile_columns = self._profile_arrays()
            self.need_columns = self._need_arrays()
        self.vectors.follow()
        self.rows, self._last_numbers = list(demand), np.array(found, np.int64)
        return self._last_numbers

    def _add_need(self, need: Need) -> int:
        known = self._need_numbers.get(id(need))
        if known is not None:
            return known
        # The list keeps the object alive, so that its id stays its own.
        number = self._need_numbers[id(need)] = len(self._needs)
        self._needs.append(need)
        line = (
            self._tables.clusters.number(need.cluster),
            self.profile_number(need.profile),
            self.vectors.number(need.aggregate),
            self.vectors.number(need.min_unit),
            self._tables.pairs.number((need.fingerprint, need.group)),
            int(need.parked),
        )
        for column, value in zip(self._need_lists, line, strict=True):
            column.append(value)
        return number

    def scaled_times(self, number: int, times: int) -> list[int]:
        """Return a multiple of a wanted vector in scaled units."""
        return self._tables.scaled(self.vectors.vectors[number], times)[0]

    def profile_number(self, profile: Profile) -> int:
        """Return the number of a profile; equal profiles have one."""
        known = self._profile_numbers.get(profile.fingerprint)
        if known is not None:
            return known
        spread, same_key = profile.strict_spread, profile.same_key
        key = same_key if same_key is not None else spread.topology_key if spread is not None else None
        mode = MODE_SAME if same_key is not None else MODE_SPREAD if spread is not None else MODE_PLAIN
        priority, interruption, reclamation = profile.precedence
        number = self._profile_numbers[profile.fingerprint] = len(self.profiles)
        self.profiles.append(profile)
        line = [
            # A whole order of (priority, interruption, reclamation) in one integer: ordinals take five bits.
            (priority << 10) + (interruption << 5) + reclamation,
            priority,
            interruption,
            mode,
            -1 if key is None else self._key_number(key),
            0 if spread is None else spread.skew_max,
            number,
        ]
        for column, value in zip(self._profile_lists, line, strict=True):
            column.append(value)
        if mode == MODE_SAME:
            self._profile_lists[-1][number] = self.profile_number(folded_profile(profile))
        return number

    def _key_number(self, key: str) -> int:
        number = self._keys.number(key)
        if number == len(self.keys):
            self.keys.append(key)
        return number

    def _profile_arrays(self) -> ProfileColumns:
        lists = self._profile_lists
        types = (np.int64, np.int64, np.int32, np.uint8, np.int32, np.int64, np.int32)
        return ProfileColumns(*(np.array(column, dtype) for column, dtype in zip(lists, types, strict=True)))

    def _need_arrays(self) -> NeedColumns:
        types = (np.int32, np.int32, np.int32, np.int32, np.int32, np.uint8)
        return NeedColumns(*(np.array(column, dtype) for column, dtype in zip(self._need_lists, types, strict=True)))


class Folded(NamedTuple):
    """The folded list: one entry per row, in list order."""

    #: Place of the row's first member in the demand.
    place: Int64s
    cluster: Int32s
    profile: Int32s
    #: Number of the wanted vector; of a folded row that of one member.
    aggregate: Int32s
    min_unit: Int32s
    pair: Int32s
    parked: Bytes
    #: How many rows were folded into this one, 0 when it is not folded.
    members: Int64s
    #: Places of the members of each folded row, by its place in this list.
    member_places: dict[int, Int64s]


def unfolded(columns: NeedColumns, numbers: Int64s) -> Folded:
    """Return the list of a demand in which nothing folds."""
    return Folded(
        place=np.arange(len(numbers)),
        cluster=columns.cluster[numbers],
        profile=columns.profile[numbers],
        aggregate=columns.aggregate[numbers],
        min_unit=columns.min_unit[numbers],
        pair=columns.pair[numbers],
        parked=columns.parked[numbers],
        members=np.zeros(len(numbers), np.int64),
        member_places={},
    )


class FoldQuestions(NamedTuple):
    """The distinct (cluster, folded profile, aggregate) of the Same rows: each folds or does not as a whole."""

    #: Places of the Same rows in the demand, and the question of each.
    places: Int64s
    question: Int64s
    cluster: Int64s
    profile: Int64s
    aggregate: Int64s


def fold_questions(rows: Folded, profiles: ProfileColumns) -> FoldQuestions:
    """Return what must be asked to fold the demand."""
    places = np.flatnonzero(profiles.mode[rows.profile] == MODE_SAME)
    cluster, aggregate = rows.cluster[places].astype(np.int64), rows.aggregate[places].astype(np.int64)
    folded = profiles.folded[rows.profile[places]].astype(np.int64)
    if len(places) == 0:
        return FoldQuestions(places, cluster, cluster, folded, aggregate)
    profile_count, vector_count = int(folded.max()) + 1, int(aggregate.max()) + 1
    key = (cluster * profile_count + folded) * vector_count + aggregate
    distinct, question = np.unique(key, return_inverse=True)
    rest, asked_aggregate = np.divmod(distinct, vector_count)
    asked_cluster, asked_profile = np.divmod(rest, profile_count)
    return FoldQuestions(places, question, asked_cluster, asked_profile, asked_aggregate)


def fold_rows(rows: Folded, questions: FoldQuestions, folds: Bytes, group_pairs: Int64s) -> Folded:
    """Return the folded list: a folded row stands where its first member stood (§4).

    `folds` and `group_pairs`, the pair of (folded fingerprint, no group), are per question.
    """
    folding = folds[questions.question] != 0
    if not folding.any():
        return rows
    places, question = questions.places[folding], questions.question[folding]
    order = np.argsort(question, kind="stable")
    asked, starts, counts = np.unique(question[order], return_index=True, return_counts=True)
    grouped = places[order]
    firsts = grouped[starts]
    keep = np.ones(len(rows.place), np.bool_)
    keep[places] = False
    keep[firsts] = True
    changed: dict[str, tuple[npt.NDArray[Any], npt.NDArray[Any]]] = {
        "profile": (rows.profile, questions.profile[asked]),
        "min_unit": (rows.min_unit, questions.aggregate[asked]),
        "pair": (rows.pair, group_pairs[asked]),
        "parked": (rows.parked, np.zeros(len(asked))),
        "members": (rows.members, counts),
    }
    columns = {}
    for name, (column, values) in changed.items():
        column = column.copy()
        column[firsts] = values
        columns[name] = column[keep]
    position = np.cumsum(keep) - 1
    members = {
        int(position[first]): grouped[start : start + count]
        for first, start, count in zip(firsts.tolist(), starts.tolist(), counts.tolist(), strict=True)
    }
    return Folded(
        place=rows.place[keep],
        cluster=rows.cluster[keep],
        aggregate=rows.aggregate[keep],
        member_places=members,
        **columns,
    )


def joined(members: Sequence[Need]) -> Need:
    """Return the folded row of equal gangs: their aggregates summed, the earliest known arrival (§4)."""
    first = members[0]
    arrivals = [need.arrival_unix_nanos for need in members if need.arrival_unix_nanos]
    return replace(
        first,
        profile=folded_profile(first.profile),
        min_unit=first.aggregate,
        group="",
        parked=False,
        aggregate={name: milli * len(members) for name, milli in first.aggregate.items()},
        arrival_unix_nanos=min(arrivals, default=0),
    )
