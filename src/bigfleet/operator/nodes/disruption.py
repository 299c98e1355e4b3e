"""Decides which pods a voluntary drain must not evict, and which pods the scheduler puts on a cordoned node again.

Pods say so by the annotations of the Cluster Autoscaler and of Karpenter, so that no pod needs one of our own
(docs/spec/operator.md §7.2). This module reads one pod at a time and nothing else.
"""

from typing import Final

from bigfleet.operator.kubernetes.objects import NodeTaint, PodObject
from bigfleet.operator.kubernetes.scheduling_rules import repelling_taint

#: "false": the pod must not be moved to save a node. "true": it may, also without a controller.
SAFE_TO_EVICT: Final = "cluster-autoscaler.kubernetes.io/safe-to-evict"
#: "true": the pod must not be moved to save a node.
DO_NOT_DISRUPT: Final = "karpenter.sh/do-not-disrupt"
ANNOTATIONS: Final = (SAFE_TO_EVICT, DO_NOT_DISRUPT)
#: What the node controller puts on a cordoned node, and the scheduler respects on it.
_CORDONED: Final = (NodeTaint(key="node.kubernetes.io/unschedulable", effect="NoSchedule"),)


def why_not_disrupted(pod: PodObject) -> str | None:
    """Return why a voluntary drain must not evict the pod; None if it may."""
    annotations = pod.metadata.annotations or {}
    safe = annotations.get(SAFE_TO_EVICT)
    if safe == "false":
        return f"it has the annotation {SAFE_TO_EVICT}: false"
    if annotations.get(DO_NOT_DISRUPT) == "true":
        return f"it has the annotation {DO_NOT_DISRUPT}: true"
    if safe != "true" and not any(owner.controller for owner in pod.metadata.owner_references or ()):
        return f"it has no controller that would replace it; annotate it with {SAFE_TO_EVICT}: true to allow this"
    return None


def comes_back(pod: PodObject) -> bool:
    """Return whether the scheduler may put a pod like this on a node that is cordoned."""
    return repelling_taint(_CORDONED, pod.spec.tolerations) is None
