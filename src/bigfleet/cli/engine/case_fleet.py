"""Carries the machines of an engine case over its cycles, and applies what was decided in between.

The format is that of tests/cases/engine/README.md. This module does not decide or compare anything.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bigfleet.cli.engine.cases import (
    CAPACITY_TYPES,
    HOST,
    HOSTED,
    START_SECONDS,
    STATES,
    Entry,
    fingerprints_of,
    machine_of,
    overheads_of,
)
from bigfleet.engine.decision import Action, ActionKind, Options
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model.ids import Fingerprint, MachineId
from bigfleet.model.machine import NO_HOST, Machine, PreemptedFor
from bigfleet.model.need import Need
from bigfleet.model.states import MachineState


@dataclass(slots=True)
class CaseFleet:
    """The machines of one case, their flags and the clock: everything that a snapshot is made of."""

    now_seconds: float = START_SECONDS
    machines: dict[MachineId, Machine] = field(default_factory=dict)
    idle_since_seconds: dict[MachineId, float] = field(default_factory=dict)
    unjoined: set[str] = field(default_factory=set)
    reserved: set[str] = field(default_factory=set)
    leaving: set[str] = field(default_factory=set)

    def add(self, entries: Iterable[Entry], fingerprints: Mapping[str, Fingerprint]) -> None:
        """Insert machines as the cases write them."""
        for entry in entries:
            for machine_id in entry.get("ids") or [entry["id"]]:
                machine = machine_of(entry, machine_id, fingerprints)
                self.machines[machine_id] = machine
                flags = {"unjoined": self.unjoined, "reserved": self.reserved, "leaving": self.leaving}
                for flag, holders in flags.items():
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
        machine = replace(machine, state=state, host=HOST if state in HOSTED else NO_HOST)
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
        self.move(stamped.assigned(action.profile), MachineState.CONFIGURED)

    def options(self, needs: Iterable[Need], case: Entry, **more: Any) -> Options:
        """Return the options of a case: every cluster has reported but those in `not_reported`."""
        clusters = {machine.cluster for machine in self.machines.values()} | {need.cluster for need in needs}
        holds = case.get("release", {"OnDemand": 600, "Spot": 60})
        return Options(
            now_seconds=self.now_seconds,
            reported=frozenset(clusters - set(case.get("not_reported", ()))),
            unjoined=frozenset(self.unjoined & self.machines.keys()),
            reserved=frozenset(self.reserved & self.machines.keys()),
            leaving=frozenset(self.leaving & self.machines.keys()),
            hold_seconds={CAPACITY_TYPES[name]: float(seconds) for name, seconds in holds.items()},
            drain_seconds=float(case.get("drain_s", 30)),
            overheads=overheads_of(case.get("overheads") or ()),
            **more,
        )


def fleet_of(case: Entry) -> CaseFleet:
    """Return the fleet of a case, with the fingerprints of its needs resolved."""
    fleet = CaseFleet()
    fleet.add(case.get("machines") or (), fingerprints_of(case.get("needs") or ()))
    return fleet
