"""Turns rows of demand into integers, once per row object (docs/spec/model.md §8).

A need is a frozen value, so what is worked out for one object holds for as long as the object does; a table that keeps
its rows between cycles pays for the changed ones alone. Profiles, vectors and the questions that rows put to matching
are numbered too. This module must not look at machines beyond what matching asks.
"""

import math
import operator
from collections.abc import Sequence
from itertools import repeat
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from bigfleet.engine.columnar.arrays import MODE_PLAIN, MODE_SAME, MODE_SPREAD, Bytes, Int32s, Int64s
from bigfleet.engine.columnar.kernels.base import COVERAGE_MAX
from bigfleet.engine.columnar.tables import NOWHERE, Numbers, VocabularyTables
from bigfleet.engine.demand_order import ListedRows
from bigfleet.engine.folding import folded_profile
from bigfleet.model.need import Need
from bigfleet.model.profile import Profile
from bigfleet.model.vector import Vector

#: A demand is stale when it knows this many needs more than twice the current ones.
STALE_NEEDS_MAX: Final = 1000
#: No question: the row folds under none.
NO_ASK: Final = -1
#: Needs that are looked up in one go.
LOOKED_UP_MAX: Final = 4096


class ProfileColumns(NamedTuple):
    """One entry per profile."""

    precedence: Int64s
    priority: Int64s
    bucket: Int32s
    mode: Bytes
    #: Number of the topology key, -1 for plain profiles.
    key: Int32s
    skew: Int64s


class NeedColumns(NamedTuple):
    """One entry per need."""

    cluster: Int32s
    profile: Int32s
    aggregate: Int32s
    #: What it asks of one machine: profile and min unit.
    ask: Int32s
    #: What its folded row asks of one machine, NO_ASK for a row without Same.
    folded_ask: Int32s
    #: Its class among gangs: profile, min unit and the dimensions that it wants; NO_ASK for a row without Same.
    gang: Int32s
    pair: Int32s
    parked: Bytes


#: NumPy sorts keys of 16 bits by counting.
_SHORT_MAX: Final = 1 << 16
NEED_TYPES: Final = (np.int32, np.int32, np.int32, np.int32, np.int32, np.int32, np.int32, np.uint8)
PROFILE_TYPES: Final = (np.int64, np.int64, np.int32, np.uint8, np.int32, np.int64)


def _extended(columns: Sequence[npt.NDArray[Any]], added: Sequence[list[int]]) -> list[npt.NDArray[Any]]:
    """Return the columns with what was added, and forget that it was."""
    grown = [
        np.concatenate([column, np.array(values, column.dtype)]) for column, values in zip(columns, added, strict=True)
    ]
    for values in added:
        values.clear()
    return grown


class Asks:
    """Questions to matching, (profile, vector): which shapes match and cover the vector; answered once per fleet."""

    def __init__(self, tables: VocabularyTables, profiles: list[Profile], vectors: list[Vector]) -> None:
        self._tables = tables
        self._profiles = profiles
        self._vectors = vectors
        self._numbers: dict[tuple[int, int], int] = {}
        #: Profile and vector of each question.
        self.profile: list[int] = []
        self.vector: list[int] = []
        self._version = -1
        self._fit: Int32s = np.zeros(0, np.int32)
        self._proving: Int32s = np.zeros(0, np.int32)

    def number(self, profile: int, vector: int) -> int:
        """Return the number of a question."""
        number = self._numbers.setdefault((profile, vector), len(self.profile))
        if number == len(self.profile):
            self.profile.append(profile)
            self.vector.append(vector)
        return number

    def fits(self, asks: Int32s) -> Int32s:
        """Return the fit of each question."""
        self._follow()
        for ask in np.flatnonzero(self._is_asked(asks) & (self._fit < 0)).tolist():
            profile = self._profiles[self.profile[ask]]
            self._fit[ask] = self._tables.fit(profile.requirements, self._vectors[self.vector[ask]])
        fits: Int32s = self._fit[asks]
        return fits

    def proving_fits(self, asks: Int32s) -> Int32s:
        """Return the fit of each question among machines that carry the profile's strict-spread key (§4)."""
        self.fits(asks)
        for ask in np.flatnonzero(self._is_asked(asks) & (self._proving < 0)).tolist():
            spread = self._profiles[self.profile[ask]].strict_spread
            fit = int(self._fit[ask])
            self._proving[ask] = fit if spread is None else self._tables.carrying(fit, spread.topology_key)
        proving: Int32s = self._proving[asks]
        return proving

    def _is_asked(self, asks: Int32s) -> npt.NDArray[np.bool_]:
        return np.bincount(asks, minlength=len(self.profile)) > 0

    def _follow(self) -> None:
        if self._version != self._tables.fits_version:
            self._version = self._tables.fits_version
            self._fit = self._proving = np.zeros(0, np.int32)
        missing = np.full(len(self.profile) - len(self._fit), -1, np.int32)
        if len(missing):
            self._fit = np.concatenate([self._fit, missing])
            self._proving = np.concatenate([self._proving, missing])


