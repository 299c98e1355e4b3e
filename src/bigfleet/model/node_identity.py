"""Computes what a machine looks like as a node: its labels, its taints, its provider id (docs/spec/wire.md §8)."""

from collections.abc import Iterator

from bigfleet.model import labels as keys
from bigfleet.model.frames import Taint
from bigfleet.model.machine import Machine

_EFFECTS = frozenset({"NoSchedule", "PreferNoSchedule", "NoExecute"})


def provider_id(machine: Machine) -> str:
    """Return the `spec.providerID` of the machine's node, "" without a host."""
    if not machine.host.is_present:
        return ""
    return machine.host.ref if "://" in machine.host.ref else f"{machine.host.provider}://{machine.host.ref}"


def node_labels(machine: Machine) -> dict[str, str]:
    """Return the labels that the node carries: the machine's, its type and zone, without the taints label."""
    node = {key: value for key, value in machine.labels.items() if key != keys.TAINTS}
    if machine.instance_type:
        node[keys.INSTANCE_TYPE] = machine.instance_type
    if machine.zone:
        node[keys.ZONE] = machine.zone
    return node


def node_taints(machine: Machine) -> Iterator[Taint]:
    """Yield the taints of the provider label `key=value:effect,…`; a malformed entry is left out."""
    for entry in machine.labels.get(keys.TAINTS, "").split(","):
        pair, _colon, effect = entry.rpartition(":")
        key, _equals, value = pair.partition("=")
        if key and effect in _EFFECTS:
            yield Taint(key, value, effect)
