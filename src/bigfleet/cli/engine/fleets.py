"""Reads generated fleets in the format of decisions.jsonl and writes decisions in the same form.

One JSON object a line; tests/cases/engine/README.md describes the fields. A line that cannot be read is named with its
file, its line and what is wrong; it is never skipped.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigfleet.cli.engine.cases import (
    CAPACITY_TYPES,
    OPERATORS,
    SPREAD_MODES,
    Entry,
    row_name,
)
from bigfleet.cli.engine.machine_entries import machine_of_entry
from bigfleet.cli.engine.registry import Decide
from bigfleet.cli.engine.shape_entries import checked_overhead, row_amounts, shape_entries
from bigfleet.engine.decision import Action, ActionKind, Decision, Options, RowResult
from bigfleet.engine.snapshot import Snapshot
from bigfleet.files.bounded import CONFIGURATION_BYTES_MAX, bounded_lines
from bigfleet.files.json_loading import load_json
from bigfleet.model.ids import ClusterId
from bigfleet.model.need import Need
from bigfleet.model.profile import Profile, Requirement, TopologySpread
from bigfleet.model.shapes import Overhead, canonical_overheads


class FleetFault(ValueError):
    """A line that is no fleet; the message names file, line and field."""


def read_fleets(path: Path) -> Iterator[tuple[int, Entry]]:
    """Yield (line, fleet) of every line that is not blank, lines from 1. Raises FleetFault."""
    try:
        for number, line in enumerate(bounded_lines(path, CONFIGURATION_BYTES_MAX), start=1):
            if line.strip():
                yield number, _fleet(path, number, line.decode("utf-8"))
    except OSError as error:
        raise FleetFault(f"{path}: {error.strerror}; name a file with one JSON object a line") from error
    except UnicodeDecodeError as error:
        raise FleetFault(f"{path}: not UTF-8 text ({error.reason})") from error


def _fleet(path: Path, number: int, line: str) -> Entry:
    try:
        fleet = load_json(line)
    except ValueError as error:
        raise FleetFault(f"{path} line {number}: not JSON ({error})") from error
    if not isinstance(fleet, dict):
        raise FleetFault(f"{path} line {number}: a JSON object is expected")
    for name, kind in (("options", dict), ("inventory", list), ("demand", list)):
        if not isinstance(fleet.get(name), kind):
            raise FleetFault(f"{path} line {number}: {name} is missing or no {'list' if kind is list else 'object'}")
    return fleet


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision of a generated fleet, its rows named as in the file."""

    decision: Decision
    rows: Mapping[str, RowResult]

    def name_of(self, machine_id: str, *, victim: bool) -> str:
        """Return the row that claims the machine, or that takes it as a victim."""
        return next(name for name, row in self.rows.items() if machine_id in (row.victims if victim else row.claimed))


def decide_fleet(fleet: Entry, decide: Decide) -> Decided:
    """Run an engine on a fleet. Raises KeyError, TypeError or ValueError for a fleet with a wrong field."""
    needs = [fleet_need_of(record) for record in fleet["demand"]]
    ids = {id(need): record["id"] for need, record in zip(needs, fleet["demand"], strict=True)}
    decision = decide(fleet_snapshot_of(fleet), needs, fleet_options_of(fleet))
    rows = {row_name([ids[id(member)] for member in row.members], folded=row.folded): row for row in decision.rows}
    if len(rows) != len(decision.rows):
        raise ValueError("the ids of the demand repeat")
    return Decided(decision, rows)


def decision_record(result: Decided) -> dict[str, Any]:
    """Return the whole decision in the form of the file."""
    rows = result.rows
    in_order = sorted(rows.items(), key=lambda item: item[1].need.profile.precedence, reverse=True)
    gangs = {name: row for name, row in rows.items() if row.need.profile.same_key is not None and row.domain}
    return {
        "actions": [_action_record(action, result) for action in result.decision.actions],
        "claims": {name: sorted(row.claimed) for name, row in rows.items()},
        "domains": {name: row.domain for name, row in gangs.items()},
        "order": [name for name, _ in in_order],
        "rows": [_row_record(name, row) for name, row in rows.items()],
        "satisfiable": {name: row.satisfiable for name, row in gangs.items()},
        "unresolved_milli": {name: dict(row.unresolved) for name, row in rows.items() if row.unresolved},
        "unsatisfied_milli": {name: dict(row.deficit) for name, row in rows.items() if row.deficit},
    }


