"""Compares a stored CapacityRequest with the one that a pod should have: by meaning, not by spelling.

Quantities are compared by value, absent and empty fields are equal.
"""

from collections.abc import Hashable, Mapping

import msgspec

from bigfleet.model.quantity import QuantityError, parse_quantity
from bigfleet.operator.kubernetes.api import JsonObject
from bigfleet.operator.kubernetes.objects import CapacityRequestObject, CapacityRequestSpec, PodObject, Quantity
from bigfleet.operator.kubernetes.resources import OWNED_BY_POD
from bigfleet.operator.pods.selectors import canonical_selector


def has_metadata_of(stored: CapacityRequestObject, pod: PodObject) -> bool:
    """Return whether the request carries the pod's label, and names the pod as its controller."""
    uid = pod.metadata.uid
    labels, owners = stored.metadata.labels or {}, stored.metadata.owner_references or ()
    return labels.get(OWNED_BY_POD) == uid and any(owner.uid == uid and owner.controller for owner in owners)


def has_spec(stored: CapacityRequestObject, wanted: JsonObject) -> bool:
    """Return whether the stored spec means what the wanted one means."""
    return _meaning(stored.spec) == _meaning(msgspec.convert(wanted, CapacityRequestSpec))


def _meaning(spec: CapacityRequestSpec) -> Hashable:
    together, exclusion = spec.co_location, spec.exclusion
    selector = together.label_selector if together is not None else None
    return (
        spec.priority,
        _values(spec.resources),
        tuple((each.key, each.operator, tuple(each.values or ())) for each in spec.requirements or ()),
        tuple((each.max_skew, each.topology_key, each.when_unsatisfiable) for each in spec.topology_spread or ()),
        None if together is None else (together.topology_key, selector and canonical_selector(selector).text),
        None if exclusion is None else (exclusion.group, exclusion.max_per_machine),
        _value(spec.interruption_penalty),
        _value(spec.reclamation_penalty),
    )


def _values(quantities: Mapping[str, Quantity]) -> Hashable:
    return tuple((name, _value(quantity)) for name, quantity in sorted(quantities.items()))


def _value(quantity: Quantity | None) -> int | str | None:
    """Return milli-units, the text of what is no quantity, None for none."""
    if quantity is None:
        return None
    try:
        return parse_quantity(str(quantity))
    except QuantityError:
        return str(quantity)
