"""Counts and prices the machines of a fleet by shape, and matches shapes with demand.

NumPy over all machines, Python over shapes and distinct queries only; what was read of the vocabulary stays cached
while it grows. Hints, verdicts and the demand gauge query it, off the loop, one at a time. This module must not create
an object per machine, nor decide which cluster gets one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bigfleet.engine.columns.store import REMOVED, ColumnSnapshot, Shape, Vocabulary
from bigfleet.model import labels, vector
from bigfleet.model.need import Need
from bigfleet.model.profile import Requirement
from bigfleet.model.states import MachineState
from bigfleet.model.vector import Vector

Mask = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int64]
Prices = npt.NDArray[np.float64]
#: Rows of a snapshot.
MachineRows = npt.NDArray[np.int64]
#: Requirements on one key whose answers are cached; over that all are worked out again.
REQUIREMENTS_MAX = 1024


class Ask(NamedTuple):
    """What one machine must satisfy; the same for every priority, penalty and cluster."""

    requirements: tuple[Requirement, ...]
    #: Milli-units by name, names ascending.
    min_unit: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, need: Need) -> "Ask":
        """Return what a row asks of each of its machines; Same asks for the key and an allowed value."""
        return cls(need.profile.requirements, vector.vector_key(need.min_unit))


@dataclass(frozen=True, slots=True, kw_only=True)
class Classes:
    """The machines of one snapshot by shape: one entry per shape of a machine that is not Failed."""

    #: Shape numbers, ascending.
    shapes: Counts
    #: Machines that can be given away, and their lowest price, infinite where there is none.
    idle: Counts
    idle_price_usd_per_hour: Prices
    speculative: Counts
    speculative_price_usd_per_hour: Prices


def classes_of(view: ColumnSnapshot, taken: MachineRows) -> Classes:
    """Count a snapshot's machines by shape; rows that are `taken` cannot be given away."""
    columns = view.columns
    counts = np.bincount(columns.shape, minlength=len(view.vocabulary.shapes))
    # Few are dead, so taking them out again is cheaper than picking the others.
    np.subtract.at(counts, columns.shape[~_is_live(view)], 1)
    shapes = np.flatnonzero(counts)
    idle = giveable_rows(view, MachineState.IDLE, taken)
    speculative = giveable_rows(view, MachineState.SPECULATIVE, taken)
    idle_counts, idle_price = _by_shape(view, idle)
    speculative_counts, speculative_price = _by_shape(view, speculative)
    return Classes(
        shapes=shapes,
        idle=idle_counts[shapes],
        idle_price_usd_per_hour=idle_price[shapes],
        speculative=speculative_counts[shapes],
        speculative_price_usd_per_hour=speculative_price[shapes],
    )


def live_prices(view: ColumnSnapshot, classes: Classes) -> Prices:
    """Return the lowest price among the machines of each class, whatever their state; Failed ones are left out."""
    _counts, prices = _by_shape(view, np.flatnonzero(_is_live(view)))
    return prices[classes.shapes]


def _is_live(view: ColumnSnapshot) -> Mask:
    live: Mask = (view.columns.state != REMOVED) & (view.columns.state != MachineState.FAILED)
    return live


def _by_shape(view: ColumnSnapshot, rows: MachineRows) -> tuple[Counts, Prices]:
    """Return how many of the machines each shape of the vocabulary has, and their lowest price."""
    vocabulary, shape, offer = view.vocabulary, view.columns.shape[rows], view.columns.offer[rows]
    # A vocabulary holds many offers that no machine has any more.
    prices = np.zeros(int(offer.max()) + 1 if len(offer) else 0)
    used = np.flatnonzero(np.bincount(offer))
    prices[used] = [vocabulary.offers[number].price_usd_per_hour for number in used.tolist()]
    # A vocabulary may grow while it is read: what this snapshot refers to stands at its head.
    counts = np.bincount(shape, minlength=len(vocabulary.shapes))
    cheapest = np.full(len(counts), np.inf)
    np.minimum.at(cheapest, shape, prices[offer])
    return counts, cheapest


def giveable_rows(view: ColumnSnapshot, state: MachineState, taken: MachineRows) -> MachineRows:
    """Return the machines of a state that are not taken."""
    return _without(np.flatnonzero(view.columns.state == state), taken)


def _without(rows: MachineRows, taken: MachineRows) -> MachineRows:
    if not len(taken) or not len(rows):
        return rows
    is_taken = np.zeros(max(int(rows[-1]), int(taken.max())) + 1, np.bool_)
    is_taken[taken] = True
    return rows[~is_taken[rows]]


# ---- which shapes fit --------------------------------------------------------------------------------------------


