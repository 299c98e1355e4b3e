"""Turns the pod shapes of a row into `capacity.proto` and back (docs/spec/wire.md §7).

Shapes that did not change since the last roll-up are the same objects. This module must not leave a shape out.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from bigfleet.model.frames import MalformedMessage
from bigfleet.model.quantity import MILLI_MAX, Family, format_quantity
from bigfleet.model.shapes import (
    COUNT_MAX,
    SHAPES_MAX,
    DemandShape,
    canonical_shapes,
    largest_of,
    missing_in,
    total_of,
)
from bigfleet.model.vector import Vector, format_vector, guess_family
from bigfleet.rpc.wire.amounts import amounts_of, check_count
from bigfleet.rpc.wire.gen import capacity_pb2

#: Shapes, and lists of them, that are shared: most rows have the shapes of the roll-up before.
_SHAPES_CACHED_MAX: Final = 65_536
_LISTS_CACHED_MAX: Final = 8_192
#: Bytes of a shape and of a list that are shared; larger ones are read each time. An ordinary shape has 50.
SHAPE_BYTES_MAX: Final = 512
LIST_BYTES_MAX: Final = 8_192


@dataclass(frozen=True, slots=True)
class RowShapes:
    """The shapes of a row with what follows from them."""

    #: In canonical order.
    shapes: tuple[DemandShape, ...]
    total: Vector
    largest: Vector
    #: How each dimension was written first.
    families: Mapping[str, Family]


NO_SHAPES: Final = RowShapes((), MappingProxyType({}), MappingProxyType({}), MappingProxyType({}))


def shapes_to_wire(
    shapes: Iterable[DemandShape], families: Mapping[str, Family] | None = None
) -> list[capacity_pb2.PodShape]:
    """Return the messages of some shapes, in their order, written the way the row's quantities were."""
    return [
        capacity_pb2.PodShape(
            resources=format_vector(shape.resources, families),
            count=shape.count,
            max_per_machine=shape.max_per_machine,
        )
        for shape in shapes
    ]


def shapes_from_wire(place: str, messages: Sequence[capacity_pb2.PodShape]) -> RowShapes:
    """Return checked shapes in canonical order. Raises MalformedMessage for the first fault, naming its place."""
    if not messages:
        return NO_SHAPES
    check_count(place, len(messages), "shapes", SHAPES_MAX)
    contents = tuple([message.SerializeToString(deterministic=True) for message in messages])
    return _shared_list(place, contents) if sum(map(len, contents)) <= LIST_BYTES_MAX else _list(place, contents)


def check_agreement(place: str, found: RowShapes, aggregate: Vector) -> None:
    """Raise MalformedMessage when shapes contradict an aggregate that was given."""
    wrong = missing_in(found.shapes, aggregate)
    if wrong is None:
        return
    name, sum_milli, said = wrong
    family = found.families.get(name) or guess_family(name)
    total, wanted = format_quantity(sum_milli, family), format_quantity(min(said, MILLI_MAX), family)
    raise MalformedMessage(place, f"add up to {name} {total}, aggregate_resources says {wanted}")


def _list(place: str, contents: tuple[bytes, ...]) -> RowShapes:
    shapes, families = [], {}
    for index, content in enumerate(contents):
        try:
            shape, written = _shared_shape(content) if len(content) <= SHAPE_BYTES_MAX else _shape(content)
        except MalformedMessage as fault:
            raise MalformedMessage(f"{place}[{index}].{fault.place}", fault.fault) from None
        shapes.append(shape)
        families.update({name: family for name, family in written.items() if name not in families})
    canonical = canonical_shapes(shapes)
    return RowShapes(canonical, total_of(canonical), largest_of(canonical), families)


_shared_list = lru_cache(maxsize=_LISTS_CACHED_MAX)(_list)


def _shape(content: bytes) -> tuple[DemandShape, Mapping[str, Family]]:
    """Return what a serialized shape says. Raises MalformedMessage with places within the shape."""
    message = capacity_pb2.PodShape.FromString(content)
    resources, written = amounts_of("resources", dict(message.resources.items()))
    if not 1 <= message.count <= COUNT_MAX:
        raise MalformedMessage("count", f"is {message.count}, a shape has 1 to {COUNT_MAX:,} pods")
    if message.max_per_machine < 0:
        raise MalformedMessage("max_per_machine", f"is {message.max_per_machine}, and must not be negative")
    return DemandShape(resources, message.count, message.max_per_machine), written


_shared_shape = lru_cache(maxsize=_SHAPES_CACHED_MAX)(_shape)
