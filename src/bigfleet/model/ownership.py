"""Defines which machines a shard owns: its base, its domains, and one row for each machine that was ever moved.

docs/spec/coordinator.md §9. Shards store this on disk and act on it. The coordinator reads their copies and predicts
the effect of its instructions with the same functions. Every transition is idempotent: a row is replaced only under a
higher version. This module must not read a clock or hold state.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from bigfleet.model.ids import MachineId, ShardId
from bigfleet.model.machine import Machine

#: A shard that has adopted so many machines refuses to adopt another.
ADOPTED_MAX = 10_000

_VERSION = re.compile(r"([0-9]{1,19})-([0-9]{1,19})(?:/.*)?", re.DOTALL)


class OwnershipVersion(NamedTuple):
    """Version of an ownership row: term and sequence number of the instruction that made it.

    Along a machine's chain of owners it only rises.
    """

    term: int
    sequence: int

    @property
    def instruction_id(self) -> str:
        """The id of the instruction to the donor."""
        return f"{self.term}-{self.sequence}"


def version_of(instruction_id: str, *, own: OwnershipVersion) -> OwnershipVersion:
    """Return the version of an instruction's rows: the id's part before a slash, else the instruction's own."""
    found = _VERSION.fullmatch(instruction_id)
    return OwnershipVersion(int(found[1]), int(found[2])) if found is not None else own


class Domain(NamedTuple):
    """A topology domain: every machine whose attribute `topology_key` has the value `topology_value`."""

    topology_key: str
    topology_value: str


class Base(Enum):
    """What a shard owns before the exceptions; a shard that never sent a view counts as ALL."""

    ALL = "all"
    DOMAINS = "domains"


class RowKind(Enum):
    """What became of a machine that moved."""

    #: It is here; the other shard is the one that gave it.
    ADOPTED = "adopted"
    #: Given up, and not yet known to have arrived; the other shard is the one that gets it.
    RELEASED = "released"
    #: It is elsewhere.
    DISOWNED = "disowned"


