"""Generates the operator world of a seed: its machines, workloads, replicas and faults.

As in `bigfleet.sim.plan_generator`, from streams of its own. Equal seeds must give equal plans.
"""

from typing import Final

import msgspec

from bigfleet.sim.kernel.streams import Random, Streams
from bigfleet.sim.plan_generator import NETWORK_FAULTS, PoolPlan, WorldPlan

#: Faults of cloud, shard, provider and network that this world has as well: those that clusters see something of, and
#: after which no machine is held for half an hour.
SHARED_FAULTS: Final = (
    "error-after-effect",
    "transient",
    "slow-boot",
    "interruptions",
    *NETWORK_FAULTS,
    "stall",
    "reconnect-storm",
    "list-stale",
    "store-down",
    "provider-crash",
    "shard-crash",
    "shard-pause",
    "shard-zombie",
)
#: Faults of API servers, their clients, and people.
KUBERNETES_FAULTS: Final = (
    "api-down",
    "api-hangs",
    "api-slow",
    "watches-dropped",
    "watches-expired",
    "writes-refused",
    "answers-lost",
    "operator-killed",
    "operator-paused",
    "operator-cut-off",
    "pod-controller-killed",
    "pod-controller-paused",
    "pod-controller-cut-off",
    "session-cut",
    "nodes-not-ready",
    "person-cordons",
    "person-meddles",
)
OPERATOR_FAULTS: Final = (*SHARED_FAULTS, *KUBERNETES_FAULTS)


class WorkloadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Equal pods of one controller in one cluster; no two workloads of a cluster have the same priority."""

    name: str
    count: int
    cpu_milli: int
    priority: int
    #: Pods that a disruption budget lets be away at a time; None is no budget.
    unavailable_max: int | None = None
    #: One pod a node, by required anti-affinity.
    is_exclusive: bool = False
    #: How long a pod takes to end.
    ends_seconds: float = 2.0


class OperatorPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a run of the operator world depends on."""

    #: Shard, provider, machines, faults and times. Its clusters are empty: those of this world are below.
    world: WorldPlan
    clusters: tuple[tuple[WorkloadPlan, ...], ...]
    #: Processes of each Deployment: operator and pod controller.
    replicas: int = 1
    #: Whether Nodes carry the machine id, or are matched by their provider id.
    has_node_labels: bool = True
    #: How long a Node is there before it is Ready.
    ready_seconds: float = 5.0
    #: How often the garbage collector of the cluster runs.
    collects_seconds: float = 5.0
    #: What a DaemonSet takes of each node.
    daemon_cpu_milli: int = 100
    #: Nodes of each cluster that are no machines of the fleet, of 4 CPUs each.
    unmanaged_nodes: int = 0
    #: Changes of a kind that an API server remembers for watches that resume.
    history_max: int = 500


def draw_operator(seed: int) -> OperatorPlan:
    """Return the plan of a seed."""
    rng = Streams(seed).of("swarm of operators")
    eagerness = rng.choice((0.15, 0.3, 0.5))
    world = WorldPlan(
        seed=seed,
        faults=tuple(fault for fault in OPERATOR_FAULTS if rng.random() < eagerness),
        pools=_pools(rng),
        clusters=(),
        safety_seconds=float(rng.choice((150, 300, 450))),
        fault_seconds_mean=float(rng.choice((8, 15, 30))),
        change_seconds_mean=float(rng.choice((15, 30, 60))),
        cycle_interval_seconds=float(rng.choice((5, 10, 20))),
        reclaim_cap_fraction=rng.choice((0.2, 0.5)),
        reclaim_after_seconds=float(rng.choice((0, 0, 60))),
        join_gate=rng.choice(("observe", "observe", "enforce")),
    )
    return OperatorPlan(
        world=world,
        clusters=tuple(_workloads(rng, number) for number in range(rng.choice((1, 1, 2)))),
        replicas=rng.choice((1, 2, 2)),
        has_node_labels=rng.random() < 0.7,
        ready_seconds=rng.choice((0.0, 5.0, 20.0)),
        collects_seconds=rng.choice((5.0, 30.0)),
        history_max=rng.choice((30, 500)),
    )


def _pools(rng: Random) -> tuple[PoolPlan, ...]:
    pools = [_pool(rng, "small", "bare_metal", rng.randint(3, 6), 0.0)]
    if rng.random() < 0.6:
        pools.append(_pool(rng, "small", "reserved", rng.randint(2, 5), 0.0))
    if rng.random() < 0.4:
        pools.append(_pool(rng, "large", "spot", rng.randint(1, 3), 0.3))
    return tuple(pools)


def _pool(rng: Random, instance_type: str, capacity_type: str, count: int, probability: float) -> PoolPlan:
    cpu, price = (4, 0.2) if instance_type == "small" else (16, 0.7)
    return PoolPlan(
        instance_type=instance_type,
        zone=rng.choice("ab"),
        capacity_type=capacity_type,
        count=count,
        cpu=cpu,
        price_usd_per_hour=price * {"bare_metal": 0.2, "reserved": 0.6, "spot": 0.3}[capacity_type],
        probability=probability,
    )


def _workloads(rng: Random, cluster: int) -> tuple[WorkloadPlan, ...]:
    def budget(share: float) -> int | None:
        return rng.randint(1, 2) if rng.random() < share else None

    return (
        WorkloadPlan(
            name="web",
            count=rng.randint(1, 10),
            cpu_milli=1000,
            priority=100 + cluster,
            unavailable_max=budget(0.6),
            ends_seconds=rng.choice((1.0, 10.0)),
        ),
        WorkloadPlan(
            name="service",
            count=rng.randint(0, 4),
            cpu_milli=2000,
            priority=1000 + cluster,
            unavailable_max=budget(0.5),
            is_exclusive=rng.random() < 0.3,
        ),
        WorkloadPlan(name="batch", count=rng.randint(0, 6), cpu_milli=500, priority=10 + cluster),
    )
