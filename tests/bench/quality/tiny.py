"""Generates tiny instances, and finds their cheapest fleet by trying every assignment of pods to machines."""

from collections.abc import Iterator, Sequence
from itertools import product

from hypothesis import strategies as st

from bench.quality.reports.handmade import instance, offer, row
from bench.quality.values import CPU, MEMORY, MILLI, PODS, Instance, Offer, PackingRow


@st.composite
def tiny_instances(draw: st.DrawFn) -> Instance:
    """Draw one cluster of at most five pods and at most three classes with small numbers, limits and pins included."""
    classes = [
        offer(f"m{n}", draw(st.integers(1, 8)), draw(st.integers(1, 8)), draw(st.integers(1, 20)) / 10)
        for n in range(draw(st.integers(1, 3)))
    ]
    if draw(st.booleans()):
        classes[0] = _with_pods(classes[0], draw(st.integers(1, 3)))
    rows = []
    for number in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["", "m0"]))
        made = row(f"r{number}", [(draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 2)))], kind)
        rows.append(_limited(made) if draw(st.booleans()) else made)
    return instance(classes, {"c": rows})


def _with_pods(of: Offer, pods: int) -> Offer:
    return offer(of.id, 0, 0, of.price_usd_per_hour, allocatable={**of.allocatable, PODS: pods * MILLI}, stock=of.stock)


def _limited(of: PackingRow) -> PackingRow:
    shape = of.shapes[0]
    limited = type(shape)(shape.resources, shape.count, 1)
    return row(of.id, [], shapes=(limited,), requirements=of.requirements)


def cheapest(of: Instance) -> float | None:
    """Return the least cost of a fleet that hosts every pod of the only cluster, or None where there is none.

    Pods are assigned to bins in every way that is not a mere renaming of bins; each bin gets its cheapest class.
    """
    rows = of.clusters[0].rows
    pods = [(index, shape) for index, made in enumerate(rows) for shape in made.shapes for _ in range(shape.count)]
    best: float | None = None
    for bins in _partitions(len(pods)):
        cost = 0.0
        for number in range(max(bins, default=-1) + 1):
            inside = [pods[place] for place in range(len(pods)) if bins[place] == number]
            prices = [one.price_usd_per_hour for one in of.offers if _hosts(of, one, inside)]
            if not prices:
                break
            cost += min(prices)
        else:
            best = cost if best is None else min(best, cost)
    return best


def _partitions(items: int) -> Iterator[tuple[int, ...]]:
    """Yield each way to put items into unnamed bins, as the bin of each item."""
    for bins in product(range(items), repeat=items):
        if all(bins[place] <= max(bins[:place], default=-1) + 1 for place in range(items)):
            yield bins


def _hosts(of: Instance, one: Offer, inside: Sequence[tuple[int, object]]) -> bool:
    rows = of.clusters[0].rows
    shapes = [rows[index].shapes[0] for index, _ in inside]
    if not all(one.matches(rows[index].requirements) for index, _ in inside):
        return False
    for name in (CPU, MEMORY):
        if sum(shape.resources[name] for shape in shapes) > one.allocatable[name]:
            return False
    if len(inside) * MILLI > one.allocatable.get(PODS, 1 << 60):
        return False
    indices = [index for index, _ in inside]
    return all(
        not shape.max_per_machine or indices.count(index) <= shape.max_per_machine
        for (index, _), shape in zip(inside, shapes, strict=True)
    )
