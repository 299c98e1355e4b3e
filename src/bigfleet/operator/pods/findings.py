"""Defines what a CapacityRequest cannot express of a pod: a reason for Events and a message for a person.

A message names the field of the pod and what BigFleet does instead. No part of a pod is left out without one.
"""

from dataclasses import dataclass
from enum import Enum


class InexpressibleReason(Enum):
    """The reason of a Warning Event on a pod (docs/spec/operator.md §11)."""

    UNSUPPORTED_AFFINITY = "UnsupportedAffinity"
    UNSUPPORTED_POD_AFFINITY = "UnsupportedPodAffinity"
    UNSUPPORTED_ANTI_AFFINITY = "UnsupportedAntiAffinity"
    UNSUPPORTED_TOPOLOGY_SPREAD = "UnsupportedTopologySpread"
    UNSUPPORTED_HOST_PORTS = "UnsupportedHostPorts"
    UNSUPPORTED_VOLUME_AFFINITY = "UnsupportedVolumeAffinity"
    UNSUPPORTED_RESOURCE_CLAIMS = "UnsupportedResourceClaims"
    UNSUPPORTED_RESOURCES = "UnsupportedResources"
    HOSTNAME_REQUIREMENT = "HostnameRequirement"
    INVALID_PENALTY = "InvalidPenalty"


@dataclass(frozen=True, slots=True)
class Inexpressible:
    """One thing that the request of a pod does not say, or says differently."""

    reason: InexpressibleReason
    message: str
