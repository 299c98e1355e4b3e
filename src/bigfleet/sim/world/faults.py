"""Faults that come and go, one function each: they change the world around the code, and undo it themselves.

Which of them a world has is drawn from the seed (`bigfleet.sim.world.swarm`); when they come, in `chaos`. Every draw is
made from the stream of faults. None may touch the state of the code that is tried.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from bigfleet.sim.world.cluster import ClusterSite
from bigfleet.sim.world.coordinator_faults import COORDINATOR_FAULTS
from bigfleet.sim.world.provider import PROVIDER
from bigfleet.sim.world.shard import ShardSite
from bigfleet.sim.world.swarm import LIVE

if TYPE_CHECKING:
    from bigfleet.sim.world.world import World

Fault = Callable[["World"], Awaitable[None]]
#: A process that dies may run so many more callbacks first, so that deaths fall between any two awaits.
_DEATH_STEPS_MAX = 400
#: Faults that run at the same time.
AT_ONCE_MAX = 4


async def chaos(world: "World") -> None:
    """Let faults of the plan come until cancelled; whoever is cancelled undoes what it did in `heal`."""
    rng = world.rng
    kinds = [name for name in FAULTS if name in world.plan.faults]
    if world.plan.coordinator != LIVE:
        # Whether nobody answers or nobody is asked, the world must take the same course.
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
        world.evidence.faults[name] += 1
        task = asyncio.create_task(_one(world, name))
        world.faults_running.append(task)
        running.add(task)


async def _one(world: "World", name: str) -> None:
    await FAULTS[name](world)
    world.evidence.note("fault", name, "over")


async def _for_a_while(world: "World", seconds_max: float = 120.0) -> None:
    await world.clock.sleep(world.rng.uniform(2.0, seconds_max))


# ---- the network ------------------------------------------------------------------------------------------------


def _pair(world: "World") -> tuple[str, str]:
    shard = _shard(world)
    names = [PROVIDER, *(site.process.name for site in world.clusters if site.shard is shard)]
    return shard.name, world.rng.choice(names)


def _shard(world: "World") -> ShardSite:
    return world.shards[0] if len(world.shards) == 1 else world.rng.choice(world.shards)


async def partition(world: "World") -> None:
    """Nothing passes between the shard and a peer, in either direction."""
    one, other = _pair(world)
    world.evidence.note("fault", "partition", f"{one} {other}")
    links = (world.network.link(one, other), world.network.link(other, one))
    for link in links:
        link.is_cut = True
    await _for_a_while(world)
    for link in links:
        link.is_cut = False


async def partition_one_way(world: "World") -> None:
    """Nothing passes in one direction between the shard and a peer."""
    ends = list(_pair(world))
    world.rng.shuffle(ends)
    world.evidence.note("fault", "partition-one-way", " ".join(ends))
    link = world.network.link(*ends)
    link.is_cut = True
    await _for_a_while(world)
    link.is_cut = False


async def stall(world: "World") -> None:
    """What is sent to or from a peer arrives later, all at once."""
    one, other = _pair(world)
    seconds = world.rng.uniform(1.0, 60.0)
    world.evidence.note("fault", "stall", f"{one} {other} {seconds:.1f} s")
    for link in (world.network.link(one, other), world.network.link(other, one)):
        link.stalled_until_seconds = world.clock.monotonic_seconds() + seconds
    await world.clock.sleep(seconds)


async def slow_reader(world: "World") -> None:
    """An operator takes seconds for each frame."""
    site = _cluster(world)
    world.evidence.note("fault", "slow-reader", site.process.name)
    link = world.network.link(site.shard.name, site.process.name)
    link.reads_seconds = world.rng.uniform(0.5, 5.0)
    await _for_a_while(world)
    link.reads_seconds = 0.0


async def reconnect_storm(world: "World") -> None:
    """Every stream breaks at the same moment."""
    world.evidence.note("fault", "reconnect-storm")
    for connection in world.network.connections:
        connection.break_off("a storm")


# ---- the provider -----------------------------------------------------------------------------------------------


async def _lie_of_list(world: "World", name: str) -> None:
    world.evidence.note("fault", name)
    world.provider.lies.add(name)
    await _for_a_while(world)
    world.provider.lies.discard(name)


async def store_down(world: "World") -> None:
    """The provider's disk takes nothing."""
    world.evidence.note("fault", "store-down")
    world.provider.store.is_down = True
    await _for_a_while(world, 30.0)
    world.provider.store.is_down = False


async def provider_crash(world: "World") -> None:
    """The provider dies between two awaits, and starts again over its disk."""
    process = world.provider.process
    process.dies_at_step = process.steps + world.rng.randrange(1, _DEATH_STEPS_MAX)
    await world.clock.sleep(world.rng.uniform(5.0, 60.0))
    process.kill()
    world.evidence.note("fault", "provider-crash", f"step {process.steps}")
    await world.clock.sleep(world.rng.uniform(0.5, 30.0))
    if not world.provider.process.is_alive:
        world.provider.start()


