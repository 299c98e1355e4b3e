"""Converts demand to `capacity.proto` and back, and reports which part of a roll-up is invalid.

docs/spec/wire.md §7, §2. One invalid row refuses the whole roll-up: half a demand, read as a whole one, would release
machines. Rows are read on request only, because most roll-ups repeat the one before and are recognised by their digest.
`bigfleet.rpc.wire.convert_session` carries roll-ups over a session. A row is never corrected or left out.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple, Self

import xxhash
from google.protobuf.message import DecodeError

from bigfleet.model import penalty, vector
from bigfleet.model.frames import MalformedMessage, RollUp
from bigfleet.model.ids import ClusterId
from bigfleet.model.need import Need, new_need
from bigfleet.model.profile import Operator, Profile, Requirement, SpreadMode, TopologySpread
from bigfleet.model.quantity import Family
from bigfleet.model.shapes import OVERHEADS_MAX, Overhead, canonical_overheads, overhead_fault
from bigfleet.model.vector import Vector, format_vector
from bigfleet.rpc.wire.amounts import amounts_of, check_count, check_string, check_text
from bigfleet.rpc.wire.convert_shapes import NO_SHAPES, check_agreement, shapes_from_wire, shapes_to_wire
from bigfleet.rpc.wire.gen import capacity_pb2
from bigfleet.rpc.wire.known_rows import KnownRows
from bigfleet.rpc.wire.rollup_head import RollUpHead, head_of_rollup

# Bounds of docs/spec/wire.md §2.
NEEDS_MAX = 20_000
REQUIREMENTS_MAX = 64
VALUES_MAX = 1_000

#: Bytes of what is shared; what is larger is read each time. An ordinary row has 100 to 400. Caches count entries, and
#: must not be filled with rows that are as long as the bounds allow.
SHARED_BYTES_MAX = 4_096
#: The same of one requirement. A list of fifty instance types has 600.
REQUIREMENT_BYTES_MAX = 1_024
#: Requirements that are shared: they repeat from roll-up to roll-up and over the rows of one.
_REQUIREMENTS_CACHED_MAX = 16_384
#: Profiles that are shared: every cluster asks for much the same kinds of machine.
_PROFILES_CACHED_MAX = 16_384
#: The same with their min units.
_KINDS_CACHED_MAX = 16_384

#: Rows of a roll-up from which on its rows are remembered: those of as many kinds take 0.1 s to be read.
KNOWN_ROWS_MIN = 2_000
_known_rows = KnownRows()

_OPERATORS = {operator.value: operator for operator in Operator}
_SPREAD_MODES = {mode.value: mode for mode in SpreadMode}
_OPERATORS_WITH_VALUES = frozenset({Operator.IN, Operator.NOT_IN})

_NO_FAMILIES: Mapping[str, Family] = MappingProxyType({})

#: How `CapacityNeed.shapes` and `.waiting` begin: fields 100 and 101, length-delimited.
_SHAPE_TAGS = (b"\xa2\x06", b"\xaa\x06")

_WireRequirement = capacity_pb2.NodeSelectorRequirement
_WireSpread = capacity_pb2.TopologySpread


class ReceivedRollUp:
    """A roll-up as it came off the wire; its rows are read when they are first asked for."""

    __slots__ = (
        "_cluster_id",
        "_digest",
        "_may_have_shapes",
        "_message",
        "_outcome",
        "_rows",
        "_size_bytes",
        "_timestamp_unix_nanos",
        "_unread",
    )

    def __init__(self, message: capacity_pb2.ClusterCapacityNeeds) -> None:
        """Take over the message: no other code may use it from here on."""
        self._message: capacity_pb2.ClusterCapacityNeeds | None = message
        #: Frame and place in it from which the message has yet to be parsed.
        self._unread: tuple[bytes, int] | None = None
        self._cluster_id = message.cluster_id
        self._timestamp_unix_nanos = message.timestamp_unix_nanos
        self._rows = len(message.needs)
        self._size_bytes = message.ByteSize()
        self._digest: bytes | None = None
        #: False once the bytes of the message have shown that no row has shapes.
        self._may_have_shapes = True
        self._outcome: _Demand | MalformedMessage | None = None

    @classmethod
    def repeated(cls, frame: bytes, known_digest: bytes | None) -> Self | None:
        """Return the roll-up of a frame whose bytes say, but for the timestamp, what the digest was made of; else None.

        Nothing but the head of the frame is read. None for a frame that is written in another way than an operator of
        ours writes it: such a one must be read to be known.
        """
        head = head_of_rollup(frame) if known_digest is not None else None
        if head is None or head.digest != known_digest:
            return None
        return cls._with_head(frame, head, known_digest)

    @classmethod
    def unread(cls, frame: bytes) -> Self | None:
        """Return the roll-up of a frame of which only the head is read; None for one that is written in another way.

        If the rest is no message, MalformedMessage is raised by what needs it.
        """
        head = head_of_rollup(frame)
        return None if head is None else cls._with_head(frame, head, None)

    @classmethod
    def _with_head(cls, frame: bytes, head: RollUpHead, digest: bytes | None) -> Self:
        offer = cls.__new__(cls)
        offer._message, offer._unread, offer._rows, offer._outcome = None, (frame, head.start), -1, None
        offer._size_bytes = len(frame) - head.start
        offer._cluster_id, offer._timestamp_unix_nanos = head.cluster_id, head.timestamp_unix_nanos
        offer._digest, offer._may_have_shapes = digest, True
        return offer

    @property
    def cluster_id(self) -> str:
        """The cluster that the message names, which need not be the session's."""
        return self._cluster_id

    @property
    def timestamp_unix_nanos(self) -> int:
        """When the operator built it."""
        return self._timestamp_unix_nanos

    @property
    def rows(self) -> int:
        """How many rows the message has; one that was known by its bytes is parsed for it."""
        if self._rows < 0:
            self._parsed()
        return self._rows

    @property
    def size_bytes(self) -> int:
        """How many bytes the message has; nothing is parsed for it."""
        return self._size_bytes

    @property
    def has_digest(self) -> bool:
        """Return whether the digest is at hand, so that asking for it costs nothing."""
        return self._digest is not None

    @property
    def digest(self) -> bytes:
        """16 bytes (XXH3) that are equal for messages that differ in nothing but their timestamp."""
        if self._digest is None:
            content = _content(self._parsed())
            self._digest = xxhash.xxh3_128_digest(content)
            self._may_have_shapes = any(tag in content for tag in _SHAPE_TAGS)
        return self._digest

    def needs(self) -> tuple[Need, ...]:
        """Return the rows in message order. Raises MalformedMessage for the first fault, with its row and field."""
        return self._demand().needs

    def overheads(self) -> tuple[Overhead, ...]:
        """Return the overheads in canonical order. Raises MalformedMessage as `needs` does."""
        return self._demand().overheads

    def _demand(self) -> "_Demand":
        if self._outcome is None:
            message = self._parsed()
            # Reading takes the message apart, so what is made of the whole must have been made.
            self._digest = self.digest
            try:
                self._outcome = _demand_from_wire(
                    ClusterId(self._cluster_id), message, may_have_shapes=self._may_have_shapes
                )
            except MalformedMessage as fault:
                self._outcome = fault
            self._message = None
        if isinstance(self._outcome, MalformedMessage):
            raise self._outcome
        return self._outcome

    def _parsed(self) -> capacity_pb2.ClusterCapacityNeeds:
        if self._message is None:
            assert self._unread is not None, "the message has been read, and with it what it was asked for"
            frame, start = self._unread
            try:
                message = capacity_pb2.ClusterCapacityNeeds.FromString(frame[start:])
            except DecodeError as error:
                raise MalformedMessage("rollup", f"could not be read: {error}") from error
            if message.cluster_id != self._cluster_id:
                # The head has the first of several, which was compared with the session; a parser takes the last.
                raise MalformedMessage("cluster_id", "is given twice with different values; give it once")
            self._timestamp_unix_nanos = message.timestamp_unix_nanos
            self._message = message
            self._rows = len(message.needs)
        return self._message


