"""The custom resource definitions: names, columns, bounds, agreement with the structs that read the objects, cases.

The rules in CEL are judged by `test_crd_rules.py`, and all cases by a real API server in tests/kubernetes.
"""

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from bigfleet.model.quantity import MILLI_MAX, Family, format_quantity, parse_quantity
from bigfleet.operator.kubernetes.api import ApiError, Resource
from bigfleet.operator.kubernetes.resources import AVAILABLE_CAPACITIES, CAPACITY_REQUESTS, GROUP, UPCOMING_NODES
from bigfleet.sim.kernel.virtual_time import LoopClock
from bigfleet.sim.kubernetes.client import InMemoryApi
from bigfleet.sim.kubernetes.server import InMemoryApiServer
from tests.operator.crd_cases import CASES, PARAMETERS, DefinitionCase, contains
from tests.operator.crd_schema import (
    FOLDER,
    Schema,
    check_objects,
    definitions,
    rules_of,
    schema_of,
    schemas,
    step_faults,
)

DEFINITIONS = definitions()
RESOURCES: list[Resource[Any]] = [CAPACITY_REQUESTS, UPCOMING_NODES, AVAILABLE_CAPACITIES]
#: (short names, columns, columns with `-o wide` alone, selectable fields), as docs/spec/operator.md §2 says.
PRINTED: dict[str, tuple[list[str], dict[str, str], dict[str, str], list[str]]] = {
    "CapacityRequest": (
        ["cr", "crs"],
        {
            "Phase": ".status.phase",
            "Priority": ".spec.priority",
            "Satisfied": '.status.conditions[?(@.type=="Satisfied")].status',
            "Age": ".metadata.creationTimestamp",
        },
        {"Shortfall": '.status.conditions[?(@.type=="Shortfall")].reason'},
        [".status.phase"],
    ),
    "UpcomingNode": (
        ["upn"],
        {"Phase": ".status.phase", "Node": ".status.nodeRef.name", "Age": ".metadata.creationTimestamp"},
        {"Machine": ".spec.machineID"},
        [],
    ),
    "AvailableCapacity": (
        ["avc"],
        {"Availability": ".spec.availability", "Available": ".spec.availableCount", "Cost": ".spec.cost"},
        {"Expires": ".status.expiresAt"},
        [],
    ),
}
#: In the schema, and never read.
UNREAD = {
    "UpcomingNode": {
        "spec.taints[].timeAdded",
        "status.nodeRef.resourceVersion",
        "status.nodeRef.fieldPath",
    },
    "AvailableCapacity": {
        "spec.estimatedProvisioningTime",
        "spec.nodeTemplate",
        "spec.supportsAtomicProvisioning",
    },
}
#: What every kind has, and no schema of ours bounds.
OF_ALL = {"apiVersion", "kind", "metadata"}


def version_of(kind: str) -> dict[str, Any]:
    """Return the only version of a definition."""
    (version,) = DEFINITIONS[kind]["spec"]["versions"]
    assert isinstance(version, dict)
    return version


def test_there_is_one_definition_a_kind() -> None:
    """Each in a file named after the plural."""
    assert sorted(DEFINITIONS) == sorted(each.kind for each in RESOURCES)
    assert {path.stem for path in FOLDER.iterdir()} == {each.plural for each in RESOURCES}


@pytest.mark.parametrize("resource", RESOURCES, ids=lambda resource: resource.kind)
def test_a_definition_is_that_of_its_resource(resource: Resource[Any]) -> None:
    """Group, names, scope, version; a status subresource; the category fleet."""
    definition = DEFINITIONS[resource.kind]
    spec, version = definition["spec"], version_of(resource.kind)

    assert (definition["apiVersion"], definition["kind"]) == ("apiextensions.k8s.io/v1", "CustomResourceDefinition")
    assert definition["metadata"]["name"] == f"{resource.plural}.{GROUP}"
    assert (spec["group"], spec["scope"]) == (GROUP, "Namespaced" if resource.namespaced else "Cluster")
    assert spec["names"] == {
        "kind": resource.kind,
        "listKind": f"{resource.kind}List",
        "plural": resource.plural,
        "singular": resource.kind.lower(),
        "shortNames": PRINTED[resource.kind][0],
        "categories": ["fleet"],
    }
    assert (version["name"], version["served"], version["storage"]) == (resource.version, True, True)
    assert version["subresources"] == {"status": {}}


