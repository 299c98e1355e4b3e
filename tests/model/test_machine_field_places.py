"""Counts the places that spell a machine's fields by hand, and fails for one that is not listed with its reason.

A place is a class, a function or the top of a module that names at least four fields as its own fields, keyword
arguments, texts or values that are passed on. One that names fewer only uses them. `test_machine_fields.py` proves that
places which must see every field do.
"""

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from typing import Final

from bigfleet.model.machine import MACHINE_FIELDS
from tests.syntax_trees import SOURCE, parsed, sources, tree_of

FIELDS_MIN: Final = 4
#: Names that much else has, too; they say nothing about a place.
COMMON: Final = frozenset({"id", "state", "host", "cluster", "zone", "labels", "resources"})
FIELDS: Final = tuple(name for name in MACHINE_FIELDS if name not in COMMON)
#: By spelling in Python, JSON, and on the wire: the field.
SPELLINGS: Final = {
    **{name: name for name in FIELDS},
    **{re.sub("_(.)", lambda found: found[1].upper(), name): name for name in FIELDS},
    "price_per_hour": "price_usd_per_hour",
}

#: By reason: the places that spell fields, each as its module in `src/bigfleet` and its scope.
PLACES: Final[dict[str, tuple[str, ...]]] = {
    "declares the fields: of a machine, of those that a shard gives it, and of what a provider offers": (
        "model/machine.py Machine",
        "model/machine.py Stamp",
        "provider/backend.py Slot",
    ),
    "wire: fields have numbers for good, and a List holds half a million records": (
        "model/metadata.py",
        "rpc/servers/provider.py encode_list_entry",
        "rpc/wire/convert_machine.py machine_from_wire",
        "rpc/wire/convert_machine.py machine_to_wire",
    ),
    "wire: the conformance suite reads it without the code that it judges": (
        "conformance/ports.py MachineSeen",
        "rpc/clients/conformance.py machine_seen",
    ),
    "disk: a new field of a machine changes no file by itself": (
        "provider/backends/simulated/book.py Made",
        "provider/storage/codec.py _Row",
        "provider/storage/codec.py decode_record",
        "provider/storage/codec.py encode_record",
        "shard/ownership/ownership_file.py",
    ),
    "runs for each of half a million machines, and takes longer by way of a table": (
        "engine/columnar/tables.py VocabularyTables._follow_stamps",
        "engine/columns/objects.py machine_at",
        "engine/columns/objects.py machines_at",
        "shard/inventory/machine_record.py Facts",
        "shard/inventory/machine_record.py InventoryRecord.machine",
        "shard/inventory/machine_record.py Keeper.facts",
    ),
    "input of people: names, defaults and checks of its own": (
        "cli/engine/cases.py machine_of",
        "cli/engine/machine_entries.py",
        "cli/plan/inputs.py",
        "cli/plan/inputs.py MachineEntry",
        "cli/plan/inputs.py machine_given",
        "provider/backends/simulated/world.py Pool",
        "provider/inventory/offerings.py",
        "provider/inventory/offerings.py _offering",
        "sim/scenarios/scenario_file.py ShapeSpec",
    ),
    "input of programs: what a line leaves out is as its slot says, and a table takes twice as long": (
        "provider/backends/exec/inventory_lines.py InventoryLines._host",
        "provider/backends/exec/inventory_lines.py InventoryLines._take_slot",
        "provider/backends/exec/inventory_lines.py _HostLine",
        "provider/backends/exec/inventory_lines.py _SlotLine",
    ),
    "shown to people, under names of its own": (
        "cli/explain/page.py show_machine",
        "cli/get/columns.py",
        "cli/get/records.py machine_record",
    ),
    "makes an offer of values that have no machine yet, or only a part of one": (
        "demo/fleet.py trace_fleet",
        "provider/backends/aws/backend.py AwsBackend._describe_unoffered",
        "provider/backends/aws/backend.py AwsBackend._template",
        "provider/backends/fake.py fake_slot",
        "provider/backends/libvirt/fleet.py _lines",
        "provider/backends/partitioned/backend.py _slot_of",
        "provider/backends/partitioned/hosts_file.py _line",
        "provider/backends/simulated/fleet.py _PoolShape.of",
        "sim/plan_generator.py WorldPlan.cloud",
        "sim/scenarios/stock.py _slot",
    ),
    "decides by these fields": (
        "engine/shapes/fleet.py _put_fuller_first",
        "engine/targets.py ClassKey",
        "provider/records/validate.py facts_fault",
    ),
    "judges decisions by code that shares nothing with the engine": (
        "sim/packing/comparison.py offers_of",
        "sim/packing/values.py PackingOffer",
    ),
}


