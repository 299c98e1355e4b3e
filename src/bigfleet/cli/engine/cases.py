"""Reads engine cases from YAML and turns their short names into model values (tests/cases/engine/README.md).

Machines and needs come from `machine_of` and `need_of`, whole fleets from `bigfleet.cli.engine.case_fleet`. Nothing
here decides or compares anything, and a file that is no list of cases is reported by name, never skipped in silence.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from bigfleet.cli.engine.shape_entries import checked_overhead, row_amounts, shape_entries
from bigfleet.engine.decision import Action, ActionKind
from bigfleet.files.bounded import CONFIGURATION_BYTES_MAX, read_bounded
from bigfleet.files.yaml_loading import load_yaml
from bigfleet.model import labels as keys
from bigfleet.model.ids import ClusterId, Fingerprint, MachineId
from bigfleet.model.machine import NO_HOST, HostRef, Machine, PreemptedFor
from bigfleet.model.need import Need
from bigfleet.model.profile import Operator, Profile, Requirement, SpreadMode, TopologySpread
from bigfleet.model.shapes import Overhead, canonical_overheads
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.model.vector import Vector, parse_vector

#: Cases of one file; far above any topic.
CASES_MAX: Final = 100_000
SHORT_KEYS = {
    "IT": keys.INSTANCE_TYPE,
    "Z": keys.ZONE,
    "R": "example.com/rack",
    "B": "example.com/block",
    "CT": "karpenter.sh/capacity-type",
}
_IN_T4 = ["IT", "In", ["t4"]]
_IN_G8 = ["IT", "In", ["g8"]]
MACHINE_TEMPLATES: Mapping[str, Mapping[str, Any]] = {
    "T4": {"type": "t4", "ct": "BareMetal", "price": 1.0, "alloc": {"cpu": "4"}},
    "G8": {"type": "g8", "ct": "BareMetal", "price": 1.0, "alloc": {"gpu": "8"}},
}
NEED_TEMPLATES: Mapping[str, Mapping[str, Any]] = {
    "P4": {"reqs": [_IN_T4], "min": {"cpu": "1"}},
    "PG": {"reqs": [_IN_G8], "min": {"gpu": "8"}},
    "SZ": {"reqs": [_IN_G8, ["Z", "Same"]], "min": {"gpu": "8"}},
    "SR": {"reqs": [_IN_G8, ["R", "Same"]], "min": {"gpu": "8"}},
}
STATES = {state.label: state for state in MachineState}
CAPACITY_TYPES = {capacity_type.label: capacity_type for capacity_type in CapacityType}
OPERATORS = {operator.label: operator for operator in Operator}
SPREAD_MODES: Final = {"".join(p.capitalize() for p in mode.name.split("_")): mode for mode in SpreadMode}
HOST = HostRef("case", "host")
#: Where every case's clock starts; late enough for any idle_for_s.
START_SECONDS = 10_000_000.0

HOSTED: Final = frozenset(
    {
        MachineState.IDLE,
        MachineState.CONFIGURING,
        MachineState.CONFIGURED,
        MachineState.DRAINING,
        MachineState.DELETING,
    }
)

Entry = Mapping[str, Any]


class CaseFileFault(ValueError):
    """A file that is no list of cases; the message names the file and what is wrong."""


@dataclass(frozen=True, slots=True)
class Case:
    """One case of one file."""

    topic: str
    name: str
    stage: str
    data: Entry

    @property
    def is_plain(self) -> bool:
        """Return whether the case needs neither Same nor a spread nor folding."""
        if self.stage in ("fold", "parking", "parking_ages") or self.data.get("fn") == "choose_domain":
            return False
        steps = [self.data, *self.data.get("cycles", ())]
        needs = [need_of(entry) for step in steps for entry in step.get("needs", ()) or ()]
        return all(need.profile.same_key is None and not need.profile.spreads for need in needs)


def read_case_file(path: Path) -> list[Case]:
    """Return the cases of one file in its order. Raises CaseFileFault."""
    try:
        entries = load_yaml(read_bounded(path, CONFIGURATION_BYTES_MAX).decode("utf-8"))
    except OSError as error:
        raise CaseFileFault(f"{path}: {error.strerror}; name a file that can be read") from error
    except UnicodeDecodeError as error:
        raise CaseFileFault(f"{path}: not UTF-8 text ({error.reason})") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise CaseFileFault(f"{path}: not YAML ({' '.join(str(error).split())})") from error
    if not isinstance(entries, list) or not entries:
        raise CaseFileFault(f"{path}: not a list of cases; write a YAML list or one JSON object a line")
    if len(entries) > CASES_MAX:
        raise CaseFileFault(f"{path}: {len(entries)} cases, at most {CASES_MAX} are read")
    for number, entry in enumerate(entries):
        if (
            not isinstance(entry, dict)
            or not isinstance(entry.get("name"), str)
            or not isinstance(entry.get("stage"), str)
        ):
            raise CaseFileFault(f"{path}: entry {number} has no name and stage, which every case needs")
    return [Case(path.stem, entry["name"], entry["stage"], entry) for entry in entries]


def dollars(value: float | str) -> float:
    """Return a number that may be written as the string `+Inf`."""
    return float(value)


def key_of(name: str) -> str:
    """Return the label key of a short name; other names stand for themselves."""
    return SHORT_KEYS.get(name, name)


def need_of(entry: Entry) -> Need:
    """Return the row of a need as the cases write it."""
    full = {**NEED_TEMPLATES.get(entry.get("t", ""), {}), **entry}
    shapes = shape_entries(full.get("shapes"), "shapes")
    amounts = row_amounts(
        aggregate=full.get("agg") or (None if shapes else {}),
        min_unit=full.get("min") or {},
        shapes=shapes,
        waiting=shape_entries(full.get("waiting"), "waiting"),
        is_lenient=True,
    )
    return Need(
        cluster=ClusterId(full.get("cluster", "c1")),
        profile=profile_of(full),
        aggregate=amounts.aggregate,
        min_unit=amounts.min_unit,
        arrival_unix_nanos=full.get("arrival", 0),
        group=full.get("group", ""),
        parked=full.get("parked", False),
        families=amounts.families,
        shapes=amounts.shapes,
        waiting=amounts.waiting,
    )


def overheads_of(entries: Iterable[Entry]) -> dict[str, tuple[Overhead, ...]]:
    """Return what DaemonSets take, by cluster, canonical. Raises ShapeFault."""
    found: dict[str, list[Overhead]] = {}
    for entry in entries:
        overhead = checked_overhead(requirements_of(entry.get("reqs") or ()), entry["resources"])
        found.setdefault(entry.get("cluster", "c1"), []).append(overhead)
    summed = {cluster: canonical_overheads(overheads) for cluster, overheads in found.items()}
    return {cluster: overheads for cluster, overheads in summed.items() if overheads}


def requirements_of(entries: Iterable[Sequence[Any]]) -> tuple[Requirement, ...]:
    """Return requirements as the cases write them."""
    return tuple(
        Requirement(key_of(key), OPERATORS[operator], tuple(values[0]) if values else ())
        for key, operator, *values in entries
    )


def profile_of(entry: Entry) -> Profile:
    """Return the profile of a need whose template is expanded."""
    return Profile(
        requirements=requirements_of(entry.get("reqs") or ()),
        spreads=tuple(
            TopologySpread(key_of(key), skew, SPREAD_MODES[mode]) for key, skew, mode in entry.get("spread") or ()
        ),
        priority=entry.get("prio", 100),
        interruption_bucket=entry.get("ipb", 1),
        reclamation_bucket=entry.get("rpb", 1),
    )


def fingerprints_of(entries: Iterable[Entry]) -> dict[str, Fingerprint]:
    """Return the fingerprint of each need that has an id."""
    return {entry["id"]: need_of(entry).fingerprint for entry in entries if "id" in entry}


def machine_of(entry: Entry, machine_id: str, fingerprints: Mapping[str, Fingerprint]) -> Machine:
    """Return one machine as the cases write it; `@n` in a fingerprint is that of the need n."""
    full = {**MACHINE_TEMPLATES.get(entry.get("t", ""), {}), **entry}
    state = STATES[full["st"]]
    cluster, fingerprint, group = full.get("pfor") or ("", "", "")
    return Machine(
        id=MachineId(machine_id),
        state=state,
        host=HOST if full.get("host", state in HOSTED) else NO_HOST,
        cluster=ClusterId(full.get("cluster", "")),
        instance_type=full.get("type", ""),
        zone=full.get("zone", ""),
        capacity_type=CAPACITY_TYPES[full.get("ct", "Unspecified")],
        resources=full.get("resources") or {},
        allocatable=full.get("alloc") or {},
        labels={key_of(key): value for key, value in (full.get("labels") or {}).items()},
        price_usd_per_hour=float(full.get("price", 0.0)),
        interruption_probability=float(full.get("iprob", 0.0)),
        last_error="broken" if state is MachineState.FAILED else "",
        assigned_priority=full.get("aprio", 0),
        assigned_interruption_penalty_dollars=dollars(full.get("aint", 0.0)),
        assigned_reclamation_penalty_dollars=dollars(full.get("arec", 0.0)),
        assigned_need_fingerprint=_resolved(full.get("afp", ""), fingerprints),
        assigned_group=full.get("agroup", ""),
        intended_cluster=ClusterId(full.get("icl", "")),
        preempted_for=PreemptedFor(cluster, _resolved(fingerprint, fingerprints), group) if "pfor" in full else None,
    )


def _resolved(fingerprint: str, fingerprints: Mapping[str, Fingerprint]) -> Fingerprint:
    return fingerprints[fingerprint[1:]] if fingerprint.startswith("@") else Fingerprint(fingerprint)


def vector_of(quantities: Mapping[str, str] | None) -> Vector:
    """Return the vector of quantities as the cases write them; none is zero."""
    return parse_vector(quantities or {})


def row_name(members: Sequence[str], *, folded: bool) -> str:
    """Return the name of a row in the cases: its id, or `fold(a+b)`."""
    return f"fold({'+'.join(members)})" if folded else members[0]


def action_text(action: Action) -> str:
    """Return an action as the cases write it."""
    text = f"{action.kind.label} {action.machine_id}"
    if action.kind is ActionKind.DELETE:
        return text
    text = f"{text} {action.cluster}"
    if action.kind is ActionKind.PREEMPT:
        return f"{text} grace={action.grace_seconds} by={action.preemptor_priority}"
    return text
