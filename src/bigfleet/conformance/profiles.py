"""Defines the profiles of a conformance run, and which of the providers under test each profile uses."""

from enum import Enum


class Lane(Enum):
    """Which provider a behaviour is tried on."""

    #: The running one, or one that the suite starts in its place.
    MAIN = "main"
    #: The same with a large fleet.
    SCALE = "scale"
    #: One that the suite starts, kills and starts again.
    DURABLE = "durable"
    #: One that the suite starts with the selectors of docs/spec/provider.md §20.
    FAULT = "fault"


class ConformanceProfile(Enum):
    """A group of behaviours that is asked for by name."""

    CORE = "core"
    CLOUD = "cloud"
    #: BigFleet's own: the public contract does not ask for cursors with removals.
    DELTA = "delta"
    SPOT = "spot"
    FAULT = "fault"
    DURABLE = "durable"
    SCALE = "scale"

    @property
    def lane(self) -> Lane:
        """The provider on which the profile's behaviours are tried."""
        return _LANES.get(self, Lane.MAIN)

    @property
    def title(self) -> str:
        """The name for people, which says what the public contract does not ask for."""
        return f"{self.value} (BigFleet's own)" if self is ConformanceProfile.DELTA else self.value


_LANES = {
    ConformanceProfile.FAULT: Lane.FAULT,
    ConformanceProfile.DURABLE: Lane.DURABLE,
    ConformanceProfile.SCALE: Lane.SCALE,
}
