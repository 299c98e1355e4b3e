"""Generates the world of a seed: its size, its faults, the demand of its clusters.

Swarm testing: each seed draws which faults are on, not only how often, so that one fault does not always hide another
(docs/spec/simulation.md). A plan is a value that can be stored, reduced (`bigfleet.sim.world.shrink`) and run again.
Equal seeds must give equal plans.
"""

from typing import Final

import msgspec

from bigfleet.coordinator.leader_term import CoordinatorSettings
from bigfleet.provider.backends.simulated.world import (
    CloudWorld,
    Dwell,
    Dwells,
    Faults,
    Interruption,
    Pool,
    StockoutModel,
)
from bigfleet.shard.ownership.handover import COOLDOWN_REPORT_CYCLES
from bigfleet.shard.ports import JoinGate, ShardSettings
from bigfleet.sim.kernel.streams import Random, Streams

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
#: The provider takes hardly more operations of a kind than it carries out at a time, all the time.
SHORT_QUEUES: Final = "queues-short"
#: Faults that the network has all the time.
NETWORK_FAULTS: Final = ("net-reset", "net-slow")
#: Faults that come and go; `bigfleet.sim.faults.catalogue` says how.
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
#: Those that a world of one shard may draw.
SHARD_FAULTS: Final = (*CLOUD_FAULTS, *NETWORK_FAULTS, *EVENTS)
#: While a machine is between two shards, an operator says that it wants nothing, or next to nothing.
QUARANTINE_OVER_HANDOVER: Final = "quarantine-over-handover"
#: While a machine is being taken from a gang, every lease of the coordinator's store ends.
LEASE_LOST_OVER_PREEMPTION: Final = "lease-lost-over-preemption"
#: Faults that come and go between several shards, their coordinator and its store.
COORDINATOR_EVENTS: Final = (
    "coordinator-partition",
    "coordinator-partition-one-way",
    "coordinator-crash",
    "coordinator-pause",
    "coordinators-away",
    "store-leaderless",
    "store-partition",
    "lease-lost",
    "commit-unknown",
    "watch-gap",
    "report-twice",
    "answer-again",
    "shard-crash-over-instruction",
    "shard-disk-full",
    "shard-disk-lost",
    "domain-moved",
)
#: Faults for states that the others hardly ever reach. Drawn apart: no other draw moves with them.
RARE_FAULTS: Final = (SHORT_QUEUES, QUARANTINE_OVER_HANDOVER, LEASE_LOST_OVER_PREEMPTION)
ALL_FAULTS: Final = (*SHARD_FAULTS, *COORDINATOR_EVENTS, *RARE_FAULTS)
#: How a coordinator is about: it lives, it never answers, or no shard is configured with one.
LIVE, GONE, NONE = "live", "gone", "none"
#: Every so many-th decision is made a second time from nothing: most of the time of a world goes into decisions.
VERIFY_EVERY_CYCLES: Final = 3
#: Of the seeds, those with several shards.
SEVERAL_SHARE = 0.5
_ZONES: Final = ("a", "b")
_ZONES_OF_SHARDS: Final = ("a", "b", "c")


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
    #: Pods of this kind that one machine may host, because they exclude each other; 0 is no limit.
    per_machine_max: int = 0
    #: The pods must be spread evenly over the zones.
    is_spread: bool = False
    #: No node is ever good enough, for a reason that is no want of capacity.
    is_unschedulable: bool = False


