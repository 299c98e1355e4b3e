"""Derives the names that the operator writes: labels, UpcomingNodes, AvailableCapacities (docs/spec/operator.md §2.4).

A machine id may be any text; a label value or an object name may not. An id that does not fit is hashed, and the
original is stored in an annotation and in the spec. Equal ids always give equal names.
"""

import hashlib
import re

_LABEL_VALUE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", re.ASCII)
_HASHED_LABEL = re.compile(r"h-[0-9a-f]{40}", re.ASCII)
_DNS_LABEL = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
_SUBDOMAIN = re.compile(rf"{_DNS_LABEL}(?:\.{_DNS_LABEL})*", re.ASCII)
_NAME_CHARACTERS_MAX = 253
_UPCOMING_PREFIX = "un-"
_HASH_CHARACTERS = 40


def machine_label(machine_id: str) -> str:
    """Return the value of the machine-id label: the id itself if a label can hold it, else `h-` and a hash."""
    if _LABEL_VALUE.fullmatch(machine_id):
        return machine_id
    return "h-" + _hash(machine_id)


def is_hashed_label(value: str) -> bool:
    """Return whether a label value may be a hash, from which no machine id can be read."""
    return _HASHED_LABEL.fullmatch(value) is not None


def upcoming_node_name(machine_id: str) -> str:
    """Return the name of the machine's UpcomingNode."""
    name = _UPCOMING_PREFIX + machine_id
    if len(name) <= _NAME_CHARACTERS_MAX and _SUBDOMAIN.fullmatch(name):
        return name
    return _UPCOMING_PREFIX + _hash(machine_id)


def available_capacity_name(supersedes_key: str) -> str:
    """Return the name of the AvailableCapacity that shows the hints of one key."""
    return "ac-" + hashlib.sha256(supersedes_key.encode()).digest()[:16].hex()


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_CHARACTERS]
