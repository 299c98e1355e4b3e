"""Checks a CapacityRequest against the schema in deploy/crds, as an API server does; CEL rules apart."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

DEFINITION = Path(__file__).parents[3] / "deploy" / "crds" / "capacityrequests.yaml"
_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "boolean": bool,
}


@cache
def spec_schema() -> dict[str, Any]:
    """Return the schema of `spec`."""
    definition = yaml.safe_load(DEFINITION.read_text(encoding="utf-8"))
    (version,) = definition["spec"]["versions"]
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return schema


def schema_faults(value: Any, schema: dict[str, Any], place: str = "spec") -> Iterator[str]:
    """Yield what an API server would refuse or silently drop."""
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, bool) or not isinstance(value, int | str):
            yield f"{place}: {value!r} is neither integer nor string"
            return
    elif isinstance(value, bool) != (schema["type"] == "boolean") or not isinstance(value, _TYPES[schema["type"]]):
        yield f"{place}: {value!r} is no {schema['type']}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{place}: {value!r} is none of {schema['enum']}"
    if isinstance(value, int):
        least, most = schema.get("minimum", -(2**31)), schema.get("maximum", 2**31 - 1)
        if not least <= value <= most:
            yield f"{place}: {value} is not from {least} to {most}"
    if isinstance(value, str):
        if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 10**9):
            yield f"{place}: {value!r} has a wrong length"
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield f"{place}: {value!r} does not match {schema['pattern']}"
    if isinstance(value, list):
        if len(value) > schema.get("maxItems", 10**9):
            yield f"{place}: has {len(value)} items"
        for position, item in enumerate(value):
            yield from schema_faults(item, schema["items"], f"{place}[{position}]")
    if isinstance(value, dict):
        yield from _object_faults(value, schema, place)


def _object_faults(value: dict[str, Any], schema: dict[str, Any], place: str) -> Iterator[str]:
    if not schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", 10**9):
        yield f"{place}: has {len(value)} entries"
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{place}.{name}: is missing"
    for name, inner in value.items():
        known = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
        if known is None:
            yield f"{place}.{name}: is unknown, and would be dropped"
        else:
            yield from schema_faults(inner, known, f"{place}.{name}")
