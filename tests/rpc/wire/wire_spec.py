"""Reads messages, enums and services out of the prose and tables of docs/spec/wire.md.

This is the second witness beside the hand-kept table of wire_table.py: a typo in the .proto files and in that table
alike is seen here. It understands the shorthand of the page (several fields in one row, ranges of numbers, "N
reserved" in the meaning column) and nothing more: an unknown form raises, so that no row is skipped in silence.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

SPEC = Path(__file__).resolve().parents[3] / "docs" / "spec" / "wire.md"

#: The sections that define one .proto file each.
SECTIONS = {6: "provider", 7: "capacity", 8: "shard", 9: "shardread", 10: "coordinator", 12: "shardadmin"}

#: Members of a oneof whose message the page leaves to their names.
ONEOF_MEMBER_TYPES = {
    ("InspectNeedsResponse", "header"): "InspectNeedsHeader",
    ("InspectNeedsResponse", "need"): "NeedView",
    ("ListMachinesResponse", "header"): "ListMachinesHeader",
    ("ListMachinesResponse", "machine"): "MachineView",
    ("ListMachinesResponse", "end"): "ListMachinesEnd",
    ("CoordinatorInstruction", "assign_domain"): "AssignDomain",
    ("CoordinatorInstruction", "unassign_domain"): "UnassignDomain",
    ("CoordinatorInstruction", "reassign_speculative"): "ReassignSpeculative",
    ("CoordinatorInstruction", "cross_shard_drain"): "CrossShardDrain",
    ("CoordinatorInstruction", "transfer_ownership"): "TransferOwnership",
}

#: The fencing token, whose types section 5 gives once for all calls.
TOKEN_TYPES = {"shard_id": "str", "shard_epoch": "i64", "sequence_number": "i64"}

_FIELD_NAME = re.compile(r"[a-z][a-z0-9_]*")
_RESERVED = re.compile(r"((?:\d+, )*\d+) reserved")
_ENUM_VALUE = re.compile(r"(?:^|, |then |to )`?([A-Z0-9_]+)`?(?: =)? (\d+)")
_METHOD = re.compile(r"`(\w+)\((stream )?(\w+)\)( → (stream )?(\w+))?`|→ `(\w+)`")


@dataclass
class WireSpec:
    """What the page says, in the notation of wire_table.py."""

    messages: dict[str, dict[str, tuple[int, str]]] = field(default_factory=dict)
    oneofs: dict[str, dict[str, tuple[str, ...]]] = field(default_factory=dict)
    reserved: dict[str, tuple[int, ...]] = field(default_factory=dict)
    enums: dict[str, dict[str, int]] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    services: dict[str, dict[str, tuple[str, str, bool, bool]]] = field(default_factory=dict)


def read_spec() -> WireSpec:
    """Parse sections 6 to 10 and 12 of the page."""
    spec = WireSpec()
    for number, section in _sections(SPEC.read_text(encoding="utf-8")).items():
        first_message = len(spec.messages)
        _read_enums(section, spec, SECTIONS[number])
        _read_tables(section, spec, SECTIONS[number])
        _resolve_nested_enums(list(spec.messages)[first_message:], spec)
        _read_service(section, spec)
        _add_empty_messages(spec, SECTIONS[number])
    return spec


def _sections(text: str) -> dict[int, str]:
    parts = re.split(r"^## (\d+)\. .*$", text, flags=re.MULTILINE)
    found = {int(number): body for number, body in zip(parts[1::2], parts[2::2], strict=True)}
    return {number: found[number] for number in SECTIONS}


def _read_tables(section: str, spec: WireSpec, file: str) -> None:
    owners: list[str] = []
    table = ""
    for line in section.splitlines():
        if not line.startswith("|"):
            table = ""
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not table:
            table = cells[0]
            continue
        if set(cells[0]) == {"-"}:
            continue
        if cells[0]:
            owners = [name.removesuffix(" (ours)") for name in cells[0].split(", ")]
        if table == "oneof":
            _read_oneof_row(owners[0], cells, spec)
        elif table == "message":
            for owner in owners:
                _read_field_row(owner, cells, spec)
        else:
            raise ValueError(f"unknown table: {line}")
        spec.files |= dict.fromkeys((owner.partition(".")[0] for owner in owners), file)


def _read_oneof_row(owner: str, cells: list[str], spec: WireSpec) -> None:
    message, _, oneof = owner.partition(".")
    name, _, kind = cells[1].partition(": ")
    _add_field(spec, message, name, int(cells[2]), kind)
    members = spec.oneofs.setdefault(message, {})
    members[oneof] = (*members.get(oneof, ()), name)


def _read_field_row(message: str, cells: list[str], spec: WireSpec) -> None:
    _, names_cell, numbers_cell, types_cell, meaning = cells
    if names_cell == "–":
        assert types_cell == "reserved", cells
        _add_reserved(spec, message, _numbers(numbers_cell))
        return
    names = _names(names_cell)
    numbers = _numbers(numbers_cell)
    types = _types(spec, message, names, types_cell)
    for name, number, kind in zip(names, numbers, types, strict=True):
        _add_field(spec, message, name, number, kind)
    for found in _RESERVED.findall(meaning):
        _add_reserved(spec, message, _numbers(found))
    if "token: " in meaning:
        for name, number in re.findall(r"(\w+) (\d+)", meaning.partition("token: ")[2]):
            _add_field(spec, message, name, int(number), TOKEN_TYPES[name])
    if types_cell.startswith("oneof "):
        oneof = types_cell.removeprefix("oneof ").removesuffix(", bytes")
        spec.oneofs.setdefault(message, {})[oneof] = tuple(names)


def _names(cell: str) -> list[str]:
    """Field names of a row; `…word…` repeats the name before it with another word in its place."""
    names: list[str] = []
    for name in re.split(r", | / ", cell):
        if name.startswith("…"):
            prefix, _, rest = names[-1].partition("_")
            names.append("_".join([prefix, name.strip("…"), rest.partition("_")[2]]))
        else:
            names.append(name)
    assert all(_FIELD_NAME.fullmatch(name) for name in names), cell
    return names


def _numbers(cell: str) -> list[int]:
    if "–" in cell:
        first, last = cell.split("–")
        return list(range(int(first), int(last) + 1))
    return [int(number) for number in re.split(r", | / ", cell)]


def _types(spec: WireSpec, message: str, names: list[str], cell: str) -> list[str]:
    """One type per name: given, shared by the row, of the oneof's member, or that of an earlier field of the name."""
    if cell.startswith("oneof ") and cell.endswith(", bytes"):
        return ["bytes"] * len(names)
    if cell.startswith("oneof "):
        return [ONEOF_MEMBER_TYPES[message, name] for name in names]
    if not cell:
        return [_type_used_before(spec, name) for name in names]
    types = re.split(r", | / ", cell)
    return types * len(names) if len(types) == 1 else types


