"""Builds small instances by hand, for findings and tests."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from bench.quality.values import (
    CPU,
    MEMORY,
    MIB,
    MILLI,
    Instance,
    Offer,
    PackingCluster,
    PackingRequirement,
    PackingRow,
    PackingShape,
)
from bigfleet.model import labels as keys

GIB: Final = 1024 * MIB


def offer(name: str, cpu: float, gib: int, usd: float, **fields: Any) -> Offer:
    """Return a class of on-demand machines that can be created, 300 of them, unless the fields say otherwise."""
    made = Offer(
        id=name,
        instance_type=name,
        zone="z1",
        capacity_type="OnDemand",
        allocatable={CPU: round(cpu * MILLI), MEMORY: gib * GIB},
        price_usd_per_hour=usd,
        stock=300,
    )
    return replace(made, **fields)


def row(name: str, pods: Sequence[tuple[float, float, int]], kind: str = "", **fields: Any) -> PackingRow:
    """Return a row of (cpu, GiB, count) shapes, on machines of one type where a type is named."""
    shapes = tuple(PackingShape({CPU: round(c * MILLI), MEMORY: round(g * 1024) * MIB}, n) for c, g, n in pods)
    requirements = (PackingRequirement(keys.INSTANCE_TYPE, "In", (kind,)),) if kind else ()
    return replace(PackingRow(id=name, shapes=shapes, requirements=requirements), **fields)


def instance(offers: Sequence[Offer], *steps: Mapping[str, Sequence[PackingRow]]) -> Instance:
    """Return an instance of some demands in turn, rows by cluster."""
    demands = tuple(tuple(PackingCluster(name, tuple(rows)) for name, rows in step.items()) for step in steps)
    return Instance(family="finding", size="small", seed=0, offers=tuple(offers), steps=demands)
