"""Reads a what-if file and applies its patches to the input of a plan (docs/planning.md).

A file is a list of patches, each a mapping with one key, applied in order. A patch that matches nothing is rejected, so
that an unchanged plan is not mistaken for the answer.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from bigfleet.cli.engine.cases import CAPACITY_TYPES
from bigfleet.cli.engine.shape_entries import ShapeEntry
from bigfleet.cli.plan.inputs import (
    MACHINES_MAX,
    ClusterOverheadEntry,
    MachineEntry,
    MachineGiven,
    OverheadEntry,
    converted,
    machine_given,
    overheads_given,
    read_document,
    with_profile,
    with_shapes,
)
from bigfleet.cli.plan.planning import PlanInput
from bigfleet.cli.plan.shard_limits import check_demand
from bigfleet.cli.runtime.failures import UsageFault
from bigfleet.model.ids import MachineId

PATCHES_MAX: Final = 1000


class MachineSelector(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Which machines are meant: all that agree with every field that is given."""

    instance_type: str | None = None
    zone: str | None = None
    capacity_type: str | None = None


class LoseEntry(MachineSelector, forbid_unknown_fields=True, kw_only=True):
    """`lose_machines`: how many of them; all when it is left out."""

    count: int | None = None


class PriceEntry(MachineSelector, forbid_unknown_fields=True, kw_only=True):
    """`price_factor`: what their price is multiplied by."""

    factor: float


