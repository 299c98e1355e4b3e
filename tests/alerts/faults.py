"""Defines what a fault is to the alerts: how it is made, how it is mended, and which alerts it fires."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tests.alerts.programs import Fleet
from tests.alerts.prometheus_server import Fired


def nothing(_fleet: Fleet) -> None:
    """Leave all as it is: the fault ended by itself, or happened once."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something of a fleet that is broken, and mended afterwards."""

    #: What happens, in the words of a person who looks at it.
    what: str
    #: Alerts that must fire while it is broken, and the instance or job that each is about.
    fires: dict[str, str]
    make: Callable[[Fleet], object]
    mend: Callable[[Fleet], object]
    #: What goes on happening while it is broken.
    again: Callable[[Fleet], object] = nothing

    @property
    def fired(self) -> set[Fired]:
        """The alerts with their subjects."""
        return {Fired(alert, subject) for alert, subject in self.fires.items()}


@dataclass(frozen=True, slots=True)
class Course:
    """One fleet and its faults: all of a stage are made together and mended together, stage after stage."""

    build: Callable[[Fleet], object]
    stages: tuple[tuple[Fault, ...], ...]
    #: Alerts that the faults may fire as well, with the reason that is in the runbook.
    also: frozenset[Fired] = field(default=frozenset())
    #: Whether a cluster is scraped, with an operator and a pod controller.
    has_cluster: bool = False

    @property
    def faults(self) -> Iterable[Fault]:
        """All faults of all stages."""
        return (fault for stage in self.stages for fault in stage)

    @property
    def expected(self) -> set[Fired]:
        """All alerts that may fire."""
        return {each for fault in self.faults for each in fault.fired} | self.also
