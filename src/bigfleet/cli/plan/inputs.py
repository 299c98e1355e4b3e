"""Reads the machines and the demand of a plan from files (docs/planning.md).

Machines: JSON lines, CSV or Parquet with the field names of docs/spec/model.md §1, or the nodes of a GPU cluster
trace.
Demand: a YAML or JSON list of rows, or a mapping with rows and overheads. Nothing is skipped or guessed: an error names
file, line or row, and field.
"""

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import yaml

from bigfleet.cli.engine.cases import CAPACITY_TYPES, HOST, HOSTED, OPERATORS, SPREAD_MODES, STATES
from bigfleet.cli.engine.machine_entries import machine_of_entry
from bigfleet.cli.engine.shape_entries import ShapeEntry, ShapeFault, checked_overhead, row_amounts
from bigfleet.cli.plan.shard_limits import check_demand, check_dollars, check_machine, check_row
from bigfleet.cli.runtime.failures import UsageFault, one_line
from bigfleet.demo.fleet import trace_fleet
from bigfleet.demo.trace import TraceFault, read_nodes
from bigfleet.files.bounded import read_bounded
from bigfleet.files.field_faults import field_fault
from bigfleet.files.json_loading import load_json
from bigfleet.files.yaml_loading import load_yaml
from bigfleet.model.ids import ClusterId, MachineId, identifier_fault
from bigfleet.model.machine import Machine, invariant_fault
from bigfleet.model.need import Need
from bigfleet.model.penalty import ORDINALS
from bigfleet.model.profile import Operator, Profile, Requirement, SpreadMode, TopologySpread
from bigfleet.model.shapes import OVERHEADS_MAX, Overhead, canonical_overheads
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.model.vector import vector_faults

T = TypeVar("T")

_KEYS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])

MACHINES_MAX: Final = 1_000_000
NEEDS_MAX: Final = 100_000
FILE_BYTES_MAX: Final = 2_000_000_000
_INT32: Final = range(-(2**31), 2**31)
_AMOUNTS: Final = (
    "price_per_hour",
    "assigned_interruption_penalty_dollars",
    "assigned_reclamation_penalty_dollars",
)
_MAP_COLUMNS: Final = ("resources", "allocatable", "labels")
#: A column that has no form in one cell of text.
_NESTED_ONLY: Final = "preempted_for"


class MachineEntry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One machine as it is written; fields and defaults as in docs/planning.md."""

    id: str
    state: str = "Idle"
    host: bool | None = None
    cluster: str = ""
    instance_type: str = ""
    zone: str = ""
    capacity_type: str = "Unspecified"
    resources: dict[str, str | int] = {}
    allocatable: dict[str, str | int] = {}
    labels: dict[str, str] = {}
    price_per_hour: float | str = 0.0
    interruption_probability: float = 0.0
    last_error: str = ""
    assigned_priority: int = 0
    assigned_interruption_penalty_dollars: float | str = 0.0
    assigned_reclamation_penalty_dollars: float | str = 0.0
    assigned_need_fingerprint: str = ""
    assigned_group: str = ""
    intended_cluster: str = ""
    preempted_for: tuple[str, str, str] | None = None
    idle_since: float | None = None
    unjoined: bool = False
    reserved: bool = False


class RequirementEntry(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """`[key, operator, [values]]`; the values may be left out."""

    key: str
    operator: str
    values: list[str] = []


class NodeSelectorEntry(msgspec.Struct, forbid_unknown_fields=True):
    """The same with the field names of Kubernetes."""

    key: str
    operator: str
    values: list[str] = []


class SpreadEntry(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """`[topology key, max skew, mode]`."""

    key: str
    skew: int
    mode: str


class PodSpreadEntry(msgspec.Struct, forbid_unknown_fields=True):
    """The same with the field names of Kubernetes."""

    key: str = msgspec.field(name="topologyKey")
    skew: int = msgspec.field(name="maxSkew")
    mode: str = msgspec.field(name="whenUnsatisfiable")


class NeedEntry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One row of demand as it is written; fields and defaults as in docs/planning.md."""

    id: str
    cluster: str
    aggregate: dict[str, str | int] | None = None
    shapes: list[ShapeEntry] = []
    waiting: list[ShapeEntry] = []
    min_unit: dict[str, str | int] = {}
    priority: int = 0
    interruption_bucket: int = 1
    reclamation_bucket: int = 1
    requirements: list[list[Any] | NodeSelectorEntry] = []
    spreads: list[list[Any] | PodSpreadEntry] = []
    group: str = ""
    arrival: int = 0
    parked: bool = False


