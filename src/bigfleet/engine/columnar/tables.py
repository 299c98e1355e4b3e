"""Turns what a store interned into integer tables, and keeps them between calls.

Supplies become scaled int64 vectors: each dimension is divided by the greatest common divisor of all supplies, which
changes no comparison, and what a row wants is rounded up to it, which changes none either (docs/adr/0110). Attributes
become ranks, requirement sets become one byte per shape. Tables only follow a vocabulary; this module must not look at
claims, or decide anything.
"""

import math
from collections.abc import Mapping
from typing import Final

import numpy as np

from bigfleet.engine.columnar.arrays import NO_DOMAIN, QUANTITY_MAX, Bytes, Floats, Int32s, Int64s
from bigfleet.engine.columns.store import Offer, Shape, Vocabulary
from bigfleet.model import labels as keys
from bigfleet.model.machine import Stamp
from bigfleet.model.profile import Requirement
from bigfleet.model.vector import Vector

#: Dimension 0 stands for every resource that no machine has; bits of an int64 distinguish dimensions.
NOWHERE: Final = 0
DIMENSIONS_MAX: Final = 60
#: Pairs of fingerprint and group, and questions of matching, that tables keep: ten times what a large shard has.
PAIRS_MAX: Final = 5_000_000
QUESTIONS_MAX: Final = 500_000
#: Masks are forgotten when more than this many bytes of them are stored.
FITS_BYTES_MAX: Final = 256 * 2**20


class DoesNotFit(Exception):
    """The input has numbers that the columns cannot hold; the reference engine must answer."""


class Numbers:
    """Values numbered from 0 in order of first sight."""

    def __init__(self) -> None:
        self.of: dict[object, int] = {}

    def __len__(self) -> int:
        return len(self.of)

    def number(self, value: object) -> int:
        """Return the number of a value."""
        return self.of.setdefault(value, len(self.of))


class Attribute:
    """The values of one key over all shapes, ranked by value."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._numbers: dict[str, int] = {}
        #: Value number of each shape, -1 without the attribute.
        self.of_shape: Int32s = np.zeros(0, np.int32)
        #: Values in order; a domain's number is its place here.
        self.values: list[str] = []
        self._rank = np.full(1, NO_DOMAIN, np.int32)

    def extend(self, shapes: list[Shape]) -> None:
        """Follow the vocabulary's shapes."""
        known = len(self.of_shape)
        if known == len(shapes):
            return
        numbers = self._numbers
        found = [self._value(shape) for shape in shapes[known:]]
        added = [-1 if value is None else numbers.setdefault(value, len(numbers)) for value in found]
        self.of_shape = np.concatenate([self.of_shape, np.array(added, np.int32)])
        if len(numbers) != len(self.values):
            self.values = sorted(numbers)
            # The last entry answers for -1.
            self._rank = np.full(len(numbers) + 1, NO_DOMAIN, np.int32)
            self._rank[[numbers[value] for value in self.values]] = np.arange(len(self.values))

    def _value(self, shape: Shape) -> str | None:
        if self._key == keys.INSTANCE_TYPE and shape.instance_type:
            return shape.instance_type
        if self._key == keys.ZONE and shape.zone:
            return shape.zone
        return next((value for key, value in shape.labels if key == self._key), None)

    def domains(self) -> Int32s:
        """Return the rank of each shape's value, NO_DOMAIN without one."""
        return self._rank[self.of_shape]

    def holding(self, requirement: Requirement) -> Bytes:
        """Return for each shape whether the requirement holds."""
        # A value that is not named by the requirement stands for every other one.
        unnamed = "".join(requirement.values) + "+"
        holds = np.full(len(self._numbers) + 1, requirement.holds(unnamed), np.uint8)
        holds[-1] = requirement.holds(None)
        for value in requirement.values:
            number = self._numbers.get(value)
            if number is not None:
                holds[number] = requirement.holds(value)
        return holds[self.of_shape]


