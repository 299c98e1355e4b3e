"""Provides the parts of faults: crash and restart, pause, faulty responses, partition.

Every wait and every draw is made in the order in which the fault asks for it, from the stream of faults. A fault never
touches the state of the code under test.
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from bigfleet.sim.kernel.network import Link
from bigfleet.sim.kernel.processes import Process
from bigfleet.sim.sites.cluster import ClusterSite
from bigfleet.sim.world.world import World

Fault = Callable[[World], Awaitable[None]]


class Site(Protocol):
    """A place with its process of the moment."""

    process: Process


async def for_a_while(world: World, seconds_max: float) -> None:
    """Wait two seconds or more."""
    await world.clock.sleep(world.rng.uniform(2.0, seconds_max))


async def crash(
    world: World,
    name: str,
    site: Site,
    start: Callable[[], None],
    *,
    who: str = "",
    steps_max: int = 400,
    dies_seconds: tuple[float, float] = (5.0, 30.0),
    back_seconds_max: float = 30.0,
) -> None:
    """Let a process die between two awaits, one of its next steps or some seconds away, and come back."""
    process = site.process
    process.dies_at_step = process.steps + world.rng.randrange(1, steps_max)
    await world.clock.sleep(world.rng.uniform(*dies_seconds))
    process.kill()
    world.observations.note("fault", name, f"{who} step {process.steps}".lstrip())
    await come_back(world, site, start, back_seconds_max)


async def come_back(world: World, site: Site, start: Callable[[], None], seconds_max: float) -> None:
    """Start a process again after a while, unless somebody has done so meanwhile."""
    await world.clock.sleep(world.rng.uniform(0.5, seconds_max))
    if not site.process.is_alive:
        start()


async def stand_still(world: World, process: Process, seconds_max: float) -> None:
    """Pause a process, which goes on after a while and knows nothing of it."""
    process.pause()
    await for_a_while(world, seconds_max)
    process.resume()


async def cut(world: World, links: Iterable[Link], seconds_max: float) -> None:
    """Let nothing pass for a while."""
    cut_off = list(links)
    for link in cut_off:
        link.is_cut = True
    await for_a_while(world, seconds_max)
    for link in cut_off:
        link.is_cut = False


async def answer_wrongly(world: World, faulty_responses: set[str], name: str, seconds_max: float) -> None:
    """Let a component give one kind of faulty response for a while."""
    faulty_responses.add(name)
    await for_a_while(world, seconds_max)
    faulty_responses.discard(name)


async def let_operator_answer_wrongly(world: World, site: ClusterSite, name: str, seconds_max: float = 90.0) -> None:
    """Let an operator report wrongly for a while, from its next roll-up on, which comes at once."""
    site.faulty_responses.add(name)
    if site.cluster is not None:
        site.cluster.apply()
    await answer_wrongly(world, site.faulty_responses, name, seconds_max)