class NeedPatch(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`set_need`: the new priority, penalty buckets or pods of a row."""

    id: str
    priority: int | None = None
    interruption_bucket: int | None = None
    reclamation_bucket: int | None = None
    shapes: list[ShapeEntry] | None = None


class OverheadPatch(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`set_overheads`: all that DaemonSets take in a cluster from now on."""

    cluster: str
    overheads: list[ClusterOverheadEntry]


def read_patches(path: Path) -> list[tuple[str, str, Any]]:
    """Return (place, kind, content) of every patch of a file; an empty file has none. Raises UsageFault."""
    patches = read_document(path)
    if patches is None:
        return []
    if not isinstance(patches, list) or len(patches) > PATCHES_MAX:
        raise UsageFault(f"{path}: a list of at most {PATCHES_MAX} patches is expected")
    found = []
    for number, patch in enumerate(patches):
        if not isinstance(patch, dict) or len(patch) != 1:
            raise UsageFault(f"{path} [{number}]: one key is expected, one of {', '.join(_PATCHES)}")
        ((kind, content),) = patch.items()
        if kind not in _PATCHES:
            raise UsageFault(f"{path} [{number}]: {kind!r} is unknown; there are {', '.join(_PATCHES)}")
        found.append((f"{path} [{number}].{kind}", str(kind), content))
    return found


def apply_patches(given: PlanInput, path: Path) -> PlanInput:
    """Return the input with every patch of a file applied, in order. Raises UsageFault."""
    for place, kind, content in read_patches(path):
        given = _PATCHES[kind](given, content, place)
    return given


def _add_machines(given: PlanInput, content: Any, place: str) -> PlanInput:
    if not isinstance(content, dict):
        raise UsageFault(f"{place}: the fields of a machine and a count are expected")
    fields = {"id": "added", **content}
    count = fields.pop("count", 1)
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MACHINES_MAX:
        raise UsageFault(f"{place}.count: {count!r} is not a count; use a number from 1 to {MACHINES_MAX:,}")
    entry = converted(fields, MachineEntry, place)
    machines = dict(given.machines)
    for number in range(count):
        entry_id = f"{entry.id}-{number:03d}"
        one = machine_given(msgspec.structs.replace(entry, id=entry_id), place)
        if one.machine.id in machines:
            raise UsageFault(f"{place}: there is a machine {entry_id!r} already; give the patch another id")
        machines[one.machine.id] = one
    return replace(given, machines=machines)


def _lose_machines(given: PlanInput, content: Any, place: str) -> PlanInput:
    entry = converted(content, LoseEntry, place)
    matching = sorted(_matching(given.machines, entry, place))
    count = len(matching) if entry.count is None else entry.count
    if not 1 <= count <= len(matching):
        raise UsageFault(f"{place}.count: {count} cannot be lost; {len(matching):,} match")
    lost = frozenset(matching[:count])
    return replace(given, machines={key: one for key, one in given.machines.items() if key not in lost})


def _price_factor(given: PlanInput, content: Any, place: str) -> PlanInput:
    entry = converted(content, PriceEntry, place)
    if not math.isfinite(entry.factor) or entry.factor < 0:
        raise UsageFault(f"{place}.factor: {entry.factor} is not a factor; use a number of at least 0")
    machines = dict(given.machines)
    matching = _matching(given.machines, entry, place)
    if all(machines[machine_id].machine.price_usd_per_hour == 0 for machine_id in matching):
        raise UsageFault(f"{place}: the machines that match ({len(matching):,}) cost nothing and stay so at any factor")
    for machine_id in matching:
        one = machines[machine_id]
        price = one.machine.price_usd_per_hour
        # An unbounded price stays so, also when it is multiplied by zero.
        scaled = price if math.isinf(price) else price * entry.factor
        machines[machine_id] = replace(one, machine=replace(one.machine, price_usd_per_hour=scaled))
    return replace(given, machines=machines)


def _matching(machines: Mapping[MachineId, MachineGiven], wanted: MachineSelector, place: str) -> list[MachineId]:
    if wanted.capacity_type is not None and wanted.capacity_type not in CAPACITY_TYPES:
        known = ", ".join(CAPACITY_TYPES)
        raise UsageFault(f"{place}.capacity_type: {wanted.capacity_type!r} is unknown; choose one of {known}")
    found = [
        machine_id
        for machine_id, one in machines.items()
        if wanted.instance_type in (None, one.machine.instance_type)
        and wanted.zone in (None, one.machine.zone)
        and wanted.capacity_type in (None, one.machine.capacity_type.label)
    ]
    if not found:
        raise UsageFault(f"{place}: no machine matches")
    return found


def _set_need(given: PlanInput, content: Any, place: str) -> PlanInput:
    entry = converted(content, NeedPatch, place)
    names = ("priority", "interruption_bucket", "reclamation_bucket")
    changes = {name: value for name in names if (value := getattr(entry, name)) is not None}
    if not changes and entry.shapes is None:
        raise UsageFault(f"{place}: nothing is set; give {', '.join(names)}, shapes")
    if all(need.id != entry.id for need in given.needs):
        raise UsageFault(f"{place}.id: the demand has no row {entry.id!r}")
    needs = list(given.needs)
    for number, need in enumerate(needs):
        if need.id == entry.id:
            changed = with_profile(need, place, **changes)
            needs[number] = changed if entry.shapes is None else with_shapes(changed, entry.shapes, place)
    return replace(given, needs=tuple(needs))


def _set_overheads(given: PlanInput, content: Any, place: str) -> PlanInput:
    entry = converted(content, OverheadPatch, place)
    if all(need.need.cluster != entry.cluster for need in given.needs):
        raise UsageFault(f"{place}.cluster: the demand has no cluster {entry.cluster!r}")
    said = [
        OverheadEntry(cluster=entry.cluster, resources=one.resources, requirements=one.requirements)
        for one in entry.overheads
    ]
    others = {cluster: known for cluster, known in given.overheads.items() if cluster != entry.cluster}
    overheads = overheads_given(said, place)
    check_demand((), overheads, place)
    return replace(given, overheads={**others, **overheads})


def _remove_cluster(given: PlanInput, content: Any, place: str) -> PlanInput:
    if not isinstance(content, str):
        raise UsageFault(f"{place}: the id of a cluster is expected")
    serves = any(one.machine.cluster == content for one in given.machines.values())
    if not serves and all(need.need.cluster != content for need in given.needs):
        raise UsageFault(f"{place}: neither the demand nor the machines have a cluster {content!r}")
    return replace(
        given,
        needs=tuple(need for need in given.needs if need.need.cluster != content),
        removed_clusters=given.removed_clusters | {content},
        overheads={cluster: known for cluster, known in given.overheads.items() if cluster != content},
    )


_PATCHES: Final[Mapping[str, Callable[[PlanInput, Any, str], PlanInput]]] = {
    "add_machines": _add_machines,
    "lose_machines": _lose_machines,
    "price_factor": _price_factor,
    "set_need": _set_need,
    "set_overheads": _set_overheads,
    "remove_cluster": _remove_cluster,
}