def _type_used_before(spec: WireSpec, name: str) -> str:
    types = {fields[name][1] for fields in spec.messages.values() if name in fields}
    assert len(types) == 1, f"{name}: no type in its row, and {types} elsewhere"
    return types.pop()


def _add_field(spec: WireSpec, message: str, name: str, number: int, kind: str) -> None:
    fields = spec.messages.setdefault(message, {})
    assert name not in fields, f"{message}.{name} is there twice"
    fields[name] = (number, kind)


def _add_reserved(spec: WireSpec, message: str, numbers: list[int]) -> None:
    spec.reserved[message] = tuple(sorted({*spec.reserved.get(message, ()), *numbers}))


def _read_enums(section: str, spec: WireSpec, file: str) -> None:
    for outer, name, prefix, text in _enum_texts(section):
        without_remarks = re.sub(r"\s\([^)]*\)|\s\*\*\(ours\)\*\*", "", text)
        values = {prefix + value: int(number) for value, number in _ENUM_VALUE.findall(without_remarks)}
        if "doubling to" in text:
            _fill_doubling(prefix, values)
        spec.enums[f"{outer}.{name}" if outer else name] = values
        if not outer:
            spec.files[name] = file


def _enum_texts(section: str) -> list[tuple[str, str, str, str]]:
    """(outer message, name, prefix, list of values) of each enum; a list ends at the first full stop."""
    heads = re.compile(r"enum (?:(\w+)\.)?\*\*(\w+)\*\* \((?:prefix |ours, )?`(\w+_)`\): ")
    found = []
    for head in heads.finditer(section):
        end = re.compile(r"\.(?:\s|$)").search(section, head.end())
        assert end is not None, head.group(0)
        outer, name, prefix = head.groups()
        found.append((outer or "", name, prefix, section[head.end() : end.start()]))
    return found


