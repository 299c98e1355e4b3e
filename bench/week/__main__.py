"""`python -m bench.week`: simulates a fleet over days in each mode of exchanges and prints one table.

docs/spec/benchmarks.md, "A week with exchanges".
"""

import argparse
import hashlib
import sys
import time
from collections.abc import Sequence
from typing import Final

import structlog
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from bench.week.figures import WeekFigures, Why, packer_cost_usd
from bench.week.paths import MINUTES_PER_DAY, Paths, paths_of
from bench.week.world import run_week
from bigfleet.exchange.values import ExchangeMode

#: Machines of each pool.
SLOTS: Final = 12
WIDTH: Final = 120
DAYS_MAX: Final = 60
CLUSTERS_MAX: Final = 20
COLUMNS: Final = (
    *("mode", "seed", "cost $", "÷ off", "÷ packer", "mach", "pending"),
    *("exch", "recl", "intr", "fail", "stuck", "x/m/d", "done", "real", "busy", "checksum"),
)
KEY: Final = (
    "cost: prices of all machines that are there, over the whole time but the first hour. packer: repacks from nothing "
    "each hour, moves are free.\n"
    "mach: machines of clusters. pending: share of the pods' time without a machine. exch, recl, intr, fail: evictions "
    "per pod and day by\nexchanges, other reclaims, interruptions and failures. stuck: pods evicted by exchanges that "
    "the scheduler placed nowhere at once.\n"
    "x/m/d: machines that go in exchanges per machine and day, median over clusters and days. done: exchanges done of "
    "those that ended.\n"
    "real: realised of promised savings of all that ended. busy: share of the clusters' time with an exchange."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, print the table, and return 0; wrong options end the process with one line."""
    options = _parser().parse_args(arguments)
    minutes = max(1, round(options.days * MINUTES_PER_DAY))
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory(), cache_logger_on_first_use=False)
    figures: list[WeekFigures] = []
    table = _table(f"{options.days:g} days, {options.clusters} clusters")
    for seed in options.seeds:
        paths = paths_of(seed, minutes=minutes, clusters=options.clusters, slots=SLOTS)
        packer_usd = packer_cost_usd(paths, slots=SLOTS)
        table.add_row("packer", str(seed), f"{packer_usd:.2f}", *[""] * (len(COLUMNS) - 3))
        found = [_run(paths, mode, seed) for mode in options.modes]
        off_usd = next((each.cost_usd for each in found if each.mode == ExchangeMode.OFF.value), None)
        for each in found:
            table.add_row(*_cells(each, off_usd, packer_usd))
        figures += found
    console = Console(width=WIDTH, highlight=False)
    console.print(table)
    console.print(KEY)
    for each in figures:
        if each.records:
            console.print(_exchanges(each))
    digest = hashlib.sha256("".join(each.checksum for each in figures).encode()).hexdigest()[:12]
    console.print(f"{len(figures)} runs, checksum {digest}")
    return 0


def _run(paths: Paths, mode: ExchangeMode, seed: int) -> WeekFigures:
    began_seconds = time.process_time()
    figures = run_week(paths, mode=mode, seed=seed, slots=SLOTS)
    took_seconds = time.process_time() - began_seconds
    text = f"{mode.value}, seed {seed}: ${figures.cost_usd:.2f} in {took_seconds:.0f} s of processor time"
    print(text, file=sys.stderr, flush=True)
    return figures


def _table(title: str) -> Table:
    table = Table(title=title, box=SIMPLE, padding=(0, 0), collapse_padding=True)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("mode", "checksum") else "right", no_wrap=True)
    return table


def _cells(figures: WeekFigures, off_usd: float | None, packer_usd: float) -> list[str]:
    promised = figures.promised_usd_per_hour
    return [
        figures.mode,
        str(figures.seed),
        f"{figures.cost_usd:.2f}",
        f"{figures.cost_usd / off_usd:.3f}" if off_usd else "",
        f"{figures.cost_usd / packer_usd:.3f}" if packer_usd else "",
        f"{figures.machines:.1f}",
        f"{100 * figures.pending_share:.2f}%",
        *(
            f"{figures.evictions_per_pod_day(why):.3f}"
            for why in (Why.EXCHANGE, Why.RECLAIM, Why.INTERRUPTION, Why.FAILURE)
        ),
        str(figures.stranded[Why.EXCHANGE]),
        f"{figures.exchanged_median:.2f}",
        f"{len(figures.done)}/{len(figures.ended)}",
        f"{figures.realised_usd_per_hour / promised:.2f}" if promised else "",
        f"{100 * figures.busy_share:.0f}%",
        figures.checksum,
    ]


def _exchanges(figures: WeekFigures) -> str:
    ends = ", ".join(f"{count} {end}" for end, count in sorted(figures.ends.items()))
    return (
        f"{figures.mode}, seed {figures.seed}: ${figures.promised_usd_per_hour:.2f}/h promised, "
        f"${figures.realised_usd_per_hour:.2f}/h realised; {ends or 'none ended'}; proposals of the same "
        f"clusters that had to wait when one began: ${figures.passed_over_usd_per_hour:.2f}/h"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.week", description="Simulate a fleet over days, with and without exchanges."
    )
    parser.add_argument("--days", type=_days, default=1.0, help="virtual days, such as 7 or 0.5")
    parser.add_argument("--seeds", type=_seeds, default=(0,), help="such as 0 or 0,3")
    parser.add_argument("--modes", type=_modes, default=tuple(ExchangeMode), help="of off, propose, on")
    parser.add_argument("--clusters", type=_clusters, default=4, help=f"from 1 to {CLUSTERS_MAX}")
    return parser


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = 0.0
    # Less has no hour after the first one.
    if not 0.1 <= days <= DAYS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of days; write a number from 0.1 to {DAYS_MAX}")
    return days


def _clusters(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= CLUSTERS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of clusters; write one from 1 to {CLUSTERS_MAX}")
    return int(text)


def _seeds(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} are no seeds; write numbers such as 0 or 0,3")
    return tuple(dict.fromkeys(int(part) for part in parts))


def _modes(text: str) -> tuple[ExchangeMode, ...]:
    known = {mode.value: mode for mode in ExchangeMode}
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if part not in known:
            raise argparse.ArgumentTypeError(f"{part!r} is no mode; choose from {', '.join(known)}")
    return tuple(dict.fromkeys(known[part] for part in parts))


if __name__ == "__main__":
    sys.exit(main())
