"""Finds why a scan rejected a machine: the first reason that applies (docs/spec/aggregates.md §8).

Reads the allocations after the scan: during the scan of a row only that row claims machines, so the holdings of other
rows have not changed. This module must not change the allocations or be called by a phase.
"""

from collections.abc import Callable

from bigfleet.engine.decision import Options
from bigfleet.engine.explain.records import Detail, Rejection, RowRef, Stage
from bigfleet.engine.reference.credit import is_own
from bigfleet.engine.reference.pool import RESERVABLE_STATES, is_set_aside, is_sold_out
from bigfleet.engine.reference.rows import Allocations, DemandRow
from bigfleet.model import vector
from bigfleet.model.machine import Machine
from bigfleet.model.states import MachineState
from bigfleet.model.vector import Vector

Reason = tuple[Rejection, Detail]
_FREE_STAGES = frozenset({Stage.CREDIT, Stage.DOMAIN, Stage.IDLE, Stage.SPECULATIVE})
_DRAIN_STAGES = frozenset({Stage.COMING, Stage.VICTIM})
#: Reasons that leave a machine a candidate: it was looked at on its turn, and something else was better or enough.
LATE_REASONS = frozenset({Rejection.NOT_USEFUL, Rejection.SKEW, Rejection.COVERED})


def ref(row: DemandRow) -> RowRef:
    """Return the reference of a row in records."""
    return RowRef.of(row.need, row.position)


class Rejections:
    """Finds the reason for one machine of one scan."""

    def __init__(self, options: Options, allocations: Allocations) -> None:
        self._options = options
        self._allocations = allocations
        self._checks: tuple[Callable[[DemandRow, Stage, Machine], Reason | None], ...] = (
            self._hidden,
            self._not_own,
            self._held,
            self._protected,
            self._unfit,
        )

    def reason(self, row: DemandRow, stage: Stage, machine: Machine, remaining: Vector) -> Reason | None:
        """Return why the machine cannot serve what remains, or None for one that can.

        `remaining` is what the row still wanted on the machine's turn; when it is empty the last reason is `covered`.
        """
        for check in self._checks:
            found = check(row, stage, machine)
            if found is not None:
                return found
        if remaining and not vector.is_useful(machine.supply, remaining):
            return Rejection.NOT_USEFUL, {"remaining": remaining}
        return self._misplaced(row, stage, machine) or (None if remaining else (Rejection.COVERED, {}))

    def _hidden(self, row: DemandRow, stage: Stage, machine: Machine) -> Reason | None:
        if machine.id in self._options.unjoined:
            return Rejection.UNJOINED, {}
        if machine.id in self._options.reserved and machine.state in RESERVABLE_STATES:
            return Rejection.RESERVED, {}
        if is_sold_out(machine, self._options):
            return Rejection.SOLD_OUT, {}
        if is_set_aside(machine, self._options):
            return Rejection.SET_ASIDE, {}
        return None

    def _not_own(self, row: DemandRow, stage: Stage, machine: Machine) -> Reason | None:
        need = row.need
        if stage is Stage.COMING:
            wanted = machine.preempted_for or ("", "", "")
            differs = [
                name
                for name, have, want in zip(("cluster", "fingerprint", "group"), wanted, need.key, strict=True)
                if have != want
            ]
        elif machine.state is MachineState.CREATING:
            differs = [] if is_own(row, machine) else self._stamps_that_differ(row, machine)
            if machine.intended_cluster not in ("", need.cluster):
                differs.append("cluster")
        else:
            return None
        return (Rejection.NOT_OWN, {"differs": tuple(differs)}) if differs else None

    def _stamps_that_differ(self, row: DemandRow, machine: Machine) -> list[str]:
        fingerprint = [] if machine.assigned_need_fingerprint == row.need.fingerprint else ["fingerprint"]
        group = [] if machine.assigned_group == row.need.group else ["group"]
        return fingerprint + group

    def _held(self, row: DemandRow, stage: Stage, machine: Machine) -> Reason | None:
        if stage in _FREE_STAGES:
            holder = self._allocations.claims.get(machine.id)
            if holder is not None and holder is not row:
                return Rejection.CLAIMED, {"row": ref(holder)}
        if stage is Stage.DOMAIN:
            holder = self._allocations.earmarks.get(machine.id)
            if holder is not None and holder is not row:
                return Rejection.EARMARKED, {"row": ref(holder)}
        if stage in _DRAIN_STAGES:
            holder = self._allocations.taken.get(machine.id)
            if holder is not None and holder is not row:
                return Rejection.TAKEN, {"row": ref(holder)}
        return None

    def _protected(self, row: DemandRow, stage: Stage, machine: Machine) -> Reason | None:
        if stage is not Stage.VICTIM:
            return None
        priority = row.need.profile.priority
        if machine.assigned_priority >= priority:
            return Rejection.ASSIGNED_PRIORITY, {"assigned": machine.assigned_priority, "row": priority}
        holder = self._allocations.claims.get(machine.id)
        if holder is not None and holder.need.profile.precedence >= row.need.profile.precedence:
            return Rejection.CLAIMED_BY_PEER, {"row": ref(holder), "precedence": holder.need.profile.precedence}
        return None

    def _unfit(self, row: DemandRow, stage: Stage, machine: Machine) -> Reason | None:
        for requirement in row.need.profile.requirements:
            value = machine.attribute(requirement.key)
            if not requirement.holds(value):
                return Rejection.PROFILE, {
                    "key": requirement.key,
                    "operator": requirement.operator,
                    "values": requirement.values,
                    "value": value,
                }
        for name, want in sorted(row.need.min_unit.items()):
            have = machine.supply.get(name, 0)
            if have < want:
                return Rejection.MIN_UNIT, {"dimension": name, "have": have, "want": want}
        return None

    def _misplaced(self, row: DemandRow, stage: Stage, machine: Machine) -> Reason | None:
        if stage is Stage.DOMAIN:
            return None
        profile = row.need.profile
        spread = profile.strict_spread
        if spread is not None and stage is not Stage.CREDIT and machine.attribute(spread.topology_key) is None:
            return Rejection.NO_TOPOLOGY_VALUE, {"key": spread.topology_key}
        if profile.same_key is not None:
            value = machine.attribute(profile.same_key)
            if value != row.domain:
                return Rejection.OTHER_DOMAIN, {"value": value, "chosen": row.domain}
        return None
