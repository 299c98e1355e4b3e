"""Converts parts of a shard's state into parts of its report: ownership, reservations, pools without stock.

docs/spec/wire.md §10, docs/spec/shard.md §11.3. Pure functions. This module must not judge what the shard says.
"""

from collections.abc import Iterable, Mapping

from bigfleet.coordinator.ephemeral_state import SOLD_OUT_MAX
from bigfleet.engine.decision import CapacityPool
from bigfleet.model.ids import MachineId
from bigfleet.model.ownership import Owned, Reservation
from bigfleet.model.shard_report import Holding, SoldOutPool


def sold_out_of(pools: Mapping[CapacityPool, float]) -> tuple[SoldOutPool, ...]:
    """Return the pools without stock, longest back-off first; as many as one report may name."""
    longest = sorted(pools.items(), key=lambda item: (-item[1], item[0]))[:SOLD_OUT_MAX]
    return tuple(SoldOutPool(*pool, backoff_seconds) for pool, backoff_seconds in longest)


def pools_of(reported: Iterable[SoldOutPool]) -> dict[CapacityPool, float]:
    """Return the pools that other shards report, each with the rest of its back-off in seconds."""
    return {CapacityPool(each.instance_type, each.zone, each.capacity_type): each.backoff_seconds for each in reported}


def holding_of(owned: Owned, reservations: Mapping[MachineId, Reservation]) -> Holding:
    """Return the view that a leader compares with its tables."""
    return Holding(owned=owned, reservations=tuple(each for _machine_id, each in sorted(reservations.items())))