def _fill_doubling(prefix: str, values: dict[str, int]) -> None:
    """PenaltyBucket gives 1, 2, 4 and the last power of two; those between follow."""
    last = values.pop(f"{prefix}8388608")
    assert values[f"{prefix}4"] == 5
    dollars, number = 8, 6
    while dollars < 8388608:
        values[f"{prefix}{dollars}"] = number
        dollars, number = dollars * 2, number + 1
    assert last == number
    values[f"{prefix}8388608"] = last


def _resolve_nested_enums(messages: list[str], spec: WireSpec) -> None:
    """Tables write `Outcome` for the nested enum of the message or, failing that, of its section."""
    for message in messages:
        for name, (number, kind) in spec.messages[message].items():
            inside = [key for key in spec.enums if key.endswith(f".{kind}")]
            if f"{message}.{kind}" in inside:
                spec.messages[message][name] = (number, f"{message}.{kind}")
            elif kind not in spec.enums and inside:
                near = [key for key in inside if key.partition(".")[0] in messages]
                assert len(near) == 1, f"{message}.{name}: {kind} could be any of {inside}"
                spec.messages[message][name] = (number, near[0])


def _read_service(section: str, spec: WireSpec) -> None:
    head = re.search(r"^Service \*\*(\w+)\*\*(.*)$", section, re.MULTILINE)
    if head is None:
        return
    name, text = head.groups()
    methods = spec.services[name] = {}
    if name == "Coordinator":
        methods.update(_coordinator_methods(text))
        return
    waiting: list[tuple[str, str, bool]] = []  # methods of a list whose answer is named after the last of them
    for method, stream_in, request, answer, stream_out, response, shared in _METHOD.findall(text):
        if shared:
            methods |= {each: (asked, shared, streamed, False) for each, asked, streamed in waiting}
            waiting = []
        elif answer:
            methods[method] = (request, response, bool(stream_in), bool(stream_out))
        else:
            waiting.append((method, request, bool(stream_in)))
    assert not waiting, f"{name}: no answer for {waiting}"


def _add_empty_messages(spec: WireSpec, file: str) -> None:
    """A message that a method names and no table lists has no fields."""
    for methods in spec.services.values():
        for request, response, _, _ in methods.values():
            for message in (request, response):
                if message not in spec.messages:
                    spec.messages[message] = {}
                    spec.files[message] = file


def _coordinator_methods(text: str) -> dict[str, tuple[str, str, bool, bool]]:
    """Section 10 names most methods alone: each takes XRequest and gives XResponse, its message empty if not listed."""
    listed = text.partition("Responses without rows")[0]
    methods = {}
    for method, request, stream_out, response in re.findall(r"(\w+)\((\w+)\) → (stream )?(\w+)", listed):
        methods[method] = (request, response, False, bool(stream_out))
    alone = re.sub(r"\w+\(\w+\) → (?:stream )?\w+|\(each [^)]*\)|\(ours\)", "", listed)
    for method in re.findall(r"[A-Z]\w+", alone):
        methods[method] = (f"{method}Request", f"{method}Response", False, False)
    return methods
