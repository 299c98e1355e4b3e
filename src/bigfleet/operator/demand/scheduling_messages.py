"""Parses the messages of the Kubernetes scheduler: whether a pod waits for capacity, and for which reasons.

The scheduler writes `0/5 nodes are available: 2 Insufficient cpu, 3 node(s) had untolerated taint {a: b}. preemption:
…`. An unknown part never counts as a lack of capacity, nor as something that no node can change. Reasons with a number
of nodes come and go with the nodes and with the pods on them; those of the pod itself have none, or are known.
"""

import re
from typing import Final

#: What more nodes can change, in the scheduler's own words.
_CAPACITY: Final = re.compile(
    r"Insufficient \S"
    r"|Too many pods"
    r"|didn't match Pod's node affinity|didn't match pod affinity rules|didn't match pod anti-affinity rules"
    r"|didn't satisfy existing pods anti-affinity rules|didn't match pod topology spread constraints"
    r"|volume node affinity conflict"
    r"|untolerated taint|had taint"
    r"|were unschedulable"
    r"|didn't have free ports"
    r"|exceed max volume count"
    r"|no nodes available to schedule pods|0/0 nodes are available",
    re.IGNORECASE,
)
#: What no node can change: claims and volumes that are not there yet.
_NOT_CAPACITY: Final = re.compile(
    r"unbound|persistentvolumeclaim|pvc\(s\)|persistent volumes to bind|ephemeral volume controller|resourceclaim"
    r"|allocate all claims|device class|scheduling gate",
    re.IGNORECASE,
)
#: What is said of the pod itself, by some versions with the number of all nodes.
_OF_THE_POD: Final = re.compile(
    r"unbound|persistentvolumeclaim|ephemeral volume controller|resourceclaim|device class|scheduling gate",
    re.IGNORECASE,
)
_HEAD: Final = re.compile(r"^\d+/\d+ nodes are available: ")
_COUNT: Final = re.compile(r"^\d+ ")


def waits_for_capacity(message: str) -> bool:
    """Return whether more or other nodes can help a pod of which the scheduler says this."""
    text = _without_preemption(message)
    return _CAPACITY.search(text) is not None and _NOT_CAPACITY.search(text) is None


def waits_for_no_node(message: str) -> bool:
    """Return whether the scheduler names something that no node can change."""
    return _NOT_CAPACITY.search(_without_preemption(message)) is not None


def reasons_of(message: str) -> str:
    """Return the reasons of a message without the numbers of nodes, sorted: equal while only these numbers change."""
    return ", ".join(sorted({_COUNT.sub("", part) for part in _parts(message)}))


def pod_reasons_of(message: str) -> frozenset[str]:
    """Return the reasons that concern the pod itself, not the nodes that there are."""
    return frozenset(_COUNT.sub("", part) for part in _parts(message) if _is_of_the_pod(part))


def _is_of_the_pod(part: str) -> bool:
    if _COUNT.match(part) is None:
        return _CAPACITY.search(part) is None
    return "node(s)" not in part and _OF_THE_POD.search(part) is not None


def _parts(message: str) -> list[str]:
    return _HEAD.sub("", _without_preemption(message)).rstrip(". ").split(", ")


def _without_preemption(message: str) -> str:
    """What follows says what preemption would need, in words that mean the opposite here."""
    return message.partition(" preemption:")[0]
