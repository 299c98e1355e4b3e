"""Turns demand into `capacity.proto` and back, and says what in a roll-up cannot be taken (docs/spec/wire.md §7, §2).

One bad row refuses the whole roll-up: half a demand that reads as a whole one would give machines away. Rows are read
only when somebody asks for them, because most roll-ups repeat the one before and are known by their digest.
`bigfleet.rpc.convert_session` carries roll-ups over a session. Nothing here may mend a row or leave one out.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache

import xxhash

from bigfleet.model import penalty
from bigfleet.model.frames import MalformedMessage, RollUp
from bigfleet.model.ids import ClusterId
from bigfleet.model.need import Need
from bigfleet.model.profile import Operator, Profile, Requirement, SpreadMode, TopologySpread
from bigfleet.model.quantity import QuantityError, parse_quantity
from bigfleet.model.vector import Vector, families, format_vector, parse_vector
from bigfleet.rpc.gen import capacity_pb2

# Bounds of docs/spec/wire.md §2.
NEEDS_MAX = 20_000
REQUIREMENTS_MAX = 64
VALUES_MAX = 1_000
RESOURCE_NAMES_MAX = 32
STRING_BYTES_MAX = 1_024

#: Requirements that are kept shared: they repeat from roll-up to roll-up and over the rows of one.
_REQUIREMENTS_CACHED_MAX = 16_384
#: Profiles that are kept shared: every cluster asks for much the same kinds of machine.
_PROFILES_CACHED_MAX = 16_384
_NAME_SHOWN_CHARACTERS_MAX = 64

_OPERATORS = {operator.value: operator for operator in Operator}
_SPREAD_MODES = {mode.value: mode for mode in SpreadMode}
_OPERATORS_WITH_VALUES = frozenset({Operator.IN, Operator.NOT_IN})

_WireRequirement = capacity_pb2.NodeSelectorRequirement
_WireSpread = capacity_pb2.TopologySpread


class ReceivedRollUp:
    """A roll-up as it came off the wire; its rows are read when they are asked for, and anew each time."""

    __slots__ = ("_digest", "_message", "_timestamp_unix_nanos")

    def __init__(self, message: capacity_pb2.ClusterCapacityNeeds) -> None:
        """Take over the message: nobody else may change it from here on."""
        self._message = message
        self._timestamp_unix_nanos = message.timestamp_unix_nanos
        self._digest: bytes | None = None

    @property
    def cluster_id(self) -> str:
        """The cluster that the message names, which need not be the session's."""
        return self._message.cluster_id

    @property
    def timestamp_unix_nanos(self) -> int:
        """When the operator built it."""
        return self._timestamp_unix_nanos

    @property
    def rows(self) -> int:
        """How many rows the message has."""
        return len(self._message.needs)

    @property
    def digest(self) -> bytes:
        """16 bytes (XXH3) that are equal for messages that differ in nothing but their timestamp."""
        if self._digest is None:
            self._digest = _digest(self._message)
        return self._digest

    def needs(self) -> tuple[Need, ...]:
        """Return the rows in message order. Raises MalformedMessage for the first fault, with its row and field."""
        message = self._message
        _check_count("needs", len(message.needs), "rows", NEEDS_MAX)
        _check_string("cluster_id", message.cluster_id)
        cluster = ClusterId(message.cluster_id)
        return tuple(_need_from_wire(cluster, row, f"needs[{index}]") for index, row in enumerate(message.needs))


def _digest(message: capacity_pb2.ClusterCapacityNeeds) -> bytes:
    timestamp_unix_nanos = message.timestamp_unix_nanos
    # Cleared and set again: a copy of a large roll-up costs more than everything else here.
    message.timestamp_unix_nanos = 0
    try:
        content = message.SerializeToString(deterministic=True)
    finally:
        message.timestamp_unix_nanos = timestamp_unix_nanos
    return xxhash.xxh3_128_digest(content)


# ---- to the wire ----------------------------------------------------------------------------------------------------


