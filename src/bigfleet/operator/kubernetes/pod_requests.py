"""Computes what one pod requests of its node, by the arithmetic of the Kubernetes scheduler.

The request of a pod is the larger of two amounts in each resource: what its containers and its sidecars (init
containers that restart) use together, and the most that is in use while its init containers run one after the other.
Requests of the pod as a whole (pod-level resources) take the place of that maximum for the resources that they name.
The pod's overhead comes on top. A limit without a request is the request, as the API server defaults it. This module
must never leave out or guess a quantity that it cannot read.
"""

from collections.abc import Mapping

from bigfleet.model.quantity import QuantityError, parse_quantity
from bigfleet.operator.kubernetes.objects import Container, PodSpec, Quantity, ResourceRequirements

#: `restartPolicy` of an init container that runs for the pod's whole life.
_SIDECAR = "Always"
#: Only these resources count where a pod requests as a whole; a pod may name no others there.
_POD_LEVEL_RESOURCES = ("cpu", "memory")
_POD_LEVEL_PREFIX = "hugepages-"


class UnreadableRequest(ValueError):
    """A quantity that cannot be read; the message names the field."""


def pod_requests(spec: PodSpec) -> dict[str, int]:
    """Return what the pod requests, milli-units, exact; resources of which it requests nothing are absent.

    `pods: 1` is not part of it. Raises UnreadableRequest for a quantity that is none, or that is negative.
    """
    running: dict[str, int] = {}
    for container in spec.containers:
        _add(running, _requests_of(container, "containers"))
    sidecars: dict[str, int] = {}
    peak: dict[str, int] = {}
    for container in spec.init_containers or ():
        requests = _requests_of(container, "initContainers")
        if container.restart_policy == _SIDECAR:
            # A sidecar keeps running, beside the init containers after it and beside the pod's containers.
            _add(sidecars, requests)
            _raise_to(peak, sidecars)
        else:
            _add(requests, sidecars)
            _raise_to(peak, requests)
    _add(running, sidecars)
    _raise_to(running, peak)
    running.update(_requests_of_the_whole(spec.resources, running))
    _add(running, _parsed(spec.overhead, "overhead"))
    return {name: milli for name, milli in running.items() if milli}


def _is_pod_level(name: str) -> bool:
    return name in _POD_LEVEL_RESOURCES or name.startswith(_POD_LEVEL_PREFIX)


def _requests_of_the_whole(resources: ResourceRequirements | None, containers: Mapping[str, int]) -> dict[str, int]:
    """Return the pod-level requests; a pod-level limit stands in where neither the pod nor its containers request."""
    if resources is None:
        return {}
    whole = _parsed(resources.requests, "resources.requests")
    for name, milli in _parsed(resources.limits, "resources.limits").items():
        whole.setdefault(name, containers.get(name) or milli)
    return {name: milli for name, milli in whole.items() if _is_pod_level(name)}


def _requests_of(container: Container, place: str) -> dict[str, int]:
    place = f"{place}[{container.name}].resources"
    resources = container.resources
    return {**_parsed(resources.limits, f"{place}.limits"), **_parsed(resources.requests, f"{place}.requests")}


def _parsed(quantities: Mapping[str, Quantity] | None, place: str) -> dict[str, int]:
    parsed = {}
    for name, quantity in (quantities or {}).items():
        try:
            milli = parse_quantity(str(quantity))
        except QuantityError as error:
            raise UnreadableRequest(f"{place}[{name}]: {error}") from error
        if milli < 0:
            raise UnreadableRequest(f"{place}[{name}]: {str(quantity)!r} is negative")
        parsed[name] = milli
    return parsed


def _add(total: dict[str, int], more: Mapping[str, int]) -> None:
    for name, milli in more.items():
        total[name] = total.get(name, 0) + milli


def _raise_to(largest: dict[str, int], other: Mapping[str, int]) -> None:
    for name, milli in other.items():
        largest[name] = max(largest.get(name, 0), milli)