class ClusterOverheadEntry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What DaemonSets take of every matching machine of a known cluster, as it is written."""

    resources: dict[str, str | int]
    requirements: list[list[Any] | NodeSelectorEntry] = []


class OverheadEntry(ClusterOverheadEntry, forbid_unknown_fields=True, kw_only=True):
    """The same with the cluster beside it."""

    cluster: str


class DemandEntry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A demand file in the form of a mapping: rows and overheads."""

    rows: list[Any]
    overheads: list[OverheadEntry] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineGiven:
    """A machine with what a plan wants to know beside it."""

    machine: Machine
    idle_since_seconds: float | None = None
    unjoined: bool = False
    reserved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedGiven:
    """A row of demand and the name that people know it by."""

    id: str
    need: Need


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandGiven:
    """The content of a demand file."""

    #: In the order of the file.
    needs: tuple[NeedGiven, ...]
    #: By cluster, canonical.
    overheads: Mapping[str, tuple[Overhead, ...]]


# ---- machines ----------------------------------------------------------------------------------------------------


def read_machines(path: Path) -> list[MachineGiven]:
    """Return the machines of a file, ids different. Raises UsageFault naming file, line and field."""
    if path.suffix.lower() == ".csv":
        entries = _trace_machines(path) if "sn" in _csv_header(path) else _csv_machines(path)
    elif path.suffix.lower() == ".parquet":
        entries = _parquet_machines(path)
    else:
        entries = _json_machines(path)
    found: dict[str, str] = {}
    machines: list[MachineGiven] = []
    for place, given in entries:
        machine_id = given.machine.id
        if machine_id in found:
            raise UsageFault(f"{place}: the id {machine_id!r} is already used at {found[machine_id]}; ids must differ")
        if len(machines) == MACHINES_MAX:
            raise UsageFault(f"{place}: more than {MACHINES_MAX:,} machines; split the fleet")
        found[machine_id] = place
        machines.append(given)
    if not machines:
        raise UsageFault(f"{path}: no machines; a plan needs at least one")
    return machines


def machine_given(entry: MachineEntry, place: str) -> MachineGiven:
    """Return a machine that holds the invariant. Raises UsageFault naming the place and the field."""
    state = _named(entry.state, STATES, f"{place}: state")
    if not entry.id:
        raise UsageFault(f"{place}: id is empty; every machine needs an id")
    for name, quantities in (("resources", entry.resources), ("allocatable", entry.allocatable)):
        _check_quantities(quantities, f"{place}: {name}")
    _named(entry.capacity_type, CAPACITY_TYPES, f"{place}: capacity_type")
    for name in _AMOUNTS:
        check_dollars(getattr(entry, name), f"{place}: {name}")
    _int32(entry.assigned_priority, f"{place}: assigned_priority")
    given: dict[str, Any] = {
        "host": state in HOSTED if entry.host is None else entry.host,
        "resources": _texts(entry.resources),
        "allocatable": _texts(entry.allocatable),
        "last_error": entry.last_error or ("not reported" if state is MachineState.FAILED else ""),
    }
    machine = machine_of_entry(msgspec.structs.asdict(entry) | given)
    fault = invariant_fault(machine)
    if fault is not None:
        raise UsageFault(f"{place}: {fault[1]}")
    check_machine(machine, place)
    if entry.idle_since is not None and not math.isfinite(entry.idle_since):
        raise UsageFault(f"{place}: idle_since: {entry.idle_since} is not a time; use seconds")
    return MachineGiven(
        machine=machine,
        idle_since_seconds=entry.idle_since if state is MachineState.IDLE else None,
        unjoined=entry.unjoined,
        reserved=entry.reserved,
    )


def _json_machines(path: Path) -> Iterator[tuple[str, MachineGiven]]:
    decoder = msgspec.json.Decoder(MachineEntry)
    text = _text(path)
    is_compact = '" ' not in text and '"\t' not in text
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{path} line {number}"
        try:
            entry = decoder.decode(line)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise UsageFault(f"{place}: {one_line(field_fault(error, MachineEntry))}") from error
        # Each key of a compact line is followed by its colon at once; most lines need not be read again.
        keys = len(_KEYS.decode(line)) + len(entry.resources) + len(entry.allocatable) + len(entry.labels)
        if not is_compact or line.count('":') != keys:
            _check_distinct(line, place)
        yield place, machine_given(entry, place)


def _check_distinct(line: str, place: str) -> None:
    """Raise UsageFault for a key that an object of a line has twice."""
    try:
        load_json(line)
    except json.JSONDecodeError as error:
        raise UsageFault(f"{place}: {error.msg}") from error