# ---- the shard --------------------------------------------------------------------------------------------------


async def shard_crash(world: "World") -> None:
    """A shard dies between two awaits, and starts again from its disk."""
    site = _shard(world)
    process = site.process
    process.dies_at_step = process.steps + world.rng.randrange(1, _DEATH_STEPS_MAX)
    await world.clock.sleep(world.rng.uniform(5.0, 30.0))
    process.kill()
    world.evidence.note("fault", "shard-crash", f"{_named(world, site)}step {process.steps}")
    await world.clock.sleep(world.rng.uniform(0.5, 30.0))
    if not site.process.is_alive:
        site.start(world.plan.settings())


async def shard_pause(world: "World") -> None:
    """A shard stands still for a while and goes on, as after a long garbage collection."""
    site = _shard(world)
    process = site.process
    world.evidence.note("fault", "shard-pause", _named(world, site))
    process.pause()
    await _for_a_while(world)
    process.resume()


async def shard_zombie(world: "World") -> None:
    """A shard stands still, a successor starts, and the first one goes on and knows nothing of it."""
    site = _shard(world)
    process = site.process
    if not process.is_alive or world.zombies:
        return
    world.evidence.note("fault", "shard-zombie", _named(world, site))
    process.pause()
    world.zombies.append(process)
    await world.clock.sleep(world.rng.uniform(1.0, 20.0))
    if site.process is process:
        site.start(world.plan.settings())
    await _for_a_while(world)
    process.resume()
    world.evidence.mark("a zombie went on")
    await _for_a_while(world)
    process.kill()
    world.zombies.remove(process)


def _named(world: "World", site: ShardSite) -> str:
    return "" if len(world.shards) == 1 else f"{site.name} "


# ---- operators --------------------------------------------------------------------------------------------------


def _cluster(world: "World") -> ClusterSite:
    return world.rng.choice(world.clusters)


async def operator_crash(world: "World") -> None:
    """An operator dies and starts again from what Kubernetes holds."""
    site = _cluster(world)
    process = site.process
    process.dies_at_step = process.steps + world.rng.randrange(1, _DEATH_STEPS_MAX)
    await world.clock.sleep(world.rng.uniform(5.0, 30.0))
    process.kill()
    world.evidence.note("fault", "operator-crash", process.name)
    await world.clock.sleep(world.rng.uniform(0.5, 60.0))
    if not site.process.is_alive:
        site.start()


async def operator_silent(world: "World") -> None:
    """An operator says nothing for a while, and then tells the whole of a demand that has changed."""
    site = _cluster(world)
    world.evidence.note("fault", "operator-silent", site.process.name)
    process = site.process
    process.pause()
    await _for_a_while(world, 240.0)
    process.resume()


async def operator_twin(world: "World") -> None:
    """Two operators have one identity."""
    site = _cluster(world)
    if site.has_twin:
        return
    world.evidence.note("fault", "operator-twin", site.process.name)
    site.start_twin()
    await _for_a_while(world)
    site.stop_twin()


async def _lie_of_operator(world: "World", name: str) -> None:
    site = _cluster(world)
    world.evidence.note("fault", name, site.process.name)
    site.lies.add(name)
    if site.cluster is not None:
        site.cluster.apply()
    await _for_a_while(world, 90.0)
    site.lies.discard(name)


FAULTS: dict[str, Fault] = {
    "partition": partition,
    "partition-one-way": partition_one_way,
    "stall": stall,
    "slow-reader": slow_reader,
    "reconnect-storm": reconnect_storm,
    "list-stale": partial(_lie_of_list, name="list-stale"),
    "list-partial": partial(_lie_of_list, name="list-partial"),
    "cursor-lost": partial(_lie_of_list, name="cursor-lost"),
    "records-mangled": partial(_lie_of_list, name="records-mangled"),
    "store-down": store_down,
    "provider-crash": provider_crash,
    "shard-crash": shard_crash,
    "shard-pause": shard_pause,
    "shard-zombie": shard_zombie,
    "operator-crash": operator_crash,
    "operator-silent": operator_silent,
    "operator-twin": operator_twin,
    "rollup-empty": partial(_lie_of_operator, name="rollup-empty"),
    "rollup-truncated": partial(_lie_of_operator, name="rollup-truncated"),
    "rollup-stale": partial(_lie_of_operator, name="rollup-stale"),
    "rollup-replayed": partial(_lie_of_operator, name="rollup-replayed"),
    "rollup-flapping": partial(_lie_of_operator, name="rollup-flapping"),
    "bootstrap-refused": partial(_lie_of_operator, name="bootstrap-refused"),
    "bootstrap-silent": partial(_lie_of_operator, name="bootstrap-silent"),
    **COORDINATOR_FAULTS,
}