class _Values:
    """The value of one attribute, numbered, for every shape."""

    def __init__(self) -> None:
        self.numbers = np.zeros(0, np.int32)
        self.texts: list[str | None] = []
        self._known: dict[str | None, int] = {}
        #: Whether each of the texts that were known then satisfies a requirement.
        self._held: dict[Requirement, Mask] = {}

    def holding(self, requirement: Requirement, shapes: Counts) -> Mask:
        """Say of each of the shapes whether its value satisfies the requirement."""
        held = self._held.get(requirement)
        if held is None or len(held) < len(self.texts):
            if len(self._held) >= REQUIREMENTS_MAX:
                self._held.clear()
            held = np.array([requirement.holds(text) for text in self.texts], np.bool_)
            self._held[requirement] = held
        return held[self.numbers[shapes]]

    def extend(self, key: str, shapes: list[Shape]) -> None:
        """Read the attribute of shapes that follow those known."""
        fresh = np.empty(len(shapes), np.int32)
        for place, shape in enumerate(shapes):
            text = _attribute(shape, key)
            number = self._known.setdefault(text, len(self.texts))
            if number == len(self.texts):
                self.texts.append(text)
            fresh[place] = number
        self.numbers = np.concatenate([self.numbers, fresh])


def _attribute(shape: Shape, key: str) -> str | None:
    """Return what a requirement is compared with, as `Machine.attribute` does."""
    if key == labels.INSTANCE_TYPE and shape.instance_type:
        return shape.instance_type
    if key == labels.ZONE and shape.zone:
        return shape.zone
    return next((value for name, value in shape.labels if name == key), None)


class Attributes:
    """Attribute values of a vocabulary's shapes, read once per key and shape."""

    def __init__(self) -> None:
        self._vocabulary: Vocabulary | None = None
        self._by_key: dict[str, _Values] = {}

    def fits(self, view: ColumnSnapshot, shapes: Counts) -> "Fits":
        """Return what fits among some shapes of the view's vocabulary."""
        if view.vocabulary is not self._vocabulary:
            self._vocabulary, self._by_key = view.vocabulary, {}
        return Fits(self, view.vocabulary, shapes)

    def holding(self, requirement: Requirement, shapes: Counts) -> Mask:
        """Say of each of the shapes whether its attribute satisfies the requirement."""
        values = self._by_key.setdefault(requirement.key, _Values())
        assert self._vocabulary is not None
        known, size = len(values.numbers), int(shapes[-1]) + 1 if len(shapes) else 0
        if size > known:
            values.extend(requirement.key, self._vocabulary.shapes[known:size])
        return values.holding(requirement, shapes) if len(shapes) else np.zeros(0, np.bool_)


class Fits:
    """Answers for one set of shapes; each part of a question is worked out once."""

    def __init__(self, attributes: Attributes, vocabulary: Vocabulary, shapes: Counts) -> None:
        self._attributes = attributes
        self._vocabulary = vocabulary
        self._shapes = shapes
        supply_of = np.array(vocabulary.supply_of_shape, np.int64)
        #: Supply number of each of the shapes.
        self.supplies = supply_of[shapes] if len(shapes) else np.zeros(0, np.int64)
        self._held: dict[Requirement, Mask] = {}
        self._covering: dict[tuple[tuple[str, int], ...], Mask] = {}
        self._fitting: dict[Ask, Mask] = {}

    def fitting(self, ask: Ask) -> Mask:
        """Say of each of the shapes whether its machines match the ask and hold its min unit."""
        known = self._fitting.get(ask)
        if known is None:
            known = self._covers(ask.min_unit)
            for requirement in ask.requirements:
                known = known & self._holds(requirement)
            self._fitting[ask] = known
        return known

    def supply(self, place: int) -> Vector:
        """Return what a machine of the shape at a place offers."""
        return self._vocabulary.supplies[int(self.supplies[place])]

    def offering(self, names: tuple[str, ...]) -> Mask:
        """Say of each of the shapes whether it offers something of every named resource."""
        return self._covers(tuple((name, 1) for name in names))

    def _holds(self, requirement: Requirement) -> Mask:
        known = self._held.get(requirement)
        if known is None:
            known = self._held[requirement] = self._attributes.holding(requirement, self._shapes)
        return known

    def _covers(self, min_unit: tuple[tuple[str, int], ...]) -> Mask:
        known = self._covering.get(min_unit)
        if known is None:
            wanted: Mapping[str, int] = dict(min_unit)
            covered: Any = [vector.covers(supply, wanted) for supply in self._vocabulary.supplies]
            # A vocabulary without a supply has no shapes either; an entry more keeps the lookup legal.
            known = self._covering[min_unit] = np.array([*covered, False], np.bool_)[self.supplies]
        return known


class FleetClasses:
    """The classes of the newest snapshot that was asked about, with their fits; cached while nothing moved."""

    def __init__(self) -> None:
        self._attributes = Attributes()
        self._key: tuple[object, ...] = ()
        self._made: tuple[Classes, Fits] | None = None

    def of(self, view: ColumnSnapshot, taken: MachineRows) -> tuple[Classes, Fits]:
        """Return the classes; the same objects while the snapshot and what is taken stay the same."""
        # Numbers, not the snapshot: holding it would keep its columns from being used again.
        key = (view.layout, view.generation, id(view.vocabulary), taken.tobytes())
        if self._made is None or key != self._key:
            classes = classes_of(view, taken)
            self._made = classes, self._attributes.fits(view, classes.shapes)
            self._key = key
        return self._made