@pytest.mark.parametrize("kind", sorted(PRINTED))
def test_the_columns_are_those_of_the_specification(kind: str) -> None:
    """Those of `-o wide` have priority 1."""
    version = version_of(kind)
    _, columns, wide, fields = PRINTED[kind]
    found = {(each["name"], each["jsonPath"], each.get("priority", 0)) for each in version["additionalPrinterColumns"]}

    assert found == {(name, path, 0) for name, path in columns.items()} | {(n, p, 1) for n, p in wide.items()}
    assert [each["jsonPath"] for each in version.get("selectableFields", [])] == fields


@pytest.mark.parametrize("kind", sorted(DEFINITIONS))
def test_everything_is_described(kind: str) -> None:
    """`kubectl explain` has a sentence for each field."""
    silent = [
        f"{path}.{name}"
        for path, schema in schemas(schema_of(DEFINITIONS[kind]), "")
        for name, each in schema.get("properties", {}).items()
        if not each.get("description", "").endswith(".") and name not in OF_ALL and ".nodeRef." not in f"{path}.{name}"
    ]

    assert silent == []


@pytest.mark.parametrize("kind", sorted(DEFINITIONS))
def test_everything_is_bounded(kind: str) -> None:
    """Texts, lists and maps: what a rule costs is estimated from the bounds, and one object must not fill a cache."""
    bounds = {"string": ("maxLength", "enum", "format"), "array": ("maxItems",)}
    unbounded = []
    for path, schema in schemas(schema_of(DEFINITIONS[kind]), ""):
        needed = bounds.get(schema.get("type", ""), ())
        if schema.get("x-kubernetes-int-or-string"):
            needed = ("maxLength",)
        if "additionalProperties" in schema:
            needed = ("maxProperties",)
        if needed and not any(each in schema for each in needed) and path not in OF_ALL:
            unbounded.append(path)

    assert unbounded == []


@pytest.mark.parametrize("kind", sorted(DEFINITIONS))
def test_every_rule_names_its_field(kind: str) -> None:
    """The message begins with the name of the field that it is about."""
    for path, schema in schemas(schema_of(DEFINITIONS[kind]), ""):
        for rule in schema.get("x-kubernetes-validations", ()):
            field = rule["message"].partition(":")[0]
            assert field in {*schema.get("properties", {}), path.removesuffix("[]").rpartition(".")[2]}, rule


# ---- the structs -------------------------------------------------------------------------------------------------


def mismatches(node: inspect.Type, schema: Schema, path: str) -> Iterator[str]:
    """Yield where a struct and a schema do not agree."""
    if isinstance(node, inspect.UnionType):
        types = [each for each in node.types if not isinstance(each, inspect.NoneType)]
        if len(types) > 1:
            if not schema.get("x-kubernetes-int-or-string"):
                yield f"{path}: a quantity is read, the schema has {schema.get('type')}"
            return
        (node,) = types
    plain = {inspect.StrType: "string", inspect.IntType: "integer", inspect.BoolType: "boolean"}
    expected = plain.get(type(node)) or ("array" if isinstance(node, inspect.ListType) else "object")
    if schema.get("type") != expected:
        yield f"{path}: {expected} is read, the schema has {schema.get('type')}"
    elif isinstance(node, inspect.ListType):
        yield from mismatches(node.item_type, schema["items"], f"{path}[]")
    elif isinstance(node, inspect.DictType):
        yield from mismatches(node.value_type, schema["additionalProperties"], f"{path}[]")
    elif isinstance(node, inspect.StructType):
        fields = {field.encode_name: field.type for field in node.fields}
        properties = schema["properties"]
        prefix = f"{path}." if path else ""
        yield from (f"{prefix}{name} is read, and not in the schema" for name in fields.keys() - properties.keys())
        yield from (f"{prefix}{name}" for name in properties.keys() - fields.keys())
        for name in (fields.keys() & properties.keys()) - OF_ALL:
            yield from mismatches(fields[name], properties[name], f"{prefix}{name}")


