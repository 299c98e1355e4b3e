"""`make bench`: runs the benchmarks, prints their table, writes their record; `--markdown` shows a record instead."""

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path

from bench.harness import run, run_measurements
from bench.record import (
    FULL_RECORD,
    PARTIAL_RECORD,
    README,
    WrongRecord,
    machine_entry,
    put_table,
    read_record,
    run_entry,
    write_record,
)
from bench.workloads.catalogue import ALL, MEASUREMENTS
from bigfleet.cli.runtime.system import configure_logging


def main() -> None:
    """Read the command line and run, or turn the last record into the table of bench/README.md."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="leave the slow ones out")
    parser.add_argument("--only", default="", help="run those whose name contains this")
    parser.add_argument(
        "--json",
        type=Path,
        help=f"the record (default: {FULL_RECORD.name} beside this file, {PARTIAL_RECORD.name} with --quick or --only)",
    )
    parser.add_argument(
        "--markdown", action="store_true", help="run nothing: put the record of a full run into bench/README.md"
    )
    options = parser.parse_args()
    is_full = not options.quick and not options.only
    path = options.json or (FULL_RECORD if is_full else PARTIAL_RECORD)
    if options.markdown:
        try:
            put_table(README, read_record(path))
        except WrongRecord as error:
            sys.exit(f"make bench: {error}")
        print(f"{README} shows the run of {path}")
        return
    chosen = [b for b in ALL if options.only in b.name and not (options.quick and b.is_slow)]
    watched = [m for m in MEASUREMENTS if options.only in m.name and not (options.quick and m.is_slow)]
    if not chosen and not watched:
        names = ", ".join(dict.fromkeys([*(b.name for b in ALL), *(m.name for m in MEASUREMENTS)]))
        parser.error(f"no benchmark's name contains {options.only!r}; there are: {names}")
    # What is done on purpose thousands of times, such as removing machines, is no news.
    configure_logging("bench", "error")
    machine, started = machine_entry(), datetime.now(UTC)
    measured = run(chosen) if chosen else []
    measurements = run_measurements(watched)
    write_record(
        path, run_entry(measured, machine=machine, started=started, is_full=is_full, measurements=measurements)
    )
    print(f"the record of this run is in {path}")


if __name__ == "__main__":
    main()
