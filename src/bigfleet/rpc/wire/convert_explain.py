"""Converts the engine's records to the `Explanation` messages of docs/spec/wire.md §9: one record, one message.

The kind is the record's name in docs/spec/aggregates.md §8, the text one sentence for a person, the attributes every
field of the record as text, so that a program need not parse the sentence. Equal records give equal messages. Nothing
here decides, and a message has nothing that its record does not have.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from enum import Enum, IntEnum
from typing import Any, Final

from bigfleet.engine.explain.explanation import AcquiredMachine, MachineExplanation, PassedOver, RejectionCount
from bigfleet.engine.explain.records import (
    Acquired,
    CandidateConsidered,
    CandidateRejected,
    Credited,
    DomainsRanked,
    Earmarked,
    MachineHeld,
    MachineKept,
    MachineReclaimed,
    MachineReleased,
    MachineSpared,
    Mode,
    Record,
    Rejection,
    RowFinished,
    RowFolded,
    RowNotFolded,
    RowRef,
    RowStarted,
    RowUnresolved,
    VictimComing,
    VictimPicked,
    VictimsRanked,
)
from bigfleet.engine.explain.sentences import amounts_text, default_row_name, sentences
from bigfleet.model.vector import format_vector
from bigfleet.rpc.wire.gen import shardread_pb2

#: Entries of one list that an attribute names; how many more there are stands in `<attribute>.left_out`.
LISTED_MAX = 100

_WORD_START = re.compile(r"(?<!^)(?=[A-Z])")
#: What put the first domain before the second (docs/spec/aggregates.md §5.3).
_RULES: Final[Mapping[int, str]] = {
    1: "only the first could cover it whole",
    2: "both could cover it whole, and more of the first serves it already or the first is tighter",
    3: "neither could cover it whole, and the first covers more or serves it already",
    4: "the first has more machines for it",
    5: "both offer the same and the first comes first by name",
}


def explanation_to_wire(record: Record, *, possible_victims: int = 0) -> shardread_pb2.Explanation:
    """Return the message of one record.

    `possible_victims` is how many there are where a record that ranks them holds only the first, `LISTED_MAX` at least.
    """
    attributes = attributes_of(record)
    if isinstance(record, VictimsRanked) and possible_victims > LISTED_MAX:
        attributes["victims.left_out"] = str(possible_victims - LISTED_MAX)
    return shardread_pb2.Explanation(
        kind=kind_of(record),
        machine_id=getattr(record, "machine", ""),
        domain=_domain_of(record),
        text=text_of(record, possible_victims=possible_victims),
        attributes=attributes,
    )


def kind_of(record: Record) -> str:
    """Return the record's name in docs/spec/aggregates.md §8, such as `row_started`."""
    return _WORD_START.sub("_", type(record).__name__).lower()


def _domain_of(record: Record) -> str:
    if isinstance(record, DomainsRanked):
        return record.domains[0].value if record.domains else ""
    return getattr(record, "domain", None) or ""


# ---- the sentence ------------------------------------------------------------------------------------------------


def text_of(record: Record, *, possible_victims: int = 0) -> str:
    """Return one sentence that says what the record says most of all; `possible_victims` as in a message."""
    match record:
        case MachineKept() | MachineReclaimed() | MachineSpared() | MachineReleased() | MachineHeld():
            return _sentence(MachineExplanation(machine=record.machine, outcome=record))
        case Credited():
            return _sentence(MachineExplanation(machine=record.machine, credited=record))
        case Earmarked():
            return _sentence(MachineExplanation(machine=record.machine, earmarked=record))
        case VictimComing():
            return _sentence(MachineExplanation(machine=record.machine, coming=record))
        case Acquired():
            taken = AcquiredMachine(record=record, flips=())
            return _sentence(MachineExplanation(machine=record.machine, acquired=taken))
        case CandidateRejected():
            over = PassedOver(row=record.row, machine=record.machine, detail=record.detail)
            once = RejectionCount(stage=record.stage, reason=record.reason, count=1, sample=(over,))
            sentence = _sentence(MachineExplanation(machine=record.machine, rejections=(once,)))
            return f"{record.machine}: {_uncapitalized(sentence)}"
        case CandidateConsidered():
            row = default_row_name(record.row)
            return f"{record.machine} is number {record.position + 1:,} of the {record.stage} candidates of {row}."
        case VictimPicked():
            return _picked_text(record)
        case _:
            return _row_text(record, possible_victims)


def _sentence(explanation: MachineExplanation) -> str:
    first, *rest = sentences(explanation)
    return "; ".join([first.removesuffix("."), *(_uncapitalized(more).removesuffix(".") for more in rest)]) + "."


