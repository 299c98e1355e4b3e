"""Maps a pod to the CapacityRequest that stands for it, or to the reason why there is none.

docs/spec/operator.md §11. Pure: equal pods and volumes give equal requests. No pod makes it raise, and nothing that a
pod asks for is left out without a finding.
"""

from dataclasses import dataclass
from enum import Enum

from bigfleet.model.quantity import QuantityError
from bigfleet.operator.kubernetes.api import Json, JsonObject
from bigfleet.operator.kubernetes.objects import PodObject
from bigfleet.operator.kubernetes.resources import (
    CAPACITY_REQUESTS,
    INTERRUPTION_PENALTY_ANNOTATION,
    OWNED_BY_POD,
    PODS,
    RECLAMATION_PENALTY_ANNOTATION,
)
from bigfleet.operator.pods.arithmetic import NOTHING, RESOURCES_MAX, requested_resources
from bigfleet.operator.pods.defaults import PenaltyDefaults, penalty_text
from bigfleet.operator.pods.findings import Inexpressible, InexpressibleReason
from bigfleet.operator.pods.placement import place_pod
from bigfleet.operator.pods.requirements import (
    REQUIREMENTS_MAX,
    node_requirements,
    requirements_json,
    settle_hostnames,
)
from bigfleet.operator.pods.volumes import NoVolumes, Volumes, volume_requirements

REQUEST_NAME_PREFIX = "cr-"

_NO_DEFAULTS = PenaltyDefaults()
_NO_VOLUMES = NoVolumes()


class PodStanding(Enum):
    """Whether a pod has a request."""

    #: It has one for its whole life, scheduled or not.
    REQUESTS = "requests"
    #: It has ended, or leaves its node and another pod takes its place: a request that is still there is deleted at
    #: once.
    TERMINAL = "terminal"
    #: It is being deleted otherwise: its request stays until the pod is gone, and none is made.
    LEAVING = "leaving"
    #: It comes with its node, or must not run yet.
    EXCLUDED = "excluded"
    #: Only its metadata could be decoded.
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodMapping:
    """The request of one pod."""

    #: `spec` of the CapacityRequest; None when the pod has none.
    spec: JsonObject | None
    #: Why there is none, "" when there is one.
    why_none: str = ""
    findings: tuple[Inexpressible, ...] = ()


def standing_of(pod: PodObject) -> PodStanding:
    """Return whether the pod has a request (docs/spec/operator.md §11, "Which pods")."""
    if not pod.spec.containers:
        # Every pod has a container; one that could not be decoded has nothing but its metadata.
        return PodStanding.UNREADABLE
    if pod.is_finished or pod.is_displaced:
        return PodStanding.TERMINAL
    if why_excluded(pod):
        return PodStanding.EXCLUDED
    return PodStanding.LEAVING if pod.is_terminating else PodStanding.REQUESTS


def why_excluded(pod: PodObject) -> str:
    """Say why a pod never has a request as it is now, "" when it may have one."""
    if pod.is_mirror:
        return "a mirror pod comes with its node"
    if pod.is_of_daemon_set:
        return "a pod of a DaemonSet comes with its node"
    if pod.spec.scheduling_gates:
        # Capacity would be bought for a pod that must not run, perhaps for days; the last gate's end is an update.
        return "a scheduling gate keeps the pod from running"
    return ""


def request_name(pod_uid: str) -> str:
    """Return the name of the request of a pod."""
    return REQUEST_NAME_PREFIX + pod_uid


def map_pod(pod: PodObject, *, volumes: Volumes = _NO_VOLUMES, defaults: PenaltyDefaults = _NO_DEFAULTS) -> PodMapping:
    """Return the spec of the pod's request, with any standing, and what the request does not say."""
    own, findings = node_requirements(pod.spec)
    if own is None:
        return PodMapping(spec=None, why_none=findings[0].message, findings=tuple(findings))
    attached, more = volume_requirements(pod, volumes)
    findings += more
    settled, more = settle_hostnames([*own, *attached], is_bound=bool(pod.spec.node_name))
    findings += more
    requirements = requirements_json(settled)
    resources, more = requested_resources(pod.spec)
    findings += more
    for what, count, count_max, reason in (
        ("requirements", len(requirements), REQUIREMENTS_MAX, InexpressibleReason.UNSUPPORTED_AFFINITY),
        ("resources", len(resources), RESOURCES_MAX, InexpressibleReason.UNSUPPORTED_RESOURCES),
    ):
        if count > count_max:
            message = (
                f"spec: the pod has {count} {what}, a request at most {count_max};"
                " no capacity is requested for this pod"
            )
            findings.append(Inexpressible(reason, message))
            return PodMapping(spec=None, why_none=message, findings=tuple(findings))
    if pod.spec.resource_claims:
        names = ", ".join(claim.name for claim in pod.spec.resource_claims)
        message = f"spec.resourceClaims: {names}: capacity is requested without these devices"
        findings.append(Inexpressible(InexpressibleReason.UNSUPPORTED_RESOURCE_CLAIMS, message))
    placement = place_pod(pod)
    findings += placement.findings
    spec: dict[str, Json] = {
        "priority": pod.spec.priority or 0,
        "resources": resources or dict(NOTHING),
        "requirements": requirements,
    }
    if placement.spreads:
        spec["topologySpread"] = placement.spreads
    if placement.co_location is not None:
        spec["coLocation"] = placement.co_location
    if placement.exclusion is not None:
        spec["exclusion"] = placement.exclusion
    spec.update(_penalties(pod, defaults, findings))
    return PodMapping(spec=spec, findings=tuple(findings))


def request_body(pod: PodObject, spec: JsonObject) -> dict[str, Json]:
    """Return the whole CapacityRequest of a pod."""
    uid = pod.metadata.uid
    return {
        "apiVersion": CAPACITY_REQUESTS.api_version,
        "kind": CAPACITY_REQUESTS.kind,
        "metadata": {
            "name": request_name(uid),
            "namespace": pod.metadata.namespace,
            "labels": {OWNED_BY_POD: uid},
            "ownerReferences": [
                {
                    "apiVersion": PODS.api_version,
                    "kind": PODS.kind,
                    "name": pod.metadata.name,
                    "uid": uid,
                    "controller": True,
                }
            ],
        },
        "spec": spec,
    }


def _penalties(pod: PodObject, defaults: PenaltyDefaults, findings: list[Inexpressible]) -> dict[str, Json]:
    """Return the penalties: of the annotations, else of the pod's PriorityClass."""
    annotations = pod.metadata.annotations or {}
    default = defaults.of(pod.spec.priority_class_name)
    found: dict[str, Json] = {}
    for field, annotation, otherwise in (
        ("interruptionPenalty", INTERRUPTION_PENALTY_ANNOTATION, default.interruption_penalty),
        ("reclamationPenalty", RECLAMATION_PENALTY_ANNOTATION, default.reclamation_penalty),
    ):
        text = annotations.get(annotation)
        penalty = otherwise
        if text is not None:
            try:
                stated = penalty_text(text)
                penalty = defaults.bounded(stated)
                fault = "" if penalty == stated else f"{stated} is above the maximum of annotations in this cluster"
            except QuantityError as error:
                fault = str(error)
            if fault:
                message = f"metadata.annotations[{annotation}]: {fault}; the penalty is {penalty or 'unset'} instead"
                findings.append(Inexpressible(InexpressibleReason.INVALID_PENALTY, message))
        if penalty is not None:
            found[field] = penalty
    return found
