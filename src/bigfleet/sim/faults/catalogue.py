"""Injects faults into the world around the code, one function each, and undoes them.

The seed determines the faults of a world (`bigfleet.sim.plan_generator`), `chaos` their times. Every draw comes from
the stream of faults. A fault never touches the state of the code under test.
"""

import asyncio
from collections.abc import Mapping
from functools import partial

from bigfleet.sim.faults.coordinator import COORDINATOR_FAULTS
from bigfleet.sim.faults.parts import (
    Fault,
    answer_wrongly,
    crash,
    cut,
    for_a_while,
    let_operator_answer_wrongly,
    stand_still,
)
from bigfleet.sim.plan_generator import LIVE
from bigfleet.sim.sites.cluster import ClusterSite
from bigfleet.sim.sites.provider import PROVIDER
from bigfleet.sim.sites.shard import ShardSite
from bigfleet.sim.world.world import World

#: How long what is undone again lasts.
_LASTS_SECONDS_MAX = 120.0
#: Faults that run at the same time.
AT_ONCE_MAX = 4


async def chaos(world: World, more: Mapping[str, Fault] | None = None) -> None:
    """Let faults of the plan come until cancelled; a cancelled fault is undone in `heal`.

    `more` are the faults of a world that has others beside `FAULTS`.
    """
    rng, faults = world.rng, FAULTS | dict(more or {})
    kinds = [name for name in faults if name in world.plan.faults]
    if world.plan.coordinator != LIVE:
        # Without an answer and without a call, the world must take the same course.
        kinds = [name for name in kinds if name not in COORDINATOR_FAULTS]
    running: set[asyncio.Task[None]] = set()
    if not kinds:
        return
    while True:
        await world.clock.sleep(rng.expovariate(1.0 / world.plan.fault_seconds_mean))
        running = {task for task in running if not task.done()}
        name = rng.choice(kinds)
        if len(running) >= AT_ONCE_MAX:
            continue
        world.observations.faults[name] += 1
        task = asyncio.create_task(_one(world, name, faults[name]))
        world.faults_running.append(task)
        running.add(task)


async def _one(world: World, name: str, fault: Fault) -> None:
    await fault(world)
    world.observations.note("fault", name, "over")


# ---- the network ------------------------------------------------------------------------------------------------


def _pair(world: World) -> tuple[str, str]:
    shard = _shard(world)
    names = [PROVIDER, *(site.process.name for site in world.clusters if site.shard is shard)]
    return shard.name, world.rng.choice(names)


def _shard(world: World) -> ShardSite:
    return world.shards[0] if len(world.shards) == 1 else world.rng.choice(world.shards)


async def partition(world: World) -> None:
    """Nothing passes between the shard and a peer, in either direction."""
    one, other = _pair(world)
    world.observations.note("fault", "partition", f"{one} {other}")
    links = (world.network.link(one, other), world.network.link(other, one))
    await cut(world, links, _LASTS_SECONDS_MAX)


async def partition_one_way(world: World) -> None:
    """Nothing passes in one direction between the shard and a peer."""
    ends = list(_pair(world))
    world.rng.shuffle(ends)
    world.observations.note("fault", "partition-one-way", " ".join(ends))
    await cut(world, [world.network.link(*ends)], _LASTS_SECONDS_MAX)


async def stall(world: World) -> None:
    """What is sent to or from a peer arrives later, all at once."""
    one, other = _pair(world)
    seconds = world.rng.uniform(1.0, 60.0)
    world.observations.note("fault", "stall", f"{one} {other} {seconds:.1f} s")
    for link in (world.network.link(one, other), world.network.link(other, one)):
        link.stalled_until_seconds = world.clock.monotonic_seconds() + seconds
    await world.clock.sleep(seconds)


async def slow_reader(world: World) -> None:
    """An operator takes seconds for each frame."""
    site = _cluster(world)
    world.observations.note("fault", "slow-reader", site.process.name)
    link = world.network.link(site.shard.name, site.process.name)
    link.reads_seconds = world.rng.uniform(0.5, 5.0)
    await for_a_while(world, _LASTS_SECONDS_MAX)
    link.reads_seconds = 0.0


async def reconnect_storm(world: World) -> None:
    """Every stream breaks at the same moment."""
    world.observations.note("fault", "reconnect-storm")
    for connection in world.network.connections:
        connection.break_off("a storm")


# ---- the provider -----------------------------------------------------------------------------------------------


