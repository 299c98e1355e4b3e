"""Computes the resources of a pod's CapacityRequest from the pod's requests.

The API server fills a container's absent requests from its limits before it stores the pod, so limits are never read
here (docs/spec/operator.md §11).
"""

from collections.abc import Mapping
from typing import Final

from bigfleet.model.quantity import Family
from bigfleet.model.vector import families, format_vector
from bigfleet.operator.kubernetes.objects import PodSpec, Quantity
from bigfleet.operator.kubernetes.pod_requests import UnreadableRequest, read_quantity, sum_requests
from bigfleet.operator.pods.findings import Inexpressible, InexpressibleReason

#: A request has at least one resource; a pod that requests nothing still takes its place on a machine.
NOTHING: Final[Mapping[str, str]] = {"cpu": "0"}
#: The schema of CapacityRequest allows no more.
RESOURCES_MAX: Final = 32


def requested_resources(spec: PodSpec) -> tuple[dict[str, str], list[Inexpressible]]:
    """Return the pod's requests as canonical quantities in name order, without zeros, and what could not be read."""
    reader = _LenientReader()
    total = sum_requests(spec, reader.read, limits_stand_in=False)
    return format_vector(total, reader.families), reader.findings


class _LenientReader:
    """Parses requests; collects how each resource is written first, and what cannot be read."""

    def __init__(self) -> None:
        self.families: dict[str, Family] = {}
        self.findings: list[Inexpressible] = []

    def read(self, quantities: Mapping[str, Quantity] | None, place: str) -> dict[str, int]:
        """Return the amounts, zeros among them; what is negative or no quantity is reported and left out."""
        amounts = {}
        for name, quantity in sorted((quantities or {}).items()):
            try:
                amounts[name] = read_quantity(quantity, f"{place}.{name}")
            except UnreadableRequest as error:
                message = f"{error}; capacity is requested without this resource of it"
                self.findings.append(Inexpressible(InexpressibleReason.UNSUPPORTED_RESOURCES, message))
        written = families({name: str(quantity) for name, quantity in (quantities or {}).items()})
        self.families = written | self.families
        return amounts
