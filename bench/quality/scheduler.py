"""Simulates kube-scheduler placing pods one by one on given machines, in several random orders at once.

The queue is sorted by priority, as kube-scheduler sorts it, and is random within a priority. A machine is feasible when
its labels match, its free room covers the request, it has fewer pods of the shape than `max_per_machine`, a strict
spread stays within its skew, and a gang stays in its domain. Among the feasible ones the score of NodeResourcesFit
decides: the mean over cpu and memory of the share that is free (least-allocated) or used (most-allocated) after the
placement, as integers from 0 to 100, rounded down at both steps. Ties are broken by seeded choice. What the simulation
leaves out: the other score plugins, preferred affinity, preemption, and sampling of nodes in large clusters.

A gang's domain is given: the scheduler of a gang knows where it fits as a whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Final

import numpy as np

from bench.quality.placement import Machines
from bench.quality.values import Scheduler
from bigfleet.sim.packing.arrays import UNLIMITED, Bool, Int

ORDERS: Final = 6
#: Scores are multiplied by this before the tie-break is added.
_SCORE: Final = 1 << 20
#: Tie-breaks of one order; a prime, so that successive pods see other ones.
_TIES: Final = 10_007
_NOT_FEASIBLE: Final = -1


@dataclass(frozen=True, slots=True)
class Simulated:
    """What the scheduler did; O orders, S shapes, M machines."""

    #: Pods of each shape without a place, by order, (O, S).
    lost: Int


def simulate(
    machines: Machines,
    domain_of_row: Mapping[int, str],
    *,
    scheduler: Scheduler,
    seed: int,
    orders: int = ORDERS,
) -> Simulated:
    """Return what is lost in some random orders; `domain_of_row` names each gang's domain by position of its row.

    The pods of a gang without a domain are lost.
    """
    shapes = len(machines.arrays.keys)
    if not len(machines) or not shapes:
        return Simulated(np.repeat(machines.arrays.count[None], orders, axis=0))
    run = _Run(machines, domain_of_row, scheduler, seed, orders)
    queues = np.array([queue(machines.arrays.count, machines.arrays.priority, seed + o) for o in range(orders)])
    for step in range(queues.shape[1]):
        run.schedule(queues[:, step], step)
    return Simulated(run.lost)


def queue(count: Int, priority: Int, seed: int) -> list[int]:
    """Return the shape of each pod in the order of the queue: priority descending, random within a priority."""
    rng = Random(f"queue/{seed}")
    pods: list[int] = []
    for tier in sorted(set(priority.tolist()), reverse=True):
        same = [s for s in np.flatnonzero(priority == tier).tolist() for _ in range(int(count[s]))]
        rng.shuffle(same)
        pods += same
    return pods


class _Run:
    """The state of all orders while pods arrive."""

    def __init__(
        self, machines: Machines, domain_of_row: Mapping[int, str], scheduler: Scheduler, seed: int, orders: int
    ) -> None:
        arrays = machines.arrays
        self._orders = np.arange(orders)
        self._request = arrays.request
        self._hosts = _hosts(machines, domain_of_row)
        self._free: Int = np.repeat(machines.supply[None], orders, axis=0)
        allocatable = np.maximum(arrays.allocatable[machines.classes, :2], 1)
        self._scored = allocatable
        self._is_least = scheduler is Scheduler.LEAST_ALLOCATED
        rng = Random(f"ties/{seed}")
        ties = [[rng.randrange(_SCORE) for _ in range(_TIES + len(machines))] for _ in range(min(orders, 1))]
        # Each order reads the same numbers from another place.
        self._ties: Int = np.array(ties[0], np.int64)
        self._machines = len(machines)
        self.lost: Int = np.zeros((orders, len(arrays.keys)), np.int64)
        self._limits = _Limits(machines, orders)
        self._spreads = _Spreads(machines, orders)

    def schedule(self, shapes: Int, step: int) -> None:
        """Place one pod in each order; `shapes` names it by its shape."""
        request = self._request[shapes]
        after = self._free - request[:, None, :]
        feasible = self._hosts[shapes] & (after >= 0).all(axis=2)
        self._limits.narrow(feasible, shapes)
        self._spreads.narrow(feasible, shapes)
        # Rows of `after` that are not feasible may be negative; they are masked below.
        share = after[:, :, :2] * 100 // self._scored
        if not self._is_least:
            share = (self._scored - after[:, :, :2]) * 100 // self._scored
        score = (share[:, :, 0] + share[:, :, 1]) // 2
        key = np.where(feasible, score * _SCORE + self._tie_breaks(step), _NOT_FEASIBLE)
        chosen = key.argmax(axis=1)
        placed = key[self._orders, chosen] != _NOT_FEASIBLE
        orders, chosen = self._orders[placed], chosen[placed]
        self._free[orders, chosen] -= request[placed]
        self._limits.count(orders, shapes[placed], chosen)
        self._spreads.count(orders, shapes[placed], chosen)
        self.lost[self._orders[~placed], shapes[~placed]] += 1

    def _tie_breaks(self, step: int) -> Int:
        starts = (step * 31 + self._orders * 1_009) % _TIES
        result: Int = self._ties[starts[:, None] + np.arange(self._machines)]
        return result


def _hosts(machines: Machines, domain_of_row: Mapping[int, str]) -> Bool:
    """Return which machines each shape may use, gangs within their domain, (S, M)."""
    hosts = machines.matches.copy()
    for shape in range(len(hosts)):
        key = machines.arrays.row_of(shape).same_key
        if key is not None:
            wanted = domain_of_row.get(int(machines.arrays.row[shape]))
            hosts[shape] &= np.array([d is not None and d == wanted for d in machines.domains(key)], np.bool_)
    return hosts


class _Limits:
    """Counts pods on machines for the shapes that limit them."""

    def __init__(self, machines: Machines, orders: int) -> None:
        limited = np.flatnonzero(machines.arrays.limit < UNLIMITED)
        self._place: Int = np.full(len(machines.arrays.limit), -1, np.int64)
        self._place[limited] = np.arange(len(limited))
        self._limit = machines.arrays.limit
        self._on: Int = np.zeros((orders, len(limited), len(machines)), np.int64)
        self._is_used = bool(len(limited))

    def narrow(self, feasible: Bool, shapes: Int) -> None:
        """Remove full machines."""
        if not self._is_used:
            return
        for order in np.flatnonzero(self._place[shapes] >= 0):
            shape = shapes[order]
            feasible[order] &= self._on[order, self._place[shape]] < self._limit[shape]

    def count(self, orders: Int, shapes: Int, chosen: Int) -> None:
        """Note placements."""
        if not self._is_used:
            return
        limited = self._place[shapes] >= 0
        self._on[orders[limited], self._place[shapes[limited]], chosen[limited]] += 1


class _Spreads:
    """Counts pods in domains for the rows with a strict spread."""

    def __init__(self, machines: Machines, orders: int) -> None:
        arrays = machines.arrays
        #: By row: the skew, the domain of each machine (-1 without one), and pods by domain, (O, domains).
        self._rows: dict[int, tuple[int, Int, Int]] = {}
        self._row = arrays.row
        for shape in range(len(arrays.keys)):
            spread = arrays.row_of(shape).strict_spread
            row = int(arrays.row[shape])
            if spread is None or row in self._rows:
                continue
            values = machines.domains(spread.key)
            matching = machines.matches[shape]
            named = sorted({v for v, matches in zip(values, matching, strict=True) if matches and v is not None})
            domains = np.array([named.index(v) if v in named else -1 for v in values], np.int64)
            self._rows[row] = (max(1, spread.skew_max), domains, np.zeros((orders, max(1, len(named))), np.int64))

    def narrow(self, feasible: Bool, shapes: Int) -> None:
        """Remove machines of domains that would exceed the skew, and machines without the key."""
        if not self._rows:
            return
        for order, shape in enumerate(shapes):
            known = self._rows.get(int(self._row[shape]))
            if known is not None:
                skew, domains, counts = known
                is_open = counts[order] + 1 - counts[order].min() <= skew
                feasible[order] &= (domains >= 0) & is_open[domains]

    def count(self, orders: Int, shapes: Int, chosen: Int) -> None:
        """Note placements."""
        if not self._rows:
            return
        for order, shape, machine in zip(orders, shapes, chosen, strict=True):
            known = self._rows.get(int(self._row[shape]))
            if known is not None:
                known[2][order, known[1][machine]] += 1
