"""Finds the best decision for one tiny cluster by trying every assignment of pods to machines.

The best serves as many pods as possible, group by group in order of precedence, then costs least. It shares no code
with the engine.
"""

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
    order = groups_of(demand, machines)
    pods = [
        Pod(
            row,
            shape,
            tuple(demand[row].shapes[shape].resources.items()),
            demand[row].shapes[shape].max_per_machine,
            bucket_upper_dollars(demand[row].profile.interruption_bucket),
        )
        for row, shape in order
        for _ in range(demand[row].shapes[shape].count)
    ]
    rooms = [dict(machine.supply) for machine in machines]
    used: list[list[Pod]] = [[] for _ in machines]
    served = dict.fromkeys(order, 0)
    found: list[tuple[tuple[int, ...], float]] = [((-1,) * len(order), 0.0)]

    def may_host(pod: Pod, number: int) -> bool:
        machine, room = machines[number], rooms[number]
        if any(not r.holds(machine.attribute(r.key)) for r in demand[pod.row].profile.requirements):
            return False
        if pod.penalty_dollars == float("inf") and machine.interruption_probability > 0:
            return False
        if "pods" in room and room["pods"] < 1000:
            return False
        on_it = sum(other.row == pod.row and other.shape == pod.shape for other in used[number])
        return not (pod.limit and on_it >= pod.limit) and all(room.get(n, 0) >= milli for n, milli in pod.resources)

    def cost() -> float:
        total = 0.0
        for machine, hosted in zip(machines, used, strict=True):
            if not hosted:
                continue
            total += machine.price_usd_per_hour
            taken: dict[tuple[int, int], int] = {}
            for pod in hosted:
                taken[(pod.row, pod.shape)] = taken.get((pod.row, pod.shape), 0) + 1
            for (row, shape), count in taken.items():
                resources = demand[row].shapes[shape].resources
                share = max(milli * count / machine.supply[name] for name, milli in resources.items())
                if machine.interruption_probability:
                    penalty = bucket_upper_dollars(demand[row].profile.interruption_bucket)
                    total += machine.interruption_probability * share * penalty
        return total

    def visit(number: int, first: int) -> None:
        if number == len(pods):
            result = (tuple(served[group] for group in order), -cost())
            if result > found[0]:
                found[0] = result
            return
        pod = pods[number]
        follows = number + 1 < len(pods) and pods[number + 1] == pod
        for machine in range(first, len(machines)):
            if not may_host(pod, machine):
                continue
            for name, milli in pod.resources:
                rooms[machine][name] -= milli
            if "pods" in rooms[machine]:
                rooms[machine]["pods"] -= 1000
            used[machine].append(pod)
            served[(pod.row, pod.shape)] += 1
            visit(number + 1, machine if follows else 0)
            served[(pod.row, pod.shape)] -= 1
            used[machine].pop()
            for name, milli in pod.resources:
                rooms[machine][name] += milli
            if "pods" in rooms[machine]:
                rooms[machine]["pods"] += 1000
        skip = number + 1
        while skip < len(pods) and pods[skip] == pod:
            skip += 1
        # A pod that is left out leaves out its equals: which of them does not matter. A branch that serves fewer than
        # the best known, group by group, cannot become better.
        bound = tuple(
            served[group] + sum(1 for other in pods[skip:] if (other.row, other.shape) == group) for group in order
        )
        if bound >= found[0][0]:
            visit(skip, 0)

    visit(0, 0)
    return Best(found[0][0], -found[0][1])