class Vectors:
    """Distinct wanted vectors: scaled, with what comparing coverages takes."""

    def __init__(self, tables: VocabularyTables) -> None:
        self._tables = tables
        self._numbers: dict[frozenset[tuple[str, int]], int] = {}
        self._multiples: dict[tuple[int, int], int] = {}
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

    def multiple(self, number: int, times: int) -> int:
        """Return the number of a multiple of a vector."""
        known = self._multiples.get((number, times))
        if known is None:
            many = {name: milli * times for name, milli in self.vectors[number].items()}
            known = self._multiples[(number, times)] = self.number(many)
        return known

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


class Followed(NamedTuple):
    """Numbers of rows that were made of those of the rows before."""

    before: Int64s
    #: Clusters of the rows that came or went, with repeats.
    clusters: Int32s


class ColumnarDemand:
    """Every row object, profile and vector that recent calls have seen, in columns."""

    def __init__(self, tables: VocabularyTables) -> None:
        self._tables = tables
        self.vectors = Vectors(tables)
        self._profile_numbers: dict[str, int] = {}
        self.profiles: list[Profile] = []
        self._new_profiles: tuple[list[int], ...] = tuple([] for _ in ProfileColumns._fields)
        self.profile_columns = ProfileColumns._make(np.zeros(0, dtype) for dtype in PROFILE_TYPES)
        #: Number of the folded profile of each profile, itself without Same.
        self._folded: list[int] = []
        self._precedence_ranks: npt.NDArray[np.integer] = np.zeros(0, np.int64)
        self.asks = Asks(tables, self.profiles, self.vectors.vectors)
        self._gangs = Numbers()
        self._keys = Numbers()
        #: Topology keys in the order of their numbers.
        self.keys: list[str] = []
        self._needs: list[Need] = []
        #: The rows of the last call, in the order given.
        self.rows: Sequence[Need] = ()
        #: Where the last call's numbers came from; None where every row was looked up.
        self.followed: Followed | None = None
        self._last_numbers: Int64s = np.zeros(0, np.int64)
        self._need_numbers: dict[int, int] = {}
        self._new_needs: tuple[list[int], ...] = tuple([] for _ in NeedColumns._fields)
        self.need_columns = NeedColumns._make(np.zeros(0, dtype) for dtype in NEED_TYPES)

    def is_stale(self, rows: int) -> bool:
        """Return whether most of what is stored belongs to rows that are gone; then a new object is cheaper to keep."""
        return len(self._needs) > 2 * rows + STALE_NEEDS_MAX

    def numbers_of(self, demand: Sequence[Need]) -> Int64s:
        """Return the number of every need, in the order given; the same array while the objects are the same."""
        rows = self.rows
        if demand is not rows and not (len(demand) == len(rows) and all(map(operator.is_, demand, rows))):
            # What is stored here keeps the objects alive, so that their ids stay their own.
            self._last_numbers = self._numbers_after(demand)
            self.rows = demand if isinstance(demand, tuple) else list(demand)
        self.vectors.follow()
        return self._last_numbers

    def _numbers_after(self, demand: Sequence[Need]) -> Int64s:
        """Return the numbers of rows that are not those of the last call."""
        before, self.followed = self._last_numbers, None
        if isinstance(demand, ListedRows) and isinstance(self.rows, ListedRows) and demand.since is self.rows.moment:
            gone, come = np.array(demand.gone, np.int64), np.array(demand.come, np.int64)
            stayed, stays = np.ones(len(before), np.bool_), np.ones(len(demand), np.bool_)
            stayed[gone] = stays[come] = False
            numbers = np.empty(len(demand), np.int64)
            numbers[stays] = before[stayed]
            numbers[come] = self._look_up([demand[place] for place in demand.come])
            cluster = self.need_columns.cluster
            self.followed = Followed(before, np.concatenate([cluster[before[gone]], cluster[numbers[come]]]))
            return numbers
        return self._look_up(demand)

    def _look_up(self, needs: Sequence[Need]) -> Int64s:
        numbers = np.empty(len(needs), np.int64)
        # One call for all of them would keep the interpreter from every other thread for its whole time.
        for start in range(0, len(needs), LOOKED_UP_MAX):
            some = needs[start : start + LOOKED_UP_MAX]
            known = map(self._need_numbers.get, map(id, some), repeat(-1))
            numbers[start : start + len(some)] = np.fromiter(known, np.int64, len(some))
        missing = np.flatnonzero(numbers < 0)
        if len(missing):
            numbers[missing] = [self._add_need(needs[place]) for place in missing.tolist()]
            self.profile_columns = ProfileColumns._make(_extended(self.profile_columns, self._new_profiles))
            self.need_columns = NeedColumns._make(_extended(self.need_columns, self._new_needs))
        return numbers

    def _add_need(self, need: Need) -> int:
        known = self._need_numbers.get(id(need))
        if known is not None:
            return known
        number = self._need_numbers[id(need)] = len(self._needs)
        self._needs.append(need)
        profile = self.profile_number(need.profile)
        aggregate, min_unit = self.vectors.number(need.aggregate), self.vectors.number(need.min_unit)
        folded_ask = gang = NO_ASK
        if need.profile.same_key is not None:
            folded_ask = self.asks.number(self._folded[profile], aggregate)
            gang = self._gangs.number((profile, min_unit, frozenset(need.aggregate)))
        line = (
            self._tables.clusters.number(need.cluster),
            profile,
            aggregate,
            self.asks.number(profile, min_unit),
            folded_ask,
            gang,
            self._tables.pairs.number((need.fingerprint, need.group)),
            int(need.parked),
        )
        for column, value in zip(self._new_needs, line, strict=True):
            column.append(value)
        return number

    def precedence_ranks(self) -> npt.NDArray[np.integer]:
        """Return the rank of each profile's precedence, the highest first, in a type that sorts quickly."""
        precedence = self.profile_columns.precedence
        if len(self._precedence_ranks) != len(precedence):
            ranks = np.unique(-precedence, return_inverse=True)[1]
            self._precedence_ranks = ranks.astype(np.uint16) if len(ranks) <= _SHORT_MAX else ranks
        return self._precedence_ranks

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
        self._folded.append(number)
        line = [
            # A whole order of (priority, interruption, reclamation) in one integer: ordinals take five bits.
            (priority << 10) + (interruption << 5) + reclamation,
            priority,
            interruption,
            mode,
            -1 if key is None else self._key_number(key),
            0 if spread is None else spread.skew_max,
        ]
        for column, value in zip(self._new_profiles, line, strict=True):
            column.append(value)
        if mode == MODE_SAME:
            self._folded[number] = self.profile_number(folded_profile(profile))
        return number

    def _key_number(self, key: str) -> int:
        number = self._keys.number(key)
        if number == len(self.keys):
            self.keys.append(key)
        return number