@pytest.mark.parametrize("resource", RESOURCES, ids=lambda resource: resource.kind)
def test_schema_and_struct_agree(resource: Resource[Any]) -> None:
    """Every field that is read is in the schema with its type, and every other way round but for those listed."""
    found = set(mismatches(inspect.type_info(resource.type), schema_of(DEFINITIONS[resource.kind]), ""))

    assert found - {"apiVersion", "kind"} == UNREAD.get(resource.kind, set())


class _Wrong(msgspec.Struct):
    phase: int = 0
    absent: str = ""


def test_a_mismatch_is_found() -> None:
    """Of a type and of a field, in both directions."""
    schema = schema_of(DEFINITIONS["CapacityRequest"])["properties"]["status"]
    found = set(mismatches(inspect.type_info(_Wrong), schema, ""))

    assert "phase: integer is read, the schema has string" in found
    assert "absent is read, and not in the schema" in found
    assert "acknowledgedAt" in found


# ---- quantities --------------------------------------------------------------------------------------------------

PATTERN: str = schema_of(DEFINITIONS["CapacityRequest"])["properties"]["spec"]["properties"]["interruptionPenalty"][
    "pattern"
]


def test_all_quantities_have_one_grammar() -> None:
    """In every kind."""
    found = {
        schema["pattern"]
        for definition in DEFINITIONS.values()
        for _, schema in schemas(schema_of(definition), "")
        if schema.get("x-kubernetes-int-or-string")
    }

    assert found == {PATTERN}


@given(st.from_regex(PATTERN.replace("$", r"\Z"), fullmatch=True).filter(lambda text: len(text) <= 64))
def test_what_the_schema_takes_for_a_quantity_can_be_parsed(text: str) -> None:
    """By the one parser of the project."""
    assert abs(parse_quantity(text)) <= MILLI_MAX


@given(st.integers(-MILLI_MAX, MILLI_MAX), st.sampled_from(Family))
def test_what_the_operator_writes_is_a_quantity_to_the_schema(milli: int, family: Family) -> None:
    """However it was written before."""
    spec = {"availability": "None", "availableCount": 0, "cost": 0, "resources": {"a": format_quantity(milli, family)}}

    assert step_faults(DEFINITIONS["AvailableCapacity"], spec, ())[0] == []


# ---- cases -------------------------------------------------------------------------------------------------------


def is_about_a_rule(case: DefinitionCase) -> bool:
    """Return whether a case is refused by a rule in CEL."""
    messages = [message for _, message in rules_of(schema_of(DEFINITIONS[case.kind]))]
    return any(text in message for text in case.refused for message in messages)


def test_every_rule_has_a_case_that_it_refuses() -> None:
    """And every kind has one that is accepted."""
    for kind, definition in DEFINITIONS.items():
        refused = [text for case in CASES if case.kind == kind for text in case.refused]
        for _, message in rules_of(schema_of(definition)):
            assert any(text in message for text in refused), message
        assert any(case.kind == kind and not case.refused for case in CASES)


@pytest.mark.parametrize("case", PARAMETERS)
def test_the_schema_accepts_and_refuses(case: DefinitionCase) -> None:
    """What the case says, rules in CEL apart; those leave nothing for the rest of the schema to refuse."""
    found, stored = step_faults(DEFINITIONS[case.kind], case.spec, case.statuses)

    if not case.refused or is_about_a_rule(case):
        assert found == []
        assert contains(stored, case.stored)
    for text in () if is_about_a_rule(case) else case.refused:
        assert any(text in fault for fault in found), found


