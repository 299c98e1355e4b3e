"""Runs the `bigfleet` command: `python -m bigfleet`."""

from bigfleet.cli.main import main

if __name__ == "__main__":
    main()
