"""Defines a machine, its invariant, and its cost (docs/spec/model.md §1, §2).

`Machine` declares a machine's fields, and `Stamp` names those that a shard sets together with a row. What other
packages read, write and store of them is derived from both, or listed with a reason and compared with them
(tests/model/test_machine_field_places.py, test_machine_fields.py). A record is a frozen value: a change makes a new
one. `invariant_fault` is checked on every insert and update; a record that breaks the invariant is refused and the last
good one stays.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

from bigfleet.model import labels as keys
from bigfleet.model.ids import ClusterId, Fingerprint, MachineId
from bigfleet.model.penalty import bucket_upper_dollars
from bigfleet.model.profile import Profile
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.model.vector import Vector, parse_vector

_EMPTY: Mapping[str, str] = MappingProxyType({})


class HostRef(NamedTuple):
    """Who runs the host, and its id there; both empty means that there is none."""

    provider: str = ""
    ref: str = ""

    @property
    def is_present(self) -> bool:
        """Return whether there is a host at all."""
        return bool(self.provider or self.ref)


class PreemptedFor(NamedTuple):
    """The row that a draining machine was preempted for."""

    cluster: str
    fingerprint: str
    group: str


class Stamp(NamedTuple):
    """What a machine was bound, bought or preempted for: fields of `Machine`, each as it is without a row."""

    assigned_need_fingerprint: Fingerprint = Fingerprint("")
    assigned_group: str = ""
    assigned_priority: int = 0
    assigned_interruption_penalty_dollars: float = 0.0
    assigned_reclamation_penalty_dollars: float = 0.0
    #: Creating only: the cluster that the machine is being made for, "" when not recorded. Shard memory.
    intended_cluster: ClusterId = ClusterId("")
    #: Draining only: the row that the machine was preempted for. Shard memory.
    preempted_for: PreemptedFor | None = None


NO_HOST = HostRef()
NO_STAMP = Stamp()


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One machine or slot; the id is stable for life."""

    id: MachineId
    state: MachineState
    host: HostRef = NO_HOST
    #: Bound cluster, "" for none.
    cluster: ClusterId = ClusterId("")
    instance_type: str = ""
    zone: str = ""
    capacity_type: CapacityType = CapacityType.UNSPECIFIED
    #: The hardware shape, Kubernetes quantities as declared.
    resources: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    #: What pods get, Kubernetes quantities as declared; it hides `resources` as soon as it has an entry.
    allocatable: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    labels: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    price_usd_per_hour: float = 0.0
    #: Within one hour, in [0, 1]; declared by the provider alone.
    interruption_probability: float = 0.0
    #: Why the machine is Failed; empty in every other state.
    last_error: str = ""
    #: Kubernetes node name when the provider knows it.
    node_name: str = ""

    assigned_priority: int = 0
    assigned_interruption_penalty_dollars: float = 0.0
    assigned_reclamation_penalty_dollars: float = 0.0
    assigned_need_fingerprint: Fingerprint = Fingerprint("")
    assigned_group: str = ""
    intended_cluster: ClusterId = ClusterId("")
    preempted_for: PreemptedFor | None = None

    #: Effective allocatable in milli-units, derived: allocatable when it has an entry, else resources.
    supply: Vector = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "supply", parse_vector(self.allocatable or self.resources))

    @property
    def stamp(self) -> Stamp:
        """What the machine was bound, bought or preempted for."""
        # One is made for every machine that changes; Stamp(*...) takes half as long again.
        return tuple.__new__(Stamp, _STAMP(self))

    def attribute(self, key: str) -> str | None:
        """Return what a requirement on `key` is compared with, or None when it is absent (docs/spec/model.md §9).

        Instance type and zone come from the record when they are not empty, everything else from the labels.
        """
        if key == keys.INSTANCE_TYPE and self.instance_type:
            return self.instance_type
        if key == keys.ZONE and self.zone:
            return self.zone
        return self.labels.get(key)

    def effective_cost_usd_per_hour(self, penalty_dollars: float) -> float:
        """Return `price + probability × max(0, penalty)`; the price alone when the probability is zero.

        So a machine that is never interrupted costs its price even for an infinite penalty.
        """
        if self.interruption_probability == 0:
            return self.price_usd_per_hour
        return self.price_usd_per_hour + self.interruption_probability * max(0.0, penalty_dollars)

    def cost_for_bucket_usd_per_hour(self, interruption_bucket: int) -> float:
        """Return the effective cost at the upper bound of a penalty bucket."""
        return self.effective_cost_usd_per_hour(bucket_upper_dollars(interruption_bucket))

    def assigned(self, profile: Profile) -> "Machine":
        """Return the record with priority and penalties of the row that it is bound for."""
        return replace(
            self,
            assigned_priority=profile.priority,
            assigned_interruption_penalty_dollars=bucket_upper_dollars(profile.interruption_bucket),
            assigned_reclamation_penalty_dollars=bucket_upper_dollars(profile.reclamation_bucket),
        )

    def without_binding(self) -> "Machine":
        """Return the record without its cluster and stamps (docs/spec/engine.md §11)."""
        return replace(self, cluster=ClusterId(""), **_UNSTAMPED)


_STAMP = attrgetter(*Stamp._fields)
_UNSTAMPED: Mapping[str, Any] = NO_STAMP._asdict()
#: What a machine is made of, in order; the rest follows from it.
MACHINE_FIELDS: tuple[str, ...] = tuple(each.name for each in fields(Machine) if each.init)


class InvariantFault(Enum):
    """Which part of the invariant a record breaks; the values are metric labels."""

    STRUCTURAL = "structural"
    INTERRUPTION_PROBABILITY = "interruption_probability"
    PRICE = "price"


_HOSTLESS = (MachineState.SPECULATIVE, MachineState.CREATING)
_HOSTED_FREE = (MachineState.IDLE, MachineState.CONFIGURING, MachineState.DELETING)


def invariant_fault(machine: Machine) -> tuple[InvariantFault, str] | None:
    """Return the first broken part of the invariant with a sentence; None if it is sound (docs/spec/model.md §2)."""
    problem = _structural_problem(machine)
    if problem:
        return InvariantFault.STRUCTURAL, problem
    probability = machine.interruption_probability
    # NaN is in no range and not above anything.
    if not 0.0 <= probability <= 1.0:
        return (
            InvariantFault.INTERRUPTION_PROBABILITY,
            f"interruption_probability is {probability}, it must be in [0, 1]",
        )
    price = machine.price_usd_per_hour
    if not price >= 0:
        return InvariantFault.PRICE, f"price_per_hour is {price}, it must be a number that is not negative"
    return None


def _structural_problem(machine: Machine) -> str | None:
    state = machine.state
    if state is MachineState.UNSPECIFIED:
        return "state is Unspecified"
    if state is MachineState.FAILED:
        return None if machine.last_error else "a Failed machine must say why in last_error"
    if state in _HOSTLESS:
        if machine.host.is_present:
            return f"a {state.label} machine has no host, this one has {machine.host.ref!r}"
        return f"a {state.label} machine has no cluster, this one has {machine.cluster!r}" if machine.cluster else None
    if not machine.host.is_present:
        return f"a {state.label} machine must have a host"
    if state not in _HOSTED_FREE and not machine.cluster:
        return f"a {state.label} machine must have a cluster"
    return None