def places_of(module: str, tree: ast.Module) -> dict[str, set[str]]:
    """Return the places of a module with the fields that each spells."""
    spelled: dict[str, set[str]] = {}
    for scope, name in _names(tree, ()):
        if name in SPELLINGS:
            spelled.setdefault(" ".join((module, ".".join(scope))).strip(), set()).add(SPELLINGS[name])
    return {place: fields for place, fields in spelled.items() if len(fields) >= FIELDS_MIN}


def _names(node: ast.AST, scope: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield what could spell a field: the scope and the name."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield from _names(child, (*scope, name))
                continue
            case ast.AnnAssign(target=ast.Name(id=name)) if isinstance(node, ast.ClassDef):
                yield scope, name
            case ast.keyword(arg=str(name)) | ast.Constant(value=str(name)):
                yield scope, name
            case ast.Attribute(attr=name) if _is_passed_on(child, node):
                yield scope, name
        yield from _names(child, scope)


def _is_passed_on(attribute: ast.Attribute, parent: ast.AST) -> bool:
    """Return whether the value of an attribute is an argument, an item of a tuple or list, or assigned."""
    if isinstance(parent, ast.Call):
        return attribute is not parent.func
    return isinstance(parent, ast.Tuple | ast.List) or isinstance(attribute.ctx, ast.Store)


@functools.cache
def found_places() -> dict[str, set[str]]:
    """Return every place in the source."""
    found = {}
    for path in sources():
        text = path.read_text(encoding="utf-8")
        # Most modules name no field, and a tree takes long.
        if sum(spelling in text for spelling in SPELLINGS) >= FIELDS_MIN:
            found.update(places_of(str(path.relative_to(SOURCE)), parsed(path)))
    return found


def listed_places() -> Iterable[str]:
    return (place for places in PLACES.values() for place in places)


def test_a_place_that_spells_the_fields_of_a_machine_is_listed_with_its_reason() -> None:
    listed = set(listed_places())
    unlisted = [
        f"{place} spells {', '.join(sorted(fields))}: derive them from MACHINE_FIELDS, Stamp or Slot, or list it here"
        for place, fields in found_places().items()
        if place not in listed
    ]

    assert unlisted == []


def test_a_listed_place_still_spells_fields() -> None:
    assert sorted(listed_places()) == sorted(found_places().keys() & set(listed_places()))


def test_a_place_is_found_however_it_spells_the_fields() -> None:
    source = """
class Row:
    instance_type: str
    capacity_type: int
    last_error: str
    def of(cls, machine):
        return cls(machine.instance_type, machine.node_name, machine.last_error, machine.allocatable)
def record(m):
    return {"instanceType": m.a, "priceUsdPerHour": m.b, "capacityType": m.c, "nodeName": m.d}
def message(m):
    return Message(node_name=m.a, last_error=m.b, price_per_hour=m.c, assigned_group=m.d, zone=m.e)
def used(m):
    return m.node_name or m.last_error or m.instance_type or m.price_usd_per_hour or m.allocatable
"""

    assert places_of("m.py", tree_of(source)).keys() == {"m.py Row.of", "m.py record", "m.py message"}
    assert "m.py Row" in places_of("m.py", tree_of(source.replace("str\n    def", "str\n    node_name: str\n    def")))
