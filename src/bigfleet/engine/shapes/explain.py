"""Explains a decision over demand shapes in sentences, for a row or a machine.

Everything said is read off the decision and the working state that it left; nothing is decided again.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bigfleet.engine.decision import ActionKind, Decision, Impossibility, RowResult
from bigfleet.engine.explain.sentences import amounts_text, dollars_text
from bigfleet.engine.shapes.choice import Fill, running_cost
from bigfleet.engine.shapes.fleet import ChoiceNote, DecisionState
from bigfleet.engine.shapes.state import PODS, HostState, RowState
from bigfleet.engine.targets import class_key
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.shapes import DemandShape
from bigfleet.model.states import MachineState

#: Machines that an explanation describes one by one; the rest is counted.
DESCRIBED_MAX = 10
#: Rows that a sentence names.
NAMED_MAX = 4


@dataclass(frozen=True, slots=True)
class Explained:
    """A decision with what it takes to explain it."""

    decision: Decision
    fleet: DecisionState
    #: What people call each row of the demand, by its place there. Several rows may have one key.
    names: Sequence[str]

    @property
    def _machines(self) -> Mapping[MachineId, Machine]:
        assert self.decision.basis is not None, "a decision that is explained knows what it was made of"
        return self.decision.basis.snapshot().machines

    def row(self, position: int) -> list[str]:
        """Return why the row at a place of the demand got what it got. Raises KeyError for one that took no part."""
        row = next((row for row in self.fleet.rows if row.position == position), None)
        result = None if row is None else next((each for each in self.decision.rows if each.need is row.need), None)
        if row is None or result is None:
            raise KeyError(position)
        return [
            self._wanted(result, self.names[position]),
            *self._target(row),
            *self._placements(result, row),
            *self._preempted(result),
            *shortfall_sentences(result),
        ]

    def machine(self, machine_id: str) -> list[str]:
        """Return what the machine hosts and what becomes of it. Raises KeyError for an unknown machine."""
        machine = self._machines[MachineId(machine_id)]
        found = [
            f"{machine_id} is {machine.state.label}{_where(machine)} at {dollars_text(machine.price_usd_per_hour)}/h."
        ]
        host = self._host(machine_id)
        if host is not None and host.is_claimed:
            found.append(f"It hosts {self._hosted(host)}; {self._free(host)} is left of it.")
        note = self.fleet.notes.get(machine_id)
        if note is not None:
            found.extend(self._choice(machine_id, note))
        found.extend(self._outcome(machine, host))
        return found

    # ---- rows ----------------------------------------------------------------------------------------------------

    def _wanted(self, result: RowResult, name: str) -> str:
        need = result.need
        shapes = (*need.shapes, *need.waiting)
        if not shapes:
            return f"{name} wants {amounts_text(need.aggregate)} in any parts, at priority {need.profile.priority}."
        pods = sum(shape.count for shape in shapes)
        kinds = "; ".join(_shape(shape) for shape in shapes[:NAMED_MAX])
        rest = f"; {len(shapes) - NAMED_MAX} more shapes" if len(shapes) > NAMED_MAX else ""
        return f"{name} wants {_pods(pods)} at priority {need.profile.priority}: {kinds}{rest}."

    def _target(self, row: RowState) -> list[str]:
        target = self.fleet.options.targets.get(row.cluster.id)
        if target is None:
            return []
        counts: dict[str, int] = {}
        for key, count in sorted(target.counts.items()):
            counts[key.instance_type or "machines"] = counts.get(key.instance_type or "machines", 0) + count
        listed = ", ".join(f"{count} × {name}" for name, count in counts.items())
        more = target.runner_up_costs_more_usd_per_hour
        other = "" if more is None else f"; the best fleet led by {target.runner_up} costs {dollars_text(more)}/h more"
        found = [f"The target composition of {row.cluster.id} is {listed or 'no machine'}{other}."]
        if target.limited_pools:
            pools = ", ".join(target.limited_pools)
            found.append(f"The limit on one Spot pool's share (spot_pool_max) allows fewer machines of {pools}.")
        return found

    def _placements(self, result: RowResult, row: RowState) -> list[str]:
        counts: dict[str, int] = {}
        for placement in result.placements:
            counts[placement.machine_id] = counts.get(placement.machine_id, 0) + placement.count
        total = sum(shape.count for shape in (*result.need.shapes, *result.need.waiting))
        found = []
        for machine_id, count in list(counts.items())[:DESCRIBED_MAX]:
            found.append(f"{count} of its {_pods(total)} run on {self._machine_text(machine_id, row)}.")
            note = self.fleet.notes.get(machine_id)
            if note is not None:
                found.extend(self._choice(machine_id, note))
        for machine_id, amounts in result.shares[:DESCRIBED_MAX]:
            found.append(f"{amounts_text(amounts)} of it is on {self._machine_text(machine_id, row)}.")
        rest = max(len(counts), len(result.shares)) - DESCRIBED_MAX
        return [*found, f"{rest} more machines serve it."] if rest > 0 else found

    def _machine_text(self, machine_id: str, row: RowState) -> str:
        host = self._host(machine_id)
        if host is None:
            return machine_id
        others = sorted(self.names[other.position] for other in host.rows() if other is not row)
        if not others:
            return f"{machine_id}, which serves no other row"
        named = ", ".join(others[:NAMED_MAX])
        more = f" and {len(others) - NAMED_MAX} more" if len(others) > NAMED_MAX else ""
        return f"{machine_id}, which also serves {named}{more}"

    def _preempted(self, result: RowResult) -> list[str]:
        found = []
        for machine_id in result.victims[:DESCRIBED_MAX]:
            machine = self._machines[machine_id]
            found.append(
                f"{machine_id} of {machine.cluster} is preempted for it: that destroys less than any other machine"
                " that makes the room."
            )
        return found

    def _choice(self, machine_id: str, note: ChoiceNote) -> list[str]:
        """Return why the machine was acquired, and at which price another one would have been."""
        cost, more, runner_up = note.cost_usd_per_hour, note.costs_more_usd_per_hour, note.runner_up
        found = f"{machine_id} is acquired at {dollars_text(cost)}/h"
        if note.is_by_target:
            found += ", because the target composition has it"
            runner_up, more = self._for_the_same_pods(machine_id, cost)
        if not runner_up:
            return [f"{found}; no machine of another class could have been taken."]
        if not math.isfinite(more):
            return [f"{found}; {runner_up} could not be priced."]
        if more < 0:
            return [f"{found}; {runner_up} costs {dollars_text(-more)}/h less for these pods and more for the cluster."]
        return [
            f"{found}; next best was {runner_up}, {dollars_text(more)}/h dearer for the same pods.",
            f"{runner_up} would be taken in its place if {machine_id} cost {dollars_text(cost + more)}/h.",
        ]

    def _for_the_same_pods(self, machine_id: str, cost: float) -> tuple[str, float]:
        """Return the cheapest machine of another class that hosts what the machine hosts, and what it costs more."""
        host = self._host(machine_id)
        assert host is not None, f"{machine_id} was acquired"
        cluster, fill = (
            host.machine.cluster or self.fleet.notes[machine_id].row.cluster.id,
            Fill([*host.claims.items()]),
        )
        best: tuple[float, str] | None = None
        for offer in self.fleet.offers:
            total = self.fleet.total(cluster, offer.shape)
            is_other = offer.available > 0 and class_key(offer.example) != class_key(host.machine)
            if not is_other or not all(g.row.may_use(offer.example, offer.shape) for g, _ in fill.pods):
                continue
            used = [0] * len(total)
            for group, count in fill.pods:
                for d, milli in group.request:
                    used[d] += milli * count
            if any(milli > room for milli, room in zip(used, total, strict=True)):
                continue
            price = running_cost(offer, total, fill, self.fleet.dimensions.pods)
            if best is None or (price, offer.peek().id) < best:
                best = (price, offer.peek().id)
        return ("", math.inf) if best is None else (best[1], best[0] - cost)

    # ---- machines ------------------------------------------------------------------------------------------------

    def _host(self, machine_id: str) -> HostState | None:
        hosts = (host for cluster in self.fleet.clusters.values() for host in cluster.hosts)
        return next((host for host in hosts if host.machine.id == machine_id), None)

    def _hosted(self, host: HostState) -> str:
        counts: dict[str, int] = {}
        for group, count in host.claims.items():
            name = self.names[group.row.position]
            counts[name] = counts.get(name, 0) + count
        parts = [f"{_pods(count)} of {name}" for name, count in sorted(counts.items())]
        for row, share in host.shares.items():
            amounts = amounts_text(self.fleet.dimensions.vector(share.items()))
            parts.append(f"{amounts} of {self.names[row.position]}")
        return ", ".join(parts)

    def _free(self, host: HostState) -> str:
        names = self.fleet.dimensions.names
        left = {name: milli for name, milli in zip(names, host.room, strict=True) if milli and name != PODS}
        return amounts_text(left) if left else "nothing"

    def _outcome(self, machine: Machine, host: HostState | None) -> list[str]:
        action = next((a for a in self.decision.actions if a.machine_id == machine.id), None)
        if action is not None and action.kind is ActionKind.RECLAIM:
            if machine.id in self.fleet.options.unjoined:
                return ["It is reclaimed: it has not joined its cluster."]
            if machine.id in self.fleet.options.leaving:
                return [f"It is reclaimed from {machine.cluster}: it goes by an exchange."]
            return [f"It is reclaimed from {machine.cluster}: no row needs any of it."]
        if action is not None and action.kind is ActionKind.DELETE:
            return ["It is released: its hold is over and no row needs it."]
        if action is not None and action.kind is ActionKind.PREEMPT:
            return [f"It is preempted for priority {action.preemptor_priority}."]
        if machine.state is not MachineState.CONFIGURED or (host is not None and host.is_claimed):
            return []
        if machine.cluster not in self.fleet.options.reported:
            return [f"It is kept: {machine.cluster} has not reported."]
        target = self.fleet.options.targets.get(machine.cluster)
        if host is not None and host.is_target and target is not None:
            count = target.counts.get(class_key(machine), 0)
            return [f"It is kept: the target composition of {machine.cluster} has {count} of its class."]
        return ["It is kept: the row that it was bound for is short."]


def shortfall_sentences(result: RowResult) -> list[str]:
    """Return what the row lacks, and why; empty when it lacks nothing."""
    need = result.need
    shapes = (*need.shapes, *need.waiting)
    spread = need.profile.strict_spread
    allowed = "" if spread is None else f" and the spread over {spread.topology_key} allows"
    found = [
        f"{_pods(count)} of {_request(shapes[index])} {_have(count)} no place:"
        f" no machine that the row may take{allowed} has room for more."
        for index, count in result.unplaced
    ]
    found.extend(_impossible(entry, shapes) for entry in result.impossible)
    if need.profile.same_key is not None and not result.has_domain and result.deficit:
        found.append(f"No value of {need.profile.same_key} has a machine that could host a part of the gang.")
    return found


def _impossible(entry: Impossibility, shapes: Sequence[DemandShape]) -> str:
    if entry.shape is None:
        subject = "Its min unit is set aside"
    else:
        count = shapes[entry.shape].count
        subject = f"{_pods(count)} of {_request(shapes[entry.shape])} {'is' if count == 1 else 'are'} set aside"
    if not entry.dimension:
        return f"{subject}: no machine matches the row's requirements."
    wanted, largest = ({entry.dimension: milli} for milli in (entry.wanted, entry.largest))
    has = amounts_text(largest) if entry.largest else f"no {entry.dimension}"
    return f"{subject}: request too large, it wants {amounts_text(wanted)}, the largest machine that matches has {has}."


def _where(machine: Machine) -> str:
    return f" in {machine.cluster}" if machine.cluster else ""


def _pods(count: int) -> str:
    return "1 pod" if count == 1 else f"{count:,} pods"


def _have(count: int) -> str:
    return "has" if count == 1 else "have"


def _shape(shape: DemandShape) -> str:
    limit = f", at most {shape.max_per_machine} on a machine" if shape.max_per_machine else ""
    return f"{shape.count:,} of {_request(shape)}{limit}"


def _request(shape: DemandShape) -> str:
    return amounts_text(shape.resources) if shape.resources else "no resources"
