"""Maps the volumes of a pod to requirements: a pod must run where its bound volumes can be attached.

A claim that is not bound yet adds no requirement: its volume is created where the pod is placed. Volume drivers label
Nodes by keys of their own, which machines do not have. Once the pod has its node, such a requirement is satisfied and
left out: with it, the machine that hosts the pod would count as unused.
"""

from collections.abc import Iterable
from typing import Final, Protocol

from bigfleet.model import labels
from bigfleet.operator.kubernetes.objects import (
    NodeSelectorTerm,
    PersistentVolume,
    PersistentVolumeClaim,
    PodObject,
)
from bigfleet.operator.kubernetes.resources import HOSTNAME, OPERATING_SYSTEM
from bigfleet.operator.pods.findings import Inexpressible, InexpressibleReason
from bigfleet.operator.pods.requirements import NodeRequirement, choose_term, names_of

#: Labels of machines. Zones and regions of known drivers have been translated to these.
_OF_MACHINES: Final = frozenset({labels.INSTANCE_TYPE, labels.ZONE, labels.REGION, labels.ARCH, OPERATING_SYSTEM})
#: Azure writes an empty zone for "in none", which no machine says.
_PLACES: Final = frozenset({labels.ZONE, labels.REGION})


class Volumes(Protocol):
    """The claims and volumes of a cluster."""

    def claim(self, namespace: str, name: str) -> PersistentVolumeClaim | None:
        """Return a claim, None when it is absent."""
        ...

    def volume(self, name: str) -> PersistentVolume | None:
        """Return a volume, None when it is absent."""
        ...


class NoVolumes:
    """A cluster without claims and volumes."""

    def claim(self, _namespace: str, _name: str) -> PersistentVolumeClaim | None:
        """Return None."""
        return None

    def volume(self, _name: str) -> PersistentVolume | None:
        """Return None."""
        return None


def claims_of(pod: PodObject) -> list[str]:
    """Return the names of the claims that the pod uses, sorted, those of its ephemeral volumes among them."""
    names = set()
    for volume in pod.spec.volumes or ():
        if volume.persistent_volume_claim is not None:
            names.add(volume.persistent_volume_claim.claim_name)
        elif volume.ephemeral is not None:
            names.add(f"{pod.metadata.name}-{volume.name}")
    return sorted(names)


def volume_requirements(pod: PodObject, volumes: Volumes) -> tuple[list[NodeRequirement], list[Inexpressible]]:
    """Return the requirements of the bound volumes of the pod, and what of them is not expressed."""
    found: list[NodeRequirement] = []
    findings = []
    is_bound = bool(pod.spec.node_name)
    for name in claims_of(pod):
        claim = volumes.claim(pod.metadata.namespace, name)
        volume = volumes.volume(claim.spec.volume_name) if claim is not None and claim.spec.volume_name else None
        affinity = volume.spec.node_affinity if volume is not None else None
        if volume is None or affinity is None or affinity.required is None:
            continue
        requirements, faults = _of_terms(affinity.required.node_selector_terms or (), is_bound=is_bound)
        found.extend(requirements)
        place = f"volume {volume.metadata.name} of claim {name}: spec.nodeAffinity.required.nodeSelectorTerms"
        for fault in faults:
            findings.append(Inexpressible(InexpressibleReason.UNSUPPORTED_VOLUME_AFFINITY, f"{place}: {fault}"))
    return found, findings


def _of_terms(terms: Iterable[NodeSelectorTerm], *, is_bound: bool) -> tuple[tuple[NodeRequirement, ...], list[str]]:
    chosen = choose_term(terms, is_bound=is_bound)
    reasons = "; ".join(chosen.others)
    if chosen.requirements is None:
        what = reasons or "no term matches any node"
        return (), [f"{what}; capacity is requested wherever the pod's own rules allow"]
    faults = [f"{reasons}; capacity is requested for one term alone"] if reasons else []
    left = []
    for requirement in chosen.requirements:
        key, operator, values = requirement
        if key in _PLACES and "" in values:
            continue
        if key not in _OF_MACHINES and key != HOSTNAME:
            if is_bound:
                continue
            if operator in ("In", "Exists"):
                text = f" {names_of(values)}" if values else ""
                faults.append(
                    f"{key} {operator}{text}: only a machine whose provider sets the label {key} can satisfy the"
                    " request until the pod is bound"
                )
        left.append(requirement)
    return tuple(left), faults