class _Demand(NamedTuple):
    """What a roll-up says."""

    needs: tuple[Need, ...]
    overheads: tuple[Overhead, ...]


def _demand_from_wire(
    cluster: ClusterId, message: capacity_pb2.ClusterCapacityNeeds, *, may_have_shapes: bool
) -> _Demand:
    """Read every row as one of the cluster that was checked; the message is of no use afterwards.

    No shapes are looked for where there are none.
    """
    check_count("needs", len(message.needs), "rows", NEEDS_MAX)
    check_text("cluster_id", cluster)
    read = _known_need_from_wire if len(message.needs) >= KNOWN_ROWS_MIN else _need_from_wire
    needs = tuple([read(cluster, row, index, may_have_shapes) for index, row in enumerate(message.needs)])
    return _Demand(needs, _overheads_from_wire(message.overheads))


def _content(message: capacity_pb2.ClusterCapacityNeeds) -> bytes:
    """Return the bytes of a message without its timestamp."""
    timestamp_unix_nanos = message.timestamp_unix_nanos
    # Cleared and set again: a copy of a large roll-up costs more than everything else here.
    message.timestamp_unix_nanos = 0
    try:
        return message.SerializeToString(deterministic=True)
    finally:
        message.timestamp_unix_nanos = timestamp_unix_nanos


