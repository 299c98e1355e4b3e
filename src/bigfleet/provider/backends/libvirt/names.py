"""Derives the names of a machine's domain, volumes and node from its id and operation.

docs/spec/libvirt-provider.md §3. A name follows from the id, so that a provider that was killed finds what it made.
"""

import hashlib
import uuid
from typing import Final

#: Every domain and volume of ours begins with it.
OBJECT_PREFIX: Final = "bf-"
_DIGITS: Final = 20
#: Characters of a ULID's random part: two bindings of one machine have different node names.
_SUFFIX_CHARACTERS: Final = 6
_NAMESPACE: Final = uuid.uuid5(uuid.NAMESPACE_URL, "https://bigfleet.dev/libvirt/1")


def domain_name(machine_id: str) -> str:
    """Return the name of a machine's domain."""
    return OBJECT_PREFIX + hashlib.sha256(machine_id.encode()).hexdigest()[:_DIGITS]


def domain_uuid(machine_id: str, operation_id: str) -> str:
    """Return the UUID of the domain that a Create defines."""
    return str(uuid.uuid5(_NAMESPACE, f"{machine_id} {operation_id}"))


def overlay_name(domain: str) -> str:
    """Return the volume that is a machine's disk."""
    return f"{domain}.qcow2"


def seed_name(domain: str) -> str:
    """Return the volume that cloud-init reads."""
    return f"{domain}-seed.iso"


def node_name(domain: str, operation_id: str) -> str:
    """Return the host name of one binding, which the kubelet registers as the node's name.

    The node of an earlier binding may still be listed as Ready, so each Configure has a name of its own.
    """
    return f"{domain}-{operation_id[-_SUFFIX_CHARACTERS:].lower()}"
