"""Builds the instances of an evaluation: a family at a size with a seed, and the ten steps of demand before it.

Equal arguments and equal data give equal instances. In each of the ten steps before the last a row is absent with
probability 0.15; otherwise its counts are those of the last step times a factor that moves one place up or down, or
stays, on the ladder 1/4, 1/2, 3/4, 1, 3/2, 2; gangs keep their counts; an impossible pod joins in the last step. So
both starts are judged on equal demand.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Final

from bench.quality import families, gpu_families
from bench.quality.catalogue import Data
from bench.quality.values import CPU, Instance, Offer, PackingCluster, PackingRow, PackingShape

SIZES: Final = ("small", "medium", "large")
SEEDS: Final = 10
STEPS: Final = 10
#: Shapes of one row on the wire.
SHAPES_MAX: Final = 64
#: Milli-units: coarser than any request.
GRID_MAX: Final = 1 << 60

Builder = Callable[[Random, str, Data], tuple[list[Offer], list[PackingCluster]]]

FAMILIES: Final[dict[str, tuple[str, Builder]]] = {
    "F1": ("services, on demand", families.f1),
    "F2": ("services, spot", families.f2),
    "F3": ("GPU trace, own nodes", gpu_families.f3),
    "F4": ("GPU trace, cloud", gpu_families.f4),
    "F5": ("mixed paid fleet", gpu_families.f5),
    "F6": ("gangs in racks", gpu_families.f6),
    "F7": ("many small clusters", families.f7),
    "F8a": ("opposite shapes", families.f8a),
    "F8b": ("one impossible pod", families.f8b),
    "F8c": ("one dominant dimension", families.f8c),
    "F8d": ("64 shapes a row", families.f8d),
    "F8e": ("29 pods a machine", families.f8e),
    "F8f": ("one pod per machine", families.f8f),
    "F8g": ("strict zone spreads", families.f8g),
}

_LADDER: Final = ((1, 4), (1, 2), (3, 4), (1, 1), (3, 2), (2, 1))
_ABSENT: Final = 0.15


def build(family: str, size: str, seed: int, data: Data) -> Instance:
    """Return one instance; the family and the size must be known."""
    offers, built = FAMILIES[family][1](Random(f"{family}/{size}/{seed}"), size, data)
    clusters = [replace(cluster, rows=merged(cluster.rows)) for cluster in built]
    return Instance(
        family=family,
        size=size,
        seed=seed,
        offers=tuple(offers),
        steps=(*_steps(clusters, Random(f"{family}/{size}/{seed}/steps")), tuple(clusters)),
    )


def merged(rows: Sequence[PackingRow]) -> tuple[PackingRow, ...]:
    """Return the rows as a roll-up carries them: rows of equal profile and group are one row with all their shapes.

    The row keeps the id of the first. Shapes of equal request without a limit become one; beyond 64 shapes requests
    are rounded up to coarser powers of two until 64 are left, so that what fits the shapes fits the pods.
    """
    by_profile: dict[object, PackingRow] = {}
    for row in rows:
        profile = (
            tuple(sorted((r.key, r.operator, r.values) for r in row.requirements)),
            row.spreads,
            (row.priority, row.interruption_bucket, row.reclamation_bucket),
            row.group,
        )
        known = by_profile.get(profile)
        by_profile[profile] = row if known is None else replace(known, shapes=(*known.shapes, *row.shapes))
    return tuple(replace(row, shapes=_at_most(row.shapes, SHAPES_MAX)) for row in by_profile.values())


def _at_most(shapes: Sequence[PackingShape], number: int) -> tuple[PackingShape, ...]:
    """Return the shapes with equal ones added up, requests rounded up as far as it takes to have so many."""
    grid = 1
    while True:
        counts: Counter[tuple[tuple[str, int], ...]] = Counter()
        limited: list[PackingShape] = []
        for shape in shapes:
            resources = {name: -(-milli // grid) * grid for name, milli in shape.resources.items()}
            if shape.max_per_machine:
                limited.append(replace(shape, resources=resources))
            else:
                counts[tuple(sorted(resources.items()))] += shape.count
        result = (*(PackingShape(dict(request), count) for request, count in counts.items()), *limited)
        if len(result) <= number:
            return result
        if grid > GRID_MAX:
            raise ValueError(f"{len(limited)} groups that exclude themselves in one row, at most {number} are allowed")
        grid *= 2


def _steps(clusters: Sequence[PackingCluster], rng: Random) -> list[tuple[PackingCluster, ...]]:
    """Return the ten demands before the last one."""
    places = {(cluster.id, row.id): rng.randrange(len(_LADDER)) for cluster in clusters for row in cluster.rows}
    steps = []
    for _ in range(STEPS):
        step = []
        for cluster in clusters:
            rows = []
            for row in cluster.rows:
                place = places[cluster.id, row.id] + rng.choice((-1, 0, 1))
                places[cluster.id, row.id] = min(max(place, 0), len(_LADDER) - 1)
                if rng.random() >= _ABSENT:
                    rows.append(_scaled(row, *_LADDER[places[cluster.id, row.id]]))
            step.append(replace(cluster, rows=tuple(rows)))
        steps.append(tuple(step))
    return steps


def _scaled(row: PackingRow, numerator: int, denominator: int) -> PackingRow:
    if row.same_key is not None:
        return row
    shapes = (
        replace(shape, count=max(1, shape.count * numerator // denominator))
        for shape in row.shapes
        if shape.resources.get(CPU, 0) < families.IMPOSSIBLE_CPU_MILLI
    )
    return replace(row, shapes=tuple(shapes))


def with_impossible_pod(instance: Instance) -> Instance:
    """Return the instance with one impossible pod in the largest row of each cluster, in the last step alone."""
    last = tuple(families.with_impossible_pod(cluster) for cluster in instance.clusters)
    return replace(instance, steps=(*instance.steps[:-1], last))