# ---- to the wire ----------------------------------------------------------------------------------------------------


def rollup_to_wire(rollup: RollUp) -> capacity_pb2.ClusterCapacityNeeds:
    """Return the message of a roll-up."""
    return capacity_pb2.ClusterCapacityNeeds(
        cluster_id=rollup.cluster_id,
        timestamp_unix_nanos=rollup.timestamp_unix_nanos,
        needs=needs_to_wire(rollup.needs),
        overheads=[
            capacity_pb2.NodeOverhead(
                requirements=requirements_to_wire(overhead.requirements), resources=format_vector(overhead.resources)
            )
            for overhead in rollup.overheads
        ],
    )


def needs_to_wire(needs: Iterable[Need]) -> list[capacity_pb2.CapacityNeed]:
    """Return the messages of some rows, in their order."""
    return [need_to_wire(need) for need in needs]


def need_to_wire(need: Need) -> capacity_pb2.CapacityNeed:
    """Return the message of a row, its quantities written the way the row's own were; arrival and parking stay here."""
    profile = need.profile
    return capacity_pb2.CapacityNeed(
        requirements=requirements_to_wire(profile.requirements),
        aggregate_resources=format_vector(need.aggregate, need.families),
        priority=profile.priority,
        spread=[
            _WireSpread(
                topology_key=spread.topology_key,
                max_skew=spread.skew_max,
                when_unsatisfiable=_WireSpread.WhenUnsatisfiable.ValueType(spread.mode.value),
            )
            for spread in profile.spreads
        ],
        interruption_penalty_bucket=capacity_pb2.PenaltyBucket.ValueType(profile.interruption_bucket),
        reclamation_penalty_bucket=capacity_pb2.PenaltyBucket.ValueType(profile.reclamation_bucket),
        min_unit=format_vector(need.min_unit, need.families),
        group=need.group,
        shapes=shapes_to_wire(need.shapes, need.families),
        waiting=shapes_to_wire(need.waiting, need.families),
    )


def requirements_to_wire(requirements: Iterable[Requirement]) -> list[capacity_pb2.NodeSelectorRequirement]:
    """Return the messages of some requirements, in their order."""
    return [
        _WireRequirement(
            key=requirement.key,
            operator=_WireRequirement.Operator.ValueType(requirement.operator.value),
            values=requirement.values,
        )
        for requirement in requirements
    ]


# ---- from the wire --------------------------------------------------------------------------------------------------


def requirements_from_wire(messages: Iterable[capacity_pb2.NodeSelectorRequirement]) -> tuple[Requirement, ...]:
    """Return requirements that were checked at their source; an unknown operator reads as UNSPECIFIED."""
    return tuple(
        _requirement(message.key, _OPERATORS.get(message.operator, Operator.UNSPECIFIED), tuple(message.values))
        for message in messages
    )


