"""Holds the working state of one decision: rows while they are served, and who holds which machine.

A `DemandRow` and the `Allocations` live for one call of `decide` and are thrown away with it: they do not survive a
cycle, and nothing outside the engine may see them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from bigfleet.engine.matching import Fit
from bigfleet.engine.reference.pool import CandidatePool
from bigfleet.model import vector
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need
from bigfleet.model.states import MachineState
from bigfleet.model.vector import Vector


@dataclass(slots=True, eq=False, kw_only=True)
class DemandRow:
    """One row after folding, on its way through the phases."""

    need: Need
    members: tuple[Need, ...]
    folded: bool
    #: Place in the folded list, from 0.
    position: int
    fit: Fit
    #: Shapes that the row may take: those that fit, of a Same row only those in its domain (none without one).
    shapes: frozenset[int]
    #: Demand that nothing covers yet; it only ever shrinks.
    remaining: Vector
    #: Machines held, in claim order.
    claimed: list[Machine] = field(default_factory=list)
    #: The chosen domain of a Same row; None is no domain, "" a domain whose label is empty.
    domain: str | None = None
    satisfiable: bool = True
    #: What Phase 1 left short.
    deficit: Vector = field(default_factory=lambda: vector.ZERO)
    #: Machines that drain for the row, and victims picked for it, in order.
    coming: list[Machine] = field(default_factory=list)
    victims: list[Machine] = field(default_factory=list)

    @property
    def is_same(self) -> bool:
        """Return whether the row wants one domain."""
        return self.need.profile.same_key is not None

    def held_in(self, state: MachineState) -> list[Machine]:
        """Return the machines of a state that the row holds, ids ascending."""
        return sorted((machine for machine in self.claimed if machine.state is state), key=lambda machine: machine.id)


@dataclass(slots=True, eq=False)
class Allocations:
    """Who holds what. A machine has at most one claim, at most one earmark, and serves at most one row in Phase 2."""

    pool: CandidatePool
    #: Machine id → the row that holds the machine in this cycle; never taken back.
    claims: dict[str, DemandRow] = field(default_factory=dict)
    #: Machine id → the Same row that counts on acquiring it; earmarks hide a machine from later domain choices only.
    earmarks: dict[str, DemandRow] = field(default_factory=dict)
    #: Machine id → the row that it drains for, or is a victim of.
    taken: dict[str, DemandRow] = field(default_factory=dict)

    def claim(self, row: DemandRow, machine: Machine) -> None:
        """Give the machine to the row and count its supply."""
        assert machine.id not in self.claims, f"{machine.id} has a claim already"
        self.claims[machine.id] = row
        row.claimed.append(machine)
        row.remaining = vector.subtract(row.remaining, machine.supply)

    def take(self, row: DemandRow, machine: Machine, into: list[Machine]) -> None:
        """Count a machine that will be free for the row, `into` its coming machines or its victims."""
        assert machine.id not in self.taken, f"{machine.id} serves another row already"
        self.taken[machine.id] = row
        into.append(machine)
        row.remaining = vector.subtract(row.remaining, machine.supply)


def supply_of(machines: Iterable[Machine]) -> Vector:
    """Return the summed supply of machines, milli-units."""
    total: dict[str, int] = {}
    for machine in machines:
        for name, milli in machine.supply.items():
            total[name] = total.get(name, 0) + milli
    return total
