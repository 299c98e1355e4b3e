"""Decides which machines match and fit which row (docs/spec/model.md §9, docs/spec/aggregates.md §3).

Two machines that agree in instance type, zone, labels and supply are of one *shape*: every question of this section has
the same answer for both, so a decision asks it once per shape. This module must not look at price, state, stamps or
claims: those belong to the phases.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bigfleet.model import vector
from bigfleet.model.machine import Machine
from bigfleet.model.profile import Profile, Requirement
from bigfleet.model.vector import Vector

VectorItems = frozenset[tuple[str, int]]


def matches(profile: Profile, machine: Machine) -> bool:
    """Return whether all requirements of the profile hold; resources, price, state and stamps play no part."""
    return all(r.holds(machine.attribute(r.key)) for r in profile.requirements)


def fits(profile: Profile, min_unit: Vector, machine: Machine) -> bool:
    """Return whether the profile matches and the machine's supply covers the min unit."""
    return vector.covers(machine.supply, min_unit) and matches(profile, machine)


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """All shapes that fit one (profile, min unit); there is one object per such pair and decision."""

    profile: Profile
    min_unit: Vector
    shapes: frozenset[int]


class Shapes:
    """The shapes of one decision's machines, numbered from 0, and what fits them.

    Questions are answered per distinct attribute value and per distinct supply, of which there are far fewer than
    shapes, and each is answered once.
    """

    def __init__(self, machines: Iterable[Machine]) -> None:
        """Number the shapes. Cost: one hash of type, zone, labels and supply per machine."""
        #: The shape of every machine, by machine id.
        self.of: dict[str, int] = {}
        #: One machine of each shape, by shape number.
        self.examples: list[Machine] = []
        numbers: dict[tuple[str, str, frozenset[tuple[str, str]], VectorItems], int] = {}
        by_supply: defaultdict[VectorItems, set[int]] = defaultdict(set)
        for machine in machines:
            supply = frozenset(machine.supply.items())
            kind = (machine.instance_type, machine.zone, frozenset(machine.labels.items()), supply)
            number = numbers.setdefault(kind, len(numbers))
            if number == len(self.examples):
                self.examples.append(machine)
                by_supply[supply].add(number)
            self.of[machine.id] = number
        self._all = frozenset(range(len(self.examples)))
        #: Every distinct supply with the shapes that have it.
        self._by_supply = [(dict(supply), frozenset(found)) for supply, found in by_supply.items()]
        self._by_attribute: dict[str, Mapping[str | None, frozenset[int]]] = {}
        self._holding: dict[Requirement, frozenset[int]] = {}
        self._fits: dict[tuple[str, VectorItems], Fit] = {}

    def with_attribute(self, key: str) -> Mapping[str | None, frozenset[int]]:
        """Return the shapes by the value of an attribute; None holds those without it."""
        known = self._by_attribute.get(key)
        if known is None:
            groups: defaultdict[str | None, set[int]] = defaultdict(set)
            for number, example in enumerate(self.examples):
                groups[example.attribute(key)].add(number)
            known = self._by_attribute[key] = {value: frozenset(found) for value, found in groups.items()}
        return known

    def matching(self, profile: Profile) -> frozenset[int]:
        """Return the shapes that the profile matches, supply apart."""
        return self._all.intersection(*(self._shapes_holding(requirement) for requirement in profile.requirements))

    def _shapes_holding(self, requirement: Requirement) -> frozenset[int]:
        known = self._holding.get(requirement)
        if known is None:
            groups = self.with_attribute(requirement.key).items()
            held = (found for value, found in groups if requirement.holds(value))
            known = self._holding[requirement] = frozenset().union(*held)
        return known

    def fit(self, profile: Profile, min_unit: Vector) -> Fit:
        """Return the shapes that fit; equal questions get the same object."""
        key = (profile.fingerprint, frozenset(min_unit.items()))
        known = self._fits.get(key)
        if known is None:
            covering = (found for supply, found in self._by_supply if vector.covers(supply, min_unit))
            shapes = self.matching(profile).intersection(frozenset().union(*covering))
            known = self._fits[key] = Fit(profile, min_unit, shapes)
        return known

    def useful(self, shapes: frozenset[int], remaining: Vector) -> frozenset[int]:
        """Return those of the shapes whose supply is positive in a dimension that remains."""
        helping = (found for supply, found in self._by_supply if vector.is_useful(supply, remaining))
        return shapes.intersection(frozenset().union(*helping))

    def values(self, shapes: frozenset[int], key: str) -> Mapping[int, str]:
        """Return the attribute `key` of those shapes that have it."""
        groups = self.with_attribute(key).items()
        return {number: value for value, found in groups if value is not None for number in found & shapes}