@pytest.mark.virtual_time
async def test_a_simulated_server_refuses_what_the_schema_refuses() -> None:
    """When it is asked to; nothing is stored. What is wrong already may stay so."""
    server = InMemoryApiServer(LoopClock())
    check_objects(server)
    api = InMemoryApi(server)
    body: dict[str, Any] = {
        "apiVersion": f"{GROUP}/v1alpha1",
        "kind": "UpcomingNode",
        "metadata": {"name": "un-a"},
        "spec": {},
    }
    with pytest.raises(ApiError) as caught:
        await api.apply(UPCOMING_NODES, "un-a", body, field_manager="one")
    assert server.read(UPCOMING_NODES, "un-a") is None
    await api.apply(UPCOMING_NODES, "un-a", {**body, "spec": {"resources": {"cpu": "1"}}}, field_manager="one")
    with pytest.raises(ApiError) as again:
        await api.patch(UPCOMING_NODES.status, "un-a", {"status": {"phase": "Gone"}})

    server.put(CAPACITY_REQUESTS, {"metadata": {"name": "old", "namespace": "default"}, "spec": {"priority": 1}})
    pending = {"status": {"phase": "Pending"}}
    patched = await api.patch(CAPACITY_REQUESTS.status, "old", pending, namespace="default")

    assert patched.status.phase == "Pending"
    assert (caught.value.status, "spec.resources: Required value" in str(caught.value)) == (422, True)
    assert (again.value.status, "status.phase: Unsupported value" in str(again.value)) == (422, True)


# ---- the page ----------------------------------------------------------------------------------------------------

PAGE = (FOLDER.parents[1] / "docs" / "custom-resources.md").read_text(encoding="utf-8")
EXAMPLES = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]


def test_the_page_has_an_example_of_each_kind() -> None:
    """And one CapacityRequest with every field."""
    assert {each["kind"] for each in EXAMPLES} == set(DEFINITIONS)
    fields = set(schema_of(DEFINITIONS["CapacityRequest"])["properties"]["spec"]["properties"])
    assert any(set(each["spec"]) == fields for each in EXAMPLES if each["kind"] == "CapacityRequest")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example["metadata"]["name"])
def test_an_example_of_the_page_is_accepted(example: dict[str, Any]) -> None:
    """It has no field that would be pruned."""
    statuses = [example["status"]] if "status" in example else []
    found, stored = step_faults(DEFINITIONS[example["kind"]], example["spec"], statuses)
    known = {path for path, _ in schemas(schema_of(DEFINITIONS[example["kind"]]), "")}

    assert found == []
    assert contains(stored, {"spec": example["spec"]})
    assert (example["apiVersion"], paths_of({"spec": example["spec"], "status": stored.get("status", {})}) - known) == (
        "bigfleet.lucy.sh/v1alpha1",
        set(),
    )


@pytest.mark.parametrize("kind", sorted(DEFINITIONS))
def test_the_page_names_every_field(kind: str) -> None:
    """Of spec and status, in the section of the kind."""
    section = PAGE.split(f"\n## {kind}\n")[1].split("\n## ")[0]
    properties = schema_of(DEFINITIONS[kind])["properties"]

    for part in ("spec", "status"):
        missing = [name for name in properties[part]["properties"] if f"`{part}.{name}`" not in section]
        assert missing == []


def paths_of(value: Any, path: str = "") -> set[str]:
    """Return the paths of a value as `schemas` writes them, the keys of maps left out."""
    if isinstance(value, list):
        return {f"{path}[]"}.union(*(paths_of(each, f"{path}[]") for each in value))
    if not isinstance(value, dict):
        return {path}
    if path.rpartition(".")[2] in ("resources", "labels", "matchLabels"):
        return {path, f"{path}[]"}
    return {path}.union(*(paths_of(each, f"{path}.{name}".lstrip(".")) for name, each in value.items()))
