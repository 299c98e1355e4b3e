"""Lists every behaviour, and selects those of a run (docs/spec/provider.md §23).

A new area is a module in `areas` and an entry in `AREAS`. This module must not leave out a behaviour that was asked
for.
"""

from collections.abc import Collection

from bigfleet.conformance.areas import (
    durable,
    edge,
    fault,
    fence,
    fuzz,
    life,
    listing,
    meta,
    race,
    scale,
    shape,
)
from bigfleet.conformance.behaviour import Behaviour
from bigfleet.conformance.profiles import ConformanceProfile

AREAS = (
    life.AREA,
    edge.AREA,
    fence.AREA,
    race.AREA,
    meta.AREA,
    fault.AREA,
    shape.AREA,
    listing.AREA,
    durable.AREA,
    scale.AREA,
    fuzz.AREA,
)
BEHAVIOURS: tuple[Behaviour, ...] = tuple(behaviour for area in AREAS for behaviour in area.behaviours)
BY_ID = {behaviour.id: behaviour for behaviour in BEHAVIOURS}


def behaviours_of(profiles: Collection[ConformanceProfile]) -> tuple[Behaviour, ...]:
    """Return the behaviours of the profiles, in the order of the table."""
    return tuple(behaviour for behaviour in BEHAVIOURS if behaviour.profile in profiles)
