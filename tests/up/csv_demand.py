"""Demand of a trace at a second, computed from the CSV alone: the second opinion on what `bigfleet up` reports.

It shares no line with the project on purpose. Only the standard library may be imported here.
"""

import csv
from collections import Counter
from pathlib import Path

_MEBIBYTE = 2**20


def demand_at(pods: Path, second: int) -> dict[str, float]:
    """Return cores, bytes and GPU thousandths that the pods alive at a second ask for; zero dimensions are absent."""
    totals: Counter[str] = Counter()
    with pods.open(newline="") as file:
        for row in csv.DictReader(file):
            born = int(row["creation_time"])
            dies = int(row["deletion_time"]) if row["deletion_time"] else None
            if born <= second and (dies is None or second < dies):
                totals["cpu"] += int(row["cpu_milli"])
                totals["memory"] += int(row["memory_mib"]) * _MEBIBYTE
                totals["gpu-milli"] += int(row["num_gpu"]) * int(row["gpu_milli"])
    demand = {"cpu": totals["cpu"] / 1000, "memory": float(totals["memory"]), "gpu-milli": float(totals["gpu-milli"])}
    return {name: amount for name, amount in demand.items() if amount}


def machines_in(nodes: Path) -> int:
    """Return how many nodes the file lists."""
    with nodes.open(newline="") as file:
        return sum(1 for _row in csv.DictReader(file))
