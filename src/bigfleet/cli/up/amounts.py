"""Formats amounts of resources for people. This module does not compute with what it has rounded."""

from typing import Final

from bigfleet.demo.trace import GPU_MILLI
from bigfleet.demo.workload import GPU
from bigfleet.model.quantity import MILLI
from bigfleet.model.vector import Vector

#: The dimensions that the tables show, with their heads.
SHOWN: Final = (("cpu", "cpu"), ("memory", "memory"), ("gpu", "gpus"))
_BYTE_UNITS: Final = ((2**50, "PiB"), (2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"))
_THOUSAND: Final = 1000


def plain_numbers(vector: Vector) -> dict[str, float]:
    """Return the amounts in base units by resource name: cores, bytes, pieces; whole ones as integers."""
    return {name: milli // MILLI if milli % MILLI == 0 else milli / MILLI for name, milli in sorted(vector.items())}


def dimension_milli(vector: Vector, dimension: str) -> int:
    """Return one dimension of `SHOWN` in milli-units; `gpu` counts whole GPUs, however they are shared."""
    if dimension == "gpu":
        return vector.get(GPU, 0) + vector.get(GPU_MILLI, 0) // _THOUSAND
    return vector.get(dimension, 0)


def amount_text(milli: int, dimension: str) -> str:
    """Return an amount in at most seven characters or so: `12.5`, `1.4k`, `96.0GiB`."""
    units = milli / MILLI
    if dimension == "memory":
        for size, unit in _BYTE_UNITS:
            if units >= size:
                return f"{units / size:.1f}{unit}"
        return f"{units:.0f}B" if units else "0"
    if units >= 10 * _THOUSAND:
        return f"{units / _THOUSAND:.1f}k"
    return f"{units:.0f}" if units == int(units) else f"{units:.1f}"


def covered_share(demand: Vector, lacking: Vector) -> float:
    """Return the share of a demand that is not lacking, in its worst dimension; 1 when nothing is wanted."""
    shares = [1 - min(1.0, lacking.get(name, 0) / milli) for name, milli in demand.items() if milli]
    return min(shares, default=1.0)


def duration_text(seconds: float) -> str:
    """Return `42s`, `3m05s`, `2h10m` or `149d 8h`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600}h"
