"""Runs the operator world: a phase with faults, then a phase without, in which it must converge.

As `bigfleet.sim.world.run`, which it shares. `run_operator_plan` is a function of its plan alone.
"""

import asyncio

from bigfleet.model.clock import NANOS_PER_SECOND
from bigfleet.operator.nodes.upcoming_nodes import LEAVING_SECONDS
from bigfleet.sim.checkers import liveness
from bigfleet.sim.faults.catalogue import chaos
from bigfleet.sim.operator_world.convergence import AT_REST, drains_go_on, has_leaving_machines
from bigfleet.sim.operator_world.faults import FAULTS
from bigfleet.sim.operator_world.plan import OperatorPlan
from bigfleet.sim.operator_world.world import OperatorWorld
from bigfleet.sim.world.run import WorldResult, heal, last_words, run_world, safety_phase

_LOOK_SECONDS = 5.0
#: No machine of this world is held idle for longer.
REST_SECONDS = 250.0
#: After a reclaim that pods had no other place for, the machine is not asked for again within ten minutes.
FIT_HOLD_SECONDS = 610.0


def run_operator_plan(plan: OperatorPlan) -> WorldResult:
    """Run a plan from its start to its end. Equal plans give equal results in any process."""
    return run_world(plan.world, lambda loop, streams: OperatorWorld(plan, loop, streams), _live)


async def _live(world: OperatorWorld) -> None:
    """Live through both phases, or to the first violation."""
    world.provider.start()
    for shard in world.shards:
        shard.start(world.plan.settings())
    lasting = [asyncio.create_task(_look(world))]
    for site in world.sites:
        site.start()
        lasting += [asyncio.create_task(site.components.run()), asyncio.create_task(site.supervise())]
    tasks = [asyncio.create_task(chaos(world, FAULTS)), asyncio.create_task(_change_demand(world))]
    await safety_phase(world)
    for task in (*tasks, *world.faults_running):
        task.cancel()
    await asyncio.gather(*tasks, *world.faults_running, return_exceptions=True)
    if world.observations.violations:
        return
    for site in world.sites:
        site.heal()
    await heal(world)
    is_at_rest = await _come_to_rest(world)
    if world.observations.violations:
        return
    await last_words(world, is_at_rest)
    for name, check in AT_REST:
        world.observations.checks[name] += 1
        for site in world.sites:
            for text in check(world, site):
                world.observations.breach(name, text)


async def _come_to_rest(world: OperatorWorld) -> bool:
    """Wait until nothing has happened for a while, also once what was refused for want of room can be tried again."""
    is_at_rest = await liveness.come_to_rest(world, rest_seconds=REST_SECONDS)
    if is_at_rest and any(has_leaving_machines(world, site) for site in world.sites):
        await world.clock.sleep(LEAVING_SECONDS)
        is_at_rest = await liveness.come_to_rest(world, rest_seconds=REST_SECONDS)
    refused_nanos = max(world.observations.stranded.values(), default=None)
    if not is_at_rest or refused_nanos is None:
        return is_at_rest
    await world.clock.sleep(refused_nanos / NANOS_PER_SECOND + FIT_HOLD_SECONDS - world.clock.monotonic_seconds())
    return await liveness.come_to_rest(world, rest_seconds=REST_SECONDS)


async def _look(world: OperatorWorld) -> None:
    """Look now and then at what must go on."""
    while True:
        await world.clock.sleep(_LOOK_SECONDS)
        world.observations.checks["K11"] += 1
        for site in world.sites:
            for text in drains_go_on(world, site):
                world.observations.breach("K11", text)


async def _change_demand(world: OperatorWorld) -> None:
    rng = world.demand_rng
    while True:
        await world.clock.sleep(rng.expovariate(1.0 / world.plan.change_seconds_mean))
        number = rng.randrange(len(world.sites))
        site, workload = world.sites[number], rng.choice(world.operator_plan.clusters[number])
        wanted = rng.randint(0, max(1, 2 * workload.count))
        world.observations.note("demand", str(site.name), f"{workload.name} to {wanted}")
        site.components.wanted[workload.name] = wanted
