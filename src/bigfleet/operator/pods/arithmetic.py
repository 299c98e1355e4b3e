"""Computes the resources that a pod requests, as the scheduler does.

Only requests count. The API server fills a container's absent requests from its limits before it stores the pod, so
that limits are never read here (docs/spec/operator.md §11).
"""

from collections.abc import Iterable, Mapping
from typing import Final

from bigfleet.model.quantity import Family, QuantityError, parse_quantity
from bigfleet.model.vector import Vector, add, families, format_vector, maximum
from bigfleet.operator.kubernetes.objects import Container, PodSpec, Quantity
from bigfleet.operator.pods.findings import Inexpressible, InexpressibleReason

#: A request has at least one resource; a pod that requests nothing still takes its place on a machine.
NOTHING: Final[Mapping[str, str]] = {"cpu": "0"}
#: The schema of CapacityRequest allows no more.
RESOURCES_MAX: Final = 32

_POD_LEVEL = frozenset({"cpu", "memory"})
_POD_LEVEL_PREFIX = "hugepages-"


def is_sidecar(container: Container) -> bool:
    """Say whether an init container runs beside the containers for the pod's whole life."""
    return container.restart_policy == "Always"


def pod_requests(spec: PodSpec) -> tuple[dict[str, str], list[Inexpressible]]:
    """Return the pod's requests as canonical quantities in name order, without zeros, and what could not be read.

    The larger of containers with sidecars and of the peak over the init sequence, then pod-level requests in place of
    those of their resources, then the overhead.
    """
    reader = _Reader()
    total: Vector = {}
    for position, container in enumerate(spec.containers):
        total = add(total, reader.read(container.resources.requests, f"spec.containers[{position}].resources"))
    peak, sidecars = _init_sequence(spec.init_containers or (), reader)
    total = maximum(add(total, sidecars), peak)
    if spec.resources is not None:
        total = {**total, **_pod_level(reader.read(spec.resources.requests, "spec.resources"))}
    total = add(total, reader.read(spec.overhead, "spec.overhead", field=""))
    return format_vector({name: milli for name, milli in total.items() if milli}, reader.families), reader.findings


def _init_sequence(containers: Iterable[Container], reader: "_Reader") -> tuple[Vector, Vector]:
    """Return the peak while the init containers run one after another, and the sum of the sidecars."""
    peak: Vector = {}
    sidecars: Vector = {}
    for position, container in enumerate(containers):
        request = reader.read(container.resources.requests, f"spec.initContainers[{position}].resources")
        if is_sidecar(container):
            sidecars = add(sidecars, request)
            peak = maximum(peak, sidecars)
        else:
            # The sidecars that were started before are running meanwhile.
            peak = maximum(peak, add(request, sidecars))
    return peak, sidecars


def _pod_level(requests: Vector) -> Vector:
    """Return the resources that Kubernetes supports at the level of the pod."""
    return {name: milli for name, milli in requests.items() if name in _POD_LEVEL or name.startswith(_POD_LEVEL_PREFIX)}


class _Reader:
    """Parses requests; collects how each resource is written first, and what cannot be read."""

    def __init__(self) -> None:
        self.families: dict[str, Family] = {}
        self.findings: list[Inexpressible] = []

    def read(self, requests: Mapping[str, Quantity] | None, place: str, field: str = ".requests") -> Vector:
        """Return the amounts, zeros among them; what is negative or no quantity is reported and left out."""
        texts = {name: str(quantity) for name, quantity in (requests or {}).items()}
        amounts = {}
        for name, text in sorted(texts.items()):
            try:
                amounts[name] = parse_quantity(text)
                fault = f"{text!r} is negative" if amounts[name] < 0 else ""
            except QuantityError as error:
                fault = str(error)
            if fault:
                amounts.pop(name, None)
                message = f"{place}{field}.{name}: {fault}; capacity is requested without this resource of it"
                self.findings.append(Inexpressible(InexpressibleReason.UNSUPPORTED_RESOURCES, message))
        self.families = families(texts) | self.families
        return amounts
