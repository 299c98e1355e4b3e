"""Computes the smallest change that would turn a choice to its runner-up (docs/spec/aggregates.md §8).

A scan takes machines in order of one key, so it takes the runner-up as soon as the machine's key is behind the
runner-up's, and takes the same machines until then. That does not hold for a strict spread, whose domains open and
close as it goes: its choices have no flip here. This module does not guesse: what the records do not fix has no flip.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from bigfleet.engine.decision import ActionKind, Weights
from bigfleet.engine.explain.records import Acquired, RankedVictim, VictimPicked
from bigfleet.engine.reference.preempt import PENALTY_DOLLARS_FLOOR
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine

#: A share of a score below which a difference is float noise, and no dollars are computed from it.
_NOISE_SHARE: Final = 1e-9


class FlipKind(StrEnum):
    """What would have to be different."""

    PRICE = "price"
    INTERRUPTION_PROBABILITY = "interruption_probability"
    ROW_PENALTY = "row_penalty"
    ASSIGNED_PRIORITY = "assigned_priority"
    ASSIGNED_PENALTY = "assigned_penalty"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A change of one value beyond which another machine is taken."""

    kind: FlipKind
    #: Whose value changes; "" for the row's own.
    machine: str
    #: New value less the present one: $/h, probability, dollars or points of priority.
    change: float
    #: The value at which it turns; None where only the difference is known.
    to: float | None
    #: The machine that is taken then.
    instead: str
    #: Whether reaching the value is enough; otherwise it has to be passed.
    at_equality: bool


def acquisition_flips(record: Acquired) -> tuple[Flip, ...]:
    """Return what would have let the runner-up go first: the taken machine's price, or its interruption probability."""
    difference = record.cost_difference
    key = record.price if record.kind is ActionKind.BOOTSTRAP else record.cost
    if not record.runner_up or difference is None or record.skew is not None:
        return ()
    if not (math.isfinite(key) and math.isfinite(difference)):
        return ()
    ties_lose = record.runner_up < record.machine
    flips = [
        Flip(
            kind=FlipKind.PRICE,
            machine=record.machine,
            change=difference,
            to=record.price + difference,
            instead=record.runner_up,
            at_equality=ties_lose,
        )
    ]
    if record.kind is ActionKind.PROVISION and 0 < record.penalty_dollars < math.inf:
        change = difference / record.penalty_dollars
        if record.probability + change < 1:
            flips.append(
                Flip(
                    kind=FlipKind.INTERRUPTION_PROBABILITY,
                    machine=record.machine,
                    change=change,
                    to=record.probability + change,
                    instead=record.runner_up,
                    at_equality=ties_lose,
                )
            )
    return tuple(flips)


def penalty_flip(record: Acquired, machines: Mapping[MachineId, Machine]) -> Flip | None:
    """Return the interruption penalty of the row at which the runner-up costs less than the taken machine.

    Only of machines to be made: Idle ones are ordered by price. None when no penalty turns the two, or it is pinned.
    """
    if not record.runner_up or record.kind is not ActionKind.PROVISION or record.skew is not None:
        return None
    second, dollars = machines[MachineId(record.runner_up)], record.penalty_dollars
    risk = record.probability - second.interruption_probability
    if risk == 0 or not math.isfinite(dollars):
        return None
    # Both costs are lines over the penalty; they cross once.
    to = (second.price_usd_per_hour - record.price) / risk
    if not math.isfinite(to) or to < 0 or (to < dollars) != (risk < 0):
        return None
    return Flip(
        kind=FlipKind.ROW_PENALTY,
        machine="",
        change=to - dollars,
        to=to,
        instead=record.runner_up,
        at_equality=record.runner_up < record.machine,
    )


def victim_flips(
    record: VictimPicked, ranked: Mapping[str, RankedVictim], *, priority: int, weights: Weights
) -> tuple[Flip, ...]:
    """Return what would have drained the runner-up first: the victim's assigned priority, or its interruption penalty.

    `ranked` holds the possible victims of the row by machine, `priority` is the row's.
    """
    if not record.runner_up:
        return ()
    victim, second = ranked[record.machine], ranked[record.runner_up]
    flips = [_priority_flip(victim, second, priority=priority, weights=weights)]
    ahead = victim.score - second.score
    term = victim.interruption_term - ahead
    if weights.interruption > 0 and term > _NOISE_SHARE * max(1.0, abs(victim.score)):
        flips.append(
            Flip(
                kind=FlipKind.ASSIGNED_PENALTY,
                machine=victim.machine,
                change=max(0.0, weights.interruption / term - weights.interruption / victim.interruption_term),
                to=max(PENALTY_DOLLARS_FLOOR, weights.interruption / term),
                instead=second.machine,
                at_equality=False,
            )
        )
    return tuple(flips)


def _priority_flip(victim: RankedVictim, second: RankedVictim, *, priority: int, weights: Weights) -> Flip:
    """Find the fewest points of assigned priority that spare the victim; at the row's own priority it is spared."""

    def is_spared(points: int) -> bool:
        score = float(victim.gap - points) * weights.priority
        score = score + victim.drain_term + victim.interruption_term + victim.reclamation_term
        return score < second.score or (score == second.score and second.machine < victim.machine)

    least, most = 1, victim.gap
    while least < most:
        middle = (least + most) // 2
        if is_spared(middle):
            most = middle
        else:
            least = middle + 1
    return Flip(
        kind=FlipKind.ASSIGNED_PRIORITY,
        machine=victim.machine,
        change=float(least),
        to=float(priority - victim.gap + least),
        instead=second.machine,
        at_equality=True,
    )
