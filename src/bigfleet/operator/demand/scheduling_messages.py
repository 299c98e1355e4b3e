"""Parses the messages of the Kubernetes scheduler: whether a pod waits for capacity, and for which reasons.

The scheduler writes `0/5 nodes are available: 2 Insufficient cpu, 3 node(s) had untolerated taint {a: b}. preemption:
…`. An unknown part never counts as a lack of capacity.
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
    r"|allocate all claims|scheduling gate",
    re.IGNORECASE,
)
_HEAD: Final = re.compile(r"^\d+/\d+ nodes are available: ")
_COUNT: Final = re.compile(r"^\d+ ")


def waits_for_capacity(message: str) -> bool:
    """Return whether more or other nodes can help a pod of which the scheduler says this."""
    text = _without_preemption(message)
    return _CAPACITY.search(text) is not None and _NOT_CAPACITY.search(text) is None


def reasons_of(message: str) -> str:
    """Return the reasons of a message without the numbers of nodes, sorted: equal while only nodes change."""
    text = _HEAD.sub("", _without_preemption(message)).rstrip(". ")
    return ", ".join(sorted({_COUNT.sub("", part) for part in text.split(", ")}))


def _without_preemption(message: str) -> str:
    """What follows says what preemption would need, in words that mean the opposite here."""
    return message.partition(" preemption:")[0]
