"""Derives values from a JSON schema: values that it accepts, and one violation of each of its constraints.

The keywords are those that the schemas of deploy/charts use. A keyword or a pattern that is not known here is an error,
so that nothing new stays without a violation.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Path = tuple[str | int, ...]

_PORT: Final = r"([1-9][0-9]{0,3}|[1-5][0-9]{4}|6([0-4][0-9]{3}|5([0-4][0-9]{2}|5([0-2][0-9]|3[0-5]))))"
#: An example of each pattern, and a string that it refuses.
PATTERNS: Final = {
    r"^[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?$": ("a", "A_b"),
    r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$": ("a", ""),
    r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?$": ("a", "A_b"),
    rf"^[^:/ ]+:{_PORT}$": ("host:65535", "host:65536"),
    r"^[1-9][0-9]*(Mi|Gi|Ti)$": ("1Gi", "10"),
    r"^[1-9][0-9]*h$": ("1h", "0h"),
    r"^[A-Za-z0-9._-]{1,253}$": ("a.yaml", "a/b"),
    r"^\S{1,253}$": ("team-*", "a b"),
    r"^([0-9]|[1-9][0-9]|100)%$": ("50%", "101%"),
    r"^(unlimited|-?[0-9]{1,10})$": ("unlimited", "many"),
    r"^(unlimited|[0-9]{1,10})$": ("unlimited", "-1"),
    r"^(unlimited|[0-9]{1,12}(\.[0-9]{1,6})?)$": ("12.5", "$12"),
    r"^([0-9]+(\.[0-9]+)?(ms|s|m|h|d))+$": ("1s", "soon"),
    r"^--[a-z][a-z-]*(=.*)?$": ("--a=b", "-x"),
    r"^(etcd://.+)?$": ("etcd://a", "sqlite:///a"),
    r"^[0-9]+(\.[0-9]+)?(n|u|m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE][+-]?[0-9]+)?$": ("500m", "lots"),
}
#: A value of each type, and one that is none of it.
_TYPES: Final[Mapping[str, tuple[Any, Any]]] = {
    "string": ("a", 7),
    "integer": (1, "many"),
    "number": (1, "many"),
    "boolean": (True, "yes"),
    "array": ([], "none"),
    "object": ({}, "none"),
}
#: Those that constrain nothing by themselves.
_STRUCTURE: Final = {"$schema", "$ref", "definitions", "properties", "patternProperties", "items", "if", "then"}
#: The key of a map that takes any key, and a key that no object has.
_ANY_KEY, _UNKNOWN_KEY = "any-key", "unknownKey"


@dataclass(frozen=True, slots=True)
class Violation:
    """A value at a path that one constraint refuses."""

    #: Where the value is set; a required key is removed, and has none.
    path: Path
    value: Any
    #: Where the refusal is said to be, and a regular expression of its words.
    place: Path
    fault: str
    is_removal: bool = False
    #: A path whose value the constraint depends on.
    condition: Path | None = None

    def conflicts(self, other: "Violation") -> bool:
        """Return whether only one of two violations can be seen in one document."""
        places = ((self.path, other.path), (self.path, other.condition), (self.condition, other.path))
        return any(one is not None and two is not None and _overlap(one, two) for one, two in places)


def _overlap(one: Path, two: Path) -> bool:
    shorter = min(len(one), len(two))
    return one[:shorter] == two[:shorter]


class Schema:
    """A schema with its definitions."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root

    def example(self, node: Mapping[str, Any] | None = None) -> Any:
        """Return a value that has every property and is accepted."""
        node = self._resolved(self._root if node is None else node)
        if "enum" in node:
            return node["enum"][0]
        if "pattern" in node:
            return PATTERNS[node["pattern"]][0]
        kind = _kinds(node)[0]
        if kind == "array":
            return [self.example(node["items"])]
        if kind == "integer":
            return node.get("minimum", 1)
        if kind != "object":
            return _TYPES[kind][0]
        return {key: self.example(child) for key, child in self._children(node)}

    def violations(self) -> list[Violation]:
        """Return a violation of each constraint."""
        return list(self._violations(self._root, (), None))

    def open_places(self) -> list[Path]:
        """Return the places that accept anything: values without a type, and objects that take any key."""
        return list(self._open_places(self._root, ()))

    def _resolved(self, node: Mapping[str, Any]) -> Mapping[str, Any]:
        if "$ref" in node:
            resolved: Mapping[str, Any] = self._root["definitions"][node["$ref"].removeprefix("#/definitions/")]
            return resolved
        return node

    def _children(self, node: Mapping[str, Any]) -> Iterator[tuple[str | int, Mapping[str, Any]]]:
        yield from node.get("properties", {}).items()
        for pattern, child in node.get("patternProperties", {}).items():
            yield PATTERNS[pattern][0], child
        if "items" in node:
            yield 0, node["items"]
        if isinstance(node.get("additionalProperties"), dict):
            yield _ANY_KEY, node["additionalProperties"]

    def _open_places(self, node: Mapping[str, Any], path: Path) -> Iterator[Path]:
        node = self._resolved(node)
        is_leaf = "enum" in node or ("type" in node and not {"object", "array"} & set(_kinds(node)))
        is_closed = "items" in node or node.get("additionalProperties", True) is not True
        if not is_leaf and not is_closed:
            yield path
        for key, child in self._children(node):
            yield from self._open_places(child, (*path, key))

    def _violations(self, node: Mapping[str, Any], path: Path, condition: Path | None) -> Iterator[Violation]:
        node = self._resolved(node)
        for keyword in sorted(node.keys() - _STRUCTURE):
            # Values as a whole are an object, or no YAML file of values.
            if path or keyword != "type":
                yield from _violated(keyword, node, path, condition)
        for key, child in self._children(node):
            yield from self._violations(child, (*path, key), condition)
        if "if" in node:
            ((key, _const),) = node["if"]["properties"].items()
            yield from self._violations(node["then"], path, (*path, key))


