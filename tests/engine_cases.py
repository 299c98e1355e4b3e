"""Loads the cases of tests/cases/engine and turns their short names into model values.

The format is described in tests/cases/engine/README.md. Whoever runs a stage takes the cases from `load_cases`, the
machines and needs from `fleet_of` and `need_of`. Nothing here decides or compares anything.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from bigfleet.engine.decision import Action, ActionKind, Options
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model import labels as keys
from bigfleet.model.ids import ClusterId, Fingerprint, MachineId
from bigfleet.model.machine import NO_HOST, Host, Machine, PreemptedFor
from bigfleet.model.need import Need
from bigfleet.model.penalty import bucket_upper_dollars
from bigfleet.model.profile import Operator, Profile, Requirement, SpreadMode, TopologySpread
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.model.vector import Vector, families, parse_vector

CASES_DIRECTORY = Path(__file__).parent / "cases" / "engine"
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
SPREAD_MODES = {"".join(p.capitalize() for p in mode.name.split("_")): mode for mode in SpreadMode}
HOST = Host("case", "host")
#: Where every case's clock starts; late enough for any idle_for_s.
START_SECONDS = 10_000_000.0

_HOSTED = frozenset(
    {
        MachineState.IDLE,
        MachineState.CONFIGURING,
        MachineState.CONFIGURED,
        MachineState.DRAINING,
        MachineState.DELETING,
    }
)

Entry = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One case of one file."""

    topic: str
    name: str
    stage: str
    data: Entry

    @property
    def is_plain(self) -> bool:
        """Say whether the case needs neither Same nor a spread nor folding."""
        if self.stage in ("fold", "parking", "parking_ages") or self.data.get("fn") == "choose_domain":
            return False
        steps = [self.data, *self.data.get("cycles", ())]
        needs = [need_of(entry) for step in steps for entry in step.get("needs", ()) or ()]
        return all(need.profile.same_key is None and not need.profile.spreads for need in needs)


@cache
def all_cases() -> tuple[Case, ...]:
    """Return every case of every file, by file name, then in file order. Raises ValueError for a repeated name."""
    cases = [
        Case(path.stem, entry["name"], entry["stage"], entry)
        for path in sorted(CASES_DIRECTORY.glob("*.yaml"))
        for entry in yaml.safe_load(path.read_text(encoding="utf-8"))
    ]
    names = [case.name for case in cases]
    if len(set(names)) != len(names):
        raise ValueError(f"case names repeat: {sorted({n for n in names if names.count(n) > 1})}")
    return tuple(cases)


def load_cases(*stages: str) -> list[Case]:
    """Return the cases of the stages, in file order."""
    return [case for case in all_cases() if case.stage in stages]


@cache
def load_fleets() -> tuple[Entry, ...]:
    """Return the objects of decisions.jsonl."""
    with (CASES_DIRECTORY / "decisions.jsonl").open(encoding="utf-8") as lines:
        return tuple(json.loads(line) for line in lines)


def dollars(value: float | str) -> float:
    """Return a number that may be written as the string `+Inf`."""
    return float(value)


def key_of(name: str) -> str:
    """Return the label key of a short name; other names stand for themselves."""
    return SHORT_KEYS.get(name, name)


def need_of(entry: Entry) -> Need:
    """Return the row of a need as the cases write it."""
    full = {**NEED_TEMPLATES.get(entry.get("t", ""), {}), **entry}
    aggregate = full.get("agg") or {}
    return Need(
        cluster=ClusterId(full.get("cluster", "c1")),
        profile=profile_of(full),
        aggregate=parse_vector(aggregate),
        min_unit=parse_vector(full.get("min") or {}),
        arrival_unix_nanos=full.get("arrival", 0),
        group=full.get("group", ""),
        parked=full.get("parked", False),
        families=families(aggregate),
    )