def _requirement(key: str, operator: Operator, values: tuple[str, ...]) -> Requirement:
    if len(key) + sum(map(len, values)) + len(values) > REQUIREMENT_BYTES_MAX:
        return Requirement(key, operator, values)
    return _shared_requirement(key, operator, values)


@lru_cache(maxsize=_REQUIREMENTS_CACHED_MAX)
def _shared_requirement(key: str, operator: Operator, values: tuple[str, ...]) -> Requirement:
    return Requirement(key, operator, values)


@dataclass(frozen=True, slots=True)
class _RowKind:
    """What a row says beside its sum and its group."""

    profile: Profile
    #: Whether a requirement of the profile has the operator Same.
    is_same: bool
    min_unit: Vector
    min_unit_families: Mapping[str, Family]
    #: What is wrong with the min unit, reported only when the sum before it is sound.
    min_unit_fault: MalformedMessage | None


def _known_need_from_wire(
    cluster: ClusterId, row: capacity_pb2.CapacityNeed, index: int, may_have_shapes: bool
) -> Need:
    """Return the remembered row with these bytes, or read it; a row with a fault is never remembered."""
    content = row.SerializeToString(deterministic=True)
    need = _known_rows.find(cluster, content)
    if need is None:
        need = _need_from_wire(cluster, row, index, may_have_shapes)
        _known_rows.remember(cluster, content, need)
    return need


def _need_from_wire(cluster: ClusterId, row: capacity_pb2.CapacityNeed, index: int, may_have_shapes: bool) -> Need:
    """Read a row, and take it apart: its sum and its group, which differ from row to row, and what repeats."""
    sums = row.aggregate_resources
    texts = {name: sums[name] for name in sums}
    sums.clear()
    group = row.group
    if group:
        row.ClearField("group")
    found = waiting = NO_SHAPES
    try:
        if may_have_shapes and (row.shapes or row.waiting):
            found, waiting = shapes_from_wire("shapes", row.shapes), shapes_from_wire("waiting", row.waiting)
            row.ClearField("shapes")
            row.ClearField("waiting")
        # The bytes of what is left are quicker to have and to look up than what they say.
        kind = _row_kind(row.SerializeToString(deterministic=True))
        aggregate, written = amounts_of("aggregate_resources", texts)
        if kind.min_unit_fault is not None:
            raise kind.min_unit_fault
        if found.shapes and texts:
            check_agreement("shapes", found, aggregate)
        if group:
            check_string("group", group)
            if not kind.is_same:
                raise MalformedMessage("group", "is set, but none of the row's requirements has the operator Same")
    except MalformedMessage as fault:
        raise MalformedMessage(f"needs[{index}].{fault.place}", fault.fault) from None
    if not kind.min_unit_families.keys() <= written.keys():
        # Where both maps name a dimension, its sum decides how sums are printed.
        written = {**kind.min_unit_families, **written}
    if found is NO_SHAPES and waiting is NO_SHAPES:
        return new_need(cluster, kind.profile, aggregate, kind.min_unit, 0, group, False, written)
    if not (found.families.keys() | waiting.families.keys()) <= written.keys():
        written = {**waiting.families, **found.families, **written}
    aggregate, min_unit = aggregate or found.total, kind.min_unit or found.largest
    return new_need(cluster, kind.profile, aggregate, min_unit, 0, group, False, written, found.shapes, waiting.shapes)


def _overheads_from_wire(messages: Sequence[capacity_pb2.NodeOverhead]) -> tuple[Overhead, ...]:
    """Return overheads in canonical order. Raises MalformedMessage for the first fault."""
    check_count("overheads", len(messages), "overheads", OVERHEADS_MAX)
    found = []
    for index, message in enumerate(messages):
        place = f"overheads[{index}]"
        check_count(f"{place}.requirements", len(message.requirements), "requirements", REQUIREMENTS_MAX)
        requirements = tuple(
            _checked_requirement(requirement, f"{place}.requirements[{number}]")
            for number, requirement in enumerate(message.requirements)
        )
        fault = overhead_fault(requirements)
        if fault is not None:
            raise MalformedMessage(f"{place}.requirements", fault)
        resources, _written = amounts_of(f"{place}.resources", dict(message.resources.items()))
        found.append(Overhead(requirements, resources))
    return canonical_overheads(found)


