"""Runs many seeds of the fault world on several cores and sums up their results.

One process per core, one world at a time in each; results come in the order of the seeds. The sums are bounded by the
kinds of events, not by the number of seeds. A seed must give the same result here as in a run of its own.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import count
from multiprocessing import get_context
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from bigfleet.sim.plan_generator import WorldPlan
    from bigfleet.sim.world.run import WorldResult

#: Failing seeds that are reported one by one; the others are counted.
FAILED_NAMED_MAX = 10


class SeedRun(NamedTuple):
    """Summary of one seed's run."""

    seed: int
    trace_hash: str
    #: (invariant, virtual seconds, sentence); empty when all held.
    violations: tuple[tuple[str, float, str], ...]
    simulated_seconds: float
    cycles: int
    faults: Counter[str]
    reached: Counter[str]
    actions: Counter[str]
    checks: Counter[str]


@dataclass(slots=True)
class Total:
    """What many seeds add up to."""

    seeds: int = 0
    simulated_seconds: float = 0.0
    cycles: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    reached: Counter[str] = field(default_factory=Counter)
    actions: Counter[str] = field(default_factory=Counter)
    checks: Counter[str] = field(default_factory=Counter)
    failures: int = 0
    #: The first of them.
    failed: list[SeedRun] = field(default_factory=list)
    _digest: hashlib.blake2b = field(init=False, default_factory=lambda: hashlib.blake2b(digest_size=16))

    @property
    def trace_hash(self) -> str:
        """One hash over those of all seeds, in their order."""
        return self._digest.hexdigest()

    def add(self, run: SeedRun) -> None:
        """Count a run."""
        if self.seeds:
            self._digest.update(b"\n")
        self._digest.update(run.trace_hash.encode())
        self.seeds += 1
        self.simulated_seconds += run.simulated_seconds
        self.cycles += run.cycles
        self.faults += run.faults
        self.reached += run.reached
        self.actions += run.actions
        self.checks += run.checks
        self.failures += bool(run.violations)
        if run.violations and len(self.failed) < FAILED_NAMED_MAX:
            self.failed.append(run)


def run_seed(seed: int, steps: int | None = None) -> SeedRun:
    """Run one seed; `steps` is the length of the fault phase in steps of ten virtual seconds."""
    from bigfleet.sim.world.run import run_plan

    return seed_run(run_plan(plan_of(seed, steps)))


def run_operator_seed(seed: int, steps: int | None = None) -> SeedRun:
    """Run one seed of the operator world; `steps` as in `run_seed`."""
    import msgspec

    from bigfleet.sim.operator_world.plan import draw_operator
    from bigfleet.sim.operator_world.run import run_operator_plan
    from bigfleet.sim.world.run import SAMPLE_SECONDS

    plan = draw_operator(seed)
    if steps is not None:
        world = msgspec.structs.replace(plan.world, safety_seconds=steps * SAMPLE_SECONDS)
        plan = msgspec.structs.replace(plan, world=world)
    return seed_run(run_operator_plan(plan))


def seed_run(result: "WorldResult") -> SeedRun:
    """Return the summary of a run."""
    return SeedRun(
        seed=result.plan.seed,
        trace_hash=result.trace_hash,
        violations=tuple((each.invariant, each.at_nanos / 1e9, each.text) for each in result.violations),
        simulated_seconds=result.simulated_seconds,
        cycles=result.cycles,
        faults=result.faults,
        reached=result.reached,
        actions=result.actions,
        checks=result.checks,
    )


def plan_of(seed: int, steps: int | None = None) -> "WorldPlan":
    """Return a seed's plan, with the fault phase cut or stretched to so many steps."""
    import msgspec

    from bigfleet.sim.plan_generator import draw
    from bigfleet.sim.world.run import SAMPLE_SECONDS

    plan = draw(seed)
    return plan if steps is None else msgspec.structs.replace(plan, safety_seconds=steps * SAMPLE_SECONDS)


def run_seeds(
    seeds: Iterable[int],
    *,
    steps: int | None = None,
    jobs: int = 1,
    twice_every: int | None = None,
    of_operators: bool = False,
) -> Iterator[SeedRun]:
    """Yield the run of each seed, in order; a seed is asked for when a process is about to have nothing to do.

    Each `twice_every`-th runs twice, by several processes as a rule in two of them, and both runs are held against each
    other (S19). `of_operators` runs the operator world in place of the fault world.
    """
    run_one = run_operator_seed if of_operators else run_seed
    times = (1 if twice_every is None or number % twice_every else 2 for number in count(1))
    if jobs <= 1:
        for seed, runs in zip(seeds, times, strict=False):
            yield compared(*(run_one(seed, steps) for _ in range(runs)))
        return
    # Processes that begin again, so that each has a hash seed of its own.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_begin) as pool:
        waiting: deque[tuple[Future[SeedRun], ...]] = deque()
        for seed, runs in zip(seeds, times, strict=False):
            waiting.append(tuple(pool.submit(run_one, seed, steps) for _ in range(runs)))
            while len(going_on := [run for of_seed in waiting for run in of_seed if not run.done()]) > jobs:
                wait(going_on, return_when=FIRST_COMPLETED)
            while waiting and all(run.done() for run in waiting[0]):
                yield compared(*(run.result() for run in waiting.popleft()))
        while waiting:
            yield compared(*(run.result() for run in waiting.popleft()))


def compared(run: SeedRun, again: SeedRun | None = None) -> SeedRun:
    """Return the first run of a seed, with a breach of S19 when there was a second one that took another course."""
    if again is None:
        return run
    checks = run.checks + Counter(S19=1)
    if again.trace_hash == run.trace_hash:
        return run._replace(checks=checks)
    text = f"A second run took another course: its trace hash is {again.trace_hash}, not {run.trace_hash}."
    return run._replace(checks=checks, violations=(*run.violations, ("S19", run.simulated_seconds, text)))


def _begin() -> None:
    """Let a worker use the kernels that are on disk."""
    from bigfleet.cli.runtime.kernel_cache import keep_kernels

    keep_kernels()
