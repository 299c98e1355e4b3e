"""Defines the whole report that a shard sends every interval.

docs/spec/wire.md §10. A link builds one, a leader keeps the last of each shard and shows it; `taken` makes of it what
the leader's rules work on. Nothing here judges a report: bounds are checked where it comes off the wire.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from bigfleet.coordinator.ephemeral_state import ReceivedReport
from bigfleet.coordinator.reports import CapacityCount, Reservation, Shortfall, SoldOutPool, prepared
from bigfleet.model.ids import ClusterId, MachineId, ShardId
from bigfleet.model.instructions import Ack
from bigfleet.model.ownership import Base, Owned
from bigfleet.model.states import CapacityType
from bigfleet.model.vector import Vector


@dataclass(frozen=True, slots=True)
class CapacityRow:
    """Giveable machines of one instance type, zone and capacity type."""

    instance_type: str
    zone: str
    capacity_type: CapacityType
    count: int
    #: Smallest in the row, per dimension, milli-units.
    allocatable: Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a shard has."""

    total_machines: int = 0
    #: Idle and speculative ones.
    free_machines: int = 0
    #: Machines in any state.
    type_counts: Mapping[str, int] = field(default_factory=dict)
    zone_counts: Mapping[str, int] = field(default_factory=dict)
    #: Empty: the provider runs in the shard's process.
    provider_address: str = ""
    idle: tuple[CapacityRow, ...] = ()
    speculative: tuple[CapacityRow, ...] = ()


@dataclass(frozen=True, slots=True)
class Kept:
    """A machine that a donor drains, or has drained, for another shard."""

    machine_id: MachineId
    to_shard_id: ShardId
    instruction_id: str
    #: Idle now.
    is_ready: bool
    #: 0 until it is ready.
    expires_unix_nanos: int
    instance_type: str
    zone: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What a shard owns, and what it keeps for others: sent when it changed, or when asked for."""

    owned: Owned
    #: By machine.
    kept: tuple[Kept, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReport:
    """Everything that one report says."""

    shard_id: ShardId
    epoch: int
    cycle: int
    timestamp_unix_nanos: int = 0
    address: str = ""
    #: The term that the shard has accepted.
    echoed_term: int = 0
    summary: Summary = Summary()
    shortfalls: tuple[Shortfall, ...] = ()
    acks: tuple[Ack, ...] = ()
    #: None: as it was.
    clusters: frozenset[ClusterId] | None = None
    holding: Holding | None = None
    #: Pools in which its own creations failed for want of stock.
    sold_out: tuple[SoldOutPool, ...] = ()


def taken(report: ShardReport) -> ReceivedReport:
    """Return the report as a leader takes it; base, freshness and ready machines are filled in before each pass."""
    summary = report.summary
    return ReceivedReport(
        shard_id=report.shard_id,
        epoch=report.epoch,
        cycle=report.cycle,
        address=report.address,
        echoed_term=report.echoed_term,
        provider_address=summary.provider_address,
        figures=prepared(
            shard_id=report.shard_id,
            provider_address=summary.provider_address,
            base=Base.ALL,
            shortfalls=report.shortfalls,
            idle=map(_count, summary.idle),
            speculative=map(_count, summary.speculative),
            type_counts=summary.type_counts,
        ),
        owned=None if report.holding is None else report.holding.owned,
        clusters=report.clusters,
        acks=report.acks,
        sold_out=report.sold_out,
    )


def ready_in(kept: tuple[Kept, ...]) -> tuple[Reservation, ...]:
    """Return the machines that are drained and wait, by id."""
    ready = (each for each in kept if each.is_ready)
    return tuple(
        Reservation(each.machine_id, each.to_shard_id, each.instance_type, each.zone)
        for each in sorted(ready, key=lambda each: each.machine_id)
    )


def _count(row: CapacityRow) -> CapacityCount:
    return CapacityCount(row.instance_type, row.zone, row.count, row.allocatable)
