"""Filters the machines of a List by ownership, before anything else reads them.

docs/spec/shard.md §5.3 point 1, docs/spec/coordinator.md §9.1. It applies the rules of `bigfleet.model.ownership` to
the shard's state. A shard without a coordinator owns everything that no other shard has bound; the check is then cheap.
This module must not change what is owned.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from bigfleet.model import labels
from bigfleet.model.ids import MachineId, ShardId
from bigfleet.model.machine import Machine
from bigfleet.model.ownership import Base, Owned, Reservation
from bigfleet.model.states import TRANSITIONAL_STATES
from bigfleet.shard.ports import ListedBinding, ListedMachine, OversizedRecord


class OwnedResources(Protocol):
    """What a shard owns, and what it keeps for others, at this moment."""

    @property
    def owned(self) -> Owned:
        """Another object after every change, and the same one until then."""
        ...

    @property
    def reservations(self) -> Mapping[MachineId, Reservation]: ...


@dataclass(frozen=True, slots=True)
class OwnsAll:
    """The resources of a shard without an ownership file: no instruction can make it release anything."""

    owned: Owned = field(default_factory=lambda: Owned(base=Base.ALL))
    reservations: Mapping[MachineId, Reservation] = field(default_factory=dict)


EVERYTHING: Final = OwnsAll()


class OwnershipFilter:
    """What of a provider's machines is one shard's."""

    def __init__(
        self,
        *,
        me: ShardId,
        inherits: frozenset[ShardId],
        resources: OwnedResources,
        is_known: Callable[[MachineId], bool],
        is_busy: Callable[[MachineId], bool],
    ) -> None:
        """`is_known`: the machine is in the inventory. `is_busy`: an action of it waits or runs."""
        self._me = me
        self._inherits = inherits
        self._resources = resources
        self._is_known = is_known
        self._is_busy = is_busy
        #: What `assigned-shard` may say of a machine that is bound by us or by an unknown shard.
        self._binders = frozenset({"", me, *inherits})

    @property
    def owned(self) -> Owned:
        """What the shard owns; another object after every change."""
        return self._resources.owned

    @property
    def reserved(self) -> frozenset[MachineId]:
        """The machines that are reserved for other shards."""
        return frozenset(self._resources.reservations)

    def owns(self, record: ListedMachine) -> bool:
        """Return whether a machine is ours, by what its provider shows of it now."""
        machine, metadata = record
        owned = self.owned
        if owned.base is Base.ALL and not owned.rows:
            # So it is with a shard alone, and a delta asks it of each of its records.
            return not machine.cluster or metadata.get(labels.ASSIGNED_SHARD, "") in self._binders
        if isinstance(record, OversizedRecord) and machine.id not in owned.rows:
            # Its domain and its binding were not read: the last good record says whose it is.
            return True
        return owned.owns(
            machine,
            metadata.get(labels.ASSIGNED_SHARD, ""),
            me=self._me,
            inherits=self._inherits,
            stays=bool(owned.leaving) and self._stays(machine),
        )

    def foreign(self, records: Iterable[ListedMachine]) -> set[MachineId]:
        """Return the machines of some records that are not ours."""
        owned = self.owned
        if owned.base is Base.ALL and not owned.rows:
            # So it is with a shard alone, and of half a million records each question counts.
            binders = self._binders
            return {
                machine.id
                for machine, metadata in records
                if machine.cluster and metadata.get(labels.ASSIGNED_SHARD, "") not in binders
            }
        return {record.machine.id for record in records if not self.owns(record)}

    def owns_by_binding(self, listed: ListedBinding) -> bool | None:
        """Return whether a machine with this binding, not known and without a row of its own, is ours.

        None where its facts decide.
        """
        machine = Machine(id=MachineId(""), state=listed.state, cluster=listed.cluster)
        if self.owned.base is Base.ALL or (listed.cluster and listed.metadata.get(labels.ASSIGNED_SHARD, "")):
            return self.owns(ListedMachine(machine, listed.metadata))
        return None

    def owns_by_facts(self, facts: Machine) -> bool:
        """Return whether a machine with these facts is ours, where `owns_by_binding` does not say."""
        return self.owns(ListedMachine(facts, {}))

    def _stays(self, machine: Machine) -> bool:
        """Return whether we still have something running on a machine of a domain that we leave."""
        return self._is_known(machine.id) and (
            bool(machine.cluster)
            or machine.state in TRANSITIONAL_STATES
            or self._is_busy(machine.id)
            or machine.id in self._resources.reservations
        )
