"""The operator and the pod controller under faults: seeds that hold, and equal courses in unequal processes."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest

from bigfleet.sim.operator_world.plan import OPERATOR_FAULTS, draw_operator
from bigfleet.sim.operator_world.run import run_operator_plan
from bigfleet.sim.world.run import WorldResult

#: As many as the fault world has (`make test-slow WORLD_SEEDS=200`).
SLOW_SEEDS = range(200, 200 + int(os.environ.get("BIGFLEET_WORLD_SEEDS", "4")))


def violations_of(result: WorldResult) -> list[str]:
    """Return what was violated, for a message."""
    return [f"{each.invariant} at {each.at_nanos / 1e9:.1f} s: {each.text}" for each in result.violations]


def short(seed: int, safety_seconds: float) -> WorldResult:
    """Run a seed with so many seconds of faults."""
    plan = draw_operator(seed)
    world = msgspec.structs.replace(plan.world, safety_seconds=safety_seconds)
    return run_operator_plan(msgspec.structs.replace(plan, world=world))


def test_every_invariant_holds_in_a_short_operator_world() -> None:
    result = short(4, 120.0)

    assert violations_of(result) == []
    # Each of them has looked at something.
    assert {name for name in result.checks if name.startswith("K")} == {f"K{number}" for number in range(1, 12)}


def test_pods_of_unmanaged_nodes_are_no_demand_in_an_operator_world() -> None:
    plan = draw_operator(12)
    world = msgspec.structs.replace(plan.world, safety_seconds=120.0)
    result = run_operator_plan(msgspec.structs.replace(plan, world=world, unmanaged_nodes=2))

    assert violations_of(result) == []
    assert result.checks["K5"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", SLOW_SEEDS)
def test_every_invariant_holds_in_the_operator_world(seed: int, record_property: Callable[[str, object], None]) -> None:
    result = run_operator_plan(draw_operator(seed))
    record_property("fault worlds", (1, int(not result.violations), result.simulated_seconds / 3600))

    assert violations_of(result) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, pytest.param(3, marks=pytest.mark.long)])
def test_equal_seeds_of_the_operator_world_take_equal_courses_with_other_hash_seeds(seed: int) -> None:
    """S19, for the operator's code: the same trace hash, to the step."""
    program = (
        "import sys\n"
        "from bigfleet.cli.runtime.kernel_cache import keep_kernels\n"
        "keep_kernels()\n"
        "from bigfleet.cli.sim.seeds import run_operator_seed\n"
        "run = run_operator_seed(int(sys.argv[1]), 10)\n"
        "print(run.trace_hash, run.cycles, sorted(run.reached.items()))\n"
    )
    courses = {
        subprocess.run(
            [sys.executable, "-c", program, str(seed)],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "4242")
    }
    assert len(courses) == 1


def test_seeds_of_the_operator_world_differ_and_equal_seeds_draw_the_same() -> None:
    assert draw_operator(7) == draw_operator(7)
    plans = [draw_operator(seed) for seed in range(200)]
    assert len({msgspec.json.encode(plan) for plan in plans}) == 200
    on = Counter(fault for plan in plans for fault in plan.world.faults)
    assert set(on) == set(OPERATOR_FAULTS)
    assert max(on.values()) < 200
    assert {plan.replicas for plan in plans} == {1, 2}
