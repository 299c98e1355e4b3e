"""Maps a stored CapacityRequest to the request that it states (docs/spec/operator.md §2.1 and §3).

The schema rejects most invalid fields. Objects that were stored before the schema's rules, or by a server without it,
are rejected here by the name of the field. The content of one object is limited, so that a roll-up with it stays within
docs/spec/wire.md §2: the shard rejects a roll-up as a whole. This module must never guess a value that it cannot read.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Final, NoReturn

from bigfleet.model.ids import control_character_in, text_bytes
from bigfleet.model.metadata import FINGERPRINT_BYTES_MAX, size_fault
from bigfleet.model.profile import Operator, Requirement, SpreadMode, TopologySpread
from bigfleet.operator.kubernetes.objects import (
    CapacityCoLocation,
    CapacityExclusion,
    CapacityRequestObject,
    CapacityRequestSpec,
    CapacitySpread,
    LabelSelectorObject,
    LabelSelectorRequirement,
    Quantity,
)
from bigfleet.operator.requests import (
    HOST_PORT_GROUP,
    CapacityRequest,
    CoLocation,
    Exclusion,
    LabelSelector,
    SelectorExpression,
    UnmappableReason,
    UnmappableRequest,
    penalty_bucket,
)

#: Bounds of docs/spec/wire.md §2 and of the schema.
RESOURCES_MAX: Final = 32
REQUIREMENTS_MAX: Final = 64
VALUES_MAX: Final = 1_000
SPREADS_MAX: Final = 8
STRING_BYTES_MAX: Final = 1_024
_INT32_MAX: Final = 2**31 - 1
#: Requirements that are shared, and the characters of a shared one: larger ones are rare, and would be held for long.
_INTERNED_MAX: Final = 16_384
_INTERNED_CHARACTERS_MAX: Final = 2_048

_OPERATORS: Final[Mapping[str, Operator]] = {
    operator.label: operator for operator in (Operator.IN, Operator.NOT_IN, Operator.EXISTS, Operator.DOES_NOT_EXIST)
}
_SELECTOR_OPERATORS_WITH_VALUES: Final = frozenset({"In", "NotIn"})
_SELECTOR_OPERATORS_WITHOUT_VALUES: Final = frozenset({"Exists", "DoesNotExist"})
_SPREAD_MODES: Final[Mapping[str, SpreadMode]] = {
    "DoNotSchedule": SpreadMode.DO_NOT_SCHEDULE,
    "ScheduleAnyway": SpreadMode.SCHEDULE_ANYWAY,
}
#: The characters of label keys and values. Selectors of others match nothing, and their text would be ambiguous.
_LABEL_KEY: Final = re.compile(r"[A-Za-z0-9._/-]{1,317}", re.ASCII)
_LABEL_VALUE: Final = re.compile(r"[A-Za-z0-9._-]{0,63}", re.ASCII)


def request_id(namespace: str, name: str) -> str:
    """Return the id under which a CapacityRequest is counted: `namespace/name`."""
    return f"{namespace}/{name}"


def capacity_request(stored: CapacityRequestObject) -> CapacityRequest:
    """Return what the stored object asks for. Raises UnmappableRequest naming the first field that is wrong."""
    metadata = stored.metadata
    return request_of_spec(stored.spec, metadata.namespace, request_id(metadata.namespace, metadata.name))


def request_of_spec(spec: CapacityRequestSpec, namespace: str, id: str) -> CapacityRequest:
    """Return what a spec in a namespace asks for. Raises UnmappableRequest naming the first field that is wrong."""
    if not -_INT32_MAX - 1 <= spec.priority <= _INT32_MAX:
        _refuse("priority", f"{spec.priority} is outside of the 32-bit integers")
    return CapacityRequest(
        id=id,
        resources=_resources(spec.resources),
        requirements=_requirements(spec),
        spreads=tuple(_spreads(spec.topology_spread or ())),
        priority=spec.priority,
        interruption_bucket=_bucket("interruptionPenalty", spec.interruption_penalty),
        reclamation_bucket=_bucket("reclamationPenalty", spec.reclamation_penalty),
        co_location=_co_location(spec.co_location, namespace),
        exclusion=_exclusion(spec.exclusion, namespace),
    )


def _refuse(field: str, fault: str, reason: UnmappableReason = UnmappableReason.INVALID_REQUIREMENT) -> NoReturn:
    raise UnmappableRequest(reason, f"spec.{field}: {fault}")


def _check_text(field: str, text: str) -> None:
    if not text:
        _refuse(field, "is empty")
    _check_characters(field, text)


def _check_characters(field: str, text: str) -> None:
    _check_bytes(field, text)
    character = control_character_in(text)
    if character:
        _refuse(field, f"has the control character {character!r}")


def _check_bytes(field: str, text: str) -> None:
    size_bytes = text_bytes(text)
    if size_bytes > STRING_BYTES_MAX:
        _refuse(field, f"has {size_bytes} bytes, at most {STRING_BYTES_MAX} are allowed")


def _check_count(field: str, count: int, count_max: int) -> None:
    if count > count_max:
        _refuse(field, f"has {count:,} entries, at most {count_max:,} are allowed")


def _resources(quantities: Mapping[str, Quantity]) -> Mapping[str, str]:
    _check_count("resources", len(quantities), RESOURCES_MAX)
    for name in quantities:
        _check_text(f"resources[{name[:64]}]", name)
    return {name: str(quantity) for name, quantity in quantities.items()}


def _requirements(spec: CapacityRequestSpec) -> tuple[Requirement, ...]:
    given = spec.requirements or ()
    # A co-location appends one requirement of its own.
    _check_count("requirements", len(given), REQUIREMENTS_MAX - (spec.co_location is not None))
    # Less than their text in the end: what is far too long is not read value by value.
    size = sum(len(each.key) + sum(map(len, each.values or ())) for each in given)
    if size > FINGERPRINT_BYTES_MAX:
        _refuse("requirements", f"is {size_fault(size)}")
    return tuple(_requirement(f"requirements[{place}]", each) for place, each in enumerate(given))


def _requirement(field: str, given: LabelSelectorRequirement) -> Requirement:
    _check_text(f"{field}.key", given.key)
    operator = _OPERATORS.get(given.operator)
    if operator is None:
        _refuse(f"{field}.operator", f"{given.operator!r} is none of {', '.join(_OPERATORS)}")
    values = given.values or ()
    _check_count(f"{field}.values", len(values), VALUES_MAX)
    for value in values:
        _check_characters(f"{field}.values", value)
    if operator in (Operator.IN, Operator.NOT_IN) and not values:
        _refuse(f"{field}.values", f"operator {given.operator} needs values")
    if operator in (Operator.EXISTS, Operator.DOES_NOT_EXIST) and values:
        _refuse(f"{field}.values", f"operator {given.operator} takes no values")
    if len(given.key) + sum(map(len, values)) + len(values) > _INTERNED_CHARACTERS_MAX:
        return Requirement(given.key, operator, tuple(values))
    return _interned(given.key, operator, tuple(values))


@lru_cache(maxsize=_INTERNED_MAX)
def _interned(key: str, operator: Operator, values: tuple[str, ...]) -> Requirement:
    """Return one object for equal requirements: a cluster has thousands of each."""
    return Requirement(key, operator, values)


def _spreads(given: Iterable[CapacitySpread]) -> Iterator[TopologySpread]:
    for place, spread in enumerate(given):
        field = f"topologySpread[{place}]"
        _check_count("topologySpread", place + 1, SPREADS_MAX)
        _check_text(f"{field}.topologyKey", spread.topology_key)
        mode = _SPREAD_MODES.get(spread.when_unsatisfiable)
        if mode is None:
            _refuse(
                f"{field}.whenUnsatisfiable", f"{spread.when_unsatisfiable!r} is none of {', '.join(_SPREAD_MODES)}"
            )
        if not 1 <= spread.max_skew <= _INT32_MAX:
            _refuse(f"{field}.maxSkew", f"{spread.max_skew} is not between 1 and {_INT32_MAX}")
        yield TopologySpread(spread.topology_key, spread.max_skew, mode)


def _bucket(field: str, quantity: Quantity | None) -> int:
    try:
        return penalty_bucket(None if quantity is None else str(quantity))
    except UnmappableRequest as error:
        text = str(error).removeprefix("penalty: ")
        raise UnmappableRequest(error.reason, f"spec.{field}: {text}") from error


def _co_location(given: CapacityCoLocation | None, namespace: str) -> CoLocation | None:
    if given is None:
        return None
    if not _LABEL_KEY.fullmatch(given.topology_key):
        _refuse("coLocation.topologyKey", f"{given.topology_key[:80]!r} is no label key")
    selector = None if given.label_selector is None else _selector(given.label_selector)
    return CoLocation(topology_key=given.topology_key, namespace=namespace, selector=selector)


def _selector(given: LabelSelectorObject) -> LabelSelector:
    """Return the selector. Only characters of labels are taken, so that different selectors have different texts."""
    field = "coLocation.labelSelector"
    for key, value in (given.match_labels or {}).items():
        _check_label(f"{field}.matchLabels", key, (value,))
    for place, expression in enumerate(given.match_expressions or ()):
        where = f"{field}.matchExpressions[{place}]"
        values = expression.values or ()
        _check_label(where, expression.key, values)
        if expression.operator in _SELECTOR_OPERATORS_WITH_VALUES:
            if not values:
                _refuse(f"{where}.values", f"operator {expression.operator} needs values")
        elif expression.operator not in _SELECTOR_OPERATORS_WITHOUT_VALUES:
            _refuse(f"{where}.operator", f"{expression.operator!r} is none of In, NotIn, Exists, DoesNotExist")
        elif values:
            _refuse(f"{where}.values", f"operator {expression.operator} takes no values")
    return LabelSelector(
        match_labels=given.match_labels or {},
        match_expressions=tuple(
            SelectorExpression(each.key, each.operator, tuple(each.values or ()))
            for each in given.match_expressions or ()
        ),
    )


def _check_label(field: str, key: str, values: Iterable[str]) -> None:
    if not _LABEL_KEY.fullmatch(key):
        _refuse(field, f"{key[:80]!r} is no label key")
    for value in values:
        if not _LABEL_VALUE.fullmatch(value):
            _refuse(f"{field}[{key}]", f"{value[:80]!r} is no label value")


def _exclusion(given: CapacityExclusion | None, namespace: str) -> Exclusion | None:
    if given is None:
        return None
    if not given.group:
        _refuse("exclusion.group", "is empty")
    _check_bytes("exclusion.group", given.group)
    if not 1 <= given.max_per_machine <= _INT32_MAX:
        _refuse("exclusion.maxPerMachine", f"{given.max_per_machine} is not between 1 and {_INT32_MAX}")
    is_of_cluster = given.group.startswith(HOST_PORT_GROUP)
    group = given.group if is_of_cluster else f"{namespace}\0{given.group}"
    return Exclusion(group=group, max_per_machine=given.max_per_machine)
