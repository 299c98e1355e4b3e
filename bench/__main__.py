"""`make bench`: runs the benchmarks and prints their table; `--quick` leaves the slow ones out."""

import argparse

from bench.harness import run
from bench.workloads import ALL


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="leave the slow ones out")
    parser.add_argument("--only", default="", help="run those whose name contains this")
    options = parser.parse_args()
    chosen = [b for b in ALL if options.only in b.name and not (options.quick and b.is_slow)]
    if not chosen:
        parser.error(f"no benchmark's name contains {options.only!r}; there are: {', '.join(b.name for b in ALL)}")
    run(chosen)


if __name__ == "__main__":
    main()
