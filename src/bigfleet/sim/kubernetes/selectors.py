"""Evaluates label selectors and field selectors, as texts and as the objects of a spec, on stored objects."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from bigfleet.operator.kubernetes.api import Resource
from bigfleet.sim.kubernetes.kinds import Stored, field_of, kind_key, traits_of
from bigfleet.sim.kubernetes.refusals import bad_request

#: Says whether a stored object is selected.
Selects = Callable[[Stored], bool]

_COMMA_OUTSIDE_OF_A_SET = re.compile(r",(?![^(]*\))")
_SET = re.compile(r"(?P<key>\S+)\s+(?P<operator>in|notin)\s*\((?P<values>[^)]*)\)")
_EQUALITY = re.compile(r"(?P<key>[^!=\s]+)\s*(?P<operator>==|=|!=)\s*(?P<value>[^=!\s]*)")
_EXISTENCE = re.compile(r"(?P<negation>!?)\s*(?P<key>[^!=,()\s]+)")
_FIELDS_OF_ALL = frozenset({"metadata.name", "metadata.namespace"})


def select(resource: Resource[Any], label_selector: str, field_selector: str) -> Selects:
    """Return what both selectors select. Raises ApiError 400 for one that cannot be read, or for an unknown field."""
    labels = [_label_term(term) for term in _terms(label_selector)]
    fields = [_field_term(resource, term) for term in _terms(field_selector)]

    def selects(stored: Stored) -> bool:
        present = stored["metadata"].get("labels") or {}
        return all(term(present) for term in labels) and all(term(stored) for term in fields)

    return selects


def selector_object_matches(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """Return whether a label selector of a spec matches; an absent one matches nothing, an empty one everything."""
    if selector is None:
        return False
    if any(labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    return all(_expression_matches(each, labels) for each in selector.get("matchExpressions") or [])


def _expression_matches(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value = labels.get(expression["key"])
    values = expression.get("values") or []
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case operator:
            raise bad_request(f'"{operator}" is not a valid label selector operator')


def _terms(selector: str) -> list[str]:
    return [term.strip() for term in _COMMA_OUTSIDE_OF_A_SET.split(selector)] if selector.strip() else []


def _label_term(term: str) -> Callable[[Mapping[str, str]], bool]:
    if found := _SET.fullmatch(term):
        key, wanted = found["key"], {value.strip() for value in found["values"].split(",")}
        if found["operator"] == "in":
            return lambda labels: labels.get(key) in wanted
        return lambda labels: labels.get(key) not in wanted
    if found := _EQUALITY.fullmatch(term):
        key, value = found["key"], found["value"]
        if found["operator"] == "!=":
            return lambda labels: labels.get(key) != value
        return lambda labels: labels.get(key) == value
    if found := _EXISTENCE.fullmatch(term):
        key, wants = found["key"], not found["negation"]
        return lambda labels: (key in labels) is wants
    raise bad_request(f"unable to parse requirement: {term!r} is not a label selector")


def _field_term(resource: Resource[Any], term: str) -> Selects:
    found = _EQUALITY.fullmatch(term)
    if not found:
        raise bad_request(f"invalid field selector: {term!r}; can't understand it")
    path, value, equal = found["key"], found["value"], found["operator"] != "!="
    if path not in _FIELDS_OF_ALL | traits_of(resource).fields:
        raise bad_request(f"field label not supported: {path} ({'/'.join(filter(None, kind_key(resource)))})")
    return lambda stored: (field_of(stored, path) == value) is equal
