"""Defines the record of a machine: its own fields, and references to values that machines share.

Half a million machines have some ten thousand different sets of facts and of stamps. A record of its own takes 300
bytes a machine with its host, a record with references a hundred, and comparing facts is comparing one reference.
`Keeper` creates each shared part once, with its number in the columns. These are values only: which machines
exist is not known here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from bigfleet.engine.columns.store import Numbers, Vocabulary
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import HostRef, Machine, Stamp
from bigfleet.model.states import CapacityType, MachineState

T = TypeVar("T")
U = TypeVar("U")

#: Parts of each kind that are shared; beyond, sharing begins again, which costs memory and nothing else.
SHARED_MAX: Final = 262_144


class Facts(NamedTuple):
    """What a provider declares of many machines alike."""

    host_provider: str
    instance_type: str
    zone: str
    capacity_type: CapacityType
    resources: Mapping[str, str]
    allocatable: Mapping[str, str]
    labels: Mapping[str, str]
    price_usd_per_hour: float
    interruption_probability: float


class Binding(NamedTuple):
    """Where a machine is in its life, and what for."""

    state: MachineState
    cluster: ClusterId
    stamp: Stamp

    def moved(self, state: MachineState, cluster: ClusterId) -> "Binding":
        """Return the binding in another state and cluster; what a machine was preempted for ends with its drain."""
        stamp = self.stamp
        if stamp.preempted_for is not None and state is not MachineState.DRAINING:
            stamp = stamp._replace(preempted_for=None)
        if state is self.state and cluster == self.cluster and stamp is self.stamp:
            return self
        return Binding(state, cluster, stamp)


class InventoryRecord(NamedTuple):
    """A machine but for its id."""

    facts: Facts
    binding: Binding
    host_ref: str
    node_name: str
    last_error: str

    @property
    def state(self) -> MachineState:
        """Where the machine is in its life."""
        return self.binding.state

    @property
    def cluster(self) -> ClusterId:
        """Bound cluster, "" for none."""
        return self.binding.cluster

    @property
    def instance_type(self) -> str:
        """As declared."""
        return self.facts.instance_type

    @property
    def zone(self) -> str:
        """As declared."""
        return self.facts.zone

    @property
    def capacity_type(self) -> CapacityType:
        """As declared."""
        return self.facts.capacity_type

    def machine(self, machine_id: MachineId) -> Machine:
        """Return the machine, equal to the one that was stored."""
        facts, binding = self.facts, self.binding
        stamp = binding.stamp
        # Every field by name: with **stamp._asdict() it takes a tenth longer.
        return Machine(
            id=machine_id,
            state=binding.state,
            host=HostRef(facts.host_provider, self.host_ref),
            cluster=binding.cluster,
            instance_type=facts.instance_type,
            zone=facts.zone,
            capacity_type=facts.capacity_type,
            resources=facts.resources,
            allocatable=facts.allocatable,
            labels=facts.labels,
            price_usd_per_hour=facts.price_usd_per_hour,
            interruption_probability=facts.interruption_probability,
            last_error=self.last_error,
            node_name=self.node_name,
            assigned_priority=stamp.assigned_priority,
            assigned_interruption_penalty_dollars=stamp.assigned_interruption_penalty_dollars,
            assigned_reclamation_penalty_dollars=stamp.assigned_reclamation_penalty_dollars,
            assigned_need_fingerprint=stamp.assigned_need_fingerprint,
            assigned_group=stamp.assigned_group,
            intended_cluster=stamp.intended_cluster,
            preempted_for=stamp.preempted_for,
        )

    def declares(self, machine: Machine) -> bool:
        """Return whether the facts are those of a record: all a provider reports but state, cluster and last error."""
        provider, instance_type, zone, capacity_type, resources, allocatable, labels, price, probability = self.facts
        # What conversion shares is one object, so most comparisons are of two references.
        return (
            (labels is machine.labels or labels == machine.labels)
            and (allocatable is machine.allocatable or allocatable == machine.allocatable)
            and (resources is machine.resources or resources == machine.resources)
            and instance_type == machine.instance_type
            and zone == machine.zone
            and capacity_type is machine.capacity_type
            and price == machine.price_usd_per_hour
            and probability == machine.interruption_probability
            and self.node_name == machine.node_name
            and self.host_ref == machine.host.ref
            and provider == machine.host.provider
        )

    def is_framed_like(self, machine: Machine) -> bool:
        """Return whether both make the same frame for a cluster; most changes of stamps and prices leave it as is."""
        facts = self.facts
        return (
            self.binding.state is machine.state
            and self.last_error == machine.last_error
            and self.node_name == machine.node_name
            and (facts.host_provider, self.host_ref) == machine.host
            and facts.labels == machine.labels
            and facts.instance_type == machine.instance_type
            and facts.zone == machine.zone
            and facts.allocatable == machine.allocatable
            and facts.resources == machine.resources
        )


class NumberedFacts(NamedTuple):
    """Facts, and the numbers that the columns know them by."""

    facts: Facts
    shape: int
    offer: int


class NumberedBinding(NamedTuple):
    """A binding, and the numbers that the columns know it by."""

    binding: Binding
    state: int
    cluster: int
    stamp: int


@dataclass(frozen=True, slots=True)
class Picked(Generic[T]):
    """One value for each of many machines: the distinct values, and by machine which of them."""

    values: Sequence[T]
    which: npt.NDArray[np.int64]

    def spread(self, alike: Sequence[U]) -> list[U]:
        """Return one of these for each machine; they are one for each distinct value."""
        return list(map(alike.__getitem__, self.which.tolist()))


class Keeper:
    """Makes the records of machines, equal parts once."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        #: Maps are looked up by identity; the facts hold them, so that no other map can get their place in memory.
        self._facts: dict[tuple[object, ...], NumberedFacts] = {}
        self._bindings: dict[Binding, NumberedBinding] = {}
        #: The same by identity, of those that were made here: most machines keep their binding.
        self._made_here: dict[int, NumberedBinding] = {}

    def keep(
        self, machine: Machine, binding: Binding, idle_since_seconds: float, vocabulary: Vocabulary
    ) -> tuple[InventoryRecord, Numbers]:
        """Return what to keep of a machine whose state, cluster and stamps are those of `binding`, and its numbers."""
        binding, state, cluster, stamp = self.binding(binding, vocabulary)
        facts, shape, offer = self.facts(machine, vocabulary)
        return (
            InventoryRecord(facts, binding, machine.host.ref, machine.node_name, machine.last_error),
            (state, cluster, shape, offer, stamp, idle_since_seconds),
        )

    def facts(self, machine: Machine, vocabulary: Vocabulary) -> NumberedFacts:
        """Return the facts of a machine in numbers of the vocabulary."""
        if vocabulary is not self._vocabulary:
            self._use(vocabulary)
        key = (
            machine.host.provider,
            machine.instance_type,
            machine.zone,
            machine.capacity_type,
            id(machine.resources),
            id(machine.allocatable),
            id(machine.labels),
            machine.price_usd_per_hour,
            machine.interruption_probability,
        )
        return self._facts.get(key) or self._numbered_facts(key, machine)

    def binding(self, binding: Binding, vocabulary: Vocabulary) -> NumberedBinding:
        """Return a binding in numbers of the vocabulary; equal ones are one object."""
        if vocabulary is not self._vocabulary:
            self._use(vocabulary)
        return self._made_here.get(id(binding)) or self._bindings.get(binding) or self._numbered_binding(binding)

    def _use(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._facts.clear()
        self._forget_bindings()

    def _numbered_binding(self, binding: Binding) -> NumberedBinding:
        state, cluster, stamp = binding
        vocabulary = self._vocabulary
        if len(self._bindings) >= SHARED_MAX:
            self._forget_bindings()
        numbered = NumberedBinding(binding, int(state), vocabulary.cluster(cluster), vocabulary.add_stamp(stamp))
        self._bindings[binding] = self._made_here[id(binding)] = numbered
        return numbered

    def _forget_bindings(self) -> None:
        self._bindings.clear()
        self._made_here.clear()

    def _numbered_facts(self, key: tuple[object, ...], machine: Machine) -> NumberedFacts:
        facts = Facts(*FACTS_OF(machine))
        vocabulary = self._vocabulary
        if len(self._facts) >= SHARED_MAX:
            self._facts.clear()
        numbered = NumberedFacts(facts, vocabulary.shape(machine), vocabulary.offer(machine))
        self._facts[key] = numbered
        return numbered


def binding_of(machine: Machine) -> Binding:
    """Return a machine's state, cluster and stamps."""
    return Binding(machine.state, machine.cluster, machine.stamp)


#: The fields of a machine that are facts, in their order.
FACTS_OF: Final = attrgetter("host.provider", *Facts._fields[1:])
