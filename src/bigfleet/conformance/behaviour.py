"""Defines a behaviour: an id, a profile, a title in the words of docs/spec/provider.md §23, and a coroutine.

Each area module makes one `Area` and registers its behaviours with it; `catalogue` gathers the areas. This module must
not run one.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from bigfleet.conformance.lab import Lab
from bigfleet.conformance.profiles import ConformanceProfile, Lane

Check = Callable[[Lab], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """One row of the table."""

    #: Such as `LIFE-1`.
    id: str
    profile: ConformanceProfile
    title: str
    check: Check
    lane: Lane


@dataclass(frozen=True, slots=True)
class Area:
    """Behaviours about one thing, in the order of their numbers."""

    name: str
    behaviours: list[Behaviour] = field(default_factory=list)

    def behaviour(
        self, number: int, profile: ConformanceProfile, *, lane: Lane | None = None
    ) -> Callable[[Check], Check]:
        """Register the function under this number; its docstring is the title. The lane is the profile's by default."""

        def register(check: Check) -> Check:
            assert number == len(self.behaviours) + 1, f"{self.name}-{number} is out of order"
            title = " ".join((check.__doc__ or "").split())
            assert title, f"{self.name}-{number} has no title"
            id = f"{self.name}-{number}"
            behaviour = Behaviour(id=id, profile=profile, title=title, check=check, lane=lane or profile.lane)
            self.behaviours.append(behaviour)
            return check

        return register
