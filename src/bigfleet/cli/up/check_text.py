"""Renders a fleet check: a line of the live view, a table of the summary, an object of the report."""

from collections.abc import Iterator
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from bigfleet.cli.up.amounts import duration_text
from bigfleet.cli.up.fleet_check import FleetCheck

#: An older check says its age.
AGE_SECONDS_MAX: Final = 5.0
#: Clusters that the summary names.
_CLUSTERS_MAX: Final = 4


def check_line(check: FleetCheck | None, age_seconds: float = 0.0) -> str:
    """Return the check in one line of at most 80 characters or so, with its age when it is old."""
    if check is None:
        return "pods not checked yet"
    age = f"{duration_text(age_seconds)} ago, " if age_seconds > AGE_SECONDS_MAX else ""
    return f"{age}{_words(check)}"


def _words(check: FleetCheck) -> str:
    boot = f" ({check.booting} booting)" if check.booting else ""
    line = f"pods: {check.pods}, without a place: {check.unplaced}{boot}"
    if check.packed is None:
        return f"{line}; all machines are free"
    line += f"; {_dollars(check.usd_per_hour)}"
    if check.packed.unhosted:
        return f"{line}; a packer leaves {check.packed.unhosted} out"
    line += f", packer {_dollars(check.packed.usd_per_hour)}"
    return line if check.ratio is None else f"{line}, ratio {check.ratio:.2f}"


def check_table(check: FleetCheck) -> Table:
    """Return the summary's table: what is counted, how many, and what to make of it."""
    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 1),
        show_header=False,
        title="pods and cost",
        title_justify="left",
        title_style="bold underline",
    )
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column()
    style = "red" if check.unplaced else "green"
    table.add_row("pods", str(check.pods))
    table.add_row("without a place", Text(str(check.unplaced), style=style), _where(check))
    if check.unplaced:
        table.add_row("  booting", str(check.booting), "their machines are being created or configured")
    for label, number, words in _cost_rows(check):
        table.add_row(label, number, words)
    return table


def _where(check: FleetCheck) -> str:
    """Return the clusters whose pods have no place, those with the most first."""
    if not check.unplaced:
        return "placed one by one as kube-scheduler does"
    short = [(cluster, counts.unplaced) for cluster, counts in check.by_cluster.items() if counts.unplaced]
    short.sort(key=lambda one: -one[1])
    named = ", ".join(f"{cluster}: {count}" for cluster, count in short[:_CLUSTERS_MAX])
    hidden = len(short) - _CLUSTERS_MAX
    return f"{named}, and {hidden} more clusters" if hidden > 0 else named


def _cost_rows(check: FleetCheck) -> Iterator[tuple[str, str, str]]:
    packed = check.packed
    if packed is None:
        yield "machines in service", str(check.machines), "free: no machine of this fleet has a price"
        return
    yield (
        "machines in service",
        str(check.machines),
        f"the fleet with its idle machines: {_dollars(check.usd_per_hour)}",
    )
    if packed.unhosted:
        yield "a packer takes", "-", f"no comparison: {packed.unhosted} pods fit on no machine that is left"
        return
    yield "a packer takes", str(packed.machines), f"its fleet, for the same pods: {_dollars(packed.usd_per_hour)}"
    if check.ratio is not None:
        yield "cost ratio", f"{check.ratio:.2f}", "this fleet ÷ the packer's"
    elif check.unplaced:
        yield "cost ratio", "-", "no comparison: some pods have no place"
    else:
        yield "cost ratio", "-", "no comparison: the packer pays nothing"


def check_document(check: FleetCheck) -> dict[str, Any]:
    """Return the check as JSON values."""
    packed = check.packed
    return {
        "pods": check.pods,
        "without_place": check.unplaced,
        "booting": check.booting,
        "machines": check.machines,
        "usd_per_hour": round(check.usd_per_hour, 4),
        "packer": None
        if packed is None
        else {
            "machines": packed.machines,
            "usd_per_hour": round(packed.usd_per_hour, 4),
            "unhosted": packed.unhosted,
        },
        "ratio": None if check.ratio is None else round(check.ratio, 4),
        "clusters": {
            cluster: {"pods": counts.pods, "without_place": counts.unplaced, "booting": counts.booting}
            for cluster, counts in check.by_cluster.items()
        },
    }


def _dollars(usd: float) -> str:
    return f"${usd:.2f}/h"