class VocabularyTables:
    """Integer tables of one vocabulary, and what matches it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        #: Clusters and (fingerprint, group) pairs, of machines and of rows alike; cluster 0 is "".
        self.clusters = Numbers()
        self.clusters.number("")
        self.pairs = Numbers()
        #: Names of dimensions; the first stands for all that no machine has.
        self.dimensions: dict[str, int] = {}
        self.scale: list[int] = [1]
        #: Rises when dimensions or scales change: scaled demand must be worked out again.
        self.scale_version = 0
        #: Rises when fits are numbered again.
        self.fits_version = 0
        self.supply: Int64s = np.zeros((0, 1), np.int64)
        self.helps: Int64s = np.zeros(0, np.int64)
        self.supply_of: Int32s = np.zeros(0, np.int32)
        #: Number here of each cluster of the vocabulary.
        self.cluster_of: Int32s = np.zeros(0, np.int32)
        self.stamp_pair: Int32s = np.zeros(0, np.int32)
        self.stamp_intended: Int32s = np.zeros(0, np.int32)
        self.stamp_for: Int64s = np.zeros(0, np.int64)
        self.stamp_priority: Int64s = np.zeros(0, np.int64)
        self.stamp_interruption: Floats = np.zeros(0)
        self.stamp_reclamation: Floats = np.zeros(0)
        self.offer_price: Floats = np.zeros(0)
        self.offer_probability: Floats = np.zeros(0)
        self.offer_capacity_type: Int32s = np.zeros(0, np.int32)
        self._supplies = 0
        self._attributes: dict[str, Attribute] = {}
        self._masks: dict[tuple[Requirement, ...], Bytes] = {}
        self._fit_numbers: dict[bytes, int] = {}
        self._fits: dict[tuple[tuple[Requirement, ...], frozenset[tuple[str, int]]], int] = {}
        self.fits: Bytes = np.zeros((0, 0), np.uint8)

    def follow(self) -> None:
        """Take in what the vocabulary learned since. Raises DoesNotFit for numbers that columns cannot hold."""
        vocabulary = self.vocabulary
        # Stamps refer to clusters, shapes to supplies: each list is read after those that refer to it.
        self._follow_stamps(vocabulary.stamps[len(self.stamp_pair) :])
        self._follow_offers(vocabulary.offers[len(self.offer_price) :])
        names = vocabulary.clusters[len(self.cluster_of) :]
        if names:
            numbers = [self.clusters.number(name) for name in names]
            self.cluster_of = np.concatenate([self.cluster_of, np.array(numbers, np.int32)])
        added = vocabulary.supply_of_shape[len(self.supply_of) : len(vocabulary.shapes)]
        if added:
            self._follow_supplies()
            self.supply_of = np.concatenate([self.supply_of, np.array(added, np.int32)])
            for attribute in self._attributes.values():
                attribute.extend(vocabulary.shapes[: len(self.supply_of)])
            self._forget_fits()

    def _follow_stamps(self, added: list[Stamp]) -> None:
        if not added:
            return
        pairs = [self.pairs.number((stamp.assigned_need_fingerprint, stamp.assigned_group)) for stamp in added]
        intended = [self.clusters.number(stamp.intended_cluster) for stamp in added]
        wanted = [-1 if stamp.preempted_for is None else self.row_key(*stamp.preempted_for) for stamp in added]
        self.stamp_pair = np.concatenate([self.stamp_pair, np.array(pairs, np.int32)])
        self.stamp_intended = np.concatenate([self.stamp_intended, np.array(intended, np.int32)])
        self.stamp_for = np.concatenate([self.stamp_for, np.array(wanted, np.int64)])
        try:
            priorities = np.array([stamp.assigned_priority for stamp in added], np.int64)
        except OverflowError:
            raise DoesNotFit("an assigned priority is outside int64") from None
        self.stamp_priority = np.concatenate([self.stamp_priority, priorities])
        dollars = np.array(
            [(s.assigned_interruption_penalty_dollars, s.assigned_reclamation_penalty_dollars) for s in added],
            np.float64,
        )
        self.stamp_interruption = np.concatenate([self.stamp_interruption, dollars[:, 0]])
        self.stamp_reclamation = np.concatenate([self.stamp_reclamation, dollars[:, 1]])

    def _follow_offers(self, added: list[Offer]) -> None:
        if not added:
            return
        numbers = np.array([(o.price_usd_per_hour, o.interruption_probability) for o in added], np.float64)
        self.offer_price = np.concatenate([self.offer_price, numbers[:, 0]])
        self.offer_probability = np.concatenate([self.offer_probability, numbers[:, 1]])
        types = np.array([offer.capacity_type for offer in added], np.int32)
        self.offer_capacity_type = np.concatenate([self.offer_capacity_type, types])

    @property
    def price_rank(self) -> Int64s:
        """Rank of each offer's price."""
        return ranks(self.offer_price)

    @property
    def reclamation_rank(self) -> Int64s:
        """Rank of each stamp's reclamation dollars, largest first."""
        return ranks(-self.stamp_reclamation)

    def row_key(self, cluster: str, fingerprint: str, group: str) -> int:
        """Return the number of (cluster, fingerprint, group)."""
        return self.clusters.number(cluster) << 32 | self.pairs.number((fingerprint, group))

    def _follow_supplies(self) -> None:
        supplies = self.vocabulary.supplies
        names = {name for supply in supplies[self._supplies :] for name in supply} - self.dimensions.keys()
        scale = self.scale + [0] * len(names)
        for name in sorted(names):
            self.dimensions[name] = len(self.dimensions) + 1
        if len(self.dimensions) >= DIMENSIONS_MAX:
            raise DoesNotFit(f"machines offer more than {DIMENSIONS_MAX} kinds of resources")
        for supply in supplies[self._supplies :]:
            for name, milli in supply.items():
                place = self.dimensions[name]
                scale[place] = math.gcd(scale[place], milli)
        first = self._supplies
        if scale != self.scale:
            first = 0
            self.scale_version += 1
        added = np.zeros((len(supplies) - first, len(scale)), np.int64)
        for line, supply in enumerate(supplies[first:]):
            for name, milli in supply.items():
                place = self.dimensions[name]
                scaled = milli // scale[place]
                if scaled >= QUANTITY_MAX:
                    raise DoesNotFit(f"{name}: {milli} milli-units of one machine do not fit")
                added[line, place] = scaled
        self.supply = np.concatenate([self.supply[:first], added]) if first else added
        self.helps = ((self.supply > 0) << np.arange(len(scale), dtype=np.int64)).sum(axis=1, dtype=np.int64)
        self.scale = scale
        self._supplies = len(supplies)

    def scaled(self, vector: Vector, times: int = 1) -> tuple[list[int], bool]:
        """Return a wanted vector in scaled units, rounded up and capped, and whether nothing was rounded or capped.

        Neither changes an answer: supplies are multiples of the scale, and the whole fleet offers less than the cap.
        """
        line, is_exact = [0] * len(self.scale), True
        for name, milli in vector.items():
            place = self.dimensions.get(name, NOWHERE)
            if place == NOWHERE:
                line[NOWHERE] = 1
                continue
            units, rest = divmod(milli * times, self.scale[place])
            is_exact = is_exact and not rest and units < QUANTITY_MAX
            line[place] = min(units + (rest > 0), QUANTITY_MAX)
        return line, is_exact

    def scale_by_name(self) -> dict[str, tuple[int, int]]:
        """Return place and milli-units per scaled unit of each dimension."""
        return {name: (place, self.scale[place]) for name, place in self.dimensions.items()}

    def attribute(self, key: str) -> Attribute:
        """Return the values of a key."""
        known = self._attributes.get(key)
        if known is None:
            known = self._attributes[key] = Attribute(key)
            known.extend(self.vocabulary.shapes[: len(self.supply_of)])
        return known

    def matching(self, requirements: tuple[Requirement, ...]) -> Bytes:
        """Return for each shape whether all requirements hold."""
        known = self._masks.get(requirements)
        if known is None:
            known = np.ones(len(self.supply_of), np.uint8)
            for requirement in requirements:
                known &= self.attribute(requirement.key).holding(requirement)
            self._masks[requirements] = known
        return known

    def fit(self, requirements: tuple[Requirement, ...], min_unit: Vector) -> int:
        """Return the number of the set of shapes that fit; equal sets have one number."""
        question = (requirements, frozenset(min_unit.items()))
        known = self._fits.get(question)
        if known is None:
            known = self._fits[question] = self._fit_number(self._fitting(requirements, min_unit))
        return known

    def carrying(self, fit: int, key: str) -> int:
        """Return the number of a fit restricted to shapes that carry a topology key."""
        return self._fit_number(self.fits[fit] & (self.attribute(key).domains() != NO_DOMAIN))

    def _fitting(self, requirements: tuple[Requirement, ...], min_unit: Vector) -> Bytes:
        wanted = np.array(self.scaled(min_unit)[0], np.int64)
        covers: Bytes = np.all(self.supply >= wanted, axis=1).astype(np.uint8)
        return self.matching(requirements) & covers[self.supply_of]

    def _fit_number(self, mask: Bytes) -> int:
        digest = mask.tobytes()
        number = self._fit_numbers.setdefault(digest, len(self._fit_numbers))
        if number >= len(self.fits):
            grown = np.zeros((max(16, 2 * number), len(self.supply_of)), np.uint8)
            grown[: len(self.fits)] = self.fits
            self.fits = grown
        self.fits[number] = mask
        return number

    @property
    def is_overgrown(self) -> bool:
        """Return whether so many groups and questions came and went that new tables are due."""
        return len(self.pairs) > PAIRS_MAX or len(self._fits) > QUESTIONS_MAX

    def trim(self) -> None:
        """Forget what was matched when it takes too much room; for between two decisions."""
        if self.fits.nbytes > FITS_BYTES_MAX:
            self._forget_fits()

    def _forget_fits(self) -> None:
        self._masks.clear()
        self._fit_numbers.clear()
        self._fits.clear()
        self.fits = np.zeros((0, len(self.supply_of)), np.uint8)
        self.fits_version += 1


def ranks(values: Floats) -> Int64s:
    """Return the dense rank of each value, smallest first; equal values share one."""
    return np.unique(values, return_inverse=True)[1].astype(np.int64)


def capacity_holds(holds: Mapping[int, float], types_max: int = 16) -> Floats:
    """Return the seconds of each capacity type, 0 where none are given."""
    return np.array([holds.get(number, 0.0) for number in range(types_max)], np.float64)