@dataclass(frozen=True, slots=True)
class OwnershipRow:
    """One machine that moved."""

    kind: RowKind
    version: OwnershipVersion
    other: ShardId
    since_unix_nanos: int = 0
    #: Its record, of a released one.
    machine: Machine | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """What one shard owns. Nobody changes one: a transition returns another, or the same where it changes nothing."""

    base: Base
    #: Held ones.
    domains: frozenset[Domain] = frozenset()
    #: Domains in which nothing new is taken; their machines go as demand lets go of them.
    leaving: frozenset[Domain] = frozenset()
    rows: Mapping[MachineId, OwnershipRow] = field(default_factory=dict)

    # ---- who owns a machine -------------------------------------------------------------------------------------

    def owns(
        self, machine: Machine, assigned_shard: str, *, me: ShardId, inherits: frozenset[ShardId], stays: bool
    ) -> bool:
        """Return whether a listed machine is ours: the first rule of §9.1 that applies.

        `assigned_shard` is what its metadata says. `stays`: it is in our inventory, and bound, pending, in a transition
        or reserved.
        """
        if machine.cluster and assigned_shard:
            return assigned_shard == me or assigned_shard in inherits
        row = self.rows.get(machine.id)
        if row is not None:
            return row.kind is RowKind.ADOPTED
        if self.base is Base.ALL or self._is_in(machine, self.domains):
            return True
        return stays and self._is_in(machine, self.leaving)

    def _is_in(self, machine: Machine, domains: frozenset[Domain]) -> bool:
        return any(machine.attribute(key) in values for key, values in _values_by_key(domains).items())

    # ---- domains ------------------------------------------------------------------------------------------------

    def assigned(self, domain: Domain) -> "Owned":
        """Return what is owned after a domain was given; one that is leaving returns to held."""
        return replace(self, base=Base.DOMAINS, domains=self.domains | {domain}, leaving=self.leaving - {domain})

    def unassigned(self, domain: Domain) -> "Owned":
        """Return what is owned after a domain was taken: it leaves, if it was held."""
        was_held = {domain} & self.domains
        return replace(self, base=Base.DOMAINS, domains=self.domains - {domain}, leaving=self.leaving | was_held)

    def left(self, domain: Domain) -> "Owned":
        """Return the ownership after the last machine has left a leaving domain."""
        return replace(self, leaving=self.leaving - {domain})

    # ---- machines -----------------------------------------------------------------------------------------------

    def _with(self, machine_id: MachineId, row: OwnershipRow) -> "Owned":
        known = self.rows.get(machine_id)
        if known is not None and known.version >= row.version:
            return self
        return replace(self, rows={**self.rows, machine_id: row})

    def released(self, machine: Machine, version: OwnershipVersion, *, to: ShardId, now_unix_nanos: int = 0) -> "Owned":
        """Return what is owned after a machine was released (H4)."""
        return self._with(machine.id, OwnershipRow(RowKind.RELEASED, version, to, now_unix_nanos, machine))

    def adopted(
        self, machine_id: MachineId, version: OwnershipVersion, *, by_gift_of: ShardId, now_unix_nanos: int = 0
    ) -> "Owned":
        """Return what is owned after a machine came (H7)."""
        return self._with(machine_id, OwnershipRow(RowKind.ADOPTED, version, by_gift_of, now_unix_nanos))

    def taken_back(
        self, machine_id: MachineId, version: OwnershipVersion, *, me: ShardId, now_unix_nanos: int = 0
    ) -> "Owned":
        """Return what is owned after a machine that was released and never arrived came back."""
        known = self.rows.get(machine_id)
        if known is None or known.kind is not RowKind.RELEASED:
            return self
        return self._with(machine_id, OwnershipRow(RowKind.ADOPTED, version, me, now_unix_nanos))

    def noted(
        self, machine_id: MachineId, version: OwnershipVersion, *, at: ShardId, now_unix_nanos: int = 0
    ) -> "Owned":
        """Return what is owned after an instruction noted that a machine is elsewhere, known here or not."""
        return self._with(machine_id, OwnershipRow(RowKind.DISOWNED, version, at, now_unix_nanos))

    def forgotten(self, machine_id: MachineId, version: OwnershipVersion) -> "Owned":
        """Return what is owned after a machine's disowned row of that version is no longer needed."""
        known = self.rows.get(machine_id)
        if known is None or known.kind is not RowKind.DISOWNED or known.version != version:
            return self
        return self.without([machine_id])

    def confirmed(self, machine_ids: Iterable[MachineId]) -> "Owned":
        """Return what is owned after released machines are known to have arrived (H10)."""
        known = {machine_id: self.rows.get(machine_id) for machine_id in machine_ids}
        done = {
            machine_id: replace(row, kind=RowKind.DISOWNED, machine=None)
            for machine_id, row in known.items()
            if row is not None and row.kind is RowKind.RELEASED
        }
        return replace(self, rows={**self.rows, **done}) if done else self

    def without(self, machine_ids: Iterable[MachineId]) -> "Owned":
        """Return what is owned without the rows of some machines."""
        gone = set(machine_ids)
        return replace(self, rows={machine_id: row for machine_id, row in self.rows.items() if machine_id not in gone})

    @property
    def adopted_count(self) -> int:
        """How many machines are here that were given."""
        return sum(row.kind is RowKind.ADOPTED for row in self.rows.values())


@lru_cache(maxsize=64)
def _values_by_key(domains: frozenset[Domain]) -> Mapping[str, frozenset[str]]:
    """Return the values of each key: thousands of racks are then one question per machine."""
    keys = {domain.topology_key for domain in domains}
    return {key: frozenset(each.topology_value for each in domains if each.topology_key == key) for key in sorted(keys)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """A machine that is drained, or was, for another shard (§9.5)."""

    machine_id: MachineId
    to_shard: ShardId
    instruction_id: str
    #: Idle now.
    is_ready: bool = False
    #: 0 until it is ready.
    expires_unix_nanos: int = 0
    instance_type: str = ""
    zone: str = ""
