"""`python -m bench.quality`: evaluates the quality of decisions, prints its tables and writes its record."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.quality.bound import BoundFault
from bench.quality.candidates import CANDIDATES
from bench.quality.catalogue import DataFault
from bench.quality.evaluation import Figure, Task, checksum, data_of, run
from bench.quality.instances import FAMILIES, SEEDS, SIZES
from bench.quality.reports.criteria import criteria
from bench.quality.reports.tables import KEY, console, criteria_table, tables
from bench.quality.scheduler import ORDERS
from bench.quality.values import Scheduler, Start

DATA_VARIABLE: Final = "BIGFLEET_QUALITY_DATA"


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate, and return 0; wrong options end the process with one line."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"--json: {options.json.parent}: no such folder; name a file in a folder that exists")
    folder = options.data or os.environ.get(DATA_VARIABLE) or None
    data = None if folder is None else Path(folder)
    try:
        is_synthetic = data_of(data).is_synthetic
        if options.findings:
            from bench.quality.reports.findings import print_findings

            for candidate in options.candidate:
                print_findings(data_of(data), candidate)
            return 0
        tasks = _tasks(options, data)
        figures: list[Figure] = []
        for number, found in enumerate(run(tasks, options.jobs), 1):
            figures += found
            if sys.stderr.isatty():
                print(f"\r{number}/{len(tasks)} {found[0].family}/{found[0].size}", end="\x1b[K", file=sys.stderr)
    except (DataFault, BoundFault) as error:
        sys.exit(f"bench.quality: {error}")
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    _show(figures, is_synthetic)
    if options.json is not None:
        _write(options.json, figures, is_synthetic)
    return 0


def _show(figures: Sequence[Figure], is_synthetic: bool) -> None:
    out = console()
    kind = "synthetic data" if is_synthetic else "data from files"
    for table in tables(figures, title=f"quality of decisions, {kind}"):
        out.print(table)
    out.print(KEY)
    for candidate in dict.fromkeys(figure.candidate for figure in figures):
        out.print(criteria_table(criteria([f for f in figures if f.candidate == candidate]), candidate))
    out.print(f"{len(figures)} figures, checksum {checksum(figures)}")


def _write(path: Path, figures: Sequence[Figure], is_synthetic: bool) -> None:
    record = {
        "is_synthetic": is_synthetic,
        "checksum": checksum(figures),
        "figures": [figure.record() for figure in figures],
        "criteria": {
            candidate: [
                {"what": one.what, "target": one.target, "reached": one.reached, "is_met": one.is_met}
                for one in criteria([f for f in figures if f.candidate == candidate])
            ]
            for candidate in dict.fromkeys(figure.candidate for figure in figures)
        },
    }
    try:
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        sys.exit(f"bench.quality: --json: {path}: {error.strerror}; name a file in a folder that exists")


def _tasks(options: argparse.Namespace, data: Path | None) -> list[Task]:
    starts = tuple(Start) if options.start == "both" else (Start(options.start),)
    return [
        Task(
            family=family,
            size=size,
            seed=seed,
            starts=starts,
            schedulers=options.scheduler,
            candidates=options.candidate,
            orders=options.orders,
            integer_effort=options.integer_effort,
            has_impossible_pod=options.impossible_pod,
            data=data,
        )
        for family in options.families
        for size in options.sizes
        for seed in options.seeds
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.quality", description="Evaluate the quality of decisions on families of fleets."
    )
    parser.add_argument(
        "--families", type=_families, default=_families("F1,F2,F3,F4,F5,F6,F7,F8"), help="such as F1,F8b; F8 is all F8"
    )
    parser.add_argument("--sizes", type=_sizes, default=("small", "medium"), help="of small, medium, large")
    parser.add_argument("--seeds", type=_seeds, default=(0, 1, 2), help=f"such as 0,3 or 0..{SEEDS - 1}")
    parser.add_argument("--start", choices=[*(s.value for s in Start), "both"], default="nothing")
    parser.add_argument(
        "--scheduler", type=_schedulers, default=(Scheduler.LEAST_ALLOCATED,), help="least-allocated, most-allocated"
    )
    parser.add_argument("--candidate", type=_candidates, default=("engine",), help=f"of {', '.join(CANDIDATES)}")
    parser.add_argument("--data", help=f"folder with ec2-catalog/ and gpu-cluster-trace-2023/ (or {DATA_VARIABLE})")
    parser.add_argument("--json", type=Path, help="file for every figure")
    parser.add_argument("--jobs", type=_positive, default=1, help="processes")
    parser.add_argument("--orders", type=_positive, default=ORDERS, help="random orders of the scheduler")
    parser.add_argument(
        "--integer-effort",
        type=_not_negative,
        default=1,
        metavar="N",
        help="multiple of the effort for the best integer answer, up to 300 pods; 0 leaves it out",
    )
    parser.add_argument("--impossible-pod", action="store_true", help="add one pod that nothing hosts, in any family")
    parser.add_argument("--findings", action="store_true", help="measure known weaknesses one by one instead")
    return parser


def _chosen(text: str, known: Sequence[str], what: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is no {what}; choose from {', '.join(known)}")
    if not names:
        raise argparse.ArgumentTypeError(f"no {what} is named; choose from {', '.join(known)}")
    return tuple(dict.fromkeys(names))


def _families(text: str) -> tuple[str, ...]:
    names: list[str] = []
    for name in text.split(","):
        members = [family for family in FAMILIES if name.strip() == "F8" and family.startswith("F8")]
        names += members or [name]
    return _chosen(",".join(names), list(FAMILIES), "family")


def _sizes(text: str) -> tuple[str, ...]:
    return _chosen(text, SIZES, "size")


def _candidates(text: str) -> tuple[str, ...]:
    return _chosen(text, list(CANDIDATES), "candidate")


def _schedulers(text: str) -> tuple[Scheduler, ...]:
    return tuple(Scheduler(name) for name in _chosen(text, [s.value for s in Scheduler], "scheduler"))


def _seeds(text: str) -> tuple[int, ...]:
    seeds: list[int] = []
    for part in text.split(","):
        first, dots, last = part.strip().partition("..")
        if not first.isdecimal() or (dots and not last.isdecimal()) or (dots and int(last) < int(first)):
            raise argparse.ArgumentTypeError(f"{part!r} is no seed; write numbers such as 0,3 or a range such as 0..9")
        seeds += range(int(first), int(last or first) + 1)
    return tuple(dict.fromkeys(seeds))


def _positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 1000")
    return int(text)


def _not_negative(text: str) -> int:
    return 0 if text == "0" else _positive(text)


if __name__ == "__main__":
    sys.exit(main())
