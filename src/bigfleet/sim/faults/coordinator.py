"""Injects faults between shards, their coordinator and its store, one function each, and undoes them.

They draw from the same stream as `bigfleet.sim.faults.catalogue`. One of them is an administrator who moves a domain. A
fault never touches the state of the code under test.
"""

from collections.abc import Callable
from functools import partial

from bigfleet.sim.faults.parts import (
    Fault,
    answer_wrongly,
    come_back,
    crash,
    cut,
    for_a_while,
    let_operator_answer_wrongly,
    stand_still,
)
from bigfleet.sim.plan_generator import LEASE_LOST_OVER_PREEMPTION, QUARANTINE_OVER_HANDOVER, is_crowd
from bigfleet.sim.sites.coordinator import CoordinatorSite
from bigfleet.sim.sites.etcd import ETCD
from bigfleet.sim.sites.shard import ShardSite
from bigfleet.sim.world.world import World

#: How long what is undone again lasts.
_LASTS_SECONDS_MAX = 90.0
#: Callbacks that a shard may still run once it was given an instruction.
_DEATH_STEPS_MAX = 60


def _replica(world: World) -> CoordinatorSite:
    return world.rng.choice(world.fleet.replicas)


def _shard(world: World) -> ShardSite:
    return world.rng.choice(world.shards)


# ---- the network ------------------------------------------------------------------------------------------------


async def coordinator_partition(world: World) -> None:
    """Nothing passes between a shard and a replica, in either direction."""
    one, other = _shard(world).name, _replica(world).name
    await _cut(world, "coordinator-partition", [(one, other), (other, one)])


async def coordinator_partition_one_way(world: World) -> None:
    """Nothing passes in one direction between a shard and a replica: an answer is lost, or a report."""
    ends = [_shard(world).name, _replica(world).name]
    world.rng.shuffle(ends)
    await _cut(world, "coordinator-partition-one-way", [(ends[0], ends[1])])


async def store_partition(world: World) -> None:
    """Nothing passes between a replica and the store."""
    name = _replica(world).name
    await _cut(world, "store-partition", [(name, ETCD), (ETCD, name)])


async def _cut(world: World, name: str, ways: list[tuple[str, str]]) -> None:
    world.observations.note("fault", name, " ".join(ways[0]))
    await cut(world, [world.fleet.network.link(*way) for way in ways], _LASTS_SECONDS_MAX)


async def _on_the_way(world: World, name: str) -> None:
    """Reports arrive twice, or answers come again, for a while."""
    world.observations.note("fault", name)
    await answer_wrongly(world, world.fleet.faults, name, 180.0)


# ---- replicas ---------------------------------------------------------------------------------------------------


async def coordinator_crash(world: World) -> None:
    """A replica dies between two awaits, and starts again knowing nothing but what is written."""
    site = _replica(world)
    await crash(
        world,
        "coordinator-crash",
        site,
        lambda: site.start(world.plan.coordinator_settings()),
        who=site.name,
        steps_max=200,
        dies_seconds=(1.0, 20.0),
    )


async def coordinator_pause(world: World) -> None:
    """A replica stands still, for longer than its lease or not, and goes on knowing nothing of it."""
    site = _replica(world)
    world.observations.note("fault", "coordinator-pause", site.name)
    await stand_still(world, site.process, 60.0)


async def coordinators_away(world: World) -> None:
    """No replica runs for a while."""
    world.observations.note("fault", "coordinators-away")
    for site in world.fleet.replicas:
        site.process.kill()
    await for_a_while(world, 240.0)
    for site in world.fleet.replicas:
        if not site.process.is_alive:
            site.start(world.plan.coordinator_settings())


# ---- the store --------------------------------------------------------------------------------------------------


async def store_leaderless(world: World) -> None:
    """No member of the store leads: it can be neither read nor written."""
    world.observations.note("fault", "store-leaderless")
    world.fleet.store.is_down = True
    await for_a_while(world, 40.0)
    world.fleet.store.is_down = False


async def lease_lost(world: World) -> None:
    """Every lease ends at once, also of live replicas."""
    world.observations.note("fault", "lease-lost")
    world.fleet.store.end_leases()
    await world.clock.sleep(0.0)


async def commit_unknown(world: World) -> None:
    """A replica does not hear what became of its writes."""
    site = _replica(world)
    world.observations.note("fault", "commit-unknown", site.name)
    site.loses_answers = True
    await for_a_while(world, _LASTS_SECONDS_MAX)
    site.loses_answers = False