def rollup_to_wire(rollup: RollUp) -> capacity_pb2.ClusterCapacityNeeds:
    """Return the message of a roll-up."""
    return capacity_pb2.ClusterCapacityNeeds(
        cluster_id=rollup.cluster_id,
        timestamp_unix_nanos=rollup.timestamp_unix_nanos,
        needs=needs_to_wire(rollup.needs),
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


@lru_cache(maxsize=_REQUIREMENTS_CACHED_MAX)
def _requirement(key: str, operator: Operator, values: tuple[str, ...]) -> Requirement:
    return Requirement(key, operator, values)


def _need_from_wire(cluster: ClusterId, row: capacity_pb2.CapacityNeed, place: str) -> Need:
    _check_count(f"{place}.requirements", len(row.requirements), "requirements", REQUIREMENTS_MAX)
    try:
        # The bytes of a profile are quicker to have and to look up than what they say.
        profile = _profile(
            tuple([requirement.SerializeToString() for requirement in row.requirements]),
            tuple([spread.SerializeToString() for spread in row.spread]),
            row.priority,
            row.interruption_penalty_bucket,
            row.reclamation_penalty_bucket,
        )
    except MalformedMessage as fault:
        raise MalformedMessage(f"{place}.{fault.place}", fault.fault) from None
    aggregate, aggregate_texts = _vector(place, "aggregate_resources", row.aggregate_resources)
    min_unit, min_unit_texts = _vector(place, "min_unit", row.min_unit)
    group = row.group
    if group:
        _check_string(f"{place}.group", group)
        if profile.same_key is None:
            raise MalformedMessage(f"{place}.group", "is set, but none of the row's requirements has the operator Same")
    return Need(
        cluster=cluster,
        profile=profile,
        aggregate=aggregate,
        min_unit=min_unit,
        group=group,
        # Where both maps name a dimension, its sum decides how sums are printed.
        families=families({**min_unit_texts, **aggregate_texts}),
    )


@lru_cache(maxsize=_PROFILES_CACHED_MAX)
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
        _check_string(f"spread[{index}].topology_key", spread.topology_key)
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


def _checked_requirement(message: capacity_pb2.NodeSelectorRequirement, place: str) -> Requirement:
    if not message.key:
        raise MalformedMessage(f"{place}.key", "is empty")
    _check_string(f"{place}.key", message.key)
    operator = _OPERATORS.get(message.operator, Operator.UNSPECIFIED)
    if operator is Operator.UNSPECIFIED:
        known = ", ".join(f"{other.label} ({other.value})" for other in Operator if other is not Operator.UNSPECIFIED)
        raise MalformedMessage(f"{place}.operator", f"is {message.operator}, known operators are {known}")
    values = tuple(message.values)
    if not values and operator in _OPERATORS_WITH_VALUES:
        raise MalformedMessage(f"{place}.values", f"is empty, the operator {operator.label} needs at least one value")
    _check_count(f"{place}.values", len(values), "values", VALUES_MAX)
    for index, value in enumerate(values):
        _check_string(f"{place}.values[{index}]", value)
    return _requirement(message.key, operator, values)


def _vector(row: str, field: str, quantities: Mapping[str, str]) -> tuple[Vector, dict[str, str]]:
    """Check a resource map and return its vector, without dimensions that are zero, and its texts."""
    texts = dict(quantities.items())
    if not _is_surely_sound(texts):
        _check_vector(f"{row}.{field}", texts)
    return parse_vector(texts), texts


def _is_surely_sound(texts: Mapping[str, str]) -> bool:
    """Say whether `_check_vector` can find no fault; every row is asked, and faults and long names are rare."""
    if len(texts) > RESOURCE_NAMES_MAX:
        return False
    try:
        for name, text in texts.items():
            if len(name) > _NAME_SHOWN_CHARACTERS_MAX or parse_quantity(text) < 0:
                return False
    except QuantityError:
        return False
    return True


def _check_vector(place: str, texts: Mapping[str, str]) -> None:
    """Raise MalformedMessage for the first fault of a resource map, names ascending."""
    _check_count(place, len(texts), "names", RESOURCE_NAMES_MAX)
    for name in sorted(texts):
        _check_string(f"{place}[{_shown(name)}]", name, "the name has")
        try:
            milli = parse_quantity(texts[name])
        except QuantityError as error:
            raise MalformedMessage(f"{place}[{_shown(name)}]", str(error)) from error
        if milli < 0:
            raise MalformedMessage(f"{place}[{_shown(name)}]", f"{texts[name]!r} is negative")


def _shown(name: str) -> str:
    short = name if len(name) <= _NAME_SHOWN_CHARACTERS_MAX else name[:_NAME_SHOWN_CHARACTERS_MAX] + "…"
    return repr(short)


def _check_bucket(place: str, ordinal: int) -> None:
    if ordinal not in penalty.ORDINALS:
        raise MalformedMessage(place, f"is {ordinal}, penalty buckets are 0 to {penalty.PINNED}")


def _check_count(place: str, count: int, noun: str, count_max: int) -> None:
    if count > count_max:
        raise MalformedMessage(place, f"has {count} {noun}, at most {count_max} are allowed")


def _check_string(place: str, text: str, subject: str = "has") -> None:
    size_bytes = text_bytes(text)
    if size_bytes > STRING_BYTES_MAX:
        raise MalformedMessage(place, f"{subject} {size_bytes} bytes, at most {STRING_BYTES_MAX} are allowed")


def text_bytes(text: str) -> int:
    """Return the size of the text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())
