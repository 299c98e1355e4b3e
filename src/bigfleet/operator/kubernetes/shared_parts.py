"""Shares equal parts of stored CapacityRequests in memory.

Replicas have the same spec, and the operator writes the same conditions to thousands of requests: without sharing,
these parts take most of the memory of a request. Structs are never changed after decoding, so sharing is safe. A part
must never be shared with one that differs in any field.
"""

from typing import Final, TypeVar

import msgspec

from bigfleet.operator.kubernetes.objects import CapacityRequestObject, CapacityRequestSpec, Condition

_Part = TypeVar("_Part", CapacityRequestSpec, Condition)

#: Parts that are remembered of each kind; then all are forgotten, which costs memory and nothing else.
PARTS_MAX: Final = 16_384


class SharedRequestParts:
    """The parts seen so far; `of` is a transform of a Reflector."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._specs: dict[bytes, CapacityRequestSpec] = {}
        self._conditions: dict[bytes, Condition] = {}

    def of(self, found: CapacityRequestObject) -> CapacityRequestObject:
        """Return the object with parts that were seen before in the place of equal ones."""
        status = found.status
        if status.conditions:
            conditions = [self._shared(self._conditions, each) for each in status.conditions]
            status = msgspec.structs.replace(status, conditions=conditions)
        return msgspec.structs.replace(found, spec=self._shared(self._specs, found.spec), status=status)

    def _shared(self, known: dict[bytes, _Part], part: _Part) -> _Part:
        # Encoded, because 1 and 1.0 are equal and are written differently.
        key = self._encoder.encode(part)
        shared = known.get(key)
        if shared is None:
            if len(known) >= PARTS_MAX:
                known.clear()
            known[key] = shared = part
        return shared