async def watch_gap(world: World) -> None:
    """Watches of the store miss what happens."""
    world.observations.note("fault", "watch-gap")
    world.fleet.store.misses_events = True
    await for_a_while(world, _LASTS_SECONDS_MAX)
    world.fleet.store.misses_events = False


# ---- shards and domains -----------------------------------------------------------------------------------------


async def shard_crash_over_instruction(world: World) -> None:
    """A shard dies some callbacks after it was given an instruction, and starts again from its disk."""
    site = _shard(world)
    link = world.fleet.links[site.name]

    def doom() -> None:
        process = site.process
        if process.dies_at_step is None:
            process.dies_at_step = process.steps + world.rng.randrange(1, _DEATH_STEPS_MAX)

    link.on_instruction.append(doom)
    await for_a_while(world, 240.0)
    link.on_instruction.clear()
    world.observations.note("fault", "shard-crash-over-instruction", f"{site.name} step {site.process.steps}")
    await come_back(world, site, lambda: site.start(world.plan.settings()), 20.0)


async def shard_disk_full(world: World) -> None:
    """A shard's disk takes nothing."""
    disk = _shard(world).disk
    assert disk is not None, "several shards have disks"
    world.observations.note("fault", "shard-disk-full", disk.shard_id)
    disk.is_full = True
    await for_a_while(world, _LASTS_SECONDS_MAX)
    disk.is_full = False


async def shard_disk_lost(world: World) -> None:
    """A shard dies and its disk is lost: it begins again, and owns nothing until it is instructed."""
    site = _shard(world)
    world.observations.note("fault", "shard-disk-lost", site.name)
    site.lose_disk()
    await come_back(world, site, lambda: site.start(world.plan.settings()), 30.0)


async def domain_moved(world: World) -> None:
    """An administrator gives a zone to another shard."""
    zone = world.rng.choice(sorted(world.fleet.wanted))
    world.fleet.wanted[zone] = _shard(world).name
    world.observations.note("fault", "domain-moved", f"{zone} {world.fleet.wanted[zone]}")
    await world.clock.sleep(0.0)


async def quarantine_over_handover(world: World) -> None:
    """While a machine is between two shards, an operator says that it wants nothing, or next to nothing."""
    moves = world.observations.moves
    if not await _comes(world, lambda: moves.under_way):
        return
    crowds = [number for number, kinds in enumerate(world.plan.clusters) if is_crowd(kinds)]
    site, name = world.clusters[world.rng.choice(crowds)], world.rng.choice(("rollup-empty", "rollup-truncated"))
    world.observations.note("fault", QUARANTINE_OVER_HANDOVER, f"{site.process.name} {name}")
    await let_operator_answer_wrongly(world, site, name)


async def lease_lost_over_preemption(world: World) -> None:
    """While a machine is being taken from a gang every lease ends, and somebody has to lead again."""
    moves = world.observations.moves
    if await _comes(world, lambda: bool(moves.taken_from_gangs)):
        world.observations.note("fault", LEASE_LOST_OVER_PREEMPTION)
        world.fleet.store.end_leases()


async def _comes(world: World, state: Callable[[], bool]) -> bool:
    """Wait for a state some minutes long; say whether it came."""
    end_seconds = world.clock.monotonic_seconds() + 240.0
    while not state():
        if world.clock.monotonic_seconds() >= end_seconds:
            return False
        await world.clock.sleep(0.5)
    return True


COORDINATOR_FAULTS: dict[str, Fault] = {
    "coordinator-partition": coordinator_partition,
    "coordinator-partition-one-way": coordinator_partition_one_way,
    "coordinator-crash": coordinator_crash,
    "coordinator-pause": coordinator_pause,
    "coordinators-away": coordinators_away,
    "store-leaderless": store_leaderless,
    "store-partition": store_partition,
    "lease-lost": lease_lost,
    "commit-unknown": commit_unknown,
    "watch-gap": watch_gap,
    "report-twice": partial(_on_the_way, name="report-twice"),
    "answer-again": partial(_on_the_way, name="answer-again"),
    "shard-crash-over-instruction": shard_crash_over_instruction,
    "shard-disk-full": shard_disk_full,
    "shard-disk-lost": shard_disk_lost,
    "domain-moved": domain_moved,
    QUARANTINE_OVER_HANDOVER: quarantine_over_handover,
    LEASE_LOST_OVER_PREEMPTION: lease_lost_over_preemption,
}
