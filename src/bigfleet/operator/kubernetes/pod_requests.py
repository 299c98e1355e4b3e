"""Computes what one pod requests of its node, by the arithmetic of the Kubernetes scheduler.

The request of a pod is the larger of two amounts in each resource: what its containers and its sidecars (init
containers that restart) use together, and the most that is in use while its init containers run one after the other.
Requests of the pod as a whole (pod-level resources) take the place of that maximum for the resources that they name.
The pod's overhead comes on top. This module must never leave out or guess a quantity that it cannot read.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Final

import structlog

from bigfleet.model.quantity import QuantityError, parse_quantity
from bigfleet.operator.kubernetes.objects import Container, PodSpec, Quantity, ResourceRequirements

log = structlog.get_logger(__name__)

_NO_REQUESTS: Final[Mapping[str, int]] = MappingProxyType({})
#: `restartPolicy` of an init container that runs for the pod's whole life.
_SIDECAR = "Always"
#: Only these resources count where a pod requests as a whole; a pod may name no others there.
_POD_LEVEL_RESOURCES = ("cpu", "memory")
_POD_LEVEL_PREFIX = "hugepages-"

#: Reads quantities by resource into milli-units; the text is their place in the pod, for messages.
QuantityReader = Callable[[Mapping[str, Quantity] | None, str], dict[str, int]]


class UnreadableRequest(ValueError):
    """A quantity that cannot be read; the message names the field."""


def pod_requests(spec: PodSpec) -> dict[str, int]:
    """Return what the pod requests, milli-units, exact; resources of which it requests nothing are absent.

    A limit without a request is the request, as the API server defaults it. `pods: 1` is not part of it. Raises
    UnreadableRequest for a quantity that is none, or that is negative.
    """
    return sum_requests(spec, read_quantities, limits_stand_in=True)


def requested_by(spec: PodSpec) -> Mapping[str, int]:
    """Return what a pod requests, milli-units; nothing if that cannot be read. Equal amounts are one object."""
    try:
        return _shared(tuple(sorted(pod_requests(spec).items())))
    except UnreadableRequest as error:
        log.debug("operator.pod_requests_unreadable", error=str(error))
        return _NO_REQUESTS


@lru_cache(maxsize=4096)
def _shared(items: tuple[tuple[str, int], ...]) -> Mapping[str, int]:
    # Pods of one workload are alike: a cluster of 50,000 pods has few hundred distinct amounts.
    return MappingProxyType(dict(items))


def sum_requests(spec: PodSpec, read: QuantityReader, *, limits_stand_in: bool) -> dict[str, int]:
    """Return what the pod requests, of quantities that `read` reads; resources of which it requests nothing are absent.

    With `limits_stand_in`, a limit without a request is the request.
    """

    def requests_of(container: Container, place: str) -> dict[str, int]:
        resources = container.resources
        requests = read(resources.requests, f"{place}.resources.requests")
        if limits_stand_in and resources.limits:
            return {**read(resources.limits, f"{place}.resources.limits"), **requests}
        return requests

    running: dict[str, int] = {}
    for position, container in enumerate(spec.containers):
        _add(running, requests_of(container, f"spec.containers[{position}]"))
    sidecars: dict[str, int] = {}
    peak: dict[str, int] = {}
    for position, container in enumerate(spec.init_containers or ()):
        requests = requests_of(container, f"spec.initContainers[{position}]")
        if is_sidecar(container):
            # A sidecar keeps running, beside the init containers after it and beside the pod's containers.
            _add(sidecars, requests)
            _raise_to(peak, sidecars)
        else:
            _add(requests, sidecars)
            _raise_to(peak, requests)
    _add(running, sidecars)
    _raise_to(running, peak)
    if spec.resources is not None:
        running.update(_requests_of_the_whole(spec.resources, running, read, limits_stand_in=limits_stand_in))
    _add(running, read(spec.overhead, "spec.overhead"))
    return {name: milli for name, milli in running.items() if milli}


def is_sidecar(container: Container) -> bool:
    """Return whether an init container runs beside the containers for the pod's whole life."""
    return container.restart_policy == _SIDECAR


def read_quantities(quantities: Mapping[str, Quantity] | None, place: str) -> dict[str, int]:
    """Return the amounts, milli-units, zeros among them. Raises UnreadableRequest naming the field."""
    return {name: read_quantity(quantity, f"{place}.{name}") for name, quantity in (quantities or {}).items()}


def read_quantity(quantity: Quantity, place: str) -> int:
    """Return the amount, milli-units. Raises UnreadableRequest naming the field."""
    try:
        milli = parse_quantity(str(quantity))
    except QuantityError as error:
        raise UnreadableRequest(f"{place}: {error}") from error
    if milli < 0:
        raise UnreadableRequest(f"{place}: {str(quantity)!r} is negative")
    return milli


def _is_pod_level(name: str) -> bool:
    return name in _POD_LEVEL_RESOURCES or name.startswith(_POD_LEVEL_PREFIX)


def _requests_of_the_whole(
    resources: ResourceRequirements, containers: Mapping[str, int], read: QuantityReader, *, limits_stand_in: bool
) -> dict[str, int]:
    """Return the pod-level requests; a pod-level limit stands in where neither the pod nor its containers request."""
    whole = read(resources.requests, "spec.resources.requests")
    if limits_stand_in:
        for name, milli in read(resources.limits, "spec.resources.limits").items():
            whole.setdefault(name, containers.get(name) or milli)
    return {name: milli for name, milli in whole.items() if _is_pod_level(name)}


def _add(total: dict[str, int], more: Mapping[str, int]) -> None:
    for name, milli in more.items():
        total[name] = total.get(name, 0) + milli


def _raise_to(largest: dict[str, int], other: Mapping[str, int]) -> None:
    for name, milli in other.items():
        largest[name] = max(largest.get(name, 0), milli)