def profile_of(entry: Entry) -> Profile:
    """Return the profile of a need whose template is expanded."""
    return Profile(
        requirements=tuple(
            Requirement(key_of(key), OPERATORS[operator], tuple(values[0]) if values else ())
            for key, operator, *values in entry.get("reqs") or ()
        ),
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
        host=HOST if full.get("host", state in _HOSTED) else NO_HOST,
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


@dataclass(slots=True)
class Fleet:
    """The machines of one case, their flags and the clock: everything that a snapshot is made of."""

    now_seconds: float = START_SECONDS
    machines: dict[MachineId, Machine] = field(default_factory=dict)
    idle_since_seconds: dict[MachineId, float] = field(default_factory=dict)
    unjoined: set[str] = field(default_factory=set)
    reserved: set[str] = field(default_factory=set)

    def add(self, entries: Iterable[Entry], fingerprints: Mapping[str, Fingerprint]) -> None:
        """Insert machines as the cases write them."""
        for entry in entries:
            for machine_id in entry.get("ids") or [entry["id"]]:
                machine = machine_of(entry, machine_id, fingerprints)
                self.machines[machine_id] = machine
                for flag, holders in (("unjoined", self.unjoined), ("reserved", self.reserved)):
                    if entry.get(flag):
                        holders.add(machine_id)
                if machine.state is MachineState.IDLE and not entry.get("no_stamp"):
                    self.idle_since_seconds[machine_id] = self.now_seconds - entry.get("idle_for_s", 0)

    def edit(self, entry: Entry) -> None:
        """Change state and priority of a machine, the only two fields that the cases edit."""
        assert entry.keys() <= {"id", "st", "aprio"}, entry
        machine = self.machines[entry["id"]]
        if "aprio" in entry:
            machine = replace(machine, assigned_priority=entry["aprio"])
        self.move(machine, STATES[entry["st"]] if "st" in entry else machine.state)

    def move(self, machine: Machine, state: MachineState) -> None:
        """Store the machine in a state; Idle and Speculative end the binding and every stamp."""
        machine = replace(machine, state=state, host=HOST if state in _HOSTED else NO_HOST)
        if state in (MachineState.IDLE, MachineState.SPECULATIVE):
            machine = machine.without_binding()
        if state is not MachineState.IDLE:
            self.idle_since_seconds.pop(machine.id, None)
        elif self.machines[machine.id].state is not MachineState.IDLE:
            self.idle_since_seconds[machine.id] = self.now_seconds
        self.machines[machine.id] = machine

    def remove(self, machine_id: MachineId) -> None:
        """Forget a machine."""
        del self.machines[machine_id]
        self.idle_since_seconds.pop(machine_id, None)

    def snapshot(self) -> Snapshot:
        """Return the snapshot of this moment."""
        return Snapshot.of(self.machines.values(), self.idle_since_seconds)

    def apply(self, actions: Iterable[Action], how: str = "instant") -> None:
        """Carry the actions out as the README's `apply` says: instant, configuring, creating or draining."""
        for action in actions:
            machine = self.machines[action.machine_id]
            if action.kind in (ActionKind.BOOTSTRAP, ActionKind.PROVISION):
                self._bind(machine, action, how)
            elif action.kind is ActionKind.DELETE:
                self.move(machine, MachineState.SPECULATIVE)
            elif how == "draining":
                preempted_for = PreemptedFor(*action.preemptor) if action.preemptor else None
                self.move(replace(machine, preempted_for=preempted_for), MachineState.DRAINING)
            else:
                self.move(machine, MachineState.IDLE)

    def _bind(self, machine: Machine, action: Action, how: str) -> None:
        assert action.profile is not None
        stamped = replace(machine, assigned_need_fingerprint=action.profile.fingerprint, assigned_group=action.group)
        if how == "creating" and action.kind is ActionKind.PROVISION:
            self.move(replace(stamped, intended_cluster=action.cluster), MachineState.CREATING)
            return
        stamped = replace(stamped, cluster=action.cluster)
        if how == "configuring" and action.kind is ActionKind.BOOTSTRAP:
            self.move(stamped, MachineState.CONFIGURING)
            return
        profile = action.profile
        stamped = replace(
            stamped,
            assigned_priority=profile.priority,
            assigned_interruption_penalty_dollars=bucket_upper_dollars(profile.interruption_bucket),
            assigned_reclamation_penalty_dollars=bucket_upper_dollars(profile.reclamation_bucket),
        )
        self.move(stamped, MachineState.CONFIGURED)

    def options(self, needs: Iterable[Need], case: Entry, **more: Any) -> Options:
        """Return the options of a case: every cluster has reported but those in `not_reported`."""
        clusters = {machine.cluster for machine in self.machines.values()} | {need.cluster for need in needs}
        holds = case.get("release", {"OnDemand": 600, "Spot": 60})
        return Options(
            now_seconds=self.now_seconds,
            reported=frozenset(clusters - set(case.get("not_reported", ()))),
            unjoined=frozenset(self.unjoined & self.machines.keys()),
            reserved=frozenset(self.reserved & self.machines.keys()),
            hold_seconds={CAPACITY_TYPES[name]: float(seconds) for name, seconds in holds.items()},
            drain_seconds=float(case.get("drain_s", 30)),
            **more,
        )


def fleet_of(case: Entry) -> Fleet:
    """Return the fleet of a case, with the fingerprints of its needs resolved."""
    fleet = Fleet()
    fleet.add(case.get("machines") or (), fingerprints_of(case.get("needs") or ()))
    return fleet


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


# ---- decisions.jsonl ---------------------------------------------------------------------------------------------


def fleet_machine_of(record: Entry) -> Machine:
    """Return one machine of a generated fleet, whose fields have the names of the spec."""
    return Machine(
        id=MachineId(record["id"]),
        state=STATES[record["state"]],
        host=HOST if record["host"] else NO_HOST,
        cluster=ClusterId(record["cluster"]),
        instance_type=record["instance_type"],
        zone=record["zone"],
        capacity_type=CAPACITY_TYPES[record["capacity_type"]],
        resources=record["resources"],
        allocatable=record["allocatable"],
        labels=record["labels"],
        price_usd_per_hour=dollars(record["price_per_hour"]),
        interruption_probability=record["interruption_probability"],
        last_error=record["last_error"],
        assigned_priority=record["assigned_priority"],
        assigned_interruption_penalty_dollars=dollars(record["assigned_interruption_penalty_dollars"]),
        assigned_reclamation_penalty_dollars=dollars(record["assigned_reclamation_penalty_dollars"]),
        assigned_need_fingerprint=Fingerprint(record["assigned_need_fingerprint"]),
        assigned_group=record["assigned_group"],
        intended_cluster=ClusterId(record["intended_cluster"]),
        preempted_for=PreemptedFor(*record["preempted_for"]) if record["preempted_for"] else None,
    )


def fleet_need_of(record: Entry) -> Need:
    """Return one row of a generated fleet."""
    return Need(
        cluster=ClusterId(record["cluster"]),
        profile=Profile(
            requirements=tuple(
                Requirement(key, OPERATORS[operator], tuple(values)) for key, operator, values in record["requirements"]
            ),
            spreads=tuple(TopologySpread(key, skew, SPREAD_MODES[mode]) for key, skew, mode in record["spreads"]),
            priority=record["priority"],
            interruption_bucket=record["interruption_bucket"],
            reclamation_bucket=record["reclamation_bucket"],
        ),
        aggregate=parse_vector(record["aggregate"]),
        min_unit=parse_vector(record["min_unit"]),
        arrival_unix_nanos=record["arrival"],
        group=record["group"],
        parked=record["parked"],
        families=families(record["aggregate"]),
    )


def fleet_snapshot_of(fleet: Entry) -> Snapshot:
    """Return the snapshot of a generated fleet."""
    inventory = fleet["inventory"]
    idle_since = {r["id"]: float(r["idle_since"]) for r in inventory if r["idle_since"] is not None}
    return Snapshot.of([fleet_machine_of(record) for record in inventory], idle_since)


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
    )


def vector_of(quantities: Mapping[str, str] | None) -> Vector:
    """Return the vector of quantities as the cases write them; none is zero."""
    return parse_vector(quantities or {})
