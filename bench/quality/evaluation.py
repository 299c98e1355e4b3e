"""Evaluates candidates on instances: one figure per instance, candidate, start and scheduler.

The packer, the bound and the best integer answer are worked out once per instance; instances run in processes of their
own when there are several jobs. Everything but CPU time is equal from run to run.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bench.quality.bound import lower_bound
from bench.quality.candidates import CANDIDATES
from bench.quality.catalogue import Data, load
from bench.quality.instances import build, with_impossible_pod
from bench.quality.integer import best_integer, is_small
from bench.quality.judges import judge, packed
from bench.quality.values import Scheduler, Settled, Start


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One instance with everything that is run on it."""

    family: str
    size: str
    seed: int
    starts: tuple[Start, ...]
    schedulers: tuple[Scheduler, ...]
    candidates: tuple[str, ...]
    orders: int
    #: 0 leaves the best integer answer out.
    integer_effort: int
    has_impossible_pod: bool
    data: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What one candidate reached on one instance; costs in $/h."""

    candidate: str
    family: str
    size: str
    seed: int
    start: str
    scheduler: str
    pods: int
    clusters: int
    cost: float
    completed: float
    #: The packer's fleet, completed in the same way.
    packer: float
    bound: float
    #: None where the instance is too large or the search was left out.
    integer: float | None
    machines: int
    #: None where the candidate makes no claims.
    violations: int | None
    first_violations: tuple[str, ...]
    unplaced: int
    lost: float
    lost_worst: int
    lost_unprotected: float
    short: int
    short_hostable: int
    impossible: int
    lost_to_neighbour: int
    held_ratio: dict[str, float]
    cycles: int
    actions: int
    actions_unneeded: int
    is_at_rest: bool
    engine_seconds: float

    @property
    def over_packer(self) -> float | None:
        """Completed cost ÷ the packer's; None where the packer's is nothing."""
        return self.completed / self.packer if self.packer > 0 else None

    @property
    def over_bound(self) -> float | None:
        """Completed cost ÷ the bound; None where the bound is nothing."""
        return self.completed / self.bound if self.bound > 0 else None

    @property
    def over_integer(self) -> float | None:
        """Completed cost ÷ the best integer answer; None without one."""
        return self.completed / self.integer if self.integer else None

    def record(self) -> dict[str, Any]:
        """Return the figure for JSON."""
        ratios = {"over_packer": self.over_packer, "over_bound": self.over_bound, "over_integer": self.over_integer}
        return {**asdict(self), **ratios}


def run(tasks: Sequence[Task], jobs: int) -> Iterator[list[Figure]]:
    """Yield the figures of each task, in the order of the tasks."""
    if jobs == 1:
        yield from map(evaluate, tasks)
        return
    # A forked child would inherit the threads' locks of the solver.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(evaluate, tasks)


_loaded: dict[Path | None, Data] = {}


def data_of(folder: Path | None) -> Data:
    """Return the data of a folder, read once per process. Raises DataFault."""
    if folder not in _loaded:
        _loaded[folder] = load(folder)
    return _loaded[folder]


def evaluate(task: Task) -> list[Figure]:
    """Return the figures of one instance: candidates, then starts, then schedulers."""
    instance = build(task.family, task.size, task.seed, data_of(task.data))
    if task.has_impossible_pod:
        instance = with_impossible_pod(instance)
    bound = lower_bound(instance)
    integer: float | None = None
    if task.integer_effort and is_small(instance):
        integer = best_integer(instance, task.integer_effort).usd_per_hour
    baseline = packed(instance)
    packer = {
        scheduler: judge(instance, baseline, scheduler=scheduler, orders=task.orders).completed_usd_per_hour
        for scheduler in task.schedulers
    }
    figures = []
    for name in task.candidates:
        candidate = CANDIDATES[name]()
        for start in task.starts:
            for scheduler in task.schedulers:
                settled = candidate.settle(instance, start, scheduler)
                verdict = judge(instance, settled, scheduler=scheduler, orders=task.orders)
                broken = verdict.violations
                figures.append(
                    Figure(
                        candidate=name,
                        family=task.family,
                        size=task.size,
                        seed=task.seed,
                        start=start.value,
                        scheduler=scheduler.value,
                        pods=instance.pods,
                        clusters=len(instance.clusters),
                        cost=verdict.cost_usd_per_hour,
                        completed=verdict.completed_usd_per_hour,
                        packer=packer[scheduler],
                        bound=bound,
                        integer=integer,
                        machines=verdict.machines,
                        violations=None if broken is None else len(broken),
                        first_violations=() if broken is None else broken[:3],
                        unplaced=verdict.unplaced,
                        lost=verdict.lost_mean,
                        lost_worst=verdict.lost_worst,
                        lost_unprotected=verdict.lost_unprotected,
                        short=verdict.short,
                        short_hostable=verdict.short_hostable,
                        impossible=verdict.impossible,
                        lost_to_neighbour=verdict.lost_to_neighbour,
                        held_ratio=dict(verdict.held_ratio),
                        **_effort(settled),
                    )
                )
    return figures


def _effort(settled: Settled) -> dict[str, Any]:
    return {
        "cycles": settled.cycles,
        "actions": settled.actions,
        "actions_unneeded": settled.actions_unneeded,
        "is_at_rest": settled.is_at_rest,
        "engine_seconds": settled.engine_seconds,
    }


def checksum(figures: Sequence[Figure]) -> str:
    """Return 12 hexadecimal digits over everything but CPU time; dollars are rounded to 0.0001."""

    def plain(value: Any) -> Any:
        if isinstance(value, float):
            return round(value, 4)
        return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value

    records = []
    for figure in figures:
        values = asdict(figure)
        values.pop("engine_seconds")
        records.append(plain(values))
    return hashlib.sha256(json.dumps(records, sort_keys=True).encode()).hexdigest()[:12]
