"""Floods a shard and compares what becomes of honest clusters with the bounds."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.overload.judge import Bound, bounds
from bench.overload.run import Outcome, run
from bench.overload.scenario import SCENARIOS, Scenario, quick
from bench.record import machine_entry
from bigfleet.cli.runtime.system import configure_logging

_COLUMNS = (
    *("phase", "s", "cycle ms", "× quiet", "longest", "ack ms p50", "p99", "most"),
    *("shard CPU s", "clients CPU s"),
)
_KINDS = ("sessions", "greedy", "silent_readers", "slow_writers", "reconnects", "frames")
_COUNTED_SHOWN = ("shed", "rollups", "session", "outbox", "connections")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the scenarios; return 1 when a bound is missed, after a line that names it."""
    names = [scenario.name for scenario in SCENARIOS]
    parser = argparse.ArgumentParser(prog="python -m bench.overload", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a fiftieth of the clients, seconds instead of minutes")
    parser.add_argument("--only", choices=names, help="run only this scenario")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for every figure")
    options = parser.parse_args(arguments)
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"--json: {options.json.parent}: no such folder; name a file in a folder that exists")
    configure_logging("bench-overload", "error")
    out, missed, records = Console(width=120, highlight=False), [], []
    for scenario in SCENARIOS:
        if options.only not in (None, scenario.name):
            continue
        chosen = quick(scenario) if options.quick else scenario
        try:
            expected = run(chosen, floods=False).checksum
            outcome = run(chosen)
        except AssertionError as error:
            missed.append(f"{chosen.name}: {error}")
            continue
        found = list(bounds(chosen, outcome, expected))
        show(out, chosen, outcome, found)
        missed += [
            f"{chosen.name}: {bound.name}: {bound.measured}, wanted {bound.wanted}"
            for bound in found
            if not bound.is_met
        ]
        records.append(
            {"scenario": asdict(chosen), "outcome": asdict(outcome), "bounds": [asdict(bound) for bound in found]}
        )
    if options.json is not None:
        record = {"machine": machine_entry(), "runs": records}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for line in missed:
        print(f"bench.overload: missed: {line}", file=sys.stderr)
    return 1 if missed else 0


def show(out: Console, scenario: Scenario, outcome: Outcome, found: Sequence[Bound]) -> None:
    """Print what a run showed."""
    table = Table(title=f"{scenario.name}: {_size(scenario)}")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == "phase" else "right")
    for phase in outcome.phases.values():
        heard = phase.latencies
        figures = [phase.cycle_ms, outcome.cycle_ratio(phase.name), max(phase.cycles_ms, default=0.0)]
        figures += [heard["p50_ms"], heard["p99_ms"], heard["most_ms"]]
        figures += [phase.shard_cpu_seconds, phase.clients_cpu_seconds]
        table.add_row(phase.name, f"{phase.seconds:.0f}", *(f"{figure:.1f}" for figure in figures))
    out.print(table)
    memory = outcome.memory
    out.print(
        f"memory of the shard: {memory.start:.0f} MiB at the start of the quiet phase, {memory.peak:.0f} at the peak, "
        f"{memory.end:.0f} at the end; its planner processes {memory.children:.0f} at most. Limit: {outcome.limit}"
    )
    for kind, crowd in outcome.crowds.items():
        counts = ", ".join(f"{value:,} {name}" for name, value in crowd["counts"].items())
        out.print(f"{kind}: {counts}; {crowd['open']} open when the flood ended")
        for text, times in crowd["reasons"].items():
            out.print(f"    {times:,} × {text}", markup=False)
    for name, value in sorted(outcome.counted.items()):
        if name.removeprefix("bigfleet_shard_").startswith(_COUNTED_SHOWN):
            out.print(f"{name} +{value:.0f}", markup=False)
    verdicts = Table()
    for column in ("bound", "measured", "wanted", "met"):
        verdicts.add_column(column)
    for bound in found:
        verdicts.add_row(bound.name, bound.measured, bound.wanted, "yes" if bound.is_met else "NO")
    out.print(verdicts)


def _size(scenario: Scenario) -> str:
    clients = {name: getattr(scenario.flood, name) for name in _KINDS}
    kinds = [f"{number:,} {name.replace('_', ' ')}" for name, number in clients.items() if number]
    return f"{scenario.honest} honest clusters; " + ", ".join(kinds)


if __name__ == "__main__":
    sys.exit(main())
