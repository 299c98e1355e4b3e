"""Defines the report that a shard sends to the coordinator at every interval (docs/spec/wire.md §10).

A shard fills in its parts, the link puts them together, the coordinator keeps the last report of each shard. Bounds are
checked where a report comes off the wire. This module does not judge a report.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from bigfleet.model.ids import ClusterId, Fingerprint, ShardId
from bigfleet.model.instructions import Ack
from bigfleet.model.ownership import Owned, Reservation
from bigfleet.model.profile import Requirement
from bigfleet.model.states import CapacityType
from bigfleet.model.vector import Vector


@dataclass(frozen=True, slots=True)
class CapacityCount:
    """Machines of one instance type, zone and capacity type that could be given away."""

    instance_type: str
    zone: str
    capacity_type: CapacityType
    count: int
    #: Smallest among them, per dimension, milli-units; a dimension that one of them lacks is absent.
    allocatable: Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSummary:
    """A shard's machines in figures."""

    #: In any state.
    total_machines: int = 0
    #: Idle and Speculative.
    free_machines: int = 0
    #: In any state, at most 256 names each, largest first, then by name.
    type_counts: Mapping[str, int] = field(default_factory=dict)
    zone_counts: Mapping[str, int] = field(default_factory=dict)
    #: Empty: the provider runs in the shard's process.
    provider_address: str = ""
    #: At most 64 each, largest first, then type, zone, capacity type.
    idle: tuple[CapacityCount, ...] = ()
    speculative: tuple[CapacityCount, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """What one profile lacks in a whole shard."""

    fingerprint: Fingerprint
    requirements: tuple[Requirement, ...]
    #: Sum of what its rows lack after Phase 2, milli-units; never empty.
    deficit: Vector
    #: Per-dimension maximum of its rows' min units, milli-units.
    min_unit: Vector
    priority: int
    #: Advancing cycles in a row in which it was present, at least 1.
    age_cycles: int
    interruption_bucket: int
    #: A requirement is Same: it never crosses a shard.
    is_topology_constrained: bool


class SoldOutPool(NamedTuple):
    """A capacity pool without stock, and how much longer nothing is created in it."""

    instance_type: str
    zone: str
    capacity_type: CapacityType
    backoff_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What a shard owns and what it reserves for others; sent after a change, or on request."""

    owned: Owned
    #: By machine.
    reservations: tuple[Reservation, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReport:
    """The content of one report."""

    shard_id: ShardId
    epoch: int
    cycle: int
    timestamp_unix_nanos: int = 0
    address: str = ""
    #: The term that the shard has accepted.
    echoed_term: int = 0
    summary: ShardSummary = ShardSummary()
    #: Priority descending, age descending, fingerprint; at most 100.
    shortfalls: tuple[Shortfall, ...] = ()
    acks: tuple[Ack, ...] = ()
    #: None: as it was.
    clusters: frozenset[ClusterId] | None = None
    holding: Holding | None = None
    #: Pools in which its own creations failed for want of stock.
    sold_out: tuple[SoldOutPool, ...] = ()