async def _faulty_list(world: World, name: str) -> None:
    world.observations.note("fault", name)
    await answer_wrongly(world, world.provider.faulty_responses, name, _LASTS_SECONDS_MAX)


async def store_down(world: World) -> None:
    """The provider's disk takes nothing."""
    world.observations.note("fault", "store-down")
    world.provider.store.is_down = True
    await for_a_while(world, 30.0)
    world.provider.store.is_down = False


async def provider_crash(world: World) -> None:
    """The provider dies between two awaits, and starts again over its disk."""
    site = world.provider
    await crash(world, "provider-crash", site, site.start, dies_seconds=(5.0, 60.0))


# ---- the shard --------------------------------------------------------------------------------------------------


async def shard_crash(world: World) -> None:
    """A shard dies between two awaits, and starts again from its disk."""
    site = _shard(world)
    await crash(world, "shard-crash", site, lambda: site.start(world.plan.settings()), who=_named(world, site))


async def shard_pause(world: World) -> None:
    """A shard stands still for a while and goes on, as after a long garbage collection."""
    site = _shard(world)
    world.observations.note("fault", "shard-pause", _named(world, site))
    await stand_still(world, site.process, _LASTS_SECONDS_MAX)


async def shard_zombie(world: World) -> None:
    """A shard stands still, a successor starts, and the first one goes on and knows nothing of it."""
    site = _shard(world)
    process = site.process
    if not process.is_alive or world.zombies:
        return
    world.observations.note("fault", "shard-zombie", _named(world, site))
    process.pause()
    world.zombies.append(process)
    await world.clock.sleep(world.rng.uniform(1.0, 20.0))
    if site.process is process:
        site.start(world.plan.settings())
    await for_a_while(world, _LASTS_SECONDS_MAX)
    process.resume()
    world.observations.mark("a zombie went on")
    await for_a_while(world, _LASTS_SECONDS_MAX)
    process.kill()
    world.zombies.remove(process)


def _named(world: World, site: ShardSite) -> str:
    return "" if len(world.shards) == 1 else site.name


# ---- operators --------------------------------------------------------------------------------------------------


def _cluster(world: World) -> ClusterSite:
    return world.rng.choice(world.clusters)


async def operator_crash(world: World) -> None:
    """An operator dies and starts again from what Kubernetes holds."""
    site = _cluster(world)
    await crash(world, "operator-crash", site, site.start, who=site.process.name, back_seconds_max=60.0)


async def operator_silent(world: World) -> None:
    """An operator says nothing for a while, and then reports the whole of a demand that has changed."""
    site = _cluster(world)
    world.observations.note("fault", "operator-silent", site.process.name)
    await stand_still(world, site.process, 240.0)


async def operator_twin(world: World) -> None:
    """Two operators have one identity."""
    site = _cluster(world)
    if site.has_twin:
        return
    world.observations.note("fault", "operator-twin", site.process.name)
    site.start_twin()
    await for_a_while(world, _LASTS_SECONDS_MAX)
    site.stop_twin()


async def _faulty_operator(world: World, name: str) -> None:
    site = _cluster(world)
    world.observations.note("fault", name, site.process.name)
    await let_operator_answer_wrongly(world, site, name)


FAULTS: dict[str, Fault] = {
    "partition": partition,
    "partition-one-way": partition_one_way,
    "stall": stall,
    "slow-reader": slow_reader,
    "reconnect-storm": reconnect_storm,
    "list-stale": partial(_faulty_list, name="list-stale"),
    "list-partial": partial(_faulty_list, name="list-partial"),
    "cursor-lost": partial(_faulty_list, name="cursor-lost"),
    "records-mangled": partial(_faulty_list, name="records-mangled"),
    "store-down": store_down,
    "provider-crash": provider_crash,
    "shard-crash": shard_crash,
    "shard-pause": shard_pause,
    "shard-zombie": shard_zombie,
    "operator-crash": operator_crash,
    "operator-silent": operator_silent,
    "operator-twin": operator_twin,
    "rollup-empty": partial(_faulty_operator, name="rollup-empty"),
    "rollup-truncated": partial(_faulty_operator, name="rollup-truncated"),
    "rollup-stale": partial(_faulty_operator, name="rollup-stale"),
    "rollup-replayed": partial(_faulty_operator, name="rollup-replayed"),
    "rollup-flapping": partial(_faulty_operator, name="rollup-flapping"),
    "bootstrap-refused": partial(_faulty_operator, name="bootstrap-refused"),
    "bootstrap-silent": partial(_faulty_operator, name="bootstrap-silent"),
    **COORDINATOR_FAULTS,
}
