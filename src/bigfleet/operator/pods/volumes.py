"""Maps the volumes of a pod to requirements: a pod must run where its bound volumes can be attached.

A claim that is not bound yet adds no requirement: its volume is created where the pod is placed.
"""

from collections.abc import Iterable
from typing import Protocol

from bigfleet.operator.kubernetes.objects import (
    NodeSelectorTerm,
    PersistentVolume,
    PersistentVolumeClaim,
    PodObject,
)
from bigfleet.operator.pods.findings import Inexpressible, InexpressibleReason
from bigfleet.operator.pods.requirements import NodeRequirement, choose_term


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
    for name in claims_of(pod):
        claim = volumes.claim(pod.metadata.namespace, name)
        volume = volumes.volume(claim.spec.volume_name) if claim is not None and claim.spec.volume_name else None
        affinity = volume.spec.node_affinity if volume is not None else None
        if volume is None or affinity is None or affinity.required is None:
            continue
        requirements, fault = _of_terms(affinity.required.node_selector_terms or ())
        found.extend(requirements)
        if fault:
            place = f"volume {volume.metadata.name} of claim {name}: spec.nodeAffinity.required.nodeSelectorTerms"
            findings.append(Inexpressible(InexpressibleReason.UNSUPPORTED_VOLUME_AFFINITY, f"{place}: {fault}"))
    return found, findings


def _of_terms(terms: Iterable[NodeSelectorTerm]) -> tuple[tuple[NodeRequirement, ...], str]:
    chosen = choose_term(terms)
    reasons = "; ".join(chosen.others)
    if chosen.requirements is None:
        return (), f"{reasons or 'no term matches any node'}; capacity is requested wherever the pod's own rules allow"
    return chosen.requirements, reasons and f"{reasons}; capacity is requested for one term alone"