def _kinds(node: Mapping[str, Any]) -> Sequence[str]:
    kinds = node["type"]
    return [kinds] if isinstance(kinds, str) else kinds


def _violated(keyword: str, node: Mapping[str, Any], path: Path, condition: Path | None) -> Iterator[Violation]:
    """Yield the violations of one keyword. Raises KeyError for an unknown one."""
    argument = node[keyword]
    if keyword == "additionalProperties":
        if argument is False:
            key = next((PATTERNS[pattern][1] for pattern in node.get("patternProperties", ())), _UNKNOWN_KEY)
            fault = f"additional properties '{key}' not allowed"
            yield Violation((*path, key), "a", path, fault, condition=condition)
        return
    if keyword == "required":
        for key in argument:
            fault = f"missing propert(y|ies) .*'{key}'"
            yield Violation((*path, key), None, path, fault, is_removal=True, condition=condition)
        return
    value, fault = _refused(keyword, argument)
    yield Violation(path, value, path, fault, condition=condition)


def _refused(keyword: str, argument: Any) -> tuple[Any, str]:
    """Return a value that a keyword with an argument refuses, and how. Raises KeyError for an unknown keyword."""
    match keyword:
        case "type":
            kinds = [argument] if isinstance(argument, str) else argument
            return _other_type(kinds), f"want {' or '.join(sorted(kinds))}"
        case "enum":
            return "none of them", "value must be one of"
        case "pattern":
            return PATTERNS[argument][1], "does not match pattern"
        case "minLength":
            return "a" * (argument - 1), f"minLength: got {argument - 1}, want {argument}"
        case "minimum":
            return argument - 1, f"minimum: got {_printed(argument - 1)}, want {_printed(argument)}"
        case "maximum":
            return argument + 1, f"maximum: got {_printed(argument + 1)}, want {_printed(argument)}"
        case "minItems":
            return [], f"minItems: got 0, want {argument}"
        case "minProperties":
            return {}, f"minProperties: got 0, want {argument}"
        case _:
            raise KeyError(keyword)


def _printed(number: int) -> str:
    """Return a pattern of a number as helm prints it: with separators, and a large one as a float."""
    if abs(number) < 1_000_000:
        return f"{number:,}"
    sign, digits = "-" * (number < 0), str(abs(number))
    mantissa = f"{digits[0]}.{digits[1:]}".rstrip("0").rstrip(".")
    exponent = f"{len(digits) - 1:02}".translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return re.escape(f"{sign}{mantissa}×10{exponent}")


def _other_type(kinds: Sequence[str]) -> Any:
    """Return a value that is of none of these types."""
    return next(value for value in (7, "many", True) if not set(kinds) & _types_of(value))


def _types_of(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    return {"string"} if isinstance(value, str) else {"integer", "number"}


def together(violations: Sequence[Violation]) -> list[list[Violation]]:
    """Return the violations in as few lists as come out of it, each without two that conflict."""
    found: list[list[Violation]] = []
    for each in violations:
        fitting = (listed for listed in found if not any(each.conflicts(other) for other in listed))
        chosen = next(fitting, None)
        if chosen is None:
            found.append([each])
        else:
            chosen.append(each)
    return found


def violate(values: Any, violation: Violation) -> None:
    """Change values so that they have a violation.

    A key that has a default is removed by null; a key of an item has none.
    """
    *parents, last = violation.path
    for key in parents:
        values = values[key]
    if violation.is_removal and 0 in parents:
        del values[last]
    else:
        values[last] = violation.value