def _row_kind(content: bytes) -> _RowKind:
    """Return what a serialized row without sum and group says. Raises MalformedMessage with places within the row."""
    return _shared_row_kind(content) if len(content) <= SHARED_BYTES_MAX else _read_row_kind(content)


def _read_row_kind(content: bytes) -> _RowKind:
    row = capacity_pb2.CapacityNeed.FromString(content)
    check_count("requirements", len(row.requirements), "requirements", REQUIREMENTS_MAX)
    # A part of a row is no longer than the row.
    profile_of: Callable[..., Profile] = _shared_profile if len(content) <= SHARED_BYTES_MAX else _profile
    profile = profile_of(
        tuple([requirement.SerializeToString() for requirement in row.requirements]),
        tuple([spread.SerializeToString() for spread in row.spread]),
        row.priority,
        row.interruption_penalty_bucket,
        row.reclamation_penalty_bucket,
    )
    min_unit: Vector = vector.ZERO
    written: Mapping[str, Family] = _NO_FAMILIES
    fault = None
    try:
        min_unit, written = amounts_of("min_unit", dict(row.min_unit.items()))
    except MalformedMessage as found:
        fault = found
    return _RowKind(profile, profile.same_key is not None, min_unit, written, fault)


_shared_row_kind = lru_cache(maxsize=_KINDS_CACHED_MAX)(_read_row_kind)


def _profile(
    requirements: tuple[bytes, ...],
    spreads: tuple[bytes, ...],
    priority: int,
    interruption_bucket: int,
    reclamation_bucket: int,
) -> Profile:
    """Return the profile that serialized parts of a row say. Raises MalformedMessage with places within the row."""
    checked = tuple(
        _checked_requirement(_WireRequirement.FromString(content), f"requirements[{index}]")
        for index, content in enumerate(requirements)
    )
    topology = [_WireSpread.FromString(content) for content in spreads]
    for index, spread in enumerate(topology):
        check_text(f"spread[{index}].topology_key", spread.topology_key)
    _check_bucket("interruption_penalty_bucket", interruption_bucket)
    _check_bucket("reclamation_penalty_bucket", reclamation_bucket)
    return Profile(
        requirements=checked,
        spreads=tuple(
            TopologySpread(
                spread.topology_key,
                spread.max_skew,
                _SPREAD_MODES.get(spread.when_unsatisfiable, SpreadMode.UNSPECIFIED),
            )
            for spread in topology
        ),
        priority=priority,
        interruption_bucket=interruption_bucket,
        reclamation_bucket=reclamation_bucket,
    )


_shared_profile = lru_cache(maxsize=_PROFILES_CACHED_MAX)(_profile)


def _checked_requirement(message: capacity_pb2.NodeSelectorRequirement, place: str) -> Requirement:
    if not message.key:
        raise MalformedMessage(f"{place}.key", "is empty")
    check_text(f"{place}.key", message.key)
    operator = _OPERATORS.get(message.operator, Operator.UNSPECIFIED)
    if operator is Operator.UNSPECIFIED:
        known = ", ".join(f"{other.label} ({other.value})" for other in Operator if other is not Operator.UNSPECIFIED)
        raise MalformedMessage(f"{place}.operator", f"is {message.operator}, known operators are {known}")
    if not message.values and operator in _OPERATORS_WITH_VALUES:
        raise MalformedMessage(f"{place}.values", f"is empty, the operator {operator.label} needs at least one value")
    check_count(f"{place}.values", len(message.values), "values", VALUES_MAX)
    values = tuple(message.values)
    for index, value in enumerate(values):
        check_text(f"{place}.values[{index}]", value)
    return _requirement(message.key, operator, values)


def _check_bucket(place: str, ordinal: int) -> None:
    if ordinal not in penalty.ORDINALS:
        raise MalformedMessage(place, f"is {ordinal}, penalty buckets are 0 to {penalty.PINNED}")
