"""Counts the messages and fields of serialized bytes, so that a parser never sees bytes with too many of them.

docs/adr/0245-elements-are-counted-before-the-parse.md. The parser is C code that holds the interpreter, and every
element that it makes takes memory, also an empty one of two bytes. This module is plain Python: it runs in a thread and
lets others run meanwhile. It must never call bytes malformed that the parser accepts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from bigfleet.rpc.wire.repeated_fields import varint_at

#: A field has at least a tag and a value or a length.
FIELD_BYTES_MIN: Final = 2

#: Of field 1; there is no field 0.
_TAG_MIN: Final = 8
_VARINT, _FIXED64, _LENGTH_DELIMITED, _GROUP_START, _GROUP_END, _FIXED32 = range(6)
_SIZES: Final = {_FIXED64: 8, _FIXED32: 4, _GROUP_START: 0, _GROUP_END: 0}


class ListLimit(NamedTuple):
    """How many entries a repeated field may have in one message, and what to call them."""

    most: int
    noun: str


@dataclass(slots=True)
class _Step:
    """A field with entries that are counted."""

    name: str
    is_message: bool
    #: What its messages hold; None where they hold neither messages nor lists.
    inner: "ScanPlan | None"
    limit: ListLimit | None


@dataclass(slots=True)
class ScanPlan:
    """The fields of a message type that have to be looked at, by tag."""

    steps: dict[int, _Step] = field(default_factory=dict)
    #: A message with fewer bytes keeps the limits of all its lists.
    limited_bytes_min: float = float("inf")


class ScanResult(NamedTuple):
    """What a scan has counted until its end or the first fault."""

    #: Entries of known fields with messages, those of maps included, at any depth.
    messages: int
    #: Fields of any kind, those within map entries and other messages without messages and lists excepted.
    fields: int
    #: Place and text of what exceeds a limit; ("", text) if the bytes are no message; None if all is well.
    fault: tuple[str, str] | None


def plan_of(descriptor: Descriptor, limits: Mapping[str, ListLimit] | None = None) -> ScanPlan:
    """Return how messages of a type are scanned; `limits` are by `Message.field`.

    Raises TypeError for a type with lists of numbers, whose entries one field can pack.
    """
    return _plan_of(descriptor, limits or {}, {}) or ScanPlan()


def _plan_of(
    descriptor: Descriptor, limits: Mapping[str, ListLimit], known: dict[str, ScanPlan | None]
) -> ScanPlan | None:
    """Return the plan of a type, None if it has neither messages nor lists."""
    if descriptor.full_name in known:
        return known[descriptor.full_name]
    plan = ScanPlan()
    known[descriptor.full_name] = plan
    for each in descriptor.fields:
        is_message = each.type == FieldDescriptor.TYPE_MESSAGE
        if not is_message and not each.is_repeated:
            continue
        if not is_message and each.type not in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            raise TypeError(f"{each.full_name} is a list of numbers, which are not counted")
        limit = limits.get(f"{descriptor.name}.{each.name}")
        inner = _plan_of(each.message_type, limits, known) if each.message_type is not None else None
        plan.steps[each.number << 3 | _LENGTH_DELIMITED] = _Step(each.name, is_message, inner, limit)
        if limit is not None:
            plan.limited_bytes_min = min(plan.limited_bytes_min, limit.most * FIELD_BYTES_MIN + 1)
    if not plan.steps:
        known[descriptor.full_name] = None
        return None
    return plan


def scan(content: bytes, plan: ScanPlan, *, messages_max: int, fields_max: int) -> ScanResult:
    """Count a message's elements up to the first fault, in the order of a parser. Never raises."""
    counter = _Counter(content, messages_max, fields_max)
    fault = None
    try:
        counter.count(0, len(content), plan)
    except _Exceeded as exceeded:
        fault = (".".join(reversed(exceeded.path)), exceeded.text)
    except (DecodeError, IndexError):
        fault = ("", "the message is cut short, or is none")
    return ScanResult(counter.messages, counter.fields, fault)


class _Exceeded(Exception):
    """A limit that does not hold."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text
        #: The fields that lead to the place, innermost first.
        self.path: list[str] = []


class _Counter:
    """One scan."""

    def __init__(self, content: bytes, messages_max: int, fields_max: int) -> None:
        self._content = content
        self._messages_max = messages_max
        self._fields_max = fields_max
        self.messages = 0
        self.fields = 0

    def count(self, position: int, end: int, plan: ScanPlan) -> None:
        """Count the fields of one message, and of the messages in it."""
        content, steps = self._content, plan.steps
        counts: dict[int, int] | None = {} if end - position >= plan.limited_bytes_min else None
        #: The parser knows no field within a group, also where the number is that of a known one.
        groups = 0
        while position < end:
            self.fields += 1
            if self.fields > self._fields_max:
                raise _Exceeded(f"has more than {self._fields_max:,} fields")
            tag = content[position]
            position += 1
            if tag >= 0x80:
                tag, position = varint_at(content, position - 1)
            if tag < _TAG_MIN:
                raise DecodeError("a field has the number 0")
            wire_type = tag & 7
            if wire_type != _LENGTH_DELIMITED:
                groups += (wire_type == _GROUP_START) - (wire_type == _GROUP_END)
                position = self._end_of_number(position, wire_type)
                continue
            size = content[position]
            position += 1
            if size >= 0x80:
                size, position = varint_at(content, position - 1)
            start, position = position, position + size
            if position > end:
                raise DecodeError("the message is cut short")
            step = None if groups else steps.get(tag)
            if step is not None:
                self._enter(step, start, position)
                if counts is not None and step.limit is not None:
                    counts[tag] = counts.get(tag, 0) + 1
                    if counts[tag] > step.limit.most:
                        raise _at(step, f"has more than {step.limit.most:,} {step.limit.noun}")
        if position != end:
            raise DecodeError("the message is cut short")

    def _enter(self, step: _Step, start: int, end: int) -> None:
        if not step.is_message:
            return
        self.messages += 1
        if self.messages > self._messages_max:
            raise _Exceeded(f"has more than {self._messages_max:,} rows, requirements, quantities and the like")
        if step.inner is not None:
            try:
                self.count(start, end, step.inner)
            except _Exceeded as exceeded:
                if exceeded.path:
                    exceeded.path.append(step.name)
                raise

    def _end_of_number(self, position: int, wire_type: int) -> int:
        if wire_type == _VARINT:
            if self._content[position] < 0x80:
                return position + 1
            return varint_at(self._content, position)[1]
        if wire_type not in _SIZES:
            raise DecodeError(f"wire type {wire_type} at byte {position}")
        return position + _SIZES[wire_type]


def _at(step: _Step, text: str) -> _Exceeded:
    exceeded = _Exceeded(text)
    exceeded.path.append(step.name)
    return exceeded


def field_at(content: bytes, position: int) -> tuple[int, int, int]:
    """Return the number of the field at a place, and where its content begins and ends.

    Raises DecodeError where there is none. Both ends of a group count as fields without content.
    """
    tag, position = varint_at(content, position)
    wire_type = tag & 7
    size = 0
    start = position
    if wire_type == _LENGTH_DELIMITED:
        size, start = varint_at(content, position)
    elif wire_type == _VARINT:
        _value, end = varint_at(content, position)
        size = end - start
    elif wire_type in _SIZES:
        size = _SIZES[wire_type]
    else:
        raise DecodeError(f"wire type {wire_type} at byte {position}")
    if start + size > len(content):
        raise DecodeError("the message is cut short")
    return tag >> 3, start, start + size