def _uncapitalized(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


def _picked_text(record: VictimPicked) -> str:
    held = "" if record.claimed_by is None else f", which {default_row_name(record.claimed_by)} held,"
    text = (
        f"{record.machine} of {record.cluster}{held} is preempted for {default_row_name(record.row)} with "
        f"{record.grace_seconds} s of notice, at a score of {record.score:.4f}"
    )
    if not record.runner_up or record.score_difference is None:
        return f"{text}; no other machine could have been drained in its place."
    if record.score_difference == 0:
        return f"{text}; the runner-up {record.runner_up} scores the same and was spared by the order of ids."
    return f"{text}; the runner-up {record.runner_up} scores {-record.score_difference:.4f} less."


_RowText = RowFolded | RowNotFolded | RowStarted | DomainsRanked | RowFinished | VictimsRanked | RowUnresolved


def _row_text(record: _RowText, possible_victims: int) -> str:
    row = default_row_name(record.row)
    match record:
        case RowFolded():
            return (
                f"{row} stands for {_counted(len(record.members), 'gang')} without a common domain, because "
                f"{record.proof_machine} alone could host any one of them whole."
            )
        case RowNotFolded():
            return (
                f"No single machine could host {row} whole, so all its machines must share one domain; "
                f"{_counted(record.matching_machines, 'machine')} would match and are too small."
            )
        case RowStarted():
            parked = ", and is parked" if record.mode is Mode.PARKED else ""
            return (
                f"{row} wants {amounts_text(record.aggregate)} at priority {record.priority:,}{parked}; "
                f"{_counted(record.rank, 'row')} came before it."
            )
        case DomainsRanked():
            return _domains_text(record, row)
        case RowFinished():
            new = len(record.bootstraps) + len(record.provisions)
            has = f"{_counted(len(record.claimed), 'machine')}, {new:,} of them taken in this cycle"
            if record.satisfied:
                return f"{row} has everything it wants: {has}."
            return f"{row} still lacks {amounts_text(record.deficit)}: it has {has}."
        case VictimsRanked():
            best = f", first of all {record.victims[0].machine}" if record.victims else ""
            count = max(possible_victims, len(record.victims))
            return f"{row} could preempt {_counted(count, 'machine')}{best}."
        case RowUnresolved():
            return (
                f"Nothing covers {amounts_text(record.deficit)} of {row}, whose "
                f"{_counted(record.victims, 'victim')} of this cycle will free {amounts_text(record.freed)}."
            )


def _domains_text(record: DomainsRanked, row: str) -> str:
    if not record.domains:
        return f"No domain of {record.key} has a machine that fits {row}, so it gets nothing."
    first = record.domains[0].value or '""'
    if len(record.domains) == 1 or record.decided_by is None:
        return f"{first} is the only domain of {record.key} with a machine that fits {row}."
    second = record.domains[1].value or '""'
    return (
        f"Of {len(record.domains):,} domains of {record.key}, {row} chose {first} before {second}: "
        f"{_RULES[record.decided_by]}."
    )


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


# ---- the attributes ----------------------------------------------------------------------------------------------


def attributes_of(record: Record) -> dict[str, str]:
    """Return the record's fields as text; one that is None is left out.

    A part of a field stands after a dot, as in `row.cluster`; a list is a JSON array of its first `LISTED_MAX` entries.
    Quantities are canonical text, floats their shortest exact form, coverages fractions as `n/d`.
    """
    return dict(_attributes(record))


def _attributes(value: Any) -> Iterator[tuple[str, str]]:
    for field in fields(value):
        part = getattr(value, field.name)
        if isinstance(value, CandidateRejected) and field.name == "detail":
            part = _Detail(_detail(value))
        yield from _flat(field.name, part)


class _Detail(dict[str, Any]):
    """What a rejection compared: parts by name, where a plain mapping is a vector."""


def _detail(record: CandidateRejected) -> dict[str, Any]:
    """Return the detail with milli-units turned into quantities."""
    if record.reason is not Rejection.MIN_UNIT:
        return dict(record.detail)
    name = str(record.detail["dimension"])
    return {key: part if key == "dimension" else _quantity(name, part) for key, part in record.detail.items()}


def _quantity(name: str, milli: Any) -> str:
    return format_vector({name: milli})[name]


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if value is None:
        return
    if isinstance(value, RowRef):
        for part_name, part in zip(RowRef._fields, value, strict=True):
            yield f"{name}.{part_name}", _scalar(part)
    elif isinstance(value, _Detail):
        for part_name, part in value.items():
            yield from _flat(f"{name}.{part_name}", part)
    elif isinstance(value, tuple):
        yield name, json.dumps([_entry(entry) for entry in value[:LISTED_MAX]], ensure_ascii=False)
        if len(value) > LISTED_MAX:
            yield f"{name}.left_out", str(len(value) - LISTED_MAX)
    elif _is_scalar(value):
        yield name, _scalar(value)
    else:
        for part_name, text in _attributes(value):
            yield f"{name}.{part_name}", text


def _entry(value: Any) -> str | dict[str, str]:
    """Return one entry of a list: a text, or a record's parts by name."""
    if isinstance(value, RowRef):
        return {part_name: _scalar(part) for part_name, part in zip(RowRef._fields, value, strict=True)}
    return _scalar(value) if _is_scalar(value) else dict(_attributes(value))


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str | int | float | Enum | Mapping)


def _scalar(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case IntEnum():
            # States, kinds, capacity types and operators: as people read them.
            return str(getattr(value, "label", value.name))
        case Mapping():
            return ", ".join(f"{name} {text}" for name, text in format_vector(value).items())
        case float():
            return repr(value)
        case _:
            return str(value)