def _action_record(action: Action, result: Decided) -> dict[str, Any]:
    """Return an action with the fields that the file gives for its kind."""
    record: dict[str, Any] = {
        "kind": action.kind.label,
        "machine": action.machine_id,
        "cluster": action.cluster,
        "reason": action.reason,
    }
    if action.kind in (ActionKind.RECLAIM, ActionKind.PREEMPT):
        record |= {"grace_seconds": action.grace_seconds, "preemptor_priority": action.preemptor_priority}
    if action.kind in (ActionKind.BOOTSTRAP, ActionKind.PROVISION, ActionKind.PREEMPT):
        record["row"] = result.name_of(action.machine_id, victim=action.kind is ActionKind.PREEMPT)
    return record


def _row_record(name: str, row: RowResult) -> dict[str, Any]:
    record: dict[str, Any] = {
        "id": name,
        "cluster": row.need.cluster,
        "fingerprint": row.need.fingerprint,
        "group": row.need.group,
        "arrival": row.need.arrival_unix_nanos,
        "aggregate_milli": dict(row.need.aggregate),
        "min_unit_milli": dict(row.need.min_unit),
    }
    for field, shapes in (("shapes", row.need.shapes), ("waiting", row.need.waiting)):
        if shapes:
            record[field] = [
                {
                    "resources_milli": dict(shape.resources),
                    "count": shape.count,
                    "max_per_machine": shape.max_per_machine,
                }
                for shape in shapes
            ]
    return record


def fleet_need_of(record: Entry) -> Need:
    """Return one row of a generated fleet. Raises ShapeFault for shapes that make no sense."""
    amounts = row_amounts(
        aggregate=record.get("aggregate"),
        min_unit=record.get("min_unit") or {},
        shapes=shape_entries(record.get("shapes"), "shapes"),
        waiting=shape_entries(record.get("waiting"), "waiting"),
        is_lenient=True,
    )
    return Need(
        cluster=ClusterId(record["cluster"]),
        profile=Profile(
            requirements=_requirements(record["requirements"]),
            spreads=tuple(TopologySpread(key, skew, SPREAD_MODES[mode]) for key, skew, mode in record["spreads"]),
            priority=record["priority"],
            interruption_bucket=record["interruption_bucket"],
            reclamation_bucket=record["reclamation_bucket"],
        ),
        aggregate=amounts.aggregate,
        min_unit=amounts.min_unit,
        arrival_unix_nanos=record["arrival"],
        group=record["group"],
        parked=record["parked"],
        families=amounts.families,
        shapes=amounts.shapes,
        waiting=amounts.waiting,
    )


def fleet_snapshot_of(fleet: Entry) -> Snapshot:
    """Return the snapshot of a generated fleet."""
    inventory = fleet["inventory"]
    idle_since = {r["id"]: float(r["idle_since"]) for r in inventory if r["idle_since"] is not None}
    return Snapshot.of([machine_of_entry(record) for record in inventory], idle_since)


def fleet_options_of(fleet: Entry) -> Options:
    """Return the options of a generated fleet."""
    options, inventory = fleet["options"], fleet["inventory"]
    clusters = {r["cluster"] for r in inventory} | {r["cluster"] for r in fleet["demand"]}
    return Options(
        now_seconds=float(options["now"]),
        reported=frozenset(clusters - set(options["not_reported"])),
        unjoined=frozenset(r["id"] for r in inventory if r["unjoined"]),
        reserved=frozenset(r["id"] for r in inventory if r["reserved"]),
        hold_seconds={CAPACITY_TYPES[name]: float(seconds) for name, seconds in options["holds"].items()},
        drain_seconds=float(options["drain_s"]),
        overheads=_overheads(options.get("overheads") or ()),
    )


def _overheads(records: Iterable[Entry]) -> dict[str, tuple[Overhead, ...]]:
    found: dict[str, list[Overhead]] = {}
    for record in records:
        overhead = checked_overhead(_requirements(record.get("requirements") or ()), record["resources"])
        found.setdefault(record["cluster"], []).append(overhead)
    summed = {cluster: canonical_overheads(overheads) for cluster, overheads in found.items()}
    return {cluster: overheads for cluster, overheads in summed.items() if overheads}


def _requirements(records: Iterable[Sequence[Any]]) -> tuple[Requirement, ...]:
    return tuple(
        Requirement(key, OPERATORS[operator], tuple(values[0]) if values else ()) for key, operator, *values in records
    )
