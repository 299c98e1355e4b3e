"""Defines the input and the result of a rebalancing pass (docs/spec/coordinator.md §7).

This module does not decide what moves.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bigfleet.coordinator.reports import ShardFigures
from bigfleet.coordinator.tables import ProviderRow, QuotaKey, QuotaRow
from bigfleet.model.ids import Fingerprint, MachineId, ShardId
from bigfleet.model.profile import Requirement
from bigfleet.model.vector import Vector


class Tier(Enum):
    """How a shortfall is served, cheapest first; READY hands over what a drain of tier 3 has freed."""

    READY = "ready"
    IDLE = "1"
    SPECULATIVE = "2"
    PREEMPT = "3"


class Skip(IntEnum):
    """Why a shortfall got nothing: the last gate that something reached, in the order of the gates."""

    STALE = 1
    BASE = 2
    AGE = 3
    TOPOLOGY = 4
    IN_FLIGHT = 5
    PROVIDER = 6
    REQUIREMENTS = 7
    DONOR_IN_NEED = 8
    MARGIN = 9
    WORTH = 10
    #: Nothing but the cooldown stood in the way of some flow.
    COOLDOWN = 11

    @property
    def label(self) -> str:
        """The value of the metric's label."""
        return self.name.lower()


class FlowKey(NamedTuple):
    """Machines of one type and zone between two shards, in either direction: the unit that cools down.

    The zone of a drain is empty.
    """

    instance_type: str
    zone: str
    #: The smaller id first.
    shards: tuple[ShardId, ShardId]

    @classmethod
    def between(cls, instance_type: str, zone: str, left: ShardId, right: ShardId) -> "FlowKey":
        """Return the key, the same in both directions."""
        return cls(instance_type, zone, (left, right) if left < right else (right, left))


class ShortfallKey(NamedTuple):
    """Names a shortfall from pass to pass."""

    shard_id: ShardId
    fingerprint: Fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """The settings of a pass, with the defaults of §1."""

    #: A shortfall must be older than this, in timer cycles of its shard.
    age_cycles: int = 5
    preempt_age_cycles: int = 12
    margin_min: int = 1
    margin_fraction: Fraction = Fraction(1, 10)
    benefit_min: Fraction = Fraction(1, 4)
    #: Machines of one instruction.
    machines_max: int = 100
    #: Drains of one pass.
    drains_max: int = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What the leader remembers of its own moves; empty after a change of leader."""

    #: Flows that must rest.
    cooling: frozenset[FlowKey] = frozenset()
    #: Donors that refused a drain for a shortfall, and must rest from it.
    refused_drains: frozenset[tuple[ShardId, Fingerprint]] = frozenset()
    #: Capacity on its way to a shortfall, milli-units.
    moving: Mapping[ShortfallKey, Vector] = field(default_factory=dict)
    #: Capacity that drains are to free for a shortfall, milli-units.
    draining: Mapping[ShortfallKey, Vector] = field(default_factory=dict)
    #: Donors that drain for somebody.
    draining_donors: frozenset[ShardId] = frozenset()
    #: Shortfalls for which a drain is under way, also one of machines of unknown size.
    drained_for: frozenset[ShortfallKey] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """The last reports, and the tables that limit moves."""

    shards: tuple[ShardFigures, ...]
    providers: Mapping[str, ProviderRow] = field(default_factory=dict)
    quotas: Mapping[QuotaKey, QuotaRow] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One instruction to a donor."""

    tier: Tier
    donor: ShardId
    requester: ShardId
    fingerprint: Fingerprint
    instance_type: str
    #: Empty in tier 3.
    zone: str
    count: int
    #: Exactly these, in READY; else the donor chooses.
    machine_ids: tuple[MachineId, ...]
    requirements: tuple[Requirement, ...]
    min_unit: Vector
    #: What the machines bring, milli-units.
    capacity: Vector
    #: The shortfall's: what a victim must be below.
    priority: int
    interruption_bucket: int
    #: The quota of which slots are transferred when the donor has named the machines; None without a quota.
    quota: QuotaKey | None
    #: One sentence for a person.
    why: str

    @property
    def shortfall(self) -> ShortfallKey:
        """The shortfall that it is for."""
        return ShortfallKey(self.requester, self.fingerprint)

    @property
    def flow(self) -> FlowKey:
        """What must rest after it."""
        return FlowKey.between(self.instance_type, self.zone, self.donor, self.requester)


def quota_behind(
    address: str, providers: Mapping[str, ProviderRow], quotas: Mapping[QuotaKey, QuotaRow]
) -> QuotaKey | None:
    """Return the quota row of the provider at an address, None without one."""
    for name, provider in sorted(providers.items()):
        key = QuotaKey(name, provider.region)
        if provider.address == address and key in quotas:
            return key
    return None


class RebalancePlan:
    """What a pass proposes, and why the rest got nothing."""

    def __init__(
        self, moves: tuple[Transfer, ...], shards: tuple[ShardFigures, ...], reasons: NDArray[np.int8]
    ) -> None:
        #: In the order in which shortfalls were served.
        self.moves = moves
        self._shards = shards
        #: Of the shortfalls of all shards in turn: a Skip, or 0 where something was proposed.
        self._reasons = reasons

    def skips(self) -> dict[Skip, int]:
        """Return how many shortfalls got nothing, by the last gate that something reached."""
        counts = np.bincount(self._reasons, minlength=len(Skip) + 1)
        return {reason: int(counts[reason]) for reason in Skip}

    def skipped(self) -> dict[ShortfallKey, Skip]:
        """Return why each shortfall got nothing, those apart for which something was proposed."""
        keys = (ShortfallKey(shard.shard_id, each.fingerprint) for shard in self._shards for each in shard.shortfalls)
        return {key: Skip(reason) for key, reason in zip(keys, self._reasons.tolist(), strict=True) if reason}
