"""Worker processes plan as this process would, and neither their death nor the shard's leaves anything behind."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures.process import BrokenProcessPool

import pytest

from bigfleet.cli.runtime.plan_workers import ProcessPlanWorkers
from bigfleet.engine.targets import class_key
from bigfleet.exchange.between_clusters import Pair, find_move, move_question
from bigfleet.exchange.questions import questions_of
from bigfleet.exchange.search import find_exchanges
from bigfleet.planner.plan import DEFAULT, THOROUGH, plan
from tests.exchange.building import held, need, offers, pods, question
from tests.exchange.fleets import own, rented, state_of
from tests.exchange.test_between_clusters import demand
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.planner.test_best import tiny


async def test_a_worker_comes_to_the_same_composition() -> None:
    problem = tiny(random.Random(1))
    with ProcessPlanWorkers(1) as workers:
        for effort in (DEFAULT, THOROUGH):
            assert await workers.plan(problem, effort) == plan(problem, effort)


async def test_a_worker_finds_the_same_exchanges() -> None:
    """A question travels to the worker and its answer back."""
    machines = held(2, "dear", 4, 3.0) + offers(4, "cheap", 8, 0.10)
    asked = question(machines, [need(pods(500, 1, 10))])
    with ProcessPlanWorkers(1) as workers:
        assert workers.is_idle
        found = await workers.find_exchanges(asked)

    assert found.proposals
    assert found == find_exchanges(asked)


async def test_a_worker_finds_the_same_move_between_clusters() -> None:
    """The question of a pair travels, too."""
    machines = [*own("a", 1), *rented("b", 1), *offers(2, "cheap", 4, 0.3, instance_type="cheap4")]
    fleet, context = state_of(machines, demand())
    giver, taker = questions_of(fleet, context)
    pair = Pair(giver.cluster, taker.cluster, class_key(machines[0]))
    asked = move_question(fleet, context, giver, pair)
    assert asked is not None
    with ProcessPlanWorkers(1) as workers:
        found = await workers.find_move(asked)

    assert found is not None
    assert found == find_move(asked)


@pytest.mark.slow
def test_a_worker_compiles_its_loops_before_the_first_problem() -> None:
    """The first plan of a new shard came ten seconds late, because the worker began to compile when it was asked."""
    script = textwrap.dedent("""
        import sys
        from bigfleet.cli.runtime.plan_workers import _work_on
        _work_on(None)
        print("bigfleet.planner.compiled" in sys.modules)
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_the_end_does_not_wait_for_a_worker() -> None:
    """A worker that compiles its loops, or plans, has nothing to keep: SIGTERM ends the shard meanwhile."""
    workers = ProcessPlanWorkers(1)
    busy = workers._started().submit(time.sleep, 100 * PATIENCE_SECONDS)
    wait_until(busy.running, "the worker never begins")
    ending = threading.Thread(target=workers.__exit__, args=(None, None, None), daemon=True)
    ending.start()
    ending.join(PATIENCE_SECONDS)

    assert not ending.is_alive()
    wait_until(busy.done, "the worker goes on")


async def test_the_end_cancels_a_plan_that_is_under_way() -> None:
    """No failure is logged: a stop is none."""
    workers = ProcessPlanWorkers(1)
    planning = asyncio.create_task(workers._answer(time.sleep, 100 * PATIENCE_SECONDS))
    await asyncio.to_thread(wait_until, lambda: is_at_work(workers), "the worker never begins")
    workers.__exit__(None, None, None)

    with pytest.raises(asyncio.CancelledError):
        await planning
    with pytest.raises(asyncio.CancelledError):
        await workers._answer(time.sleep, 0.0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_worker_survives_the_signals_that_stop_the_shard(number: int) -> None:
    """A terminal and systemd send them to all processes, also to one that has only been spawned."""
    with ProcessPlanWorkers(1) as workers:
        workers.start()
        (worker,) = children(os.getpid())
        os.kill(worker, number)

        assert await workers._answer(abs, -1) == 1
        os.kill(worker, number)
        assert await workers._answer(abs, -2) == 2


def is_at_work(workers: ProcessPlanWorkers) -> bool:
    """Return whether a worker has taken its work."""
    pool = workers._pool
    return pool is not None and any(item.future.running() for item in list(pool._pending_work_items.values()))


@pytest.mark.rule("shard 4.1/2")
@pytest.mark.slow
async def test_a_worker_that_dies_is_replaced() -> None:
    problem = tiny(random.Random(1))
    with ProcessPlanWorkers(1) as workers:
        await workers.plan(problem, DEFAULT)
        (worker,) = children(os.getpid())
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(BrokenProcessPool):
            await workers.plan(problem, DEFAULT)
        assert await workers.plan(problem, DEFAULT) == plan(problem)


@pytest.mark.rule("shard 4.1/2")
def test_a_worker_ends_with_its_shard() -> None:
    script = textwrap.dedent("""
        import asyncio, random, sys
        from bigfleet.cli.runtime.plan_workers import ProcessPlanWorkers
        from bigfleet.planner.plan import DEFAULT
        from tests.planner.test_best import tiny

        async def main():
            workers = ProcessPlanWorkers(1)
            await workers.plan(tiny(random.Random(1)), DEFAULT)
            print("planned", flush=True)
            await asyncio.sleep(3600)

        if __name__ == "__main__":
            asyncio.run(main())
    """)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as shard:
        assert shard.stdout is not None
        assert shard.stdout.readline() == "planned\n"
        (worker,) = children(shard.pid)
        shard.kill()
    wait_until(lambda: not is_running(worker), "the worker outlived its shard")


def children(parent: int) -> list[int]:
    """Return the processes that plan for a process."""
    found = []
    for task in os.listdir(f"/proc/{parent}/task"):
        with open(f"/proc/{parent}/task/{task}/children") as listed:
            found += [int(child) for child in listed.read().split()]
    return [child for child in found if "spawn_main" in command(child)]


def command(process: int) -> str:
    """Return the command line of a process."""
    with open(f"/proc/{process}/cmdline") as line:
        return line.read()


def is_running(process: int) -> bool:
    """Return whether a process is there and is no zombie."""
    try:
        with open(f"/proc/{process}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
