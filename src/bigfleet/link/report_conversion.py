"""Converts what a shard reports into what a coordinator reads: figures, shortfalls, ownership, reservations.

docs/spec/wire.md §10, docs/spec/shard.md §11.3. Pure functions. Nothing here may judge what the shard says.
"""

from collections.abc import Iterable, Mapping

from bigfleet.coordinator.ephemeral_state import SOLD_OUT_MAX
from bigfleet.coordinator.reports import Shortfall, SoldOutPool
from bigfleet.coordinator.shard_report import CapacityRow, Holding, Kept, Summary
from bigfleet.engine import shortfalls
from bigfleet.engine.decision import CapacityPool
from bigfleet.model.ids import MachineId
from bigfleet.model.ownership import Owned
from bigfleet.shard.ownership.ownership_file import Reservation
from bigfleet.shard.status import reports


def summary_of(figures: reports.Summary, *, provider_address: str) -> Summary:
    """Return a shard's figures; machines of one provider address may go from shard to shard."""
    return Summary(
        total_machines=figures.total_machines,
        free_machines=figures.free_machines,
        type_counts=figures.per_instance_type_counts,
        zone_counts=figures.per_zone_counts,
        provider_address=provider_address,
        idle=tuple(map(_row, figures.idle_by_type_zone)),
        speculative=tuple(map(_row, figures.speculative_by_type_zone)),
    )


def shortfall_of(shortfall: shortfalls.Shortfall) -> Shortfall:
    """Return what one profile lacks in the whole shard."""
    profile = shortfall.profile
    return Shortfall(
        fingerprint=shortfall.fingerprint,
        requirements=profile.requirements,
        deficit=shortfall.deficit,
        min_unit=shortfall.min_unit,
        priority=profile.priority,
        age_cycles=shortfall.age,
        interruption_bucket=profile.interruption_bucket,
        is_topology_constrained=shortfall.topology_constrained,
    )


def sold_out_of(pools: Mapping[CapacityPool, float]) -> tuple[SoldOutPool, ...]:
    """Return the pools without stock, longest back-off first; as many as one report may name."""
    longest = sorted(pools.items(), key=lambda item: (-item[1], item[0]))[:SOLD_OUT_MAX]
    return tuple(SoldOutPool(*pool, backoff_seconds) for pool, backoff_seconds in longest)


def pools_of(told: Iterable[SoldOutPool]) -> dict[CapacityPool, float]:
    """Return the pools that other shards report, each with the rest of its back-off in seconds."""
    return {CapacityPool(each.instance_type, each.zone, each.capacity_type): each.backoff_seconds for each in told}


def holding_of(owned: Owned, reservations: Mapping[MachineId, Reservation]) -> Holding:
    """Return the view that a leader squares with its tables."""
    return Holding(
        owned=owned,
        kept=tuple(
            Kept(
                each.machine_id,
                each.to_shard,
                each.instruction_id,
                each.is_ready,
                each.expires_unix_nanos,
                each.instance_type,
                each.zone,
            )
            for _machine_id, each in sorted(reservations.items())
        ),
    )


def _row(count: reports.CapacityCount) -> CapacityRow:
    return CapacityRow(count.instance_type, count.zone, count.capacity_type, count.count, count.allocatable)
