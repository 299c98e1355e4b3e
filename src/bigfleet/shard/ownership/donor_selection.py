"""Selects the machines that a donor releases, and those that it drains for another shard, in order.

docs/spec/coordinator.md §9.3 (H2) and §7.4. Pure functions over machines that the caller found to be available. Nothing
here may read a reservation, a row or a clock.
"""

from collections.abc import Iterable
from typing import NamedTuple

from bigfleet.engine.decision import Options
from bigfleet.engine.reference.preempt import grace_seconds, score_terms
from bigfleet.model import vector
from bigfleet.model.ids import MachineId
from bigfleet.model.instructions import CrossShardDrain, Selector
from bigfleet.model.machine import Machine
from bigfleet.model.penalty import bucket_for_dollars

#: A donor keeps one in so many of the machines that match, and at least one.
RETAINED_ONE_IN = 10

_DEFAULTS = Options(now_seconds=0.0, reported=frozenset())


class DonorCandidate(NamedTuple):
    """A machine that could be released."""

    machine: Machine
    #: On the monotonic clock; 0 for a slot, which is never idle.
    idle_since_seconds: float


class DrainCandidate(NamedTuple):
    """A machine that is drained for another shard, and the notice that it gets."""

    machine: Machine
    grace_seconds: int


def matches(selector: Selector, machine: Machine) -> bool:
    """Return whether a selector means a machine; its count plays no part."""
    return (
        selector.instance_type in ("", machine.instance_type)
        and selector.zone in ("", machine.zone)
        and all(requirement.holds(machine.attribute(requirement.key)) for requirement in selector.requirements)
        and vector.covers(machine.supply, selector.min_unit)
    )


def chosen(selector: Selector, matching: Iterable[DonorCandidate]) -> list[MachineId]:
    """Return what is given of all that match: cheapest to lose first, then idle longest, then by id.

    max(1, ceil(0.1 × matching)) of them stay, so of one or none nothing is given.
    """
    ordered = sorted(matching, key=_order)
    retained = max(1, -(-len(ordered) // RETAINED_ONE_IN))
    return [candidate.machine.id for candidate in ordered[: max(0, min(selector.count, len(ordered) - retained))]]


def _order(candidate: DonorCandidate) -> tuple[float, float, MachineId]:
    machine = candidate.machine
    return machine.assigned_reclamation_penalty_dollars, candidate.idle_since_seconds, machine.id


def victims(drain: CrossShardDrain, matching: Iterable[Machine]) -> list[DrainCandidate]:
    """Return what is drained of all that match, best first as Phase 2 has it, at most the selector's count.

    Both gates are strict: a machine serves less urgent work, and work that is cheaper to interrupt.
    """
    priority = drain.preemptor_priority
    cheaper = [
        machine
        for machine in matching
        if machine.assigned_priority < priority
        and bucket_for_dollars(machine.assigned_interruption_penalty_dollars) < drain.requester_interruption_bucket
    ]
    cheaper.sort(key=lambda machine: (-_score(priority, machine), machine.id))
    return [
        DrainCandidate(machine, grace_seconds(priority - machine.assigned_priority))
        for machine in cheaper[: max(0, drain.selector.count)]
    ]


def _score(priority: int, machine: Machine) -> float:
    of_priority, of_drain, of_interruption, of_reclamation = score_terms(
        row_priority=priority,
        assigned_priority=machine.assigned_priority,
        interruption_dollars=machine.assigned_interruption_penalty_dollars,
        reclamation_dollars=machine.assigned_reclamation_penalty_dollars,
        drain_seconds=_DEFAULTS.drain_seconds,
        weights=_DEFAULTS.weights,
    )
    return of_priority + of_drain + of_interruption + of_reclamation