class WorldPlan(msgspec.Struct, frozen=True, kw_only=True):
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
    reclaim_after_seconds: float = 0.0
    #: What something that no operator reports takes of the cpu of every node: fewer pods run there than are decided on.
    hidden_cpu_milli: int = 0
    #: execute, paused or dry-run; until the faults end.
    posture: str = "execute"
    join_gate: str = "observe"
    shards: int = 1
    #: The shard of each cluster, by number; empty with one shard.
    homes: tuple[int, ...] = ()
    #: The zones, and the shard that each is for; empty with one shard.
    zones: tuple[tuple[str, int], ...] = ()
    #: live, gone or none; none with one shard.
    coordinator: str = NONE
    replicas: int = 0
    #: The disks of the shards say from the start whose each zone is; else a coordinator has to.
    is_settled: bool = True
    report_seconds: float = 10.0

    def home(self, cluster: int) -> int:
        """Return the number of the shard to which a cluster reports."""
        return self.homes[cluster] if self.homes else 0

    def coordinator_settings(self) -> CoordinatorSettings:
        """Return the settings of a replica: those of the command line, at the pace of this world's reports."""
        return CoordinatorSettings(
            report_interval_seconds=self.report_seconds,
            rebalance_interval_seconds=5 * self.report_seconds,
            cooldown_seconds=COOLDOWN_REPORT_CYCLES * self.report_seconds,
        )

    def settings(self, *, is_healed: bool = False) -> ShardSettings:
        """Return the settings of a shard of this world."""
        mode = "execute" if is_healed else self.posture
        return ShardSettings(
            cycle_interval_seconds=self.cycle_interval_seconds,
            wake_gap_seconds=self.wake_gap_seconds,
            execute_concurrency_max=8,
            execute_timeout_seconds=20.0,
            bootstrap_timeout_seconds=20.0,
            list_timeout_seconds=30.0,
            engine_verify_every_cycles=VERIFY_EVERY_CYCLES,
            incremental_reconcile=self.is_incremental,
            full_list_every_cycles=10,
            reclaim_cap_fraction=self.reclaim_cap_fraction,
            reclaim_after_seconds=self.reclaim_after_seconds,
            actuation_paused=mode == "paused",
            dry_run=mode == "dry-run",
            outbox_frames_max=48,
            stuck_creating_seconds=400.0,
            stuck_configuring_seconds=400.0,
            stuck_deleting_seconds=400.0,
            stuck_draining_margin_seconds=400.0,
            join_gate=JoinGate(self.join_gate),
            join_deadline_seconds=300.0,
            cluster_silence_seconds=120.0,
            reclaim_without_session_seconds=120.0,
            report_interval_seconds=self.report_seconds,
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
            stockout=StockoutModel(available_seconds_mean=600.0, out_seconds_mean=share("stockout", 120.0)),
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


def draw(seed: int) -> WorldPlan:
    """Return the plan of a seed: of one shard, or of several."""
    alone = _of_one_shard(seed)
    rng = Streams(seed).of("swarm of shards")
    plan = _of_several(alone, rng) if rng.random() < SEVERAL_SHARE else alone
    plan = _with_rare_faults(plan, Streams(seed).of("swarm of rare faults"))
    rng = Streams(seed).of("swarm of pods")
    clusters = tuple(_with_special_pods(kinds, rng) for kinds in plan.clusters)
    return msgspec.structs.replace(plan, clusters=clusters, hidden_cpu_milli=500 if rng.random() < 0.15 else 0)


def _with_special_pods(kinds: tuple[KindPlan, ...], rng: Random) -> tuple[KindPlan, ...]:
    """Return kinds of which some are limited or spread, with pods now and then that can never run."""
    special = []
    for kind in kinds:
        draw = rng.random()
        if kind.name == "service" and draw < 0.3:
            kind = msgspec.structs.replace(kind, per_machine_max=rng.randint(1, 2))
        if kind.name == "batch" and draw < 0.2:
            kind = msgspec.structs.replace(kind, is_spread=True)
        special.append(kind)
    web = next((kind for kind in kinds if kind.name == "web"), None)
    if web is not None and rng.random() < 0.25:
        special.append(msgspec.structs.replace(web, name="huge", count=1, cpu_milli=64_000))
    if web is not None and rng.random() < 0.2:
        special.append(msgspec.structs.replace(web, name="stuck", count=1, is_unschedulable=True))
    return tuple(special)


def _with_rare_faults(plan: WorldPlan, rng: Random) -> WorldPlan:
    faults, clusters = plan.faults, list(plan.clusters)
    if rng.random() < 0.15:
        faults += (SHORT_QUEUES,)
    if plan.coordinator == LIVE and rng.random() < 0.3:
        faults += (QUARANTINE_OVER_HANDOVER,)
        if not any(map(is_crowd, clusters)):
            number = rng.randrange(len(clusters))
            clusters[number] += _crowd()
    if plan.coordinator == LIVE and rng.random() < 0.3:
        faults += (LEASE_LOST_OVER_PREEMPTION,)
        clusters = [_in_gangs(kinds) for kinds in clusters]
    return msgspec.structs.replace(plan, faults=faults, clusters=tuple(clusters))


def _crowd() -> tuple[KindPlan, ...]:
    """Return rows enough for a roll-up that can shrink suspiciously."""
    return tuple(
        KindPlan(name=f"row-{number:02d}", count=1, cpu_milli=100, priority=200 + number) for number in range(14)
    )


def is_crowd(kinds: tuple[KindPlan, ...]) -> bool:
    """Return whether a cluster has rows enough for a roll-up that can shrink suspiciously."""
    return any(kind.name == "row-00" for kind in kinds)


def _in_gangs(kinds: tuple[KindPlan, ...]) -> tuple[KindPlan, ...]:
    """Return gangs, for which nearly everything is more important, in place of what a cluster with enough wants."""
    if all(kind.name != "batch" for kind in kinds):
        # It starves: what it wants is what machines are taken from gangs for.
        return kinds
    herds = tuple(
        KindPlan(name=f"herd-{number}", count=2, cpu_milli=3000, priority=5, is_gang=True) for number in range(3)
    )
    return herds + (_crowd() if is_crowd(kinds) else ())


def _of_one_shard(seed: int) -> WorldPlan:
    rng = Streams(seed).of("swarm")
    machines = _pools(rng)
    clusters = tuple(_kinds(rng, number) for number in range(rng.randint(1, 3)))
    eagerness = rng.choice((0.15, 0.3, 0.5))
    faults = tuple(fault for fault in SHARD_FAULTS if rng.random() < eagerness)
    return WorldPlan(
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
        # Of a stream of its own: what else a seed draws stays as it was.
        reclaim_after_seconds=float(Streams(seed).of("reclaim-delay").choice((0, 60, 600))),
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
        kinds += _crowd()
    return tuple(kinds)


# ---- several shards ----------------------------------------------------------------------------------------------


def _of_several(alone: WorldPlan, rng: Random) -> WorldPlan:
    """Return a plan of two or three shards, of which one starves beside another that has machines to spare."""
    shards = rng.choice((2, 2, 3))
    starving = rng.randrange(shards)
    eagerness = rng.choice((0.15, 0.3, 0.5))
    coordinator = rng.choice((LIVE,) * 7 + (GONE,))
    homes = list(range(shards))
    if rng.random() < 0.3:
        # A shard without a cluster: its machines are for the others, and its zone can be left at once.
        homes.remove(rng.choice([number for number in homes if number != starving]))
    if rng.random() < 0.4:
        homes.append(rng.choice(homes))
    faults = (*alone.faults, *(fault for fault in COORDINATOR_EVENTS if rng.random() < eagerness))
    zones = _ZONES_OF_SHARDS[:shards]
    return msgspec.structs.replace(
        alone,
        faults=faults,
        pools=tuple(pool for number, zone in enumerate(zones) for pool in _zone(rng, zone, number == starving)),
        clusters=tuple(_wants(rng, number, home == starving) for number, home in enumerate(homes)),
        safety_seconds=float(rng.choice((500, 900))),
        change_seconds_mean=float(rng.choice((40, 100, 200))),
        cycle_interval_seconds=float(rng.choice((5, 10))),
        shards=shards,
        homes=tuple(homes),
        zones=tuple((zone, number) for number, zone in enumerate(zones)),
        coordinator=coordinator,
        replicas=rng.randint(1, 2),
        is_settled=coordinator == GONE or rng.random() < 0.6,
        report_seconds=rng.choice((5.0, 10.0)),
    )


def _zone(rng: Random, zone: str, is_poor: bool) -> tuple[PoolPlan, ...]:
    def pool(instance_type: str, capacity_type: str, count: int, probability: float = 0.0) -> PoolPlan:
        cpu, price = (4, 0.2) if instance_type == "small" else (16, 0.7)
        factor = {"bare_metal": 0.2, "reserved": 0.6, "on_demand": 1.0, "spot": 0.3}[capacity_type]
        return PoolPlan(
            instance_type=instance_type,
            zone=zone,
            capacity_type=capacity_type,
            count=count,
            cpu=cpu,
            price_usd_per_hour=price * factor,
            probability=probability,
        )

    if is_poor:
        return (pool("small", rng.choice(("bare_metal", "on_demand")), rng.randint(1, 2)),)
    pools = [pool("small", rng.choice(("bare_metal", "bare_metal", "reserved")), rng.randint(4, 7))]
    if rng.random() < 0.5:
        pools.append(pool("small", "on_demand", rng.randint(2, 5)))
    if rng.random() < 0.3:
        pools.append(pool("large", rng.choice(("reserved", "spot")), rng.randint(1, 3), 0.1))
    return tuple(pools)


def _wants(rng: Random, cluster: int, is_starving: bool) -> tuple[KindPlan, ...]:
    if not is_starving:
        return _kinds(rng, cluster)
    return (
        KindPlan(name="web", count=rng.randint(8, 16), cpu_milli=1000, priority=1000 + cluster, penalty_dollars=16),
        KindPlan(name="service", count=rng.randint(2, 6), cpu_milli=2000, priority=2000, penalty_dollars=64),
    )
