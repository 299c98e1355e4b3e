"""What one seed's world consists of: how large it is, which faults it knows, what its clusters want.

A swarm: each seed draws which faults are on, not only how often, so that one fault does not always hide behind another
(docs/spec/simulation.md). A plan is a value that can be written down, made smaller (`bigfleet.sim.world.shrink`) and
run again. Equal seeds must give equal plans.
"""

from random import Random  # noqa: TID251 - a type; the instance is handed in
from typing import Final

import msgspec

from bigfleet.provider.simulated.world import Dwell, Dwells, Faults, Interruption, Pool, Stockout
from bigfleet.provider.simulated.world import World as CloudWorld
from bigfleet.shard.ports import JoinGate, ShardSettings
from bigfleet.sim.kernel.streams import Streams

#: Faults that the cloud of a world has all the time.
CLOUD_FAULTS: Final = (
    "create-error",
    "join-never",
    "error-after-effect",
    "effect-after-timeout",
    "transient",
    "inventory-partial",
    "inventory-stale",
    "prices-bad",
    "stockout",
    "slow-boot",
    "interruptions",
)
#: Faults that the network has all the time.
NETWORK_FAULTS: Final = ("net-reset", "net-slow")
#: Faults that come and go; `bigfleet.sim.world.faults` says how.
EVENTS: Final = (
    "partition",
    "partition-one-way",
    "stall",
    "slow-reader",
    "reconnect-storm",
    "list-stale",
    "list-partial",
    "cursor-lost",
    "records-mangled",
    "store-down",
    "provider-crash",
    "shard-crash",
    "shard-pause",
    "shard-zombie",
    "operator-crash",
    "operator-silent",
    "operator-twin",
    "rollup-empty",
    "rollup-truncated",
    "rollup-stale",
    "rollup-replayed",
    "rollup-flapping",
    "bootstrap-refused",
    "bootstrap-silent",
)
ALL_FAULTS: Final = (*CLOUD_FAULTS, *NETWORK_FAULTS, *EVENTS)
_ZONES: Final = ("a", "b")


class PoolPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Machines of one kind."""

    instance_type: str
    zone: str
    capacity_type: str
    count: int
    cpu: int
    price_usd_per_hour: float
    probability: float = 0.0


class KindPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Pods of one kind in one cluster."""

    name: str
    count: int
    cpu_milli: int
    priority: int
    penalty_dollars: int = 0
    #: The pods must share a rack.
    is_gang: bool = False


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a run of the fault world depends on."""

    seed: int
    faults: tuple[str, ...]
    pools: tuple[PoolPlan, ...]
    #: Kinds of pods, by cluster.
    clusters: tuple[tuple[KindPlan, ...], ...]
    #: How long faults may come.
    safety_seconds: float
    #: Mean time between two faults, and between two changes of demand.
    fault_seconds_mean: float
    change_seconds_mean: float
    rack_size: int = 4
    cycle_interval_seconds: float = 10.0
    wake_gap_seconds: float | None = 0.5
    is_incremental: bool = False
    reclaim_cap_fraction: float = 0.2
    #: execute, paused or dry-run; until the faults end.
    posture: str = "execute"
    join_gate: str = "observe"

    def settings(self, *, is_healed: bool = False) -> ShardSettings:
        """Return the settings of a shard of this world."""
        posture = "execute" if is_healed else self.posture
        return ShardSettings(
            cycle_interval_seconds=self.cycle_interval_seconds,
            wake_gap_seconds=self.wake_gap_seconds,
            execute_concurrency_max=8,
            execute_timeout_seconds=20.0,
            bootstrap_timeout_seconds=20.0,
            list_timeout_seconds=30.0,
            engine_verify_every_cycles=1,
            incremental_reconcile=self.is_incremental,
            full_list_every_cycles=10,
            reclaim_cap_fraction=self.reclaim_cap_fraction,
            actuation_paused=posture == "paused",
            dry_run=posture == "dry-run",
            outbox_frames_max=48,
            stuck_creating_seconds=400.0,
            stuck_configuring_seconds=400.0,
            stuck_deleting_seconds=400.0,
            stuck_draining_margin_seconds=400.0,
            join_gate=JoinGate(self.join_gate),
            join_deadline_seconds=300.0,
            cluster_silence_seconds=120.0,
        )

    def cloud(self) -> CloudWorld:
        """Return the world of the simulated cloud."""
        on = set(self.faults)

        def share(fault: str, of: float) -> float:
            return of if fault in on else 0.0

        bad = share("prices-bad", 0.05)
        return CloudWorld(
            rack_size=self.rack_size,
            pools=tuple(
                Pool(
                    instance_type=pool.instance_type,
                    zone=pool.zone,
                    count=pool.count,
                    capacity_type=pool.capacity_type,
                    allocatable={"cpu": str(pool.cpu), "memory": f"{4 * pool.cpu}Gi"},
                    price_per_hour=pool.price_usd_per_hour,
                    interruption_probability=pool.probability,
                )
                for pool in self.pools
            ),
            interruption=Interruption(
                truth_factor=share("interruptions", 1.0), notice_seconds=60.0, hint_seconds=120.0
            ),
            dwell=Dwells(
                create_bare_metal=Dwell(median_seconds=60, p99_seconds=120),
                slow_share=share("slow-boot", 0.2),
                slow_factor=8.0,
            ),
            stockout=Stockout(available_seconds_mean=600.0, out_seconds_mean=share("stockout", 120.0)),
            faults=Faults(
                create_error=share("create-error", 0.1),
                join_never=share("join-never", 0.1),
                error_after_effect=share("error-after-effect", 0.1),
                effect_after_timeout=share("effect-after-timeout", 0.1),
                transient=share("transient", 0.2),
                inventory_partial=share("inventory-partial", 0.2),
                inventory_stale=share("inventory-stale", 0.2),
                price_nan=bad,
                price_negative=bad,
                price_x100=bad,
                probability_over_1=bad,
            ),
        )


def draw(seed: int) -> Plan:
    """Return the plan of a seed."""
    rng = Streams(seed).of("swarm")
    machines = _pools(rng)
    clusters = tuple(_kinds(rng, number) for number in range(rng.randint(1, 3)))
    eagerness = rng.choice((0.15, 0.3, 0.5))
    faults = tuple(fault for fault in ALL_FAULTS if rng.random() < eagerness)
    return Plan(
        seed=seed,
        faults=faults,
        pools=machines,
        clusters=clusters,
        safety_seconds=float(rng.choice((600, 1200, 1800))),
        fault_seconds_mean=float(rng.choice((15, 40, 90))),
        change_seconds_mean=float(rng.choice((20, 60, 200))),
        rack_size=rng.choice((2, 4)),
        cycle_interval_seconds=float(rng.choice((5, 10, 20))),
        wake_gap_seconds=rng.choice((0.5, 0.5, None)),
        is_incremental=rng.random() < 0.5,
        reclaim_cap_fraction=rng.choice((0.05, 0.2, 0.5)),
        posture=rng.choice(("execute",) * 14 + ("paused", "dry-run")),
        join_gate=rng.choice(("observe", "observe", "enforce", "off")),
    )


def _pools(rng: Random) -> tuple[PoolPlan, ...]:
    shapes = (("small", 4, 0.2), ("large", 16, 0.7))
    pools = []
    for instance_type, cpu, price in shapes:
        for capacity_type, factor, probability in (
            ("bare_metal", 0.2, 0.0),
            ("reserved", 0.6, 0.0),
            ("on_demand", 1.0, 0.0),
            ("spot", 0.3, 0.3),
        ):
            if rng.random() < 0.45:
                continue
            pools.append(
                PoolPlan(
                    instance_type=instance_type,
                    zone=rng.choice(_ZONES),
                    capacity_type=capacity_type,
                    count=rng.randint(2, 6),
                    cpu=cpu,
                    price_usd_per_hour=price * factor,
                    probability=probability,
                )
            )
    if not pools:
        pools.append(
            PoolPlan(
                instance_type="small",
                zone="a",
                capacity_type="on_demand",
                count=6,
                cpu=4,
                price_usd_per_hour=0.2,
            )
        )
    return tuple(pools)


def _kinds(rng: Random, cluster: int) -> tuple[KindPlan, ...]:
    kinds = [
        KindPlan(name="web", count=rng.randint(1, 12), cpu_milli=1000, priority=100 + cluster),
        KindPlan(
            name="service", count=rng.randint(0, 6), cpu_milli=2000, priority=1000 + 100 * cluster, penalty_dollars=8
        ),
        KindPlan(name="batch", count=rng.randint(0, 10), cpu_milli=500, priority=10),
    ]
    if rng.random() < 0.5:
        kinds.append(KindPlan(name="gang", count=rng.randint(2, 4), cpu_milli=3000, priority=5000, is_gang=True))
    if rng.random() < 0.3:
        # Rows enough for a roll-up that can shrink suspiciously.
        kinds += [
            KindPlan(name=f"row-{number:02d}", count=1, cpu_milli=100, priority=200 + number) for number in range(14)
        ]
    return tuple(kinds)
