"""Finds the best decision for one tiny cluster by trying every assignment of pods to machines.

The best serves as many pods as possible, group by group in order of precedence, then costs least. It shares no code
with the engine.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bigfleet.model.machine import Machine
from bigfleet.model.need import Need
from bigfleet.model.penalty import bucket_upper_dollars


@dataclass(frozen=True)
class Pod:
    """One pod, by row and shape."""

    row: int
    shape: int
    resources: tuple[tuple[str, int], ...]
    limit: int
    penalty_dollars: float


@dataclass(frozen=True)
class Best:
    """What the best assignments reach."""

    #: Pods served of each group, in order of precedence.
    served: tuple[int, ...]
    cost_usd_per_hour: float


def groups_of(demand: Sequence[Need], machines: Sequence[Machine]) -> list[tuple[int, int]]:
    """Return (row, shape) in the order in which pods are served: precedence, then the largest share of any machine."""
    most: dict[str, int] = {}
    for machine in machines:
        for name, milli in machine.supply.items():
            most[name] = max(most.get(name, 0), milli)
    order = sorted(range(len(demand)), key=lambda n: demand[n].profile.precedence, reverse=True)

    def key(group: tuple[int, int]) -> tuple[int, float, int]:
        row, shape = group
        items = demand[row].shapes[shape].resources.items()
        shares = (milli / most[name] if most.get(name) else float("inf") for name, milli in items)
        return (order.index(row), -max(shares, default=0.0), shape)

    return sorted(((row, shape) for row in order for shape in range(len(demand[row].shapes))), key=key)


def best(demand: Sequence[Need], machines: Sequence[Machine]) -> Best:
    """Return the best result; every machine is free to take and costs its price when it is used."""
    search = _Search(demand, machines)
    search.visit(0, 0)
    served, less_cost = search.found
    return Best(served, -less_cost)


class _Search:
    """Places pods one after the other, each on every machine that may host it, and keeps the best result."""

    def __init__(self, demand: Sequence[Need], machines: Sequence[Machine]) -> None:
        self.demand, self.machines = demand, machines
        self.order = groups_of(demand, machines)
        self.pods = [
            Pod(
                row,
                shape,
                tuple(demand[row].shapes[shape].resources.items()),
                demand[row].shapes[shape].max_per_machine,
                bucket_upper_dollars(demand[row].profile.interruption_bucket),
            )
            for row, shape in self.order
            for _ in range(demand[row].shapes[shape].count)
        ]
        self.rooms = [dict(machine.supply) for machine in machines]
        self.used: list[list[Pod]] = [[] for _ in machines]
        self.served = dict.fromkeys(self.order, 0)
        #: Pods served of each group, and the negative cost in US dollars per hour: the largest is the best.
        self.found: tuple[tuple[int, ...], float] = ((-1,) * len(self.order), 0.0)

    def may_host(self, pod: Pod, number: int) -> bool:
        """Return whether the machine of this number has room for the pod, and its row may run there."""
        machine, room = self.machines[number], self.rooms[number]
        if any(not r.holds(machine.attribute(r.key)) for r in self.demand[pod.row].profile.requirements):
            return False
        if pod.penalty_dollars == float("inf") and machine.interruption_probability > 0:
            return False
        if "pods" in room and room["pods"] < 1000:
            return False
        on_it = sum(other.row == pod.row and other.shape == pod.shape for other in self.used[number])
        return not (pod.limit and on_it >= pod.limit) and all(room.get(n, 0) >= milli for n, milli in pod.resources)

    def cost(self) -> float:
        """Return what the machines that host pods cost, with their interruptions, in US dollars per hour."""
        total = 0.0
        for machine, hosted in zip(self.machines, self.used, strict=True):
            if not hosted:
                continue
            total += machine.price_usd_per_hour
            for (row, shape), count in Counter((pod.row, pod.shape) for pod in hosted).items():
                resources = self.demand[row].shapes[shape].resources
                share = max(milli * count / machine.supply[name] for name, milli in resources.items())
                if machine.interruption_probability:
                    penalty = bucket_upper_dollars(self.demand[row].profile.interruption_bucket)
                    total += machine.interruption_probability * share * penalty
        return total

    def move(self, pod: Pod, number: int, by: int) -> None:
        """Take the pod's room on a machine (`by` 1), or give it back (-1)."""
        room = self.rooms[number]
        for name, milli in pod.resources:
            room[name] -= by * milli
        if "pods" in room:
            room["pods"] -= by * 1000
        self.served[(pod.row, pod.shape)] += by

    def visit(self, number: int, first: int) -> None:
        """Try every place of this pod and of those after it; `first` is the first machine to try."""
        pods = self.pods
        if number == len(pods):
            self.found = max(self.found, (tuple(self.served[group] for group in self.order), -self.cost()))
            return
        pod = pods[number]
        follows = number + 1 < len(pods) and pods[number + 1] == pod
        for machine in range(first, len(self.machines)):
            if not self.may_host(pod, machine):
                continue
            self.move(pod, machine, 1)
            self.used[machine].append(pod)
            self.visit(number + 1, machine if follows else 0)
            self.used[machine].pop()
            self.move(pod, machine, -1)
        skip = number + 1
        while skip < len(pods) and pods[skip] == pod:
            skip += 1
        # A pod that is left out leaves out its equals: which of them does not matter. A branch that serves fewer than
        # the best known, group by group, cannot become better.
        bound = tuple(
            self.served[group] + sum(1 for other in pods[skip:] if (other.row, other.shape) == group)
            for group in self.order
        )
        if bound >= self.found[0]:
            self.visit(skip, 0)
