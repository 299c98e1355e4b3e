"""Evaluates the schema of a custom resource definition on an object, without an API server.

The part of OpenAPI that our definitions use, with defaults, and their CEL rules when an evaluator is given. A keyword
that is not known here is an error, so that no rule is passed over.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from bigfleet.operator.kubernetes.resources import AVAILABLE_CAPACITIES, CAPACITY_REQUESTS, UPCOMING_NODES
from bigfleet.sim.kubernetes.kinds import kind_key
from bigfleet.sim.kubernetes.server import InMemoryApiServer

FOLDER = Path(__file__).parents[2] / "deploy" / "crds"
Schema = Mapping[str, Any]
#: Says whether a CEL expression holds of a value and, for transition rules, of the value before.
RuleEvaluator = Callable[[str, Any, Any], bool]

_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
}
_INTEGER_BITS = {"int32": 31, "int64": 63}
_KNOWN = frozenset(
    {
        *("description", "type", "properties", "required", "additionalProperties", "items", "enum", "pattern"),
        *("format", "default", "anyOf", "minimum", "minLength", "maxLength", "minItems", "maxItems"),
        *("minProperties", "maxProperties", "x-kubernetes-int-or-string", "x-kubernetes-validations"),
        *("x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-map-type"),
    }
)


def definitions() -> dict[str, Any]:
    """Return our definitions by kind."""
    loaded = [
        yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader) for path in sorted(FOLDER.glob("*.yaml"))
    ]
    return {each["spec"]["names"]["kind"]: each for each in loaded}


def check_objects(server: InMemoryApiServer, rule: RuleEvaluator | None = None) -> None:
    """Let a simulated API server refuse what the schemas of our kinds refuse; defaults are not filled in.

    A fault that an object has already is no reason to refuse a write that leaves it as it is, as on real servers.
    """
    for resource in (CAPACITY_REQUESTS, UPCOMING_NODES, AVAILABLE_CAPACITIES):
        schema = schema_of(definitions()[resource.kind])

        def validate(stored: Any, before: Any, schema: Schema = schema) -> list[str]:
            former = faults(schema, defaulted(schema, before), "", rule) if before else []
            return [each for each in faults(schema, defaulted(schema, stored), "", rule, before) if each not in former]

        server.validators[kind_key(resource)] = validate


def schema_of(definition: Mapping[str, Any]) -> Schema:
    """Return the schema of the only version of a definition."""
    (version,) = definition["spec"]["versions"]
    schema: Schema = version["schema"]["openAPIV3Schema"]
    return schema


def defaulted(schema: Schema, value: Any) -> Any:
    """Return a value with the defaults of its schema."""
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        filled = {name: each["default"] for name, each in properties.items() if "default" in each} | value
        fallback = schema.get("additionalProperties", {})
        return {name: defaulted(properties.get(name, fallback), each) for name, each in filled.items()}
    if isinstance(value, list):
        return [defaulted(schema.get("items", {}), each) for each in value]
    return value


def faults(schema: Schema, value: Any, path: str, rule: RuleEvaluator | None = None, before: Any = None) -> list[str]:
    """Return what is wrong with a value, each fault with the path of its field."""
    return list(_faults(schema, value, path, rule, before))


def rules_of(schema: Schema) -> Iterator[tuple[str, str]]:
    """Yield every rule of a schema with its message."""
    for each in schemas(schema, ""):
        for rule in each[1].get("x-kubernetes-validations", ()):
            yield rule["rule"], rule["message"]


def schemas(schema: Schema, path: str) -> Iterator[tuple[str, Schema]]:
    """Yield a schema and all within it, each with its path."""
    yield path, schema
    for name, each in schema.get("properties", {}).items():
        yield from schemas(each, _field(path, name))
    for name in ("items", "additionalProperties"):
        if name in schema:
            yield from schemas(schema[name], f"{path}[]")


def _faults(schema: Schema, value: Any, path: str, rule: RuleEvaluator | None, before: Any) -> Iterator[str]:
    unknown = schema.keys() - _KNOWN
    assert not unknown, f"{path}: this evaluator does not know {unknown}"
    if not _has_type(schema, value):
        yield f"{path}: must be of type {schema.get('type', 'integer or string')}"
        return
    found = [*_bounds(schema, value, path), *_children(schema, value, path, rule, before)]
    yield from found
    if found or rule is None:
        return
    for each in schema.get("x-kubernetes-validations", ()):
        is_transition = "oldSelf" in each["rule"]
        if not (is_transition and before is None) and not rule(each["rule"], value, before):
            yield f"{path}: {each['message']}"


def _has_type(schema: Schema, value: Any) -> bool:
    if schema.get("x-kubernetes-int-or-string"):
        return isinstance(value, int | str) and not isinstance(value, bool)
    expected = _TYPES[schema["type"]]
    return isinstance(value, expected) and (expected is bool or not isinstance(value, bool))


def _bounds(schema: Schema, value: Any, path: str) -> Iterator[str]:
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: Unsupported value: {value!r}"
    if isinstance(value, int):
        bits = _INTEGER_BITS.get(schema.get("format", ""), 63)
        if value < schema.get("minimum", -(2**bits)) or value >= 2**bits:
            yield f"{path}: {value} is out of range"
        return
    kind = "Properties" if isinstance(value, dict) else "Items" if isinstance(value, list) else "Length"
    if not schema.get(f"min{kind}", 0) <= len(value) <= schema.get(f"max{kind}", len(value)):
        yield f"{path}: has the size {len(value)}"
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        yield f"{path}: {value!r} does not match {schema['pattern']}"
    if schema.get("format") == "date-time" and not _is_time(value):
        yield f"{path}: {value!r} is no date-time"
    for keys in schema.get("x-kubernetes-list-map-keys", ()):
        seen = [each.get(keys) for each in value]
        yield from (f"{path}[{at}]: Duplicate value" for at, each in enumerate(seen) if each in seen[:at])


def _children(schema: Schema, value: Any, path: str, rule: RuleEvaluator | None, before: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (f"{_field(path, name)}: Required value" for name in schema.get("required", ()) if name not in value)
        properties, fallback = schema.get("properties", {}), schema.get("additionalProperties")
        for name, each in value.items():
            # What no schema describes is pruned, not refused.
            if (inner := properties.get(name, fallback)) is not None:
                former = before.get(name) if isinstance(before, dict) else None
                yield from _faults(inner, each, _field(path, name), rule, former)
    elif isinstance(value, list):
        for at, each in enumerate(value):
            yield from _faults(schema["items"], each, f"{path}[{at}]", rule, None)


def _field(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_time(value: str) -> bool:
    try:
        return datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False


def step_faults(
    definition: Mapping[str, Any],
    spec: Mapping[str, Any] | None,
    statuses: Sequence[Mapping[str, Any]],
    rule: RuleEvaluator | None = None,
) -> tuple[list[str], dict[str, Any]]:
    """Create an object and give it statuses in turn; return what is wrong with the last step, and the object then.

    Raises AssertionError when a step before the last is refused.
    """
    schema = schema_of(definition)
    first = {"metadata": {}, **({"spec": spec} if spec is not None else {})}
    found: list[str] = []
    before = None
    for step in [first, *({**first, "status": status} for status in statuses)]:
        assert not found, found
        stored = defaulted(schema, step)
        found = faults(schema, stored, "", rule, before)
        before = stored
    assert isinstance(before, dict)
    return found, before