def _csv_header(path: Path) -> list[str]:
    lines = _text(path).splitlines()
    if not lines:
        raise UsageFault(f"{path}: the file is empty; a header with the names of the columns is expected")
    try:
        return [name.strip() for name in next(csv.reader(lines[:1]))]
    except csv.Error as error:
        raise UsageFault(f"{path} line 1: not CSV ({error})") from error


def _csv_rows(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the place and the cells of each row, the header's too. Raises UsageFault."""
    reader = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    try:
        for cells in reader:
            yield f"{path} line {reader.line_num}", cells
    except csv.Error as error:
        raise UsageFault(f"{path} line {reader.line_num}: not CSV ({error})") from error


def _csv_machines(path: Path) -> Iterator[tuple[str, MachineGiven]]:
    header = _csv_header(path)
    known = [name for name in MachineEntry.__struct_fields__ if name != _NESTED_ONLY]
    for column in header:
        if column not in known:
            raise UsageFault(f"{path} line 1: column {column!r} is unknown; write {', '.join(known)}")
    if len(set(header)) != len(header):
        raise UsageFault(f"{path} line 1: a column is given twice")
    if "id" not in header:
        raise UsageFault(f"{path} line 1: there is no column 'id', which every machine needs")
    rows = _csv_rows(path)
    next(rows)
    for place, cells in rows:
        if not cells:
            continue
        if len(cells) != len(header):
            raise UsageFault(f"{place}: {len(cells)} cells where the header has {len(header)} columns")
        values = {column: text.strip() for column, text in zip(header, cells, strict=True) if text.strip()}
        entry: dict[str, Any] = {**values}
        for column in _MAP_COLUMNS:
            if column in values:
                entry[column] = _cell_map(values[column], f"{place}: column {column}")
        yield place, machine_given(_cells_converted(entry, place), place)


def _parquet_machines(path: Path) -> Iterator[tuple[str, MachineGiven]]:
    from bigfleet.cli.plan.parquet import mapping_of, parquet_rows

    _check_size(path)
    for place, cells in parquet_rows(path, known=MachineEntry.__struct_fields__, required="id"):
        entry: dict[str, Any] = {"id": "", **cells}
        for column in _MAP_COLUMNS:
            if column in cells:
                where, cell = f"{place}: column {column}", cells[column]
                entry[column] = _cell_map(cell, where) if isinstance(cell, str) else mapping_of(cell, where)
        preemptor = entry.get(_NESTED_ONLY)
        if isinstance(preemptor, Mapping):
            entry[_NESTED_ONLY] = [preemptor.get(name) for name in ("cluster", "fingerprint", "group")]
        yield place, machine_given(_cells_converted(entry, place), place)


def _cells_converted(cells: Mapping[str, Any], place: str) -> MachineEntry:
    """Return a row of a table as a machine; a column may hold numbers as text."""
    try:
        return msgspec.convert(cells, MachineEntry, strict=False)
    except msgspec.MsgspecError as error:
        raise UsageFault(f"{place}: {one_line(field_fault(error, MachineEntry))}") from error


def _cell_map(text: str, place: str) -> dict[str, str]:
    """Read `cpu=4;memory=16Gi`."""
    pairs = {}
    for part in text.split(";"):
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise UsageFault(f"{place}: {part!r} is not name=value; use cpu=4;memory=16Gi")
        pairs[name.strip()] = value.strip()
    return pairs


def _trace_machines(path: Path) -> Iterator[tuple[str, MachineGiven]]:
    """Yield the nodes of a trace as idle bare metal that costs nothing."""
    try:
        nodes = read_nodes(path)
    except TraceFault as fault:
        raise UsageFault(str(fault)) from fault
    for node in nodes:
        (pool,) = trace_fleet([node]).pools
        machine = Machine(
            id=MachineId(node.name),
            state=MachineState.IDLE,
            host=HOST,
            instance_type=pool["instance_type"],
            capacity_type=CapacityType.BARE_METAL,
            allocatable=pool["allocatable"],
            labels=pool["labels"],
        )
        yield f"{path} node {node.name}", MachineGiven(machine=machine)


# ---- demand ------------------------------------------------------------------------------------------------------


def read_demand(path: Path) -> DemandGiven:
    """Return the rows and overheads of a file. Raises UsageFault naming file, row and field."""
    document = read_document(path)
    if isinstance(document, dict):
        demand = converted(document, DemandEntry, str(path))
        return _checked(_needs(demand.rows, path), overheads_given(demand.overheads, str(path)), path)
    if not isinstance(document, list):
        raise UsageFault(
            f"{path}: a list of rows is expected, each with id, cluster and shapes or aggregate, "
            "or a mapping with rows and overheads"
        )
    return _checked(_needs(document, path), {}, path)


def _checked(needs: tuple[NeedGiven, ...], overheads: Mapping[str, tuple[Overhead, ...]], path: Path) -> DemandGiven:
    """Return demand that a shard would accept. Raises UsageFault."""
    places = ((f"{path} [{number}] ({given.id})", given.need) for number, given in enumerate(needs))
    check_demand(places, overheads, str(path))
    return DemandGiven(needs=needs, overheads=overheads)


def overheads_given(entries: Sequence[OverheadEntry], place: str) -> dict[str, tuple[Overhead, ...]]:
    """Return overheads by cluster, canonical. Raises UsageFault naming the place and the field."""
    found: dict[str, list[Overhead]] = {}
    for number, entry in enumerate(entries):
        where = f"{place} overheads[{number}]"
        fault = identifier_fault(entry.cluster)
        if fault:
            raise UsageFault(f"{where}: cluster {fault}")
        try:
            overhead = checked_overhead(_requirements(entry.requirements, where), entry.resources)
        except ShapeFault as wrong:
            raise UsageFault(f"{where}: {wrong}") from wrong
        found.setdefault(entry.cluster, []).append(overhead)
    summed = {cluster: canonical_overheads(overheads) for cluster, overheads in found.items()}
    for cluster, overheads in summed.items():
        if len(overheads) > OVERHEADS_MAX:
            raise UsageFault(f"{place} overheads: {len(overheads)} of cluster {cluster}, at most {OVERHEADS_MAX}")
    return {cluster: overheads for cluster, overheads in sorted(summed.items()) if overheads}


def _needs(rows: list[Any], path: Path) -> tuple[NeedGiven, ...]:
    """Return the rows in their order, ids different. Raises UsageFault naming file, row and field."""
    if len(rows) > NEEDS_MAX:
        raise UsageFault(f"{path}: {len(rows):,} rows, at most {NEEDS_MAX:,} are planned")
    found: dict[str, int] = {}
    needs = []
    for number, row in enumerate(rows):
        place = f"{path} [{number}]"
        if isinstance(row, dict) and isinstance(row.get("id"), str):
            place = f"{place} ({row['id']})"
        given = _need_given(converted(row, NeedEntry, place), place)
        if given.id in found:
            raise UsageFault(f"{place}: the id is already used at [{found[given.id]}]; ids must differ")
        found[given.id] = number
        needs.append(given)
    return tuple(needs)


def in_list_order(needs: Iterable[NeedGiven]) -> list[NeedGiven]:
    """Return the rows in list order (docs/spec/model.md §8): priority, arrival, cluster, order of the file."""
    return sorted(needs, key=lambda g: (-g.need.profile.priority, g.need.arrival_unix_nanos, g.need.cluster))


def with_profile(given: NeedGiven, place: str, **changes: int) -> NeedGiven:
    """Return the row with a changed priority or penalty bucket. Raises UsageFault for a value out of range."""
    for name, value in changes.items():
        if name == "priority":
            _int32(value, f"{place}.priority")
        else:
            _bucket(value, f"{place}.{name}")
    return replace(given, need=replace(given.need, profile=replace(given.need.profile, **changes)))  # type: ignore[arg-type]


def with_shapes(given: NeedGiven, shapes: Sequence[ShapeEntry], place: str) -> NeedGiven:
    """Return the row with other pods; aggregate and min unit follow from them. Raises UsageFault."""
    try:
        amounts = row_amounts(aggregate=None, min_unit={}, shapes=shapes)
    except ShapeFault as wrong:
        raise UsageFault(f"{place}: {wrong}") from wrong
    need = replace(
        given.need,
        aggregate=amounts.aggregate,
        min_unit=amounts.min_unit,
        families=amounts.families,
        shapes=amounts.shapes,
    )
    check_demand([(place, need)], {}, place)
    return replace(given, need=need)


def _need_given(entry: NeedEntry, place: str) -> NeedGiven:
    fault = identifier_fault(entry.cluster)
    if fault or not entry.id:
        raise UsageFault(f"{place}: {f'cluster {fault}' if fault else 'id is empty'}")
    check_row(entry.id, entry.arrival, place)
    try:
        amounts = row_amounts(
            aggregate=entry.aggregate, min_unit=entry.min_unit, shapes=entry.shapes, waiting=entry.waiting
        )
    except ShapeFault as wrong:
        raise UsageFault(f"{place}: {wrong}") from wrong
    profile = Profile(
        requirements=tuple(_requirements(entry.requirements, place)),
        spreads=tuple(_spreads(entry.spreads, place)),
        priority=_int32(entry.priority, f"{place}: priority"),
        interruption_bucket=_bucket(entry.interruption_bucket, f"{place}: interruption_bucket"),
        reclamation_bucket=_bucket(entry.reclamation_bucket, f"{place}: reclamation_bucket"),
    )
    need = Need(
        cluster=ClusterId(entry.cluster),
        profile=profile,
        aggregate=amounts.aggregate,
        min_unit=amounts.min_unit,
        arrival_unix_nanos=entry.arrival,
        group=entry.group,
        parked=entry.parked,
        families=amounts.families,
        shapes=amounts.shapes,
        waiting=amounts.waiting,
    )
    return NeedGiven(id=entry.id, need=need)


def _requirements(entries: Sequence[list[Any] | NodeSelectorEntry], place: str) -> list[Requirement]:
    found = []
    for number, written in enumerate(entries):
        where = f"{place}: requirements[{number}]"
        entry = converted(written, RequirementEntry, where) if isinstance(written, list) else written
        found.append(Requirement(entry.key, _named(entry.operator, _OPERATORS, where), tuple(entry.values)))
    return found


def _spreads(entries: Sequence[list[Any] | PodSpreadEntry], place: str) -> list[TopologySpread]:
    found = []
    for number, written in enumerate(entries):
        where = f"{place}: spreads[{number}]"
        entry = converted(written, SpreadEntry, where) if isinstance(written, list) else written
        found.append(TopologySpread(entry.key, _int32(entry.skew, where), _named(entry.mode, _SPREAD_MODES, where)))
    return found


# ---- values ------------------------------------------------------------------------------------------------------

_OPERATORS: Final = {name: operator for name, operator in OPERATORS.items() if operator is not Operator.UNSPECIFIED}
_SPREAD_MODES: Final = {name: mode for name, mode in SPREAD_MODES.items() if mode is not SpreadMode.UNSPECIFIED}


def read_document(path: Path) -> Any:
    """Return what a YAML or JSON file holds, None for an empty one. Raises UsageFault."""
    text = _text(path)
    try:
        if path.suffix.lower() == ".json":
            return load_json(text) if text.strip() else None
        return load_yaml(text)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        kind = "JSON" if path.suffix.lower() == ".json" else "YAML"
        raise UsageFault(f"{path}: not {kind} ({one_line(error)})") from error


def converted(value: object, kind: type[T], place: str) -> T:
    """Return a value read from a file as a checked entry. Raises UsageFault naming the place and the field."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UsageFault(f"{place}: {one_line(field_fault(error, kind))}") from error


def _text(path: Path) -> str:
    _check_size(path)
    try:
        text = read_bounded(path, FILE_BYTES_MAX).decode("utf-8-sig")
        return text.replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise UsageFault(f"{path}: {error.strerror}; name a file that can be read") from error
    except UnicodeDecodeError as error:
        raise UsageFault(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error


def _check_size(path: Path) -> None:
    try:
        size_bytes = path.stat().st_size
    except OSError as error:
        raise UsageFault(f"{path}: {error.strerror}; name a file that can be read") from error
    if size_bytes > FILE_BYTES_MAX:
        raise UsageFault(f"{path}: {size_bytes:,} bytes, at most {FILE_BYTES_MAX:,} are read")


def _named(name: str, known: Mapping[str, T], place: str) -> T:
    if name not in known:
        raise UsageFault(f"{place}: {name!r} is unknown; choose one of {', '.join(known)}")
    return known[name]


def _texts(quantities: Mapping[str, str | int]) -> dict[str, str]:
    return {name: str(value) for name, value in quantities.items()}


def _check_quantities(quantities: Mapping[str, str | int], place: str) -> None:
    faults = vector_faults(_texts(quantities))
    if faults:
        raise UsageFault(f"{place}.{faults[0]}")


def _int32(value: int, place: str) -> int:
    if value not in _INT32:
        raise UsageFault(f"{place}: {value} is out of range; use a 32-bit integer")
    return value


def _bucket(value: int, place: str) -> int:
    if value not in ORDINALS:
        raise UsageFault(f"{place}: {value} is not a penalty bucket; use {ORDINALS.start} to {ORDINALS.stop - 1}")
    return value
